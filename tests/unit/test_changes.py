"""Both plugins' lists of changes to upstream: complete, sorted by who needs them, and refused when not in place."""

import pkgutil

import pytest
import verl  # noqa: F401  loads the plugin, as every run does
from hydra import compose, initialize_config_module
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from orbit_kernels.upstream.ledger import Change, Device, NotInPlaceError, Overridden
from orbit_sglang import changes as of_sglang
from orbit_verl import changes as of_verl
from orbit_verl.driver.start import around_validate_config
from orbit_verl.upstream.imports import ConfigFile, Process, require_applied

SECTIONS = {**of_sglang.sections(), **of_verl.sections()}
CHANGES = [change for changes in SECTIONS.values() for change in changes]


def name(change: Change) -> str:
    return f"{change.target}-{change.by.rpartition('.')[2]}"


@pytest.mark.parametrize("change", CHANGES, ids=name)
def test_every_change_says_why_until_when_and_what_makes_it(change):
    assert len(change.why) > 15 and len(change.until) > 8 and change.kind
    if isinstance(change, ConfigFile):
        assert change.by == f"orbit_verl/conf/{change.name}.yaml"
    else:
        pkgutil.resolve_name(change.by)


def test_who_reads_for_a_gpu_skips_the_sections_of_a_cpu():
    for section, changes in SECTIONS.items():
        assert {change.device is Device.CPU for change in changes} == {section.startswith("CPU")}, section
    for ordered in (list(of_sglang.sections()), list(of_verl.sections())):
        assert ordered == sorted(ordered, key=lambda section: section.startswith("CPU"))


@pytest.mark.parametrize("change", [change for change in CHANGES if isinstance(change, Overridden)], ids=name)
def test_every_overridden_method_is_listed(change):
    """Fields of dataclasses and what Python itself puts on a class apart."""
    upstream, ours = pkgutil.resolve_name(change.target), pkgutil.resolve_name(change.by)
    if not isinstance(ours, type):
        return
    listed = {
        name
        for other in CHANGES
        if isinstance(other, Overridden) and other.by.startswith(change.by)
        for name in other.names
    }
    fields = set(getattr(ours, "__dataclass_fields__", ()))
    own = {name for name in vars(ours) if not name.startswith(("__", "_abc"))} - fields
    assert {name for name in own if hasattr(upstream, name)} - listed == set()


def test_a_driver_whose_trainers_are_not_registered_is_refused_before_ray(monkeypatch):
    require_applied(Process.DRIVER)
    monkeypatch.setitem(trainer_base.TRAINER_REGISTRY, "sync", PPOTrainerSync)
    with pytest.raises(NotInPlaceError, match=r"TRAINER_REGISTRY: it holds .*PPOTrainerSync.*make setup"):
        require_applied(Process.DRIVER)


def test_verls_check_of_the_configuration_is_the_place(monkeypatch):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["trainer.strategy=orbit"])
    monkeypatch.setitem(trainer_base.TRAINER_REGISTRY, "sync", PPOTrainerSync)
    with pytest.raises(NotInPlaceError, match="so the run would not be what trainer.strategy=orbit asks for"):
        around_validate_config(lambda **verl: None, None, (), {"config": config})


def test_no_two_changes_are_one():
    entries = [(change.target, change.by) for change in CHANGES]
    assert len(entries) == len(set(entries)) >= 100
