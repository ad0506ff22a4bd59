"""This module makes the options fields of SGLang's ``ServerArgs`` and command-line flags.

They are those of ``SlotsConfig`` and ``FrozenBaseConfig``, and are injected as dataclass fields, so that
``ServerArgs(**kwargs)``, ``from_cli_args``, ``dataclasses.fields`` and ``dataclasses.replace`` all know them.
"""

import argparse
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs

from orbit_kernels.contract.options import ENABLE_FLAG, choices
from orbit_kernels.json_files import check_json_files
from orbit_sglang.startup.options import FrozenBaseConfig, ServerOptions, SlotsConfig, command_line, unsupported
from orbit_sglang.upstream import hooks

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A ``Flag`` is one field of ``ServerArgs`` and its command-line flag."""

    field: str
    type: type
    default: Any
    help: str
    choices: tuple[str, ...] | None = None

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Adds the flag to a group of the command line."""
        name = command_line(self.field)
        if self.type is bool:
            group.add_argument(name, action="store_true", help=self.help)
        else:
            group.add_argument(name, type=self.type, default=self.default, choices=self.choices, help=self.help)


def _flags(group: type[ServerOptions]) -> Iterator[Flag]:
    for field, rule in group.declared():
        allowed = choices(field)
        yield Flag(
            field=rule.flag,
            type=str if allowed else field.type,
            default=field.default,
            help=rule.help,
            choices=allowed,
        )


FLAGS = (
    Flag(field=ENABLE_FLAG, type=bool, default=False, help="serve two adapter slots beside the frozen model"),
    *_flags(SlotsConfig),
    *_flags(FrozenBaseConfig),
)


def inject_fields() -> None:
    """Makes the flags fields of ``ServerArgs``; it is harmless when repeated."""
    for flag in FLAGS:
        if flag.field in ServerArgs.__dataclass_fields__:
            continue
        # The standard library has no public way to add a field to a dataclass that exists.
        field = dataclasses.field(default=flag.default, kw_only=True)
        field.name, field.type, field._field_type = flag.field, flag.type, dataclasses._FIELD
        ServerArgs.__dataclass_fields__[flag.field] = field
        setattr(ServerArgs, flag.field, flag.default)


def around_init(original: Callable, server_args: ServerArgs, *args: Any, **kwargs: Any) -> None:
    """Takes our arguments out, then checks what slots cannot be combined with; runs around ``ServerArgs.__init__``.

    Raises:
        ValueError: an option is out of range or cannot be combined with slots, all reasons listed; or a JSON file of the
            model or the tokeniser is cut short.
        NotInPlaceError: a change to SGLang is not in place.
    """
    for flag in FLAGS:
        setattr(server_args, flag.field, kwargs.pop(flag.field, flag.default))
    if server_args.enable_orbit_slots:
        if kwargs.get("enable_multimodal") is None:
            kwargs["enable_multimodal"] = False  # before SGLang looks for a processor of images
        _check_json(*args, **kwargs)
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


def _check_json(model_path: str, tokenizer_path: str | None = None, *_args: Any, **_kwargs: Any) -> None:
    """Reads the JSON files that SGLang is about to read, whose errors do not name them; it has the first two arguments."""
    for folder in {model_path, tokenizer_path or model_path}:
        check_json_files(folder)


def after_add_cli_args(result: None, parser: argparse.ArgumentParser) -> None:
    """Adds the flags to the command line; runs after ``ServerArgs.add_cli_args``."""
    group = parser.add_argument_group("orbit")
    for flag in FLAGS:
        flag.add_to(group)
