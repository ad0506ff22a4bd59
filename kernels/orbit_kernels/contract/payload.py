"""The payload that carries one adapter version from trainer to server, and what the two say about it.

A payload is a safetensors file in memory: peft's tensor names, and the text of peft's ``adapter_config.json`` under the
metadata key ``adapter_config``. No pickle, no compression: its size is the adapter's own plus the header. Where all parts
of a fused projection carry the same tensor on their input in every layer (OFT's rotation, LoRA's A), only the first
part's travels; the metadata key ``shared_parts`` then names the others.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping

import safetensors.torch
import torch

from orbit_kernels.adapters.config import AdapterConfig, module_name, split_name, tensor_name
from orbit_kernels.linears.fusing import FUSED_PARTS

METADATA_KEY = "adapter_config"
SHARED_KEY = "shared_parts"

ADAPTER_DTYPES = (torch.bfloat16, torch.float32)

# hashlib gives up Python's lock for every piece of 2 KiB or more and then waits for it; joining pieces holds it.
_HASHED_TOGETHER_BYTES = 1 << 18


class AdapterError(ValueError):
    """A payload that the receiver refuses, with every problem found, not only the first."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Tensors by peft's names, and the configuration that they were made with."""

    tensors: Mapping[str, torch.Tensor]
    config: AdapterConfig

    @property
    def num_bytes(self) -> int:
        """Size of the tensors in bytes, without the header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digest(self) -> str:
        """SHA-256 over names, dtypes, shapes, values and configuration; independent of the tensors' order."""
        digest = hashlib.sha256(self.config.to_peft_json().encode())
        small: list[bytes | memoryview] = []
        small_bytes = 0
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().cpu().contiguous()
            small += [f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode(), _bytes(tensor)]
            small_bytes += tensor.nbytes
            if small_bytes > _HASHED_TOGETHER_BYTES:
                large = small.pop()
                digest.update(b"".join(small))
                digest.update(large)
                small, small_bytes = [], 0
        digest.update(b"".join(small))
        return digest.hexdigest()

    def encode(self) -> bytes:
        """The payload for a server: parts that share one tensor travel once."""
        shared_leaf = self.config.method.shared_leaf
        shared = _shared_parts(self.tensors, shared_leaf)
        return self._save({n: t for n, t in self.tensors.items() if _part(n, shared_leaf) not in shared}, shared)

    def to_peft_file(self) -> bytes:
        """``adapter_model.safetensors`` as peft reads it: every tensor under its own name."""
        return self._save(self.tensors, {})

    def _save(self, tensors: Mapping[str, torch.Tensor], shared: dict[str, str]) -> bytes:
        metadata = {METADATA_KEY: self.config.to_peft_json()}
        if shared:
            metadata[SHARED_KEY] = json.dumps(shared)
        # Copies, because safetensors refuses tensors that share memory, as the parts of a tied projection may.
        copies = {n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
        return safetensors.torch.save(copies, metadata=metadata)

    @classmethod
    def decode(cls, payload: bytes) -> "Adapter":
        """Read a payload; the tensors are copies.

        Raises:
            AdapterError: not safetensors, no configuration, or a configuration that is not supported.
        """
        try:
            tensors = safetensors.torch.load(payload)
        except Exception as error:  # whatever a header of foreign bytes leads the library to
            raise AdapterError([f"the body is not a safetensors file: {error}"]) from None
        metadata = _metadata(payload)
        text = metadata.get(METADATA_KEY)
        if text is None:
            raise AdapterError(
                [f"the safetensors metadata has no {METADATA_KEY!r}: put peft's adapter_config.json there"]
            )
        try:
            config = AdapterConfig.from_peft_json(text)
        except ValueError as error:
            raise AdapterError([str(error)]) from None
        restored = _restored_parts(tensors, metadata.get(SHARED_KEY), config.method.shared_leaf)
        return cls({**tensors, **restored}, config)

    def module_tensors(self, module: str) -> dict[str, torch.Tensor]:
        """One linear's tensors by leaf; empty when it carries no adapter."""
        names = {leaf: tensor_name(module, leaf) for leaf in self.config.method.leaves}
        return {leaf: self.tensors[name] for leaf, name in names.items() if name in self.tensors}

    def modules(self) -> list[str]:
        """Hugging Face names of the linears that carry the adapter, sorted."""
        return sorted({module for name in self.tensors if (module := module_name(name))})

    def check(self, linears: Mapping[str, tuple[int, int]]) -> None:
        """Hold the tensors against the linears of a model.

        Args:
            linears: rows and columns of every weight that can carry an adapter, by Hugging Face module name.

        Raises:
            AdapterError: unknown or missing tensors, wrong shapes or dtypes, or values that are not finite; all listed.
        """
        targets = [module for module in linears if self.config.targets(module)]
        expected = {tensor_name(module, leaf): module for module in targets for leaf in self.config.method.leaves}
        problems = []
        if not targets:
            problems.append(
                f"target_modules {list(self.config.target_modules)} match no linear of the model; "
                f"known leaf names: {sorted({module.rsplit('.', 1)[-1] for module in linears})}"
            )
        for name in sorted(self.tensors.keys() - expected.keys()):
            problems.append(f"{name}: unknown tensor, {self._why_unknown(name, linears)}")
        problems += [
            f"{name}: missing, although its module is targeted"
            for name in sorted(expected.keys() - self.tensors.keys())
        ]
        fitting = []
        for name in sorted(expected.keys() & self.tensors.keys()):
            if problem := self._tensor_problem(name, *linears[expected[name]]):
                problems.append(problem)
            else:
                fitting.append(name)
        problems += [f"{name}: holds values that are not finite" for name in self._not_finite(fitting)]
        if problems:
            raise AdapterError(problems)

    def _why_unknown(self, name: str, linears: Mapping[str, tuple[int, int]]) -> str:
        module, leaf = split_name(name) or (None, None)
        if module not in linears:
            return "no such linear in the model"
        if leaf not in self.config.method.leaves:
            return f"not one of {self.config.method.peft_type}'s"
        return "not in the configuration's target_modules"

    def _tensor_problem(self, name: str, rows: int, columns: int) -> str | None:
        tensor, (_, leaf) = self.tensors[name], split_name(name)
        try:
            shape = self.config.method.shapes(rows, columns, name)[leaf]
        except ValueError as error:
            return str(error)
        if tuple(tensor.shape) != shape:
            return f"{name}: shape {tuple(tensor.shape)}, expected {shape}"
        if tensor.dtype not in ADAPTER_DTYPES:
            return f"{name}: dtype {tensor.dtype}, expected one of {[str(dtype) for dtype in ADAPTER_DTYPES]}"
        return None

    def _not_finite(self, names: list[str]) -> list[str]:
        """Those of the named tensors that hold a value that is not finite."""
        if not names:
            return []
        largest = torch.stack(torch._foreach_norm([self.tensors[name] for name in names], float("inf")))
        return [names[index] for index in (~largest.isfinite()).nonzero().flatten().tolist()]


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The bits of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _part(name: str, leaf: str) -> str | None:
    """The linear's own name in the name of one of its ``leaf`` tensors: ``q_proj`` in ``...self_attn.q_proj.oft_R.weight``."""
    names = split_name(name)
    return names[0].rsplit(".", 1)[-1] if names and names[1] == leaf else None


def _sibling(name: str, part: str) -> str:
    """The name of the same tensor of another part of a fused projection."""
    module, leaf = split_name(name)
    return tensor_name(f"{module.rpartition('.')[0]}.{part}" if "." in module else part, leaf)


def _shared_parts(tensors: Mapping[str, torch.Tensor], leaf: str) -> dict[str, str]:
    """Parts whose ``leaf`` equals the first part's of their projection in every layer, as ``{part: first part}``."""
    shared = {}
    for first, *others in FUSED_PARTS:
        firsts = {name for name in tensors if _part(name, leaf) == first}
        for part in others:
            pairs = [(name, _sibling(name, part)) for name in firsts]
            num_parts = sum(_part(name, leaf) == part for name in tensors)
            if (
                num_parts
                and num_parts == len(pairs)
                and all(other in tensors and torch.equal(tensors[name], tensors[other]) for name, other in pairs)
            ):
                shared[part] = first
    return shared


def _restored_parts(tensors: Mapping[str, torch.Tensor], text: str | None, leaf: str) -> dict[str, torch.Tensor]:
    """The tensors that ``_shared_parts`` let the sender leave out.

    Raises:
        AdapterError: the metadata names parts that cannot be shared.
    """
    if text is None:
        return {}
    allowed = {part: first for first, *others in FUSED_PARTS for part in others}
    try:
        shared = json.loads(text)
        valid = all(allowed.get(part) == first for part, first in shared.items())
    except (ValueError, AttributeError, RecursionError):
        valid = False
    if not valid:
        raise AdapterError([f"the metadata's {SHARED_KEY} is {text[:200]!r}: may map {allowed} only"])
    part_of = {name: part for name in tensors if (part := _part(name, leaf)) is not None}
    return {
        _sibling(name, part): tensors[name]
        for part, first in shared.items()
        for name, found in part_of.items()
        if found == first
    }


def _metadata(payload: bytes) -> dict[str, str]:
    """The metadata of a safetensors buffer that the library has already accepted."""
    header_bytes = int.from_bytes(payload[:8], "little")
    return json.loads(payload[8 : 8 + header_bytes]).get("__metadata__") or {}
