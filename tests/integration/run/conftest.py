import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import runs
from tests.support.zygote import NOT_COMPILED


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Callable[[torch.dtype], Path]:
    """The dense model by dtype; each is made once and must not be changed."""
    sizes = {"hidden_size": 128, "intermediate_size": 384}
    return functools.cache(lambda dtype: runs.save_model("qwen3", tmp_path_factory.mktemp("model"), dtype, **sizes))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return runs.save_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def train(data, forked_python) -> Callable[..., runs.Run]:
    """Runs verl in forked processes."""
    return functools.partial(runs.train, forked_python, NOT_COMPILED, data)


@pytest.fixture(scope="session")
def train_as_deployed(data) -> Callable[..., runs.Run]:
    """Runs verl in processes that all start as they do outside of tests."""
    return functools.partial(runs.train, sys.executable, {}, data)
