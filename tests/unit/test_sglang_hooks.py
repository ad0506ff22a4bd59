import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from orbit_kernels.upstream.ledger import Device, Ledger, Method, State
from orbit_sglang.upstream import hooks

LIMIT = object()
OTHER = object()
REASONS = {"why": "a test", "until": "it ends"}


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


def hook(name: str, *parameters: str, function=double, device=Device.ALL) -> hooks.Hook:
    target = f"{__name__}.Target.{name}"
    return hooks.Hook(
        target=target, type=HookType.AROUND, function=function, parameters=parameters, device=device, **REASONS
    )


@pytest.fixture
def ledger():
    return Ledger("SGLang", hooks.is_needed, "it would serve without adapters", "Install it")


def test_a_hook_is_reported_until_it_is_applied_and_then_not(ledger):
    table = [hook("method", "self", "value"), hook("build", "cls", "value")]
    assert [entry.problem() for entry in table] == ["the hook is not applied"] * 2
    ledger.register({"a process": table})
    HookRegistry.apply_hooks()
    assert [entry.problem() for entry in table] == [None, None]
    assert Target().method(3) == 6 and Target.build(4) == 8
    with pytest.raises(ValueError, match="already registered"):
        ledger.register({"a process": table[:1]})


def test_a_wrapper_of_someone_else_is_no_proof():
    def other(original, self, value):
        return original(self, value)

    assert hook("method", "self", "value", function=other).problem() == "the hook is not applied"


def test_a_hook_for_a_cpu_is_left_alone_on_another_device(monkeypatch, ledger):
    monkeypatch.setattr(hooks, "is_cpu", lambda: False)
    elsewhere = hook("elsewhere", "self", "value", device=Device.CPU)
    ledger.register({"a process": [elsewhere]})
    HookRegistry.apply_hooks()
    assert Target().elsewhere(3) == 3
    assert [status.state for status in ledger.report()] == [State.ELSEWHERE]
    ledger.require_applied()
    monkeypatch.setattr(hooks, "is_cpu", lambda: True)
    assert [status.problem for status in ledger.report()] == ["the hook is not applied"]


def test_a_replaced_attribute_is_reported_when_it_was_not_what_was_expected(ledger):
    right, wrong = (
        hooks.Attribute(target=f"{__name__}.{name}", expected=LIMIT, value=object(), **REASONS)
        for name in ("LIMIT", "OTHER")
    )
    ledger.register({"a process": [right, wrong]})
    assert right.value is LIMIT and right.problem() is None
    assert "expected" in wrong.problem()


def test_a_target_that_moved_or_changed_is_named():
    assert "does not exist" in hook("renamed", "self").problem()
    assert "expected ('self', 'text')" in hook("method", "self", "text").problem()


def test_a_field_that_was_not_added_is_named():
    target = "sglang.srt.server_args.ServerArgs"
    fields = hooks.Fields(target=target, add=lambda: None, names=("model_path", "no_such_field"), **REASONS)
    assert fields.problem() == "it has no field no_such_field"


def test_a_method_is_replaced_while_the_body_runs():
    instance, method = Target(), Method(f"{__name__}.Target.elsewhere", ("self", "value"))
    with hooks.method_replaced(method, instance, lambda value: value + 1):
        assert instance.elsewhere(1) == 2
    assert instance.elsewhere(1) == 1
