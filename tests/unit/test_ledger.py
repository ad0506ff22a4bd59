"""The ledger of changes to upstream: each is proven, or named with what is wrong."""

import functools

import pytest

from orbit_kernels.upstream.ledger import (
    Added,
    Change,
    Device,
    Ledger,
    Method,
    NotInPlaceError,
    OnInstance,
    Overridden,
    Registered,
    Replaced,
    State,
    counts,
)

REASONS = {"why": "a test", "until": "it ends"}
REGISTRY = {"theirs": dict, "ours": "orbit_kernels.of_a_test"}


class Upstream:
    def __init__(self):
        self.chosen = self._choose()

    def _choose(self):
        return 1

    def serve(self, request, limit=None):
        return request


class Ours(Upstream):
    @functools.wraps(Upstream.serve)
    def serve(self, *args, **kwargs):
        return super().serve(*args, **kwargs)


class Unrelated:
    pass


def named(attribute: str = "") -> str:
    return f"{__name__}.{attribute}"


def ledger(device: Device = Device.CPU) -> Ledger:
    return Ledger("test 1.0", lambda needed: needed in (Device.ALL, device), "it would be wrong", "Install it")


def on_instance(name: str, *parameters: str) -> OnInstance:
    return OnInstance(method=Method(named(f"Upstream.{name}"), parameters), by=named("Ours"), **REASONS)


@pytest.mark.parametrize(
    "change, problem",
    [
        (on_instance("serve", "self", "request"), None),
        (on_instance("moved", "self"), "the target does not exist"),
        (on_instance("serve", "self", "text"), r"takes \('self', 'request', 'limit'\), expected \('self', 'text'\)"),
        (Replaced(target=named("REGISTRY"), by=named("Ours"), **REASONS), None),
        (Replaced(target=named("MOVED"), by=named("Ours"), **REASONS), "the target does not exist"),
        (Added(target=named("Upstream.moved"), by=named("Ours"), **REASONS), "the target does not exist"),
        (Added(target="no_such_module.thing", by=named("Ours"), **REASONS), "No module named 'no_such_module'"),
        (Overridden(target=named("Upstream"), by=named("Ours"), names=("serve", "chosen"), **REASONS), None),
        (
            Overridden(target=named("Upstream"), by=named("Ours"), names=("serve", "gone"), **REASONS),
            "it has no gone to",
        ),
        (Overridden(target=named("Upstream"), by=named("Unrelated"), names=(), **REASONS), "is no subclass of it"),
        (Registered(target=named("REGISTRY"), by=named("Ours"), read=lambda known: known["ours"], **REASONS), None),
        (
            Registered(target=named("REGISTRY"), by=named("Ours"), read=lambda known: known["theirs"], **REASONS),
            "it holds <class 'dict'>, expected what .*Ours registers",
        ),
        (
            Registered(target=named("REGISTRY"), by=named("Ours"), read=lambda known: known["other"], **REASONS),
            "no such entry: KeyError: 'other'",
        ),
    ],
)
def test_a_target_that_moved_or_changed_is_named(change, problem):
    book = ledger()
    book.register({"a process": [change]})
    (status,) = book.report()
    if problem is None:
        assert status.problem is None and status.state in (State.LATER, State.APPLIED)
        book.require_applied("a process")
        return
    assert status.state is State.BROKEN
    with pytest.raises(
        NotInPlaceError, match=f"do not fit this test 1.0, so it would be wrong: .*{problem}.*Install it"
    ):
        book.require_applied()


def test_all_that_is_not_in_place_is_listed_and_only_of_the_process_that_asks():
    book = ledger()
    book.register(
        {"one": [on_instance("moved", "self"), on_instance("gone", "self")], "two": [on_instance("serve", "self")]}
    )
    with pytest.raises(NotInPlaceError, match=r"Upstream\.moved: .*; .*Upstream\.gone: "):
        book.require_applied("one")
    book.require_applied("two")


def test_a_process_whose_plugin_is_not_loaded_is_refused():
    with pytest.raises(NotInPlaceError, match="the plugin is not loaded in this process"):
        ledger().require_applied()


def test_the_same_change_twice_is_refused():
    book = ledger()
    with pytest.raises(ValueError, match="Ours is already registered on .*serve; register it once"):
        book.register({"one": [on_instance("serve", "self")], "two": [on_instance("serve", "self")]})


class Installed(Change):
    """A change that counts how often it is made."""

    kind, by, made = "counts", "a test", 0

    def install(self) -> None:
        type(self).made += 1

    def problem(self) -> str | None:
        return "looked at on the wrong device"


def test_what_another_device_needs_is_neither_made_nor_checked():
    book = ledger(Device.CUDA)
    book.register({"one": [Installed(target="x", device=Device.CPU, **REASONS)]})
    assert Installed.made == 0
    (status,) = book.report()
    assert (status.state, status.problem) == (State.ELSEWHERE, None)
    assert counts([status]) == {"a CPU only": 1}
    book.require_applied()


def test_a_method_is_replaced_on_an_instance_that_has_it_only():
    served, other = Ours(), Ours()
    before = Method(named("Upstream.serve"), ("self", "request")).replace_on(
        served, lambda request: before(request) + 1
    )
    assert served.serve(1) == 2 and other.serve(1) == 1
    with pytest.raises(NotInPlaceError, match=r"Unrelated.serve: does not exist.*make setup"):
        Method(named("Upstream.serve"), ("self", "request")).replace_on(Unrelated(), print)
    with pytest.raises(NotInPlaceError, match=r"Ours.serve: .*expected \('text',\)"):
        Method(named("Upstream.serve"), ("self", "text")).replace_on(other, print)
