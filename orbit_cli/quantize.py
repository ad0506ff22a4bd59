"""This module is ``orbit quantize``: it makes a low-precision checkpoint from a BF16 one, in the format as deployed."""

import json
import logging
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from orbit_cli.calibration import largest_inputs
from orbit_cli.rounding_errors import LinearError
from orbit_kernels.checkpoint.files import INDEX_FILE, HFCheckpoint, save_tensors
from orbit_kernels.formats import (
    Bf16Format,
    Fp8Format,
    Int4Format,
    Mxfp4Format,
    Nvfp4Format,
    WeightFormat,
    read_base_scheme,
)
from orbit_kernels.formats.scheme.write import quantization_config
from orbit_kernels.frozen.product import StoredWeight
from orbit_kernels.json_files import read_json
from orbit_kernels.linears.fusing import fused_with
from orbit_kernels.linears.names import EXPERTS

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
# ModelOpt's older place for what config.json says today.
_OTHER_QUANTIZATION_FILE = "hf_quant_config.json"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
# Linears of the decoder layers; head, embeddings, norms and routers (``mlp.gate``) stay as they are.
_LINEAR = re.compile(r"(?P<module>(?:.*\.)?layers\.\d+\..*_proj(?:_with_mqa)?)\.weight")
DEFAULT_GROUP_SIZES = {"fp8": 128, "int4": 32, "nvfp4": 16, "mxfp4": 32}


def weight_format(name: str, group_size: int | None, dtype: torch.dtype) -> WeightFormat:
    """Returns the format that ``--format`` and ``--group-size`` ask for.

    Args:
        name: one of DEFAULT_GROUP_SIZES.
        group_size: columns that share a scale; for FP8 rows and columns of a block. None for the format's default.
        dtype: of the unquantised model, and of INT4 scales.

    Raises:
        ValueError: an unknown format, or a group size that it does not have.
    """
    if name not in DEFAULT_GROUP_SIZES:
        raise ValueError(f"--format {name}: not one of {', '.join(DEFAULT_GROUP_SIZES)}")
    size = DEFAULT_GROUP_SIZES[name] if group_size is None else group_size
    if name == "fp8":
        return Fp8Format(block_rows=size, block_columns=size)
    if name == "int4":
        return Int4Format(group_size=size, scale_dtype=dtype)
    if size != DEFAULT_GROUP_SIZES[name]:
        raise ValueError(f"--group-size {size}: {name} has groups of {DEFAULT_GROUP_SIZES[name]} by definition")
    return Nvfp4Format() if name == "nvfp4" else Mxfp4Format()


def quantize_checkpoint(
    model: Path, out: Path, *, format_name: str, group_size: int | None = None, experts_only: bool = False
) -> dict[str, LinearError]:
    """Writes ``out`` with the linears of ``model``'s decoder layers in another format, and everything else as it is.

    With ``experts_only`` it quantises those of the routed experts alone, as Kimi-K2's are.

    ``out`` appears whole or not at all. NVFP4's static input scales come from a synthetic calibration, see
    ``calibration.largest_inputs``.

    Returns:
        Errors by leaf name of the linears.

    Raises:
        ValueError: the input is quantised already or no checkpoint, ``out`` is not empty, a weight does not fit the format
            or is not finite, or the disk is too small; nothing is left behind.
    """
    source = _Source(model, format_name, group_size, experts_only)
    _check_out(out, source.output_bytes)
    partial = out.with_name(f".{out.name}.partial")
    if partial.exists():
        raise ValueError(f"{partial} is in the way: the rest of an interrupted run, or of one still going; remove it")
    partial.mkdir(parents=True)
    try:
        errors = _write(source, partial)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return errors


class _Source:
    """A ``_Source`` is the checkpoint to quantise, checked before anything is written."""

    def __init__(self, folder: Path, format_name: str, group_size: int | None, experts_only: bool):
        self.folder = folder
        self.checkpoint = HFCheckpoint(folder)
        self.config = _read_config(folder)
        scheme = read_base_scheme(self.config)
        self.format = weight_format(format_name, group_size, scheme.dense.dtype)
        found = {name: _LINEAR.fullmatch(name) for name in self.checkpoint.specs}
        linears = {match["module"] for match in found.values() if match}
        self.linears = {name for name in linears if EXPERTS in name} if experts_only else linears
        self._check()

    @property
    def ignored(self) -> list[str]:
        """Returns the modules that a reader of the configuration could take for quantised linears."""
        weights = {
            name.removesuffix(".weight")
            for name, spec in self.checkpoint.specs.items()
            if name.endswith(".weight") and len(spec.shape) == 2 and "embed" not in name
        }
        # A tied head has no tensor of its own, but transformers builds a linear for it.
        return sorted((weights - self.linears) | {"lm_head"})

    @property
    def output_bytes(self) -> int:
        """Returns the bytes of the quantised checkpoint's tensors and copied files."""
        kept = [spec for name, spec in self.checkpoint.specs.items() if not self.is_quantized(name)]
        quantized = [spec for module in self.linears for spec in self.format.specs(*self.shape(module)).values()]
        return sum(spec.nbytes for spec in kept + quantized) + sum(path.stat().st_size for path in self.other_files)

    @property
    def other_files(self) -> list[Path]:
        """Returns tokeniser, chat template, generation configuration and whatever else is no weight."""
        skipped = {CONFIG_FILE, INDEX_FILE}
        files = (path for path in sorted(self.folder.iterdir()) if path.is_file() and path.name not in skipped)
        return [path for path in files if path.suffix not in _WEIGHT_SUFFIXES]

    def is_quantized(self, name: str) -> bool:
        """Returns whether a tensor is the weight of a linear that becomes quantised."""
        return name.removesuffix(".weight") in self.linears

    def shape(self, module: str) -> tuple[int, ...]:
        """Returns the rows and columns of a linear."""
        return self.checkpoint.specs[f"{module}.weight"].shape

    def fused_with(self, module: str) -> list[str]:
        """Returns the linears that a server fuses with this one into one GEMM, itself among them."""
        return [part for part in fused_with(module) if part in self.linears]

    def _check(self) -> None:
        if not self.linears:
            raise ValueError(self._nothing_to_quantize())
        problems = [problem for module in sorted(self.linears) for problem in self._problems(module)]
        if problems:
            raise ValueError(f"{self.folder} does not fit {self.format.name}: {'; '.join(problems)}")

    def _nothing_to_quantize(self) -> str:
        if any(map(_LINEAR.fullmatch, self.checkpoint.specs)):
            return f"{self.folder}: the model has no routed experts, named like mlp.experts.0.up_proj; leave --experts-only out"
        return f"{self.folder}: no linears named like model.layers.0.mlp.up_proj, so nothing to quantise"

    def _problems(self, module: str) -> Iterator[str]:
        spec = self.checkpoint.specs[f"{module}.weight"]
        if not spec.dtype.is_floating_point or spec.dtype.itemsize < 2:
            yield f"{module}: {spec.dtype}, which is quantised already"
            return
        try:
            self.format.specs(*self.shape(module))
        except ValueError as error:
            yield f"{module}: {error}"
        # SGLang 0.5.12 refuses blocks that reach from one fused part into the next (srt/layers/quantization/fp8.py::Fp8LinearMethod.validate_block_quant_shapes).
        block = self.format.block_rows if isinstance(self.format, Fp8Format) else 1
        if len(self.fused_with(module)) > 1 and self.shape(module)[0] % block:
            yield (
                f"{module}: {self.shape(module)[0]} rows are no multiple of the block of {block}, which SGLang needs of "
                "fused linears; choose a smaller --group-size"
            )


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{path}: no such file; --model must be a Hugging Face checkpoint folder")
    config = read_json(path)
    nested = [value for value in config.values() if isinstance(value, dict) and "quantization_config" in value]
    if "quantization_config" in config or nested or (folder / _OTHER_QUANTIZATION_FILE).exists():
        raise ValueError(f"{folder} is quantised already; quantise the BF16 checkpoint that it was made from")
    return config


def _check_out(out: Path, needed_bytes: int) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: exists and is not an empty folder; name another one")
    existing = next(parent for parent in out.resolve().parents if parent.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise ValueError(f"--out {out}: {needed_bytes} bytes are needed and {free_bytes} are free on its disk")


def _write(source: _Source, folder: Path) -> dict[str, LinearError]:
    errors: dict[str, LinearError] = defaultdict(LinearError)
    quantize = _quantizer(source)
    weight_map = {}
    for path, names in source.checkpoint.files().items():
        tensors = {}
        for name in names:
            tensor = source.checkpoint.tensor(name)
            if not source.is_quantized(name):
                tensors[name] = tensor
                continue
            module = name.removesuffix(".weight")
            _check_finite(module, tensor)
            stored = StoredWeight(source.format, *tensor.shape, quantize(module, tensor))
            errors[module.rpartition(".")[2]].count(tensor, stored)
            tensors |= {f"{module}.{leaf}": value for leaf, value in stored.tensors.items()}
        save_tensors(tensors, folder / path.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, path.name)
        logger.info("wrote %s: %d tensors", path.name, len(tensors))
    if (source.folder / INDEX_FILE).exists():
        index = {"metadata": {"total_size": source.output_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))
    config = source.config | {"quantization_config": quantization_config(source.format, source.ignored)}
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2))
    for path in source.other_files:
        shutil.copy2(path, folder / path.name)
    return dict(errors)


def _quantizer(source: _Source) -> Callable[[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Returns a function that quantises one linear, given its name and weight."""
    if not isinstance(source.format, Nvfp4Format):
        return lambda module, weight_OI: source.format.quantize(weight_OI)
    inputs = largest_inputs(source.folder, source.linears)

    def quantize(module: str, weight_OI: torch.Tensor) -> Mapping[str, torch.Tensor]:
        # Deployed kernels take one global scale for all parts of a fused linear.
        parts = source.fused_with(module)
        largest = max(source.checkpoint.tensor(f"{part}.weight").abs().max().item() for part in parts)
        return source.format.quantize(
            weight_OI, largest_weight=largest, largest_input=max(inputs[part] for part in parts)
        )

    return quantize


def _check_finite(module: str, weight_OI: torch.Tensor) -> None:
    """Checks that a weight is finite: no format stores another, and rounded like the others, it would pass for one."""
    problems = Bf16Format().problems({"weight": weight_OI})
    if problems:
        raise ValueError(f"{module}.{problems[0]}; quantise an intact checkpoint")
