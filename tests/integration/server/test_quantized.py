"""Real servers on a quantised base: one of a format that SGLang has, one of a format that only the reference has."""

import pytest
import torch

from orbit_kernels.checkpoint.manifest import BaseManifest
from tests.support.adapters import RAGGED_LINEARS, random_adapter
from tests.support.configurations import CONFIGURATIONS, SLOTS
from tests.support.quantized import difference_from_files, quantize
from tests.support.references import assert_close, peft_model, token_logprobs, transformers_model
from tests.support.server import (
    PROMPT,
    START_TIMEOUT_S,
    all_logprobs,
    free_port,
    launch,
    stop,
)

# By configuration: the dtype, and the largest mean and difference.
LIMITS = {"fp8": (torch.float32, 1e-5, 1e-4), "mxfp4": (torch.bfloat16, 5e-3, 0.1)}


@pytest.mark.server("fp8", "mxfp4")
def test_base_and_adapter_equal_transformers_per_token(server, request, checkpoints):
    style = request.node.callspec.params["running"]
    family, (dtype, mean, largest) = CONFIGURATIONS[style].family, LIMITS[style]
    base = server.generate(tokens=24, orbit_version=0)
    adapter = random_adapter(1, scale=0.1, linears=RAGGED_LINEARS)
    server.install(adapter)
    adapted = server.generate(tokens=24)
    assert all_logprobs(server.generate(tokens=24, orbit_version=0)).equal(all_logprobs(base))

    folder = checkpoints.quantized(family, style)
    model = transformers_model(folder, dtype)
    assert_close(all_logprobs(base), token_logprobs(model, PROMPT + base["output_ids"]), mean, largest)
    without = token_logprobs(model, PROMPT + adapted["output_ids"])
    model = peft_model(model, adapter)
    assert_close(all_logprobs(adapted), token_logprobs(model, PROMPT + adapted["output_ids"]), mean, largest)
    assert (all_logprobs(adapted) - without).abs().mean() > 10 * mean


@pytest.mark.server("mxfp4")
def test_the_route_answers_the_manifest_of_the_files(server, checkpoints):
    served = BaseManifest.from_json(server.get("/orbit/base").text)
    assert difference_from_files(checkpoints.quantized("llama", "mxfp4"), served) is None
    assert served.formats["model.layers.1.mlp.up_proj"]["format"] == "mxfp4"


def test_a_damaged_checkpoint_stops_the_start_before_anything_is_allocated(checkpoints, tmp_path):
    folder = quantize(checkpoints.ragged("qwen3"), tmp_path / "int4", "int4")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"group_size": 32', '"group_size": 16'))
    log = tmp_path / "log"
    process = launch(folder, log, free_port(), *SLOTS)
    try:
        assert process.wait(timeout=START_TIMEOUT_S) != 0
    finally:
        stop(process)
    assert "model.layers.0.mlp.down_proj.weight_scale: shape (160, 9), expected (160, 18)" in log.read_text()
    assert "Load weight" not in log.read_text()
