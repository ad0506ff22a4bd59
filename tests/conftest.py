import os
import pathlib

import pytest
import torch

# SGLang decides about its device when it is imported, whichever test does that first.
if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

# Seconds that a group takes on one core, roughly; the longest start first, so that two workers end together.
SECONDS = {
    "run": 340,
    "smollm2": 230,
    "qwen3": 180,
    "qwen3 on two ranks": 100,
    "integration/trainer/test_parallel.py": 120,
    "integration/server/test_latent_attention.py": 110,
    "integration/server/test_start_up.py": 80,
    "integration/trainer/test_expert_parallel.py": 60,
    "integration/trainer/test_mixtures_served.py": 60,
    "integration/test_setup.py": 40,
    "unit/test_cli_doctor.py": 30,
}


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Import no module for nothing: few have tests that run alone."""
    if config.option.markexpr.startswith("alone") and collection_path.suffix == ".py":
        return "mark.alone" not in collection_path.read_text() or None
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What belongs together runs on one worker in succession: the tests of a server, or of a module."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if (mark := item.get_closest_marker("xdist_group")) is None:
            mark = pytest.mark.xdist_group(item.nodeid.split("::")[0].removeprefix("tests/")).mark
            item.add_marker(pytest.mark.xdist_group(*mark.args))
        groups.setdefault(mark.args[0], []).append(item)
    names = sorted(groups, key=lambda name: -SECONDS.get(name, 0))
    items[:] = [item for name in names for item in groups[name]]
