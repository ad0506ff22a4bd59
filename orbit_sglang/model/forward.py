"""The forward pass: which slot each token uses, and the version that each generated token reports."""

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from orbit_sglang.control.messages import INFO_KEY
from orbit_sglang.model.slots import BatchSlots, SlotBank
from orbit_sglang.startup.options import SlotsConfig


@dataclasses.dataclass(frozen=True)
class BatchVersions:
    """Slot and version of each request of a batch, as they were when the batch was launched."""

    slots: list[int]
    versions: list[int]


def most_tokens(server_args: ServerArgs, context_length: int) -> int:
    """Tokens that one forward pass has at most: SGLang lets the last prompt of a prefill exceed the limit."""
    return context_length + max(server_args.max_prefill_tokens, server_args.chunked_prefill_size or 0)


def after_load_model(result: None, runner: ModelRunner) -> None:
    """After ``ModelRunner.load_model``: put the slots beside the linears."""
    if not runner.server_args.enable_orbit_slots:
        return
    server_args = runner.server_args
    batch = BatchSlots(
        most_tokens(server_args, runner.model_config.context_len), next(runner.model.parameters()).device
    )
    runner.orbit_slots = SlotBank(runner.model, SlotsConfig.from_server_args(server_args), runner.dtype, batch)


def after_init_new(result: ForwardBatch, cls: type, batch: Any, model_runner: ModelRunner) -> None:
    """After ``ForwardBatch.init_new``: remember slots and versions; requests may move before the pass has ended."""
    if model_runner.server_args.enable_orbit_slots and batch.reqs:
        pins = [req.orbit for req in batch.reqs]
        result.orbit = BatchVersions([pin.slot for pin in pins], [pin.version for pin in pins])


def around_forward(original: Callable, runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any):
    """Around ``ModelRunner.forward``: run with the slots of the batch, and attach its versions to the logits."""
    batch = getattr(forward_batch, "orbit", None)
    if batch is None:
        return original(runner, forward_batch, *args, **kwargs)
    lengths = forward_batch.extend_seq_lens_cpu if forward_batch.forward_mode.is_extend() else None
    with runner.orbit_slots.batch.running(batch.slots, lengths):
        output = original(runner, forward_batch, *args, **kwargs)
    logits = output.logits_output
    logits.customized_info = {**(logits.customized_info or {}), INFO_KEY: batch.versions}
    return output
