"""Files as others write them: the dtypes that they choose, and damage that their headers show."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from orbit_kernels.checkpoint.files import HFCheckpoint
from orbit_kernels.formats import Fp8Format, Int4Format
from tests.support.formats import quantize, random_weight

MODULE = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 160, 256


def write(folder, tensors) -> HFCheckpoint:
    save_file({f"{MODULE}.{leaf}": tensor for leaf, tensor in tensors.items()}, folder / "model.safetensors")
    return HFCheckpoint(folder)


@pytest.mark.parametrize("weight_format", [Fp8Format(), Fp8Format(scale_dtype="ue8m0")])
def test_qwen3_fp8_has_block_scales_in_bf16(weight_format, tmp_path):
    """Qwen/Qwen3-1.7B-FP8 stores ``weight_scale_inv`` so; fp32 holds the same values, which SGLang computes with."""
    tensors = weight_format.quantize(random_weight(ROWS, COLUMNS))
    tensors["weight_scale_inv"] = tensors["weight_scale_inv"].bfloat16()
    checkpoint = write(tmp_path, tensors)

    checkpoint.check({f"{MODULE}.{leaf}": spec for leaf, spec in weight_format.specs(ROWS, COLUMNS).items()})
    checkpoint.check_values({MODULE: weight_format})

    stored = checkpoint.stored_weight(MODULE, weight_format, ROWS, COLUMNS)
    assert stored["weight_scale_inv"].dtype == torch.float32
    grid = tensors["weight_scale_inv"].float().repeat_interleave(128, 0)[:ROWS].repeat_interleave(128, 1)
    assert torch.equal(weight_format.dequantize(stored, torch.float32), tensors["weight"].float() * grid)


def edit_header(path, change) -> None:
    """Rewrite the JSON header of a file and leave its data alone."""
    data = path.read_bytes()
    (num_bytes,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + num_bytes])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + num_bytes :])


@pytest.mark.parametrize("dtype", ["BF16", "I32"])
def test_a_header_that_contradicts_itself_is_refused_by_name(dtype, tmp_path):
    """The shape in the header fits config.json, but the bytes that belong to it are another tensor's."""
    write(tmp_path, quantize(Int4Format(), random_weight(ROWS, COLUMNS)))
    name = f"{MODULE}.weight_packed"

    def change(header):
        header[name]["shape"] = [ROWS, COLUMNS]
        header[name]["dtype"] = dtype

    edit_header(tmp_path / "model.safetensors", change)
    with pytest.raises(ValueError, match=rf"{name}: {dtype} \(160, 256\) needs \d+ bytes, its header gives it 20480"):
        HFCheckpoint(tmp_path)


def test_a_header_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    for text in (b"[1, 2]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}'):
        path.write_bytes(struct.pack("<Q", len(text)) + text)
        with pytest.raises(ValueError, match="not a safetensors file"):
            HFCheckpoint(tmp_path)
