"""Which Ray cluster a run starts or joins, checked before Ray starts."""

import ipaddress
import os

import ray
from omegaconf import DictConfig, OmegaConf

RAY_INIT = "ray_kwargs.ray_init"


def check_cluster(config: DictConfig) -> None:
    """Refuses a cluster that the configuration does not name, and one that every machine can reach.

    Ray 2.60 asks for a token unless it is told not to, and makes one for a cluster of its own.

    Raises:
        ValueError: ``RAY_ADDRESS`` would join another cluster, nobody would be asked for a token, or the dashboard would
            listen on every interface.
    """
    if ray.is_initialized():
        return
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise ValueError(
            f"RAY_AUTH_MODE={mode!r}: Ray listens on every interface and runs code for whoever reaches it; set it to token, or "
            "unset it"
        )
    address = os.environ.get("RAY_ADDRESS")
    if address and address != "local" and not OmegaConf.select(config, f"{RAY_INIT}.address"):
        raise ValueError(
            f"RAY_ADDRESS={address!r}: the run would join that cluster, which its configuration does not name; unset "
            f"RAY_ADDRESS for a cluster of the run's own, or set +{RAY_INIT}.address to join it"
        )
    host = OmegaConf.select(config, f"{RAY_INIT}.dashboard_host")
    if host is not None and _is_every_interface(host):
        raise ValueError(
            f"{RAY_INIT}.dashboard_host={host!r}: Ray's dashboard runs code for whoever reaches it, and would listen on every "
            "interface; use 127.0.0.1, or leave the key out"
        )


def _is_every_interface(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""
