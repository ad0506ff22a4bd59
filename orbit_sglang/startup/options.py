"""This module holds the options of the slots and of the frozen base, and what they cannot be combined with yet.

It is importable without torch or SGLang.
"""

import dataclasses
from typing import Any, Self

from orbit_kernels.adapters import METHODS, AdapterMethod
from orbit_kernels.adapters.config import AdapterConfig
from orbit_kernels.contract.options import (
    SEEDED_SAMPLING_FLAG,
    AdapterOptions,
    BaseOptions,
    Options,
    option,
)


class ServerOptions(Options):
    """``ServerOptions`` are set by fields of SGLang's ``ServerArgs``; messages name their flags on the command line."""

    @classmethod
    def written(cls, name: str, value: str) -> str:
        """Writes an option as the command line does, e.g. ``--orbit-rank 8``."""
        return f"{cls.flag(name)} {value}"

    @classmethod
    def flag(cls, name: str) -> str:
        """Returns the flag that sets an option."""
        return next(command_line(rule.flag) for field, rule in cls.declared() if field.name == name)

    @classmethod
    def from_server_args(cls, server_args: Any) -> Self:
        """Reads the options as ``flags`` put them on SGLang's ``ServerArgs``."""
        return cls(**{field.name: getattr(server_args, rule.flag) for field, rule in cls.declared()})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotsConfig(ServerOptions, AdapterOptions):
    """A ``SlotsConfig`` says how a server carries adapters.

    They are of one type and size, which an adapter must have to be staged. ``fused=tied`` shares what acts on the input
    among the parts of a fused projection, and refuses adapters whose parts differ; ``split`` gives each part its own,
    which costs OFT one row of the GEMM per part and token, and LoRA one small GEMM per part.
    """

    seeded_sampling: bool = option(
        False,
        "sample every request from its own sampling_seed, whatever else is in its batch; one is drawn for requests without",
        flag=SEEDED_SAMPLING_FLAG,
    )
    max_adapter_bytes: int = option(
        1 << 30, "largest accepted adapter payload", at_least=1, flag="orbit_max_adapter_bytes"
    )
    stage_timeout_s: float = option(
        120.0,
        "seconds to receive an adapter, and again to place it in its slot",
        above=0,
        flag="orbit_stage_timeout_s",
    )

    @property
    def method(self) -> AdapterMethod:
        """Returns the adapter method with the size that the slots are made for."""
        method = METHODS[self.type]
        return method(**{method.size_field: self.size})

    @property
    def size(self) -> int:
        """Returns the block size or rank."""
        return getattr(self, METHODS[self.type].size_field)

    @property
    def size_flag(self) -> str:
        """Returns the flag that sets ``size``."""
        return self.flag(METHODS[self.type].size_field)

    def problems(self, adapter: AdapterConfig) -> list[str]:
        """Says why an adapter of this configuration does not fit slots made at start-up.

        Its contents may be anything.
        """
        if adapter.type != self.type:
            return [
                f"adapter type {adapter.type!r}: the slots hold {self.type!r} adapters; train with "
                f"orbit.adapter.type={self.type} or start the server with {self.written('type', adapter.type)}"
            ]
        field = adapter.method.size_field
        size = getattr(adapter.method, field)
        if size == self.size:
            return []
        return [
            f"{field} {size}: the slots hold adapters of {field} {self.size}; train with orbit.adapter.{field}={self.size} "
            f"or start the server with {self.written(field, size)}"
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenBaseConfig(ServerOptions, BaseOptions):
    """A ``FrozenBaseConfig`` says how a CPU computes with a quantised base; on a GPU SGLang's kernels do."""


def command_line(flag: str) -> str:
    """Returns the flag on the command line that sets a field of ``ServerArgs``."""
    return f"--{flag.replace('_', '-')}"


# ServerArgs field, the values under which slots work, why not otherwise.
_REQUIRED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("pp_size", (1,), "a version would change between two pipeline stages of one token"),
    ("dp_size", (1,), "replicas inside one server do not agree yet on the active version"),
    ("ep_size", (1,), "a rank's own experts are not yet in what the server says of its base"),
    ("nnodes", (1,), "the payload is handed to the scheduler through a local file"),
    ("tokenizer_worker_num", (1,), "control replies reach a single tokenizer process"),
    ("speculative_algorithm", (None,), "draft tokens carry no version"),
    ("disaggregation_mode", ("null",), "a version would have to travel with the KV cache"),
    ("dllm_algorithm", (None,), "tokens of a block diffusion model carry no version"),
    ("enable_lora", (None, False), "SGLang's own LoRA changes the same linears"),
    ("enable_pdmux", (False,), "two forward passes would share one token-to-slot buffer"),
    ("enable_two_batch_overlap", (False,), "two forward passes would share one token-to-slot buffer"),
    ("enable_torch_compile", (False,), "the slot of a batch is chosen in Python, outside the compiled graph"),
    ("enforce_piecewise_cuda_graph", (False,), "the slot of a batch is chosen in Python, outside the graph"),
    ("enable_multimodal", (False,), "log-probs and adapters are those of text"),
    ("enforce_shared_experts_fusion", (False,), "shared experts have adapters of their own"),
    ("enable_attn_tp_input_scattered", (False,), "a rank's tokens would not be the batch's, whose slots are known"),
    ("moe_dense_tp_size", (None,), "a rank's tokens would not be the batch's, whose slots are known"),
    ("attn_cp_size", (1,), "a rank's tokens would not be the batch's, whose slots are known"),
    ("enable_prefill_context_parallel", (False,), "a rank's tokens would not be the batch's, whose slots are known"),
    ("moe_dp_size", (1,), "a rank's tokens would not be the batch's, whose slots are known"),
    ("enable_streaming_session", (False,), "a session's KV cache has no version"),
    ("enable_lmcache", (False,), "LMCache's keys do not hold the version"),
    ("hicache_storage_backend", (None,), "the storage's keys do not hold the version"),
    ("is_embedding", (False,), "only generation reports versions"),
    ("grpc_mode", (False,), "the control routes are HTTP"),
    ("load_format", ("auto", "safetensors"), "the base is recorded by SGLang's loader of safetensors files"),
)


def unsupported(server_args: Any, cpp_radix_tree: bool) -> list[str]:
    """Lists options of a server that slots cannot work with, one line each.

    The list is empty when the server may start.

    Args:
        server_args: SGLang's ``ServerArgs``.
        cpp_radix_tree: SGLang's experimental C++ prefix tree, which is chosen by an environment variable.
    """
    problems = [
        f"{field}={getattr(server_args, field)!r}: {reason}; use {allowed[0]!r}"
        for field, allowed, reason in _REQUIRED
        if getattr(server_args, field) not in allowed
    ]
    if server_args.orbit_base_activations == "none" and server_args.device != "cpu":
        problems.append(
            f"--orbit-base-activations none on {server_args.device}: SGLang's kernels compute as deployed; use deployed"
        )
    if server_args.enable_return_routed_experts and server_args.enable_hierarchical_cache:
        problems.append(
            "--enable-return-routed-experts with --enable-hierarchical-cache: a prefix that comes back from the host leaves its "
            "record behind; leave one of them out"
        )
    if server_args.device == "cpu" and server_args.grammar_backend not in ("xgrammar", "none"):
        problems.append(
            f"grammar_backend={server_args.grammar_backend!r} on cpu: one request with a regex ends the server; use 'xgrammar' or 'none'"
        )
    if cpp_radix_tree:
        problems.append("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE=1: the C++ tree ignores the version's namespace; unset it")
    return problems
