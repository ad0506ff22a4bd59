"""OrbitEngine against a real SGLang server with slots: the claim that the policy trained is the policy served."""

import pytest
import torch
from harness import output_logprobs, prompt_logprobs, serve
from tiny_models import save_qwen3
from trainer_support import make_batch, make_engine, randomise

PROMPTS = [[(7 * index + start) % 50 + 3 for index in range(length)] for start, length in ((1, 9), (2, 24), (3, 40))]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def engine_and_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    path = save_qwen3(folder / "model", torch.bfloat16)
    engine = make_engine(path, block_size=32, dtype="bf16")
    with serve(path, folder / "log", "--enable-orbit-slots", "--orbit-block-size", "32") as server:
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
def test_bf16_log_probs_are_the_servers(engine_and_server):
    engine, server = engine_and_server
    randomise(engine, scale=0.05, seed=1)
    server.install(engine.export_adapter())
    difference = sampled(engine, server)
    assert difference.mean() <= 1e-5 and difference.max() <= 1e-4  # measured 6.5e-8 and 9.6e-7


@pytest.mark.slow
def test_a_skipped_activation_shows(engine_and_server):
    engine, server = engine_and_server
    randomise(engine, scale=0.05, seed=2)
    server.install(engine.export_adapter())
    published = sampled(engine, server).mean()
    randomise(engine, scale=0.05, seed=3)
    assert sampled(engine, server).mean() > max(10 * published, 1e-2)
