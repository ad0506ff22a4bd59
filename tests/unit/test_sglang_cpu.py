"""Where the ranks of a CPU server run."""

import os

import pytest
from sglang.srt.utils import get_cpu_ids_by_node

from orbit_sglang.cpu.engine import THREADS_VARIABLE, place_ranks


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    return os.environ


def test_ranks_beyond_the_numa_nodes_share_out_the_cores(environment):
    num_ranks = len(get_cpu_ids_by_node()) + 1
    place_ranks(num_ranks)
    of_rank = [[int(core) for core in own.split(",")] for own in environment[THREADS_VARIABLE].split("|")]
    assert len(of_rank) == num_ranks and all(of_rank)
    assert {core for own in of_rank for core in own} == os.sched_getaffinity(0)


def test_more_ranks_than_cores_share_them(environment):
    num_ranks = 3 * len(os.sched_getaffinity(0)) + len(get_cpu_ids_by_node())
    place_ranks(num_ranks)
    assert len(environment[THREADS_VARIABLE].split("|")) == num_ranks


def test_a_rank_for_each_node_is_left_to_sglang(environment):
    place_ranks(len(get_cpu_ids_by_node()))
    assert THREADS_VARIABLE not in environment


def test_the_users_placement_stays(environment):
    environment[THREADS_VARIABLE] = "0|0"
    place_ranks(len(get_cpu_ids_by_node()) + 1)
    assert environment[THREADS_VARIABLE] == "0|0"
