"""Before Ray starts, the driver proves its changes to verl, and the run's configuration is checked and filled in."""

from collections.abc import Callable
from typing import Any

from orbit_verl.config.composing import check_composed
from orbit_verl.upstream.imports import Process, require_applied


def around_validate_config(wrapped: Callable, instance: None, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Wraps ``verl.utils.config.validate_config``, which verl calls before it starts Ray.

    Raises:
        NotInPlaceError: a change that the driver needs is not in place.
        ValueError: the run cannot work; see ``check_composed``, ``resolve``, ``check_cluster`` and ``take_run_folder``.
    """
    from orbit_verl.driver.cluster import check_cluster
    from orbit_verl.driver.run_config import is_orbit, resolve
    from orbit_verl.driver.run_folder import take_run_folder

    config = kwargs["config"] if "config" in kwargs else args[0]
    check_composed(config)
    if not is_orbit(config):
        return wrapped(*args, **kwargs)
    require_applied(Process.DRIVER)
    resolve(config)
    check_cluster(config)
    checked = wrapped(*args, **kwargs)
    take_run_folder(config)
    return checked
