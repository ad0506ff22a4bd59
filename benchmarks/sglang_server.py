"""This module runs a real SGLang server on this machine's CPU for the length of a measurement.

The server has adapter slots, or none.
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

START_TIMEOUT_S = 600.0
_CPU_FLAGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.3",
    "--max-total-tokens", "20000", "--max-running-requests", "32", "--random-seed", "0", "--sleep-on-idle",
    "--chunked-prefill-size", "-1",  # a prompt in chunks rounds attention otherwise
)  # fmt: skip


@contextlib.contextmanager
def serve(model: Path, log: Path, *flags: str, slots: bool = True) -> Iterator[str]:
    """Serves a checkpoint; yields ``host:port`` on loopback once the server is ready.

    Raises:
        RuntimeError: the server ended, or was not ready in time; with the end of its log.
    """
    port = _free_port()
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), *_CPU_FLAGS, *flags]
    command += ["--enable-orbit-slots"] if slots else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_until_ready(process, f"127.0.0.1:{port}", log)
        yield f"127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    # SGLang 0.5.12 also uses port + 10000. Linux gives both to no connection, which it numbers from 32768 on.
    for port in random.SystemRandom().sample(range(11000, 22000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("none of 100 ports between 11000 and 22000 is free on 127.0.0.1")


def _wait_until_ready(process: subprocess.Popen, address: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"http://{address}/health", timeout=5, trust_env=False).is_success:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not start; the end of its log:\n{log.read_text(errors='replace')[-3000:]}")
