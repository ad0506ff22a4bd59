"""OrbitEngine against a real SGLang server with slots: the claim that the policy trained is the policy served."""

import pytest
import torch

from orbit_verl.driver.base_check import BaseMismatch, check_bases, served_manifest
from orbit_verl.model.naming import named_tensors
from tests.support import tiny_models
from tests.support.engines import make_batch, make_engine, randomise
from tests.support.quantized import FORMATS, quantize
from tests.support.server import output_logprobs, prompt_logprobs, serve

PROMPTS = [[(7 * index + start) % 50 + 3 for index in range(length)] for start, length in ((1, 9), (2, 24), (3, 40))]
NUM_TOKENS = 48
UP = "model.layers.2.mlp.up_proj"


OFT = {"type": "oft", "block_size": 32}
LORA = {"type": "lora", "rank": 4, "alpha": 6}
CASES = {
    "bf16-oft-tied": ("bf16", OFT, "tied"),
    "int4-oft-tied": ("int4", OFT, "tied"),
    "nvfp4-oft-split": ("nvfp4", OFT, "split"),
    "bf16-lora-tied": ("bf16", LORA, "tied"),
    "int4-lora-split": ("int4", LORA, "split"),
}


@pytest.fixture(scope="module", params=CASES)
def engine_and_server(request, tmp_path_factory):
    name, method, fused = CASES[request.param]
    folder = tmp_path_factory.mktemp("served")
    path = tiny_models.save("qwen3", folder / "model", torch.bfloat16)
    if name in FORMATS:
        path = quantize(path, folder / "quantized", name)
    engine = make_engine(path, dtype="bf16", fused=fused, **method)
    flags = ["--enable-orbit-slots", "--orbit-adapter", method["type"], "--orbit-fused", fused]
    flags += ["--orbit-rank", "4"] if method is LORA else ["--orbit-block-size", "32"]
    with serve(path, folder / "log", *flags) as server:
        yield engine, server


def sampled(engine, server):
    """Differences per token between the server's log-probs and the engine's, over prompts and responses."""
    answers = server.generate(PROMPTS, NUM_TOKENS, sampling_params={"temperature": 1.0})
    tokens = [torch.tensor(prompt + answer["output_ids"]) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    batch = make_batch(tokens, micro_batch=3)
    responses = [torch.ones(NUM_TOKENS, dtype=torch.long) for _ in tokens]
    batch["loss_mask"] = torch.nested.as_nested_tensor(responses, layout=torch.jagged)
    with engine.eval_mode():
        rows = engine.infer_batch(batch)["model_output"]["log_probs"].unbind()
    theirs = [torch.tensor(prompt_logprobs(answer) + output_logprobs(answer)) for answer in answers]
    return torch.cat([(row[:-1] - their).abs() for row, their in zip(rows, theirs, strict=True)])


@pytest.mark.slow
def test_log_probs_are_the_servers(engine_and_server):
    """Activations are BF16, inputs of NVFP4 linears rounded as deployed. docs/field-cases.md: the same dequantised bits."""
    engine, server = engine_and_server
    randomise(engine, scale=0.05, seed=1)
    server.install(engine.export_adapter())
    difference = sampled(engine, server)
    assert difference.mean() <= 1e-5 and difference.max() <= 1e-4  # measured 7.3e-8 and 9.6e-7


@pytest.mark.slow
def test_a_skipped_activation_shows(engine_and_server):
    engine, server = engine_and_server
    randomise(engine, scale=0.05, seed=2)
    server.install(engine.export_adapter())
    published = sampled(engine, server).mean()
    randomise(engine, scale=0.05, seed=3)
    assert sampled(engine, server).mean() > max(10 * published, 1e-2)


@pytest.mark.slow
def test_the_bases_are_equal_and_one_flipped_bit_is_found(engine_and_server):
    """docs/field-cases.md: the same dequantised bits."""
    engine, server = engine_and_server
    address = server.url.removeprefix("http://")
    served = {address: served_manifest(address, timeout_s=60)}
    check_bases([engine.base_manifest()], served)
    name, tensor = next(item for item in named_tensors(engine.module[0]) if item[0].startswith(UP))
    bits = tensor.view(torch.uint8)
    bits[1, 1] ^= 1
    try:
        with pytest.raises(BaseMismatch, match=f"server at {address} holds another base.*{name}: sha256 is"):
            check_bases([engine.base_manifest()], served)
    finally:
        bits[1, 1] ^= 1
    check_bases([engine.base_manifest()], served)
