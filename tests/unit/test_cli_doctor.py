import dataclasses

import pytest

from orbit_cli.doctor import CORE_PACKAGES, PINS_FILE, PLUGINS, State, plugin_checks, read_pins, version_checks
from orbit_verl import plugin


def test_the_installed_stack_is_the_pinned_one():
    checks = version_checks(PINS_FILE)
    assert [check.subject for check in checks] == list(CORE_PACKAGES)
    assert {check.state for check in checks} == {State.OK}


def test_another_version_is_a_failure_that_names_both(tmp_path):
    pins = read_pins(PINS_FILE)
    pins["verl"] = "0.0.1"
    changed = tmp_path / "stack.txt"
    changed.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    failed = [check for check in version_checks(changed) if check.state is State.FAILED]
    assert [check.subject for check in failed] == ["verl"]
    assert "0.9.1 is installed, pinned is 0.0.1" in failed[0].detail


def test_a_plugin_without_an_entry_point_is_a_failure():
    (check,) = plugin_checks(dataclasses.replace(PLUGINS[0], group="verl.plugins.not_there"))
    assert check.state is State.FAILED
    assert "no entry point" in check.detail


def test_a_plugin_that_does_not_load_is_a_failure_with_the_reason():
    (check,) = plugin_checks(dataclasses.replace(PLUGINS[0], module="orbit_verl.not_there"))
    assert check.state is State.FAILED
    assert "No module named 'orbit_verl.not_there'" in check.detail


def test_hooks_that_are_not_applied_are_named(monkeypatch):
    hook = plugin.hook_report()[0]
    monkeypatch.setattr(hook, "problem", "taken out")
    (check,) = plugin_checks(PLUGINS[0])
    assert check.state is State.FAILED
    assert hook.target in check.detail and "taken out" in check.detail


@pytest.mark.slow
def test_doctor_passes_here():
    import subprocess
    import sys
    from pathlib import Path

    command = [str(Path(sys.executable).with_name("orbit")), "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("hooks applied") == len(PLUGINS)
