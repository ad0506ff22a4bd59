from pathlib import Path

import pytest

from recipes.smollm2_135m.checkpoint import write_checkpoint
from tests.support import runs
from tests.support.fork_server import fork_server
from tests.support.zygote import NOT_COMPILED


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory) -> Path:
    """SmolLM2-135M-Instruct in BF16, as its recipe makes it; it must not be changed."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def forked_python(tmp_path_factory):
    """Stands in for Python, and has imported verl, Megatron-Core and SGLang."""
    environment = runs.ENVIRONMENT | NOT_COMPILED
    with fork_server(runs.IMPORTED, environment, tmp_path_factory.mktemp("fork_server") / "log") as python:
        yield python
