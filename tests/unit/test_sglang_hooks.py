import dataclasses

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from orbit_sglang.upstream import hooks

LIMIT = object()
OTHER = object()


class Target:
    def method(self, value):
        return value

    def elsewhere(self, value):
        return value

    @classmethod
    def build(cls, value):
        return value


def double(original, self, value):
    return 2 * original(self, value)


def hook(name: str, *parameters: str, function=double) -> hooks.Hook:
    return hooks.Hook(f"{__name__}.Target.{name}", HookType.AROUND, function, parameters)


@pytest.fixture(autouse=True)
def own_table(monkeypatch):
    monkeypatch.setattr(hooks, "_HOOKS", [])


def test_a_hook_is_reported_until_it_is_applied_and_then_not():
    table = [hook("method", "self", "value"), hook("build", "cls", "value")]
    assert [entry.problem() for entry in table] == ["the hook is not applied"] * 2
    hooks.register(table)
    HookRegistry.apply_hooks()
    assert [entry.problem() for entry in table] == [None, None]
    assert Target().method(3) == 6 and Target.build(4) == 8
    with pytest.raises(ValueError, match="already registered"):
        hooks.register(table[:1])


def test_a_wrapper_of_someone_else_is_no_proof():
    def other(original, self, value):
        return original(self, value)

    assert hook("method", "self", "value", function=other).problem() == "the hook is not applied"


def test_a_hook_for_a_cpu_is_left_alone_on_another_device(monkeypatch):
    monkeypatch.setattr(hooks, "is_cpu", lambda: False)
    elsewhere = dataclasses.replace(hook("elsewhere", "self", "value"), cpu_only=True)
    hooks.register([elsewhere])
    HookRegistry.apply_hooks()
    assert Target().elsewhere(3) == 3
    assert [(status.needed, status.problem) for status in hooks.hook_report()] == [(False, None)]
    hooks.require_applied()
    monkeypatch.setattr(hooks, "is_cpu", lambda: True)
    assert elsewhere.problem() == "the hook is not applied"


def test_a_replaced_attribute_is_reported_when_it_was_not_what_was_expected(monkeypatch):
    monkeypatch.setattr(hooks, "is_cpu", lambda: True)
    right = hooks.CpuAttribute(f"{__name__}.LIMIT", expected=LIMIT, value=object())
    wrong = hooks.CpuAttribute(f"{__name__}.OTHER", expected=LIMIT, value=object())
    hooks.register([right, wrong])
    assert right.value is LIMIT and right.problem() is None
    assert "expected" in wrong.problem()


def test_a_target_that_moved_or_changed_is_named():
    assert "does not exist" in hook("renamed", "self").problem()
    assert "expected ('self', 'text')" in hook("method", "self", "text").problem()
