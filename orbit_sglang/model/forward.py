"""This module tells the forward pass which slot each token uses, and which version each generated token reports."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from orbit_sglang.control.messages import INFO_KEY
from orbit_sglang.model.resident import ResidentBase
from orbit_sglang.model.slots import SlotBank
from orbit_sglang.model.slotted.batch import BatchSlots
from orbit_sglang.startup.options import SlotsConfig


@dataclasses.dataclass(frozen=True)
class BatchVersions:
    """``BatchVersions`` are the slot and version of each request of a batch, as they were when it was launched."""

    slots: list[int]
    versions: list[int]


def most_tokens(server_args: ServerArgs, context_length: int) -> int:
    """Returns the most tokens that one forward pass has.

    SGLang lets the last prompt of a prefill exceed the limit.
    """
    return context_length + max(server_args.max_prefill_tokens, server_args.chunked_prefill_size or 0)


def after_load_model(result: None, runner: ModelRunner) -> None:
    """Puts the slots beside the linears; runs after ``ModelRunner.load_model``."""
    if not runner.server_args.enable_orbit_slots:
        return
    runner.orbit_resident = ResidentBase(runner.model)  # without the slots, which change
    server_args = runner.server_args
    batch = BatchSlots(
        most_tokens(server_args, runner.model_config.context_len), next(runner.model.parameters()).device
    )
    runner.orbit_slots = SlotBank(runner.model, SlotsConfig.from_server_args(server_args), runner.dtype, batch)


def after_init_new(result: ForwardBatch, cls: type, batch: Any, model_runner: ModelRunner) -> None:
    """Remembers slots and versions; runs after ``ForwardBatch.init_new``.

    Requests may move before the pass has ended.
    """
    if model_runner.server_args.enable_orbit_slots and batch.reqs:
        own = [req.orbit for req in batch.reqs]
        result.orbit = BatchVersions([each.slot for each in own], [each.version for each in own])


def around_forward(original: Callable, runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any):
    """Runs the pass with its batch's slots, and gives its logits the versions; runs around ``ModelRunner.forward``."""
    at_launch = getattr(forward_batch, "orbit", None)
    if at_launch is None:
        return original(runner, forward_batch, *args, **kwargs)
    lengths = forward_batch.extend_seq_lens_cpu if forward_batch.forward_mode.is_extend() else None
    with runner.orbit_slots.batch.running(at_launch.slots, lengths):
        output = original(runner, forward_batch, *args, **kwargs)
    logits = output.logits_output
    logits.customized_info = {**(logits.customized_info or {}), INFO_KEY: at_launch.versions}
    return output
