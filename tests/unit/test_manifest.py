"""Digests of a base, and the first thing in which two bases differ."""

import hashlib
import json

import pytest
import torch

from orbit_kernels.checkpoint.manifest import BaseManifest, Cut, first_difference, tensor_digest
from orbit_kernels.formats import Int4Format
from tests.support.formats import FORMATS, quantize, random_weight

MODULES = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
HOLDERS = ("the trainer", "the server")


def manifest(weight_format=None, change=None) -> BaseManifest:
    """Two linears and a norm; ``change`` may alter the tensors before they are digested."""
    weight_format = weight_format or Int4Format()
    tensors = {"model.norm.weight": torch.ones(8)}
    for seed, module in enumerate(MODULES):
        stored = quantize(weight_format, random_weight(16, 128, seed))
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in stored.items()}
    if change is not None:
        change(tensors)
    return BaseManifest.of(dict.fromkeys(MODULES, weight_format), tensors.items())


def test_a_digest_is_over_dtype_shape_and_bits():
    tensor = torch.tensor([[1.0, 2.0]])
    expected = hashlib.sha256(b"float32|(1, 2)|" + tensor.numpy().tobytes()).hexdigest()
    assert tensor_digest(tensor) == expected
    others = [tensor.view(2, 1), tensor.view(torch.int32), tensor * 2, -tensor]
    assert len({expected, *map(tensor_digest, others)}) == 5


def test_a_digest_reads_views_as_their_values():
    tensor = torch.arange(24, dtype=torch.bfloat16).view(4, 6)
    assert tensor_digest(tensor[1:3]) == tensor_digest(tensor[1:3].clone())
    assert tensor_digest(tensor[:, 2:4]) == tensor_digest(tensor[:, 2:4].clone())
    assert tensor_digest(torch.tensor(3.0)) != tensor_digest(torch.tensor([3.0]))


def test_a_digest_tells_apart_what_compares_equal():
    """Negative zero, and NaNs of other bits, are other bits."""
    assert tensor_digest(torch.tensor(0.0)) != tensor_digest(torch.tensor(-0.0))
    bits = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)
    assert tensor_digest(bits[0]) != tensor_digest(bits[1])


@pytest.mark.parametrize("name", FORMATS)
def test_every_dtype_of_every_format_survives_json(name):
    ours = manifest(FORMATS[name])
    theirs = BaseManifest.from_json(ours.to_json())
    assert theirs == ours
    assert theirs.digest == ours.digest
    assert first_difference(ours, theirs, HOLDERS) is None


def test_a_flipped_bit_is_named_with_both_digests():
    def flip(tensors):
        tensors[f"{MODULES[1]}.weight_packed"][3, 2] ^= 1 << 17

    ours, theirs = manifest(), manifest(change=flip)
    name = f"{MODULES[1]}.weight_packed"
    assert first_difference(ours, theirs, HOLDERS) == (
        f"{name}: sha256 is {ours.tensors[name]['sha256']} in the trainer and {theirs.tensors[name]['sha256']} in the server"
    )
    assert ours.digest != theirs.digest


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Int4Format(group_size=64), "group_size is 32 in the trainer and 64 in the server"),
        (Int4Format(symmetric=False), "zero_point is False in the trainer and True in the server"),
        (Int4Format(scale_dtype=torch.float32), "scale_dtype is bfloat16 in the trainer and float32 in the server"),
    ],
)
def test_formats_are_compared_before_tensors(other, message):
    assert first_difference(manifest(), manifest(other), HOLDERS) == f"{MODULES[0]}: {message}"


def test_a_linear_that_only_one_side_quantises_is_named():
    ours = manifest()
    theirs = BaseManifest(formats={MODULES[0]: ours.formats[MODULES[0]]}, tensors=ours.tensors)
    assert first_difference(ours, theirs, HOLDERS) == (
        f"{MODULES[1]}: the trainer has {ours.formats[MODULES[1]]}, the server has none"
    )
    assert first_difference(theirs, ours, HOLDERS).startswith(f"{MODULES[1]}: the trainer has none, the server has ")


def test_dtype_and_shape_are_compared_before_bits():
    def widen(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()

    assert first_difference(manifest(), manifest(change=widen), HOLDERS) == (
        "model.norm.weight: dtype is float32 in the trainer and bfloat16 in the server"
    )


@pytest.mark.parametrize("value", [[], {"formats": {}}, {"formats": {}, "tensors": []}, {"a": {}, "b": {}}])
def test_other_json_is_refused(value):
    with pytest.raises(ValueError, match="not a base manifest"):
        BaseManifest.from_json(json.dumps(value))


def in_parts() -> dict[str, tuple[Cut, ...]]:
    """Rows of one packed tensor in halves, columns of another in quarters."""
    return {
        f"{MODULES[0]}.weight_packed": (Cut(0, 0, 8), Cut(0, 8, 16)),
        f"{MODULES[1]}.weight_packed": tuple(Cut(1, start, start + 4) for start in range(0, 16, 4)),
    }


def manifest_in_parts(cuts, change=None) -> BaseManifest:
    tensors = {"model.norm.weight": torch.ones(8)}
    for seed, module in enumerate(MODULES):
        stored = quantize(Int4Format(), random_weight(16, 128, seed))
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in stored.items()}
    if change is not None:
        change(tensors)
    return BaseManifest.of({}, tensors.items(), cuts)


def test_parts_are_listed_by_name_and_read_back():
    whole = manifest_in_parts(in_parts())
    assert whole.cuts == in_parts()
    assert BaseManifest.from_json(whole.to_json()) == whole
    assert f"{MODULES[1]}.weight_packed[1, 4:8]" in whole.tensors and "model.norm.weight" in whole.tensors
    assert manifest_in_parts(None).cuts == {}


def test_ranks_join_to_what_a_trainer_digests_in_the_same_parts():
    whole, shared = manifest_in_parts(in_parts()), {"model.norm.weight", f"{MODULES[0]}.weight_scale"}
    ranks = [{name: entry for name, entry in whole.tensors.items() if name in shared} for _ in range(2)]
    for index, name in enumerate(name for name in whole.tensors if name not in shared):
        ranks[index % 2][name] = whole.tensors[name]
    assert BaseManifest.union([BaseManifest(formats={}, tensors=tensors) for tensors in ranks]) == whole


def test_ranks_that_hold_different_things_under_one_name_are_refused():
    def flip(tensors):
        tensors["model.norm.weight"][3] = 2.0

    with pytest.raises(
        ValueError, match=r"one base together.*model.norm.weight: sha256 is .* in the ranks before.*in rank 1"
    ):
        BaseManifest.union([manifest_in_parts(in_parts()), manifest_in_parts(in_parts(), flip)])


@pytest.mark.parametrize(
    "parts",
    [
        (Cut(0, 0, 8),),
        (Cut(0, 0, 8), Cut(0, 9, 16)),
        (Cut(0, 0, 9), Cut(0, 8, 16)),
        (Cut(0, 0, 8), Cut(1, 8, 16)),
        (Cut(2, 0, 16),),
        (Cut(0, 0, 8), Cut(0, 8, 17)),
    ],
    ids=str,
)
def test_parts_that_are_not_the_whole_are_refused(parts):
    """A server must not pass by naming less than it serves."""
    name = f"{MODULES[0]}.weight_packed"
    with pytest.raises(ValueError, match=rf"{name} \(16, 16\): the parts .* are not the whole of it"):
        manifest_in_parts({name: parts})
