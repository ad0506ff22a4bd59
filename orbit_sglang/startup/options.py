"""Options of the slots and of the frozen base, and what they cannot be combined with yet.

Importable without torch or SGLang.
"""

import dataclasses
from typing import Any, Literal, get_args

from orbit_kernels.adapters import METHODS, AdapterMethod
from orbit_kernels.adapters.config import AdapterConfig

FusedMode = Literal["tied", "split"]
ExpertsMode = Literal["each", "shared"]
Activations = Literal["deployed", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotsConfig:
    """How a server carries adapters.

    Args:
        adapter: adapter method of both slots; adapters of the other are refused.
        block_size: OFT: width of one rotation block; an adapter with another block size is refused.
        rank: LoRA: rank of every update; an adapter with another rank is refused.
        fused: ``tied`` shares what acts on the input (OFT's rotation, LoRA's A) among the parts of a fused projection, and
            refuses adapters whose parts differ; ``split`` gives each part its own, which costs OFT one row of the
            GEMM per part and token, and LoRA one small GEMM per part.
        experts: ``each`` routed expert has an adapter of its own, or one is ``shared`` by all of a layer and rotates before
            dispatch (OFT, tied).
        seeded_sampling: sample each request from its ``sampling_seed``; one is drawn for requests without.
        max_adapter_bytes: largest accepted payload.
        stage_timeout_s: limit for receiving a payload, and again for placing it in its slot.

    Raises:
        ValueError: a field is out of range.
    """

    adapter: Literal["oft", "lora"] = "oft"
    block_size: int = 32
    rank: int = 16
    fused: FusedMode = "tied"
    experts: ExpertsMode = "each"
    seeded_sampling: bool = False
    max_adapter_bytes: int = 1 << 30
    stage_timeout_s: float = 120.0

    def __post_init__(self):
        if self.adapter not in METHODS:
            raise ValueError(f"--orbit-adapter {self.adapter!r}: must be one of {', '.join(METHODS)}")
        if self.block_size < 2:
            raise ValueError(f"--orbit-block-size {self.block_size}: must be at least 2, e.g. 32")
        if self.rank < 1:
            raise ValueError(f"--orbit-rank {self.rank}: must be at least 1, e.g. 16")
        if self.fused not in get_args(FusedMode):
            raise ValueError(f"--orbit-fused {self.fused!r}: must be one of {', '.join(get_args(FusedMode))}")
        if self.experts not in get_args(ExpertsMode):
            raise ValueError(f"--orbit-experts {self.experts!r}: must be one of {', '.join(get_args(ExpertsMode))}")
        if self.experts == "shared" and (self.adapter, self.fused) != ("oft", "tied"):
            raise ValueError(
                f"--orbit-experts shared with --orbit-adapter {self.adapter} and --orbit-fused {self.fused}: one rotation of "
                "the experts' input needs oft and tied"
            )
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
            rank=server_args.orbit_rank,
            fused=server_args.orbit_fused,
            experts=server_args.orbit_experts,
            seeded_sampling=server_args.orbit_seeded_sampling,
            max_adapter_bytes=server_args.orbit_max_adapter_bytes,
            stage_timeout_s=server_args.orbit_stage_timeout_s,
        )

    @property
    def method(self) -> AdapterMethod:
        """The adapter method with the size that the slots are made for."""
        method = METHODS[self.adapter]
        return method(**{method.size_field: self.size})

    @property
    def size(self) -> int:
        """Block size or rank."""
        return getattr(self, METHODS[self.adapter].size_field)

    @property
    def size_flag(self) -> str:
        """The flag that sets ``size``."""
        return f"--orbit-{METHODS[self.adapter].size_field.replace('_', '-')}"

    def problems(self, adapter: AdapterConfig) -> list[str]:
        """Why an adapter of this configuration does not fit slots made at start-up; its contents may be anything."""
        if adapter.type != self.adapter:
            return [
                f"adapter type {adapter.type!r}: the slots hold {self.adapter!r} adapters; train with "
                f"orbit.adapter.type={self.adapter} or start the server with --orbit-adapter {adapter.type}"
            ]
        field = adapter.method.size_field
        size = getattr(adapter.method, field)
        if size == self.size:
            return []
        return [
            f"{field} {size}: the slots hold adapters of {field} {self.size}; train with orbit.adapter.{field}={self.size} "
            f"or start the server with {self.size_flag} {size}"
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenBaseConfig:
    """How a CPU computes with a quantised base; the trainer's ``orbit.base`` has the same fields and defaults.

    Args:
        activations: ``deployed`` quantises the input of a linear as the format's GPU kernel does, ``none`` does not.
        dequant_chunk_mb: limit in MiB of the weights that are dequantised at a time; experts have ``experts_per_chunk``.
        experts_per_chunk: experts of a mixture that are dequantised at a time.

    Raises:
        ValueError: a field is out of range.
    """

    activations: Activations = "deployed"
    dequant_chunk_mb: int = 64
    experts_per_chunk: int = 4

    def __post_init__(self):
        if self.activations not in get_args(Activations):
            raise ValueError(
                f"--orbit-base-activations {self.activations!r}: must be one of {', '.join(get_args(Activations))}"
            )
        if self.dequant_chunk_mb < 1:
            raise ValueError(f"--orbit-dequant-chunk-mb {self.dequant_chunk_mb}: must be at least 1, e.g. 64")
        if self.experts_per_chunk < 1:
            raise ValueError(f"--orbit-experts-per-chunk {self.experts_per_chunk}: must be at least 1, e.g. 4")

    @classmethod
    def from_server_args(cls, server_args: Any) -> "FrozenBaseConfig":
        """The options as ``flags`` put them on SGLang's ``ServerArgs``."""
        return cls(
            activations=server_args.orbit_base_activations,
            dequant_chunk_mb=server_args.orbit_dequant_chunk_mb,
            experts_per_chunk=server_args.orbit_experts_per_chunk,
        )

    @property
    def chunk_bytes(self) -> int:
        """The limit in bytes."""
        return self.dequant_chunk_mb << 20


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
    if server_args.orbit_base_activations == "none" and server_args.device != "cpu":
        problems.append(
            f"--orbit-base-activations none on {server_args.device}: SGLang's kernels compute as deployed; use deployed"
        )
    if server_args.enable_return_routed_experts and server_args.enable_hierarchical_cache:
        problems.append(
            "--enable-return-routed-experts with --enable-hierarchical-cache: a prefix that comes back from the host leaves its "
            "record behind; leave one of them out"
        )
    if cpp_radix_tree:
        problems.append("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE=1: the C++ tree ignores the version's namespace; unset it")
    return problems
