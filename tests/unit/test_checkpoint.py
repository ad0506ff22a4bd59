"""Reading a checkpoint folder: everything that is wrong is named before a weight is read."""

import json
import os
import stat

import pytest
import safetensors
import torch
from safetensors.torch import save_file

from orbit_kernels.checkpoint.files import HFCheckpoint, save_tensors
from orbit_kernels.formats import Fp8Format, Int4Format, Mxfp4Format, TensorSpec, WeightFormat
from tests.support.formats import FORMATS, quantize, random_weight

MODULES = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
ROWS, COLUMNS = 32, 256


def tensors_of(weight_format: WeightFormat) -> dict[str, torch.Tensor]:
    tensors = {"model.norm.weight": torch.ones(COLUMNS, dtype=torch.bfloat16)}
    for seed, module in enumerate(MODULES):
        stored = quantize(weight_format, random_weight(ROWS, COLUMNS, seed))
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in stored.items()}
    return tensors


def expected_of(weight_format: WeightFormat) -> dict[str, TensorSpec]:
    specs = weight_format.specs(ROWS, COLUMNS)
    expected = {f"{module}.{leaf}": spec for module in MODULES for leaf, spec in specs.items()}
    return expected | {"model.norm.weight": TensorSpec((COLUMNS,), torch.bfloat16)}


def write(folder, tensors) -> HFCheckpoint:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return HFCheckpoint(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_a_sound_checkpoint_is_read_to_the_bit(name, tmp_path):
    weight_format, tensors = FORMATS[name], tensors_of(FORMATS[name])
    checkpoint = write(tmp_path, tensors)

    checkpoint.check(expected_of(weight_format))
    checkpoint.check_values(dict.fromkeys(MODULES, weight_format))

    for module in MODULES:
        for leaf, tensor in checkpoint.stored_weight(module, weight_format, ROWS, COLUMNS).items():
            stored = tensors[f"{module}.{leaf}"]
            assert tensor.dtype == stored.dtype and torch.equal(tensor, stored)


def test_a_truncated_file_names_the_tensors_that_it_lacks(tmp_path):
    tensors = tensors_of(Int4Format())
    write(tmp_path, tensors)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    last = max(tensors, key=lambda name: header[name]["data_offsets"][1])

    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"truncated, the bytes of these tensors are missing: {last}$"):
        HFCheckpoint(tmp_path)

    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=last):
        HFCheckpoint(tmp_path)

    for num_bytes in (0, 5, 100):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ValueError, match="truncated inside its header"):
            HFCheckpoint(tmp_path)


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((20).to_bytes(8, "little") + b"\xff" * 40)
    with pytest.raises(ValueError, match="its header is no JSON"):
        HFCheckpoint(tmp_path)


def test_a_missing_scale_is_named(tmp_path):
    tensors = tensors_of(Fp8Format())
    del tensors[f"{MODULES[1]}.weight_scale_inv"]
    with pytest.raises(ValueError, match=rf"{MODULES[1]}\.weight_scale_inv: missing$"):
        write(tmp_path, tensors).check(expected_of(Fp8Format()))


def test_a_swapped_scale_shape_is_named(tmp_path):
    tensors = tensors_of(Int4Format())
    name = f"{MODULES[0]}.weight_scale"
    tensors[name] = tensors[name].T
    with pytest.raises(ValueError, match=rf"{name}: shape \(8, 32\), expected \(32, 8\)"):
        write(tmp_path, tensors).check(expected_of(Int4Format()))


def test_another_group_size_is_named(tmp_path):
    """config.json says 128, the tensors have groups of 32. docs/field-cases.md: the same dequantised bits."""
    checkpoint = write(tmp_path, tensors_of(Int4Format(group_size=32)))
    with pytest.raises(
        ValueError, match=rf"{MODULES[0]}\.weight_scale: shape \(32, 8\), expected \(32, 2\).*{MODULES[1]}"
    ):
        checkpoint.check(expected_of(Int4Format(group_size=128)))


def test_another_scale_dtype_is_named(tmp_path):
    """Scales that are no UE8M0 bytes. docs/field-cases.md: UE8M0 exponent bias."""
    tensors = tensors_of(Mxfp4Format())
    name = f"{MODULES[0]}.weight_scale"
    tensors[name] = tensors[name].float()
    with pytest.raises(ValueError, match=rf"{name}: dtype torch.float32, expected torch.uint8"):
        write(tmp_path, tensors).check(expected_of(Mxfp4Format()))


def test_all_misfits_are_listed_at_once(tmp_path):
    tensors = tensors_of(Int4Format()) | {"model.extra.weight": torch.ones(2)}
    del tensors["model.norm.weight"]
    with pytest.raises(ValueError, match="model.norm.weight: missing; model.extra.weight: superfluous"):
        write(tmp_path, tensors).check(expected_of(Int4Format()))

    expected = {name: spec for name, spec in expected_of(Int4Format()).items() if name != "model.norm.weight"}
    write(tmp_path, tensors).check(expected, optional=frozenset({"model.extra.weight"}))


def test_shapes_alone_may_be_expected(tmp_path):
    checkpoint = write(tmp_path, {"model.norm.weight": torch.ones(4, dtype=torch.float16)})
    checkpoint.check({"model.norm.weight": torch.Size([4])})
    with pytest.raises(ValueError, match=r"shape \(4,\), expected \(5,\)"):
        checkpoint.check({"model.norm.weight": torch.Size([5])})


def test_nan_scales_are_named_without_reading_a_weight(tmp_path, monkeypatch):
    tensors = tensors_of(Int4Format())
    tensors[f"{MODULES[1]}.weight_scale"][3, 1] = float("nan")
    checkpoint = write(tmp_path, tensors)
    read = []
    original = HFCheckpoint.tensor
    monkeypatch.setattr(HFCheckpoint, "tensor", lambda self, name: read.append(name) or original(self, name))

    with pytest.raises(
        ValueError, match=rf"{MODULES[1]}\.weight_scale: 1 of 256 scales are NaN, the first at \[3, 1\]"
    ):
        checkpoint.check_values(dict.fromkeys(MODULES, Int4Format()))
    assert read and not any(name.endswith("weight_packed") for name in read)


def test_a_wrong_weight_shape_is_named(tmp_path):
    tensors = tensors_of(Int4Format())
    tensors[f"{MODULES[0]}.weight_shape"] = torch.tensor([COLUMNS, ROWS])
    with pytest.raises(ValueError, match=rf"{MODULES[0]}\.weight_shape: \[256, 32\], but"):
        write(tmp_path, tensors).check_values(dict.fromkeys(MODULES, Int4Format()))


def test_dtypes_with_the_same_bits_are_converted(tmp_path):
    """Codes as int8, scales as float8_e8m0fnu."""
    weight_format = Mxfp4Format()
    tensors = tensors_of(weight_format)
    for module in MODULES:
        tensors[f"{module}.weight_packed"] = tensors[f"{module}.weight_packed"].view(torch.int8)
        tensors[f"{module}.weight_scale"] = tensors[f"{module}.weight_scale"].view(torch.float8_e8m0fnu)
    checkpoint = write(tmp_path, tensors)
    checkpoint.check(expected_of(weight_format))
    read = checkpoint.stored_weight(MODULES[0], weight_format, ROWS, COLUMNS)
    original = tensors_of(weight_format)
    assert all(torch.equal(read[leaf], original[f"{MODULES[0]}.{leaf}"]) for leaf in read)


def test_int32_shapes_are_widened(tmp_path):
    tensors = tensors_of(Int4Format())
    for module in MODULES:
        tensors[f"{module}.weight_shape"] = tensors[f"{module}.weight_shape"].int()
    checkpoint = write(tmp_path, tensors)
    checkpoint.check(expected_of(Int4Format()))
    shape = checkpoint.stored_weight(MODULES[0], Int4Format(), ROWS, COLUMNS)["weight_shape"]
    assert shape.dtype == torch.int64 and shape.tolist() == [ROWS, COLUMNS]


def test_ue8m0_scales_are_widened_to_their_values(tmp_path):
    weight_format = Fp8Format(scale_dtype="ue8m0")
    tensors = tensors_of(weight_format)
    name = f"{MODULES[0]}.weight_scale_inv"
    exact = tensors[name]
    tensors[name] = exact.to(torch.float8_e8m0fnu)
    checkpoint = write(tmp_path, tensors)
    checkpoint.check(expected_of(weight_format))
    assert torch.equal(checkpoint.stored_weight(MODULES[0], weight_format, ROWS, COLUMNS)["weight_scale_inv"], exact)


def test_sharded_checkpoints_are_found_by_their_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = HFCheckpoint(tmp_path)
    assert {path.name: names for path, names in checkpoint.files().items()} == {
        "one.safetensors": ["a"],
        "two.safetensors": ["b"],
    }
    assert "a" in checkpoint and checkpoint.specs["b"] == TensorSpec((3,), torch.float32)

    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ValueError, match="two.safetensors not found"):
        HFCheckpoint(tmp_path)


def test_folders_without_safetensors_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        HFCheckpoint(tmp_path / "absent")
    with pytest.raises(ValueError, match="only safetensors"):
        HFCheckpoint(tmp_path)


def test_a_file_is_opened_once_for_all_that_is_read_of_it(tmp_path, monkeypatch):
    """Opening parses the header: with a fresh one for each tensor, a model of 1T parameters would spend hours on it."""
    opened = []
    safe_open = safetensors.safe_open
    monkeypatch.setattr(
        safetensors, "safe_open", lambda path, **options: opened.append(path) or safe_open(path, **options)
    )
    files = {
        f"{number}.safetensors": {f"{number}.{index}": torch.tensor([number, index]) for index in range(3)}
        for number in range(2)
    }
    for file, tensors in files.items():
        save_file(tensors, tmp_path / file)
    checkpoint = HFCheckpoint(tmp_path)
    names = list(checkpoint.specs)
    for name in names:
        assert checkpoint.tensor(name).tolist() == [int(part) for part in name.split(".")]
    assert opened == [tmp_path / file for file in files]
    assert checkpoint.tensor(names[0]).tolist() == [int(part) for part in names[0].split(".")]


def test_permissions_of_a_written_file_follow_the_umask(tmp_path):
    """safetensors alone lets nobody but its owner read a file."""
    before = os.umask(0o027)
    try:
        save_tensors({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "model.safetensors").stat().st_mode) == 0o640
