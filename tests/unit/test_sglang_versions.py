import itertools

import pytest

from orbit_sglang.control.slots import BASE_SLOT, StagedAdapter
from orbit_sglang.http.reporting import extend_spans
from orbit_sglang.scheduler.versions import Conflict, SlotVersions


def stage(versions: SlotVersions, version: int, in_use=None) -> int:
    slot = versions.begin_stage(version, in_use or {})
    versions.finish_stage(
        StagedAdapter(version=version, adapter_type="oft", digest=f"d{version}", num_bytes=1, modules={"q_proj": 1})
    )
    return slot


def refused(code: str):
    return pytest.raises(Conflict, check=lambda conflict: conflict.code == code)


@pytest.mark.parametrize("chunks", [[[1, 1], [1, 2], [2, 0]], [[], [3], [], [3, 4, 4]], [[]]])
def test_spans_grow_chunk_by_chunk(chunks):
    spans: list[list[int]] = []
    for chunk in chunks:
        extend_spans(spans, chunk)
    flat = [version for chunk in chunks for version in chunk]
    assert [version for version, _, count in spans for _ in range(count)] == flat
    assert [first for _, first, _ in spans] == [0, *itertools.accumulate(count for _, _, count in spans)][:-1]
    assert all(left[0] != right[0] for left, right in itertools.pairwise(spans))


def test_starts_on_the_base_with_two_empty_slots():
    versions = SlotVersions()
    assert versions.active_version == 0 and versions.versions == [0]
    assert versions.slot_of(0) == BASE_SLOT and versions.slot_of(1) is None
    assert [slot["state"] for slot in versions.describe()] == ["empty", "empty"]


def test_a_staged_version_is_live_but_not_active_until_activated():
    versions = SlotVersions()
    stage(versions, 1)
    assert versions.active_version == 0 and versions.versions == [0, 1]
    versions.activate(1)
    assert versions.active_version == 1
    assert [slot["state"] for slot in versions.describe()] == ["active", "empty"]


def test_slots_alternate_and_the_active_one_is_never_the_target():
    versions = SlotVersions()
    slots = []
    for version in range(1, 7):
        slots.append(stage(versions, version))
        versions.activate(version)
    assert slots == [1, 2, 1, 2, 1, 2]
    assert versions.versions == [0, 5, 6]


@pytest.mark.parametrize("version", [0, 3, 4])
def test_versions_only_grow(version):
    versions = SlotVersions()
    stage(versions, 4)
    with refused("version_not_new"):
        versions.begin_stage(version, {})


def test_a_discarded_version_stays_seen():
    versions = SlotVersions()
    stage(versions, 1)
    assert versions.discard({}) == [1]
    assert versions.versions == [0]
    with refused("version_not_new"):
        versions.begin_stage(1, {})


def test_a_failed_version_may_be_sent_again():
    versions = SlotVersions()
    versions.begin_stage(1, {})
    versions.fail_stage(overwritten=False)
    assert stage(versions, 1) == 1


def test_only_one_staging_at_a_time():
    versions = SlotVersions()
    versions.begin_stage(1, {})
    for operation in (lambda: versions.begin_stage(2, {}), lambda: versions.discard({})):
        with refused("staging_in_progress"):
            operation()


def test_staging_waits_for_requests_on_the_inactive_version():
    """docs/field-cases.md: the slot in use."""
    versions = SlotVersions()
    stage(versions, 1)
    versions.activate(1)
    stage(versions, 2)
    versions.activate(2)
    with refused("slot_in_use") as caught:
        versions.begin_stage(3, {1: 1, 2: 7})
    assert caught.value.detail == {"requests": {1: 1}}
    assert versions.versions == [0, 1, 2] and versions.staging_version is None
    assert stage(versions, 3, {2: 7}) == 1


def test_the_target_is_no_version_that_a_request_may_use():
    versions = SlotVersions()
    for version in (1, 2):
        stage(versions, version)
        versions.activate(version)
    versions.begin_stage(3, {})
    assert versions.slot_of(1) is None and versions.versions == [0, 2]
    with refused("version_not_staged"):
        versions.rollback(1)
    with refused("version_not_staged"):
        versions.activate(3)


@pytest.mark.parametrize("overwritten, held", [(False, [0, 1, 2]), (True, [0, 2])])
def test_a_failed_staging_keeps_the_old_version_unless_it_was_overwritten(overwritten, held):
    """docs/field-cases.md: failed staging."""
    versions = SlotVersions()
    for version in (1, 2):
        stage(versions, version)
        versions.activate(version)
    versions.begin_stage(3, {})
    versions.fail_stage(overwritten)
    assert versions.versions == held and versions.active_version == 2


def test_activation_is_idempotent_and_refuses_what_is_not_staged_or_older():
    versions = SlotVersions()
    stage(versions, 1)
    stage(versions, 2)
    versions.activate(2)
    versions.activate(2)
    with refused("version_not_staged"):
        versions.activate(3)
    with refused("version_older"):
        versions.activate(1)
    assert versions.active_version == 2


def test_rollback_goes_to_the_version_before_and_only_once():
    versions = SlotVersions()
    stage(versions, 1)
    versions.activate(1)
    stage(versions, 2)
    versions.activate(2)
    assert versions.rollback(None) == 1
    with refused("nothing_to_roll_back"):
        versions.rollback(None)
    assert versions.rollback(0) == 0
    with refused("version_newer"):
        versions.rollback(2)
    versions.activate(2)
    assert versions.active_version == 2


def test_rollback_is_refused_when_the_slot_was_reused():
    versions = SlotVersions()
    stage(versions, 1)
    versions.activate(1)
    stage(versions, 2)
    versions.activate(2)
    stage(versions, 3)
    with refused("version_not_staged"):
        versions.rollback(None)
    assert versions.active_version == 2


def test_discard_spares_the_active_slot_and_waits_for_requests():
    versions = SlotVersions()
    stage(versions, 1)
    versions.activate(1)
    stage(versions, 2)
    with refused("slot_in_use"):
        versions.discard({2: 1})
    assert versions.discard({1: 5}) == [2]
    assert versions.discard({}) == []
    assert versions.versions == [0, 1]
