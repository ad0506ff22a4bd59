import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

# What the fixtures call imports verl, which most of these tests do not need.


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory) -> Path:
    """A random dense model of one layer with its tokeniser; it must not be changed."""
    from tests.support.run_configs import save_dense

    return save_dense(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(saved_model: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(saved_model, tmp_path / "model")


@pytest.fixture(scope="session")
def composed():
    """A run's configuration: composing takes seconds."""
    from tests.support.run_configs import compose_run

    return compose_run()


@pytest.fixture
def run_config(composed, model) -> Callable:
    """A run's configuration of the model, with overrides."""
    from tests.support.run_configs import with_overrides

    return functools.partial(with_overrides, composed, model)
