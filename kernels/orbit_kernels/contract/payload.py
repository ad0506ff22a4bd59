"""This module defines the payload that carries one adapter version from trainer to server.

It also defines what the two say about it. A payload is a safetensors file in memory: it has peft's tensor names, and
the text of peft's ``adapter_config.json`` under the metadata key ``adapter_config``. There is no pickle and no
compression: its size is the adapter's own plus the header.

The metadata key ``orbit_format`` holds the format's number, and ``fused`` says whether the parts of a fused projection
share one tensor on their input (OFT's rotation, LoRA's A). Where they do (``tied``) it is there once, under the name of
its owner: the first part that carries the adapter (``AdapterConfig.tied_names``). A file without the number is one of
peft's: every part has a tensor of its own.
"""

import dataclasses
import hashlib
import json
import reprlib
from collections.abc import Iterable, Mapping

import safetensors.torch
import torch

from orbit_kernels.adapters.config import AdapterConfig, module_name, split_name, tensor_name

METADATA_KEY = "adapter_config"
FORMAT_KEY = "orbit_format"
FUSED_KEY = "fused"

FORMAT = "2"
"""This is the number of the payload's format, which goes up when a reader of the last one would misread it."""

# The first format had no number, and this key where parts were left out.
_KEY_OF_FORMAT_1 = "shared_parts"

ADAPTER_DTYPES = (torch.bfloat16, torch.float32)

# hashlib gives up Python's lock for every piece of 2 KiB or more and then waits for it; joining pieces holds it.
_HASHED_TOGETHER_BYTES = 1 << 18


class AdapterError(ValueError):
    """The receiver refuses a payload, with every problem found, not only the first."""

    def __init__(self, problems: Iterable[str]):
        self.problems = list(problems)
        super().__init__("; ".join(self.problems))


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An ``Adapter`` holds tensors by peft's names, and the configuration that they were made with.

    Args:
        tensors: each once; in a tied adapter, one that the parts of a fused projection share goes by its owner's name.
        config: kind, sizes and targets.
        tied: whether the parts of a fused projection share the tensor on their input.
    """

    tensors: Mapping[str, torch.Tensor]
    config: AdapterConfig
    tied: bool = False

    @property
    def num_bytes(self) -> int:
        """Returns the size of the tensors in bytes, each counted once, without the header."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def digest(self) -> str:
        """Returns the SHA-256 over configuration, tie, names, dtypes, shapes and values.

        It is independent of the tensors' order.
        """
        digest = hashlib.sha256(self.config.to_peft_json().encode())
        if self.tied:
            digest.update(f"{FUSED_KEY}|tied|".encode())
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

    def untied(self) -> "Adapter":
        """Returns the same adapter as peft has it, with every tensor under its own name.

        Those of tied parts are one object.
        """
        names = {name: self.config.tied_names(name) if self.tied else (name,) for name in self.tensors}
        return Adapter({each: self.tensors[name] for name in names for each in names[name]}, self.config)

    def encode(self) -> bytes:
        """Returns the payload for a server."""
        return self._save({FORMAT_KEY: FORMAT, FUSED_KEY: "tied" if self.tied else "split"})

    def to_peft_file(self) -> bytes:
        """Returns ``adapter_model.safetensors`` as peft reads it."""
        return self.untied()._save({})

    def _save(self, metadata: Mapping[str, str]) -> bytes:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        # safetensors refuses tensors that share memory: the first is written from there, the others from copies.
        first = {tensor.untyped_storage().data_ptr(): name for name, tensor in reversed(tensors.items())}
        of_their_own = set(first.values())
        apart = {name: tensor if name in of_their_own else tensor.clone() for name, tensor in tensors.items()}
        return safetensors.torch.save(apart, metadata={METADATA_KEY: self.config.to_peft_json(), **metadata})

    @classmethod
    def decode(cls, payload: bytes) -> "Adapter":
        """Reads a payload; the tensors are copies.

        Raises:
            AdapterError: not safetensors, no configuration, or a configuration or a format that is not supported.
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
        return cls(tensors, config, _is_tied(metadata))

    def module_tensors(self, module: str) -> dict[str, torch.Tensor]:
        """Returns one linear's tensors by leaf, none when it carries no adapter; those of tied parts are one object."""
        if not self.config.targets(module):
            return {}
        owners = {leaf: self._owner(tensor_name(module, leaf)) for leaf in self.config.method.leaves}
        return {leaf: self.tensors[owner] for leaf, owner in owners.items() if owner in self.tensors}

    def modules(self) -> list[str]:
        """Returns the Hugging Face names of the linears that carry the adapter, sorted."""
        return sorted({module for name in self.untied().tensors if (module := module_name(name))})

    def check(self, linears: Mapping[str, tuple[int, int]]) -> None:
        """Holds the tensors against the linears of a model.

        Args:
            linears: rows and columns of every weight that can carry an adapter, by Hugging Face module name.

        Raises:
            AdapterError: unknown or missing tensors, wrong shapes or dtypes, or values that are not finite; all listed.
        """
        targets = [module for module in linears if self.config.targets(module)]
        expected = {tensor_name(module, leaf): module for module in targets for leaf in self.config.method.leaves}
        owners = {name: self._owner(name) for name in expected}
        owned = set(owners.values())
        problems = []
        if not targets:
            problems.append(
                f"target_modules {list(self.config.target_modules)} match no linear of the model; "
                f"known leaf names: {sorted({module.rsplit('.', 1)[-1] for module in linears})}"
            )
        for name in sorted(self.tensors.keys() - owned):
            problems.append(f"{name}: unknown tensor, {self._why_unknown(name, linears)}")
        problems += [
            f"{name}: missing, although its module is targeted" for name in sorted(owned - self.tensors.keys())
        ]
        fitting = self.tensors.keys() & owned
        for name in sorted(name for name, owner in owners.items() if owner in fitting):
            if problem := self._tensor_problem(name, owners[name], *linears[expected[name]]):
                problems.append(problem)
                fitting.discard(owners[name])
        problems += [f"{name}: holds values that are not finite" for name in self._not_finite(sorted(fitting))]
        if problems:
            raise AdapterError(problems)

    def _why_unknown(self, name: str, linears: Mapping[str, tuple[int, int]]) -> str:
        module, leaf = split_name(name) or ("", "")
        if module not in linears:
            return "no such linear in the model"
        if leaf not in self.config.method.leaves:
            return f"not one of {self.config.method.peft_type}'s"
        if self.tied and self.config.targets(module):
            return f"{FUSED_KEY} is 'tied', so that {self._owner(name)} alone holds it"
        return "not in the configuration's target_modules"

    def _owner(self, name: str) -> str:
        return self.config.tied_names(name)[0] if self.tied else name

    def _tensor_problem(self, name: str, owner: str, rows: int, columns: int) -> str | None:
        tensor, (_, leaf) = self.tensors[owner], split_name(name) or ("", "")
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
        """Returns those of the named tensors that hold a value that is not finite."""
        if not names:
            return []
        norms = torch._foreach_norm([self.tensors[name] for name in names], float("inf"))  # pyright: ignore[reportPrivateImportUsage]
        largest = torch.stack(norms)
        return [names[index] for index in (~largest.isfinite()).nonzero().flatten().tolist()]


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bits of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _is_tied(metadata: Mapping[str, str]) -> bool:
    """Returns whether the parts of a fused projection share the tensor on their input.

    Raises:
        AdapterError: a format or a value that this release does not read.
    """
    found = metadata.get(FORMAT_KEY, "1" if _KEY_OF_FORMAT_1 in metadata else None)
    if found is None:
        return False
    if found != FORMAT:
        raise AdapterError(
            [
                f"the metadata's {FORMAT_KEY} is {reprlib.repr(found)}: this release reads {FORMAT!r}, or a file of peft's without the key; send "
                "the adapter from a trainer of the server's release"
            ]
        )
    fused = metadata.get(FUSED_KEY)
    if fused not in ("tied", "split"):
        raise AdapterError(
            [
                f"the metadata's {FUSED_KEY} is {reprlib.repr(fused)}: must be 'tied', where the parts of a fused projection share one tensor on "
                "their input, or 'split'"
            ]
        )
    return fused == "tied"


def _metadata(payload: bytes) -> dict[str, str]:
    """Returns the metadata of a safetensors buffer that the library has already accepted."""
    header_bytes = int.from_bytes(payload[:8], "little")
    return json.loads(payload[8 : 8 + header_bytes]).get("__metadata__") or {}
