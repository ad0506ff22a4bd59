"""Real servers on a quantised base: one of a format that SGLang has, one of a format that only the reference has."""

import harness
import pytest
import quantized_models
import tiny_models
import torch
from harness import PROMPT, output_logprobs, prompt_logprobs
from peft import PeftModel

from orbit_kernels.checkpoint.manifest import BaseManifest

FLAGS = ("--enable-orbit-slots", "--orbit-base-activations", "none")
CASES = [
    ("qwen3", "fp8", "float32", 1e-5, 1e-4),
    ("llama", "mxfp4", "bfloat16", 5e-3, 0.1),
]


@pytest.mark.parametrize("family, style, dtype, mean, largest", CASES)
def test_base_and_adapter_equal_transformers_per_token(servers, tmp_path, family, style, dtype, mean, largest):
    server = servers.get(family, *FLAGS, "--dtype", dtype, style=style)
    base = server.generate(tokens=24, orbit_version=0)
    adapter = tiny_models.random_adapter(1, scale=0.1, sizes=tiny_models.RAGGED_SIZES)
    server.install(adapter)
    adapted = server.generate(tokens=24)
    assert served_logprobs(server.generate(tokens=24, orbit_version=0)).equal(served_logprobs(base))

    folder = servers.quantized(family, style)
    model = quantized_models.transformers_model(folder, getattr(torch, dtype))
    assert_close(served_logprobs(base), expected_logprobs(model, base), mean, largest)
    without = expected_logprobs(model, adapted)
    model = PeftModel.from_pretrained(model, quantized_models.save_adapter(adapter, tmp_path / "peft")).eval()
    assert_close(served_logprobs(adapted), expected_logprobs(model, adapted), mean, largest)
    assert (served_logprobs(adapted) - without).abs().mean() > 10 * mean


@pytest.mark.parametrize("family, style, dtype, mean, largest", CASES[-1:])
def test_the_route_answers_the_manifest_of_the_files(servers, family, style, dtype, mean, largest):
    server = servers.get(family, *FLAGS, "--dtype", dtype, style=style)
    served = BaseManifest.from_json(server.get("/orbit/base").text)
    assert quantized_models.difference_from_files(servers.quantized(family, style), served) is None
    assert served.formats["model.layers.1.mlp.up_proj"]["format"] == style


def test_a_damaged_checkpoint_stops_the_start_before_anything_is_allocated(servers, tmp_path):
    folder = quantized_models.save(servers.ragged("qwen3"), tmp_path / "int4", "int4")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"group_size": 32', '"group_size": 16'))
    log = tmp_path / "log"
    process = harness.launch(folder, log, harness.free_port(), *FLAGS)
    try:
        assert process.wait(timeout=harness.START_TIMEOUT_S) != 0
    finally:
        harness.stop(process)
    assert "model.layers.0.mlp.down_proj.weight_scale: shape (160, 9), expected (160, 18)" in log.read_text()
    assert "Load weight" not in log.read_text()


def served_logprobs(answer: dict) -> torch.Tensor:
    return torch.tensor(prompt_logprobs(answer) + output_logprobs(answer))


def expected_logprobs(model: torch.nn.Module, answer: dict) -> torch.Tensor:
    ids = PROMPT + answer["output_ids"]
    logprobs_TV = quantized_models.logprobs(model, ids[:1], ids[1:])
    return logprobs_TV.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def assert_close(left: torch.Tensor, right: torch.Tensor, mean: float, largest: float) -> None:
    assert (left - right).abs().mean() <= mean and (left - right).abs().max() <= largest
