"""Which Ray cluster a run may start or join."""

import pytest
import verl.trainer.main_ppo  # noqa: F401  loads verl and with it the plugin
from omegaconf import OmegaConf

from orbit_verl.driver.cluster import check_cluster


def _config(**ray_init):
    return OmegaConf.create({"ray_kwargs": {"ray_init": ray_init}})


def test_a_cluster_of_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with pytest.raises(ValueError, match=r"RAY_ADDRESS='10.0.0.1:6379'.*unset RAY_ADDRESS"):
        check_cluster(_config())
    check_cluster(_config(address="10.0.0.1:6379"))


@pytest.mark.parametrize("address", ["", "local"])
def test_a_cluster_of_its_own_is_started(monkeypatch, address):
    monkeypatch.setenv("RAY_ADDRESS", address)
    check_cluster(_config())


def test_a_cluster_that_asks_nobody_for_a_token_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ValueError, match="RAY_AUTH_MODE='disabled': Ray listens on every interface"):
        check_cluster(_config())
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_cluster(_config())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_dashboard_on_every_interface_is_refused(monkeypatch, host):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="dashboard_host"):
        check_cluster(_config(dashboard_host=host))
    check_cluster(_config(dashboard_host="127.0.0.1"))
