"""The servers that tests share, by name, and the checkpoints that they serve."""

import dataclasses
import pathlib

import torch

from tests.support import tiny_models
from tests.support.quantized import quantize

SLOTS = ("--enable-orbit-slots", "--dtype", "float32")
TWO_RANKS = ("--tp-size", "2")
KEY = "the-key"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A server; tests name it in ``pytest.mark.server``."""

    family: str
    flags: tuple[str, ...]
    key: str | None = None
    style: str | None = None


CONFIGURATIONS = {
    # Tied rotations, overlap schedule.
    "qwen3": Configuration("qwen3", SLOTS),
    "qwen3 on two ranks": Configuration("qwen3", (*SLOTS, "--orbit-seeded-sampling", "--enable-metrics", *TWO_RANKS)),
    "qwen3, split": Configuration("qwen3", (*SLOTS, "--orbit-fused", "split")),
    "llama, tied": Configuration("llama", (*SLOTS, "--orbit-fused", "tied")),
    # Tied embeddings, split rotations, no overlap, small prefill chunks, limits, an admin key.
    "llama": Configuration(
        "llama",
        (
            *(*SLOTS, "--orbit-fused", "split", "--orbit-block-size", "16", "--enable-metrics"),
            *("--orbit-max-adapter-bytes", "2000000", "--orbit-stage-timeout-s", "5", "--skip-tokenizer-init"),
            *("--disable-overlap-schedule", "--chunked-prefill-size", "64", "--admin-api-key", KEY),
        ),
        key=KEY,
    ),
    # Tied embeddings, an A for each part.
    "lora": Configuration(
        "llama",
        (*SLOTS, "--orbit-adapter", "lora", "--orbit-rank", "4", "--orbit-fused", "split", "--skip-tokenizer-init"),
    ),
    # Prompts in chunks, and a KV cache that two long requests overfill.
    "recording": Configuration(
        "qwen3_moe",
        (
            *(*SLOTS, "--enable-return-routed-experts", "--chunked-prefill-size", "64"),
            *("--max-total-tokens", "600", "--schedule-conservativeness", "0.1"),
        ),
    ),
    # A format that SGLang has, and one that only the reference has.
    "fp8": Configuration("qwen3", (*SLOTS, "--orbit-base-activations", "none"), style="fp8"),
    "mxfp4": Configuration(
        "llama", ("--enable-orbit-slots", "--orbit-base-activations", "none", "--dtype", "bfloat16"), style="mxfp4"
    ),
}


class Checkpoints:
    """Tiny checkpoints, each made once."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    def plain(self, family: str, dtype: torch.dtype = torch.float32) -> pathlib.Path:
        folder = self._folder / f"{family}-{dtype}"
        return folder if folder.exists() else tiny_models.save(family, folder, dtype)

    def ragged(self, family: str) -> pathlib.Path:
        """A BF16 checkpoint of sizes that no block divides."""
        folder = self._folder / f"{family}-ragged"
        if not folder.exists():
            tiny_models.save(family, folder, torch.bfloat16, **tiny_models.RAGGED_SIZES)
        return folder

    def quantized(self, family: str, style: str, plain: str = "lm_head") -> pathlib.Path:
        """It in a low-precision format, but for the linears with ``plain`` in their name."""
        folder = self._folder / f"{family}-{style}-{plain}"
        return folder if folder.exists() else quantize(self.ragged(family), folder, style, plain=(plain,))
