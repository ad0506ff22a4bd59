"""Options of the adapter slots, and what they cannot be combined with yet. Importable without torch or SGLang."""

import dataclasses
from typing import Any, Literal, get_args

FusedMode = Literal["tied", "split"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotsConfig:
    """How a server carries adapters.

    Args:
        adapter: adapter method of both slots.
        block_size: width of one rotation block; an adapter with another block size is refused.
        fused: ``tied`` shares one rotation among the parts of a fused projection (one GEMM, adapters whose parts
            differ are refused); ``split`` gives each part its own (one row of the GEMM per part and token).
        seeded_sampling: sample each request from its ``sampling_seed``; one is drawn for requests without.
        max_adapter_bytes: largest accepted payload.
        stage_timeout_s: limit for receiving a payload, and again for placing it in its slot.

    Raises:
        ValueError: a field is out of range.
    """

    adapter: Literal["oft"] = "oft"
    block_size: int = 32
    fused: FusedMode = "tied"
    seeded_sampling: bool = False
    max_adapter_bytes: int = 1 << 30
    stage_timeout_s: float = 120.0

    def __post_init__(self):
        if self.adapter != "oft":
            raise ValueError(f"--orbit-adapter {self.adapter!r}: only 'oft' is implemented")
        if self.block_size < 2:
            raise ValueError(f"--orbit-block-size {self.block_size}: must be at least 2, e.g. 32")
        if self.fused not in get_args(FusedMode):
            raise ValueError(f"--orbit-fused {self.fused!r}: must be one of {', '.join(get_args(FusedMode))}")
        if self.max_adapter_bytes < 1:
            raise ValueError(f"--orbit-max-adapter-bytes {self.max_adapter_bytes}: must be positive")
        if self.stage_timeout_s <= 0:
            raise ValueError(f"--orbit-stage-timeout-s {self.stage_timeout_s}: must be positive")

    @classmethod
    def from_server_args(cls, server_args: Any) -> "SlotsConfig":
        """The options as ``flags`` put them on SGLang's ``ServerArgs``."""
        return cls(
            adapter=server_args.orbit_adapter,
            block_size=server_args.orbit_block_size,
            fused=server_args.orbit_fused,
            seeded_sampling=server_args.orbit_seeded_sampling,
            max_adapter_bytes=server_args.orbit_max_adapter_bytes,
            stage_timeout_s=server_args.orbit_stage_timeout_s,
        )


# ServerArgs field, the values under which slots work, why not otherwise.
_REQUIRED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tp_size", (1,), "ranks do not agree yet on when a version is ready"),
    ("pp_size", (1,), "a version would change between two pipeline stages of one token"),
    ("dp_size", (1,), "replicas inside one server do not agree yet on the active version"),
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
    ("enable_streaming_session", (False,), "a session's KV cache has no version"),
    ("enable_lmcache", (False,), "LMCache's keys do not hold the version"),
    ("hicache_storage_backend", (None,), "the storage's keys do not hold the version"),
    ("is_embedding", (False,), "only generation reports versions"),
    ("grpc_mode", (False,), "the control routes are HTTP"),
)


def unsupported(server_args: Any, cpp_radix_tree: bool) -> list[str]:
    """Options of a server that slots cannot work with, one line each; empty when the server may start.

    Args:
        server_args: SGLang's ``ServerArgs``.
        cpp_radix_tree: SGLang's experimental C++ prefix tree, which is chosen by an environment variable.
    """
    problems = [
        f"{field}={getattr(server_args, field)!r}: {reason}; use {allowed[0]!r}"
        for field, allowed, reason in _REQUIRED
        if getattr(server_args, field) not in allowed
    ]
    if cpp_radix_tree:
        problems.append("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE=1: the C++ tree ignores the version's namespace; unset it")
    return problems
