"""The comparison of bases; against real servers it is in test_trainer_server."""

import socket

import pytest
import torch

from orbit_kernels.checkpoint.manifest import BaseManifest
from orbit_kernels.formats import Bf16Format, Int4Format
from orbit_verl.driver.base_check import BaseMismatch, check_bases, require_equal, served_manifest

UP = "model.layers.0.mlp.up_proj"


def manifest(group_size: int = 32, flipped: bool = False, ignored: bool = False) -> BaseManifest:
    """Of one linear [64, 128] with the same weight in every case."""
    weight_format = Bf16Format() if ignored else Int4Format(group_size=group_size)
    weight_OI = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    stored = weight_format.quantize(weight_OI)
    if flipped:
        stored["weight_packed"][63, -1] ^= 1 << 17
    tensors = ((f"{UP}.{leaf}", tensor) for leaf, tensor in stored.items())
    return BaseManifest.of({UP: weight_format}, tensors)


def test_equal_bases_pass():
    check_bases([manifest(), manifest()], {"one": manifest()})
    require_equal(manifest(), BaseManifest.from_json(manifest().to_json()), "a server")


@pytest.mark.parametrize(
    ("other", "name"),
    (
        ({"group_size": 64}, rf"{UP}.*32 in the trainer and 64 in"),
        ({"ignored": True}, rf"{UP}: format is int4 in the trainer and bf16 in"),
        ({"flipped": True}, rf"{UP}\.weight_packed.*[0-9a-f]{{16}}.*[0-9a-f]{{16}}"),
    ),
    ids=("group size", "ignored layer", "one bit"),
)
def test_the_first_difference_is_named_with_both_values_and_the_holder(other, name):
    """A mismatched group size is an error; so is any other bit. docs/field-cases.md: the same dequantised bits."""
    with pytest.raises(BaseMismatch, match=f"the SGLang server at one holds another base than the trainer: {name}"):
        require_equal(manifest(), manifest(**other), "the SGLang server at one")


def test_ranks_of_the_trainer_are_compared_too():
    with pytest.raises(BaseMismatch, match="trainer rank 2 holds another base"):
        check_bases([manifest(), manifest(), manifest(flipped=True)], {})


def test_a_server_that_is_gone_is_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        server = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(BaseMismatch, match=f"server at {server} does not answer /orbit/base .ConnectError"):
            served_manifest(server, timeout_s=5)
