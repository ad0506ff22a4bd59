from collections.abc import Iterator

import pytest

from tests.support.configurations import CONFIGURATIONS, Checkpoints
from tests.support.server import Server, serve


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on the servers that it, its class or its module names; those of one server run in succession."""
    if "running" in metafunc.fixturenames:
        names = metafunc.definition.get_closest_marker("server").args
        servers = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]
        metafunc.parametrize("running", servers, indirect=True, scope="session")


@pytest.fixture(scope="session")
def running(request, checkpoints, tmp_path_factory) -> Iterator[Server]:
    """The server of the test's configuration, until another one is needed."""
    wanted = CONFIGURATIONS[request.param]
    plain = checkpoints.plain(wanted.family) if wanted.style is None else None
    folder = plain or checkpoints.quantized(wanted.family, wanted.style)
    with serve(folder, tmp_path_factory.mktemp("server") / "log", *wanted.flags, key=wanted.key) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Server:
    """The same, idle and on the base model."""
    return running.idle_on_base()
