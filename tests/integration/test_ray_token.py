"""Whoever reaches a run's Ray cluster without its token runs nothing in it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

CLUSTER = """
import os, subprocess, sys
import psutil, ray
from orbit_verl.driver.run_config import LOOPBACK
os.environ.pop("RAY_AUTH_MODE", None)
options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80_000_000}
address = ray.init(_node_ip_address=LOOPBACK, **options).address_info["gcs_address"]
processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
sockets = [one for process in processes for one in process.net_connections("tcp") if one.status == "LISTEN"]
print("BEYOND LOOPBACK", any(not one.laddr.ip.startswith("127.") for one in sockets))
for mode in ("token", "disabled"):
    environment = {**os.environ, "RAY_AUTH_MODE": mode}
    ran = subprocess.run([sys.executable, "-c", sys.argv[1], address], env=environment, capture_output=True, text=True)
    print(mode.upper(), ran.returncode, "ran in the cluster" in ran.stdout)
"""
CLIENT = """
import sys
import ray
ray.init(sys.argv[1])
print(ray.get(ray.remote(lambda: "ran in the cluster").remote(), timeout=60))
"""


def test_a_client_without_the_token_runs_nothing():
    ran = subprocess.run([sys.executable, "-c", CLUSTER, CLIENT], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "TOKEN 0 True" in ran.stdout, "the attack is none"
    assert "DISABLED 1 False" in ran.stdout
    assert "BEYOND LOOPBACK True" in ran.stdout, "Ray keeps to loopback now: docs/limits.md says that it does not"
