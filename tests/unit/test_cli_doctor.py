import dataclasses
import logging
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from orbit_cli import doctor
from orbit_cli.doctor import CORE_PACKAGES, PINS_FILE, PLUGINS, State, plugin_checks, read_pins, version_checks
from orbit_cli.main import app
from orbit_cli.server_checks import server_checks
from orbit_kernels.upstream.ledger import Device, Status
from orbit_kernels.upstream.ledger import State as ChangeState
from orbit_verl.upstream.imports import LEDGER


@pytest.fixture
def closed_url():
    """A port that is taken and does not listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


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


def test_a_change_that_is_not_in_place_is_named(monkeypatch):
    import verl.utils.config

    monkeypatch.setattr(verl.utils.config, "validate_config", verl.utils.config.validate_config.__wrapped__)
    (check,) = plugin_checks(PLUGINS[0])
    assert check.state is State.FAILED
    assert check.detail == "verl.utils.config.validate_config: it is not wrapped; run make setup"


def test_all_changes_are_counted_by_device_and_state():
    (check,) = plugin_checks(PLUGINS[0])
    total = len(LEDGER.changes())
    on_cpu = sum(change.device is Device.CPU for change in LEDGER.changes())
    assert total > 35 and on_cpu == 8
    assert f"{total} changes ({total - on_cpu} on every device, {on_cpu} on a CPU only)" in check.detail
    later = sum(change.later for change in LEDGER.changes())
    assert check.detail.endswith(f": {total - later} applied, {later} made as it runs")


def test_changes_of_another_device_are_counted_as_such():
    cpu, every = (next(c for c in LEDGER.changes() if c.device is device) for device in (Device.CPU, Device.ALL))
    report = [
        Status(section="s", change=cpu, state=ChangeState.ELSEWHERE, problem=None),
        Status(section="s", change=every, state=ChangeState.APPLIED, problem=None),
    ]
    expected = "2 changes (1 on every device, 1 on a CPU only): 1 applied, 1 not on this device"
    assert doctor.summary(report) == expected


def test_a_server_that_cannot_be_reached_is_one_failed_line_and_exit_status_1(closed_url, monkeypatch):
    monkeypatch.setattr(doctor, "run_checks", list)
    ran = CliRunner().invoke(app, ["doctor", "--server", closed_url])
    assert ran.exit_code == 1
    assert ran.output.count("failed") == 1 and "cannot be reached" in ran.output
    assert logging.getLogger().isEnabledFor(logging.WARNING)  # silent while it imports, and no longer
    (check,) = server_checks(closed_url, None)
    assert check.state is State.FAILED and "Connection refused" in check.detail


@pytest.mark.parametrize("url", ["", "127.0.0.1:1", "ftp://127.0.0.1", "http://127.0.0.1:port", "http://[::1"])
def test_what_is_no_url_is_a_failure(url):
    (check,) = server_checks(url, None)
    assert check.state is State.FAILED and "URL" in check.detail


@pytest.mark.parametrize("key", ["secret\nkey", "secret ", "sécret"])
def test_a_key_that_no_header_can_carry_is_not_printed(key):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        (check,) = server_checks(f"http://127.0.0.1:{silent.getsockname()[1]}", key)
    assert check.state is State.FAILED
    assert key not in check.detail and key.strip() not in check.detail and "cret" not in check.detail


def test_asking_a_server_imports_no_stack(closed_url):
    code = (
        "import sys; from orbit_cli import main; from orbit_cli.server_checks import server_checks;"
        f"server_checks({closed_url!r}, None); print({{'sglang', 'verl', 'torch'}} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_gpu_that_torch_does_not_find_is_a_failure_and_no_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "NVIDIA_DEVICE", tmp_path)
    (check,) = doctor.device_checks(has_cuda=False)
    assert check.state is State.FAILED
    assert f"{tmp_path} is there, but torch finds no CUDA device: " in check.detail
    assert "install a driver for CUDA" in check.detail


@pytest.mark.slow
def test_doctor_passes_here():
    from pathlib import Path

    command = [str(Path(sys.executable).with_name("orbit")), "doctor"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("changes (") == len(PLUGINS)
