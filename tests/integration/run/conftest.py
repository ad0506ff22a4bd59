import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import runs
from tests.support.fork_server import fork_server


def pytest_collection_modifyitems(items):
    """A run takes gigabytes: one at a time."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("run"))


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Callable[[torch.dtype], Path]:
    """The dense model by dtype; each is made once and must not be changed."""
    sizes = {"hidden_size": 128, "intermediate_size": 384}
    return functools.cache(lambda dtype: runs.save_model("qwen3", tmp_path_factory.mktemp("model"), dtype, **sizes))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return runs.save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def train(data, tmp_path_factory) -> Callable[..., runs.Run]:
    """Runs verl in forked processes."""
    environment = runs.ENVIRONMENT | runs.NOT_COMPILED
    with fork_server(runs.IMPORTED, environment, tmp_path_factory.mktemp("fork_server") / "log") as python:
        yield functools.partial(runs.train, python, runs.NOT_COMPILED, data)


@pytest.fixture(scope="session")
def train_as_deployed(data) -> Callable[..., runs.Run]:
    """Runs verl in processes that all start as they do outside of tests."""
    return functools.partial(runs.train, sys.executable, {}, data)
