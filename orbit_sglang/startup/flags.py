"""The options of ``SlotsConfig`` and ``FrozenBaseConfig`` as fields of SGLang's ``ServerArgs`` and as command-line flags.

They are injected as dataclass fields, so that ``ServerArgs(**kwargs)``, ``from_cli_args``, ``dataclasses.fields`` and
``dataclasses.replace`` all know them.
"""

import argparse
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, get_args

from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from orbit_kernels.adapters import METHODS
from orbit_sglang.startup.options import Activations, ExpertsMode, FrozenBaseConfig, FusedMode, SlotsConfig, unsupported
from orbit_sglang.upstream import hooks

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """One field of ``ServerArgs`` and its command-line flag."""

    field: str
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] | None = None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Add the flag to a group of the command line."""
        name = "--" + self.field.replace("_", "-")
        if self.type is bool:
            group.add_argument(name, action="store_true", help=self.help)
        else:
            group.add_argument(name, type=self.type, default=self.default, choices=self.choices, help=self.help)


_DEFAULTS = SlotsConfig()
_BASE_DEFAULTS = FrozenBaseConfig()
FLAGS = (
    Flag(field="enable_orbit_slots", type=bool, default=False, help="serve two adapter slots beside the frozen model"),
    Flag(field="orbit_adapter", type=str, default=_DEFAULTS.adapter, choices=tuple(METHODS), help="adapter method"),
    Flag(field="orbit_block_size", type=int, default=_DEFAULTS.block_size, help="OFT: width of a rotation block"),
    Flag(field="orbit_rank", type=int, default=_DEFAULTS.rank, help="LoRA: rank of the updates"),
    Flag(
        field="orbit_fused",
        type=str,
        default=_DEFAULTS.fused,
        choices=get_args(FusedMode),
        help="one rotation (OFT) or one A (LoRA) for all parts of a fused projection, or one for each part",
    ),
    Flag(
        field="orbit_experts",
        type=str,
        default=_DEFAULTS.experts,
        choices=get_args(ExpertsMode),
        help="an adapter for each routed expert, or one that all experts of a layer share",
    ),
    Flag(
        field="orbit_seeded_sampling",
        type=bool,
        default=_DEFAULTS.seeded_sampling,
        help="sample every request from its own sampling_seed, whatever else is in its batch",
    ),
    Flag(
        field="orbit_max_adapter_bytes",
        type=int,
        default=_DEFAULTS.max_adapter_bytes,
        help="largest accepted adapter payload",
    ),
    Flag(
        field="orbit_stage_timeout_s",
        type=float,
        default=_DEFAULTS.stage_timeout_s,
        help="seconds to receive an adapter, and again to place it in its slot",
    ),
    Flag(
        field="orbit_base_activations",
        type=str,
        default=_BASE_DEFAULTS.activations,
        choices=get_args(Activations),
        help="on a CPU with a quantised base: quantise activations as the deployed kernel does, or leave them",
    ),
    Flag(
        field="orbit_dequant_chunk_mb",
        type=int,
        default=_BASE_DEFAULTS.dequant_chunk_mb,
        help="on a CPU with a quantised base: MiB of weights dequantised at a time",
    ),
    Flag(
        field="orbit_experts_per_chunk",
        type=int,
        default=_BASE_DEFAULTS.experts_per_chunk,
        help="on a CPU: experts of a mixture dequantised at a time",
    ),
)


def inject_fields() -> None:
    """Make the flags fields of ``ServerArgs``; harmless when repeated."""
    for flag in FLAGS:
        if flag.field in ServerArgs.__dataclass_fields__:
            continue
        # The standard library has no public way to add a field to a dataclass that exists.
        field = dataclasses.field(default=flag.default, kw_only=True)
        field.name, field.type, field._field_type = flag.field, flag.type, dataclasses._FIELD
        ServerArgs.__dataclass_fields__[flag.field] = field
        setattr(ServerArgs, flag.field, flag.default)


def around_init(original: Callable, server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """Around ``ServerArgs.__init__``: take our arguments out, then check what slots cannot be combined with.

    Raises:
        ValueError: an option is out of range or cannot be combined with slots; all reasons listed.
        hooks.HookError: a hook is not applied.
    """
    for flag in FLAGS:
        setattr(server_args, flag.field, kwargs.pop(flag.field, flag.default))
    if server_args.enable_orbit_slots and kwargs.get("enable_multimodal") is None:
        kwargs["enable_multimodal"] = False  # before SGLang looks for a processor of images
    original(server_args, *args, **kwargs)
    if server_args.enable_orbit_slots:
        hooks.require_applied()
        SlotsConfig.from_server_args(server_args)
        FrozenBaseConfig.from_server_args(server_args)
        if problems := unsupported(server_args, envs.SGLANG_EXPERIMENTAL_CPP_RADIX_TREE.get()):
            raise ValueError("--enable-orbit-slots cannot be combined with: " + "; ".join(problems))
        if not server_args.disable_piecewise_cuda_graph:
            logger.info("Disable piecewise CUDA graph: the slot of a batch is chosen in Python, outside the graph")
            server_args.disable_piecewise_cuda_graph = True
        server_args.disable_shared_experts_fusion = True  # shared experts have adapters of their own


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``."""
    group = parser.add_argument_group("orbit")
    for flag in FLAGS:
        flag.add_to(group)
