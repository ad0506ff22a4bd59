"""Router replay in the trainer: routers take recorded experts, against transformers with the same experts."""

import functools

import pytest
import torch
from verl.workers.config.engine import EngineRouterReplayConfig

from orbit_kernels.families import MixtureOfExperts
from orbit_verl.config.keys import BaseSettings
from orbit_verl.model.router import FrozenBiasedRouter, FrozenRouter
from tests.support.engines import (
    load_reference,
    log_probs,
    make_batch,
    make_engine,
    max_difference,
    nll,
    randomise,
    reference_log_probs,
    sequences,
)
from tests.support.mixtures import (
    LATENT_TARGETS,
    LAYERS,
    TOP_K,
    assert_gradients,
    leaf_tensors,
    merged_nll,
    random_record,
    routed_by,
)
from tests.support.parallel_ranks import RECOMPUTE
from tests.support.tiny_models import save_trained

PLAIN = BaseSettings(activations="none", experts_per_chunk=3)
FAMILIES = ("qwen3_moe", "deepseek_v3")
EXPERT_LAYERS = {"qwen3_moe": (0, 2), "deepseek_v3": (1, 2)}
# For each token the experts that its router is told, none where it names one twice.
RECORDED_TK = torch.tensor([[5, 1], [0, 0], [2, 3], [3, 3]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("replay")
    return {family: save_trained(family, root / family, torch.float32) for family in FAMILIES}


def replaying(folder, mode="R3", engine=None, **options):
    """An engine in a mode of router replay."""
    if folder.name == "deepseek_v3":
        options["target_modules"] = LATENT_TARGETS
    config = {"router_replay": EngineRouterReplayConfig(mode=mode)} | (engine or {})
    return make_engine(folder, base=PLAIN, engine=config, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probs_are_those_of_transformers_with_these_experts(folders, family, packed):
    """With gaps: the last token, tokens without experts, and a token with one twice are routed by the trainer."""
    engine, tokens = replaying(folders[family], packed=packed), sequences()
    records = random_record(tokens)
    reference = load_reference(folders[family], torch.float32)
    with routed_by(reference, records), torch.no_grad():
        expected = reference_log_probs(reference, tokens)
    replayed = log_probs(engine, tokens, records=records)
    assert max_difference(replayed, expected) < 1e-5
    assert max_difference(replayed, log_probs(engine, tokens)) > 1e-2
    counts = engine.replay.metrics()
    num_tokens, gaps = sum(map(len, tokens)), 3 * len(tokens)
    assert counts["orbit/router_replay/replayed"] == pytest.approx((num_tokens - gaps) / num_tokens)
    assert 0.5 < counts["orbit/router_replay/other_choice"] <= 1
    assert engine.replay.metrics() == {}


def test_sequences_padded_to_the_longest_of_all_micro_batches(folders):
    engine, tokens = (
        replaying(folders["qwen3_moe"], packed=False, engine={"pad_bshd_to_minibatch_max": True}),
        sequences(),
    )
    records = random_record(tokens)
    expected = log_probs(replaying(folders["qwen3_moe"]), tokens, records=records)
    assert max_difference(log_probs(engine, tokens, records=records, micro_batch=1), expected) < 1e-5
    assert max_difference(log_probs(engine, tokens), expected) > 1e-2


@pytest.mark.parametrize(
    "recompute",
    [{}, RECOMPUTE, {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}],
    ids=["kept", "recomputed", "experts recomputed"],
)
def test_gradients_are_those_of_merged_weights_with_these_experts(folders, recompute):
    """Layers that are computed again in backward take the same experts again, of each micro-batch its own."""
    engine = replaying(folders["qwen3_moe"], engine={"override_transformer_config": recompute})
    tokens = sequences()
    randomise(engine)
    records, reference = random_record(tokens), load_reference(folders["qwen3_moe"], torch.float32)
    trained, tensors = leaf_tensors(engine)
    weights = {name: p.float() for name, p in reference.named_parameters()}
    with routed_by(reference, records):
        loss = merged_nll(reference, weights, engine, tensors, tokens)
        loss.backward()
    with engine.train_mode(zero_grad_on_exit=False):
        output = engine.forward_backward_batch(make_batch(tokens, records=records), nll)
    assert sum(output["loss"]) == pytest.approx(loss.item(), abs=1e-5)
    assert_gradients(engine.optimizer.gradients(), trained)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", ["fixed", "dynamic"])
def test_r2_records_its_own_choice_and_replays_it(folders, family, sizes):
    """The record of the old log-probs holds in the update, although the adapter that chose has changed by then."""
    tokens = sequences()
    dynamic = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 60} if sizes == "dynamic" else {}
    engine = replaying(folders[family], "R2")
    reference = load_reference(folders[family], torch.float32)
    with routed_by(reference, []) as used, torch.no_grad():
        reference_log_probs(reference, tokens)
    with engine.eval_mode():
        output = engine.infer_batch(make_batch(tokens, enable_routing_replay=True, **dynamic))["model_output"]
    assert max_difference([row[:-1] for row in output["log_probs"].unbind()], log_probs(engine, tokens)) < 1e-5
    records = output["routed_experts"].unbind()
    for sequence, record in zip(tokens, records, strict=True):
        assert record.shape == (len(sequence), LAYERS, TOP_K) and record.dtype == torch.int16
        for layer in EXPERT_LAYERS[family]:
            assert torch.equal(_sorted(record[:, layer]), _sorted(used[len(sequence)][layer]))
    randomise(engine, scale=0.3)
    with engine.eval_mode():
        replayed = engine.infer_batch(make_batch(tokens, records=records, **dynamic))["model_output"]
    assert "routed_experts" not in replayed
    replayed = [row[:-1] for row in replayed["log_probs"].unbind()]
    counts = engine.replay.metrics()
    assert counts["orbit/router_replay/replayed"] == 1 and 0 < counts["orbit/router_replay/other_choice"] < 1
    assert max_difference(replayed, log_probs(engine, tokens)) > 1e-3
    losses = []
    with engine.train_mode(zero_grad_on_exit=False):
        for batch in (make_batch(tokens, records=records, **dynamic), make_batch(tokens, records=None)):
            losses.append(sum(engine.forward_backward_batch(batch, nll)["loss"]))
    masks = [batch_mask[:-1] for batch_mask in make_batch(tokens)["loss_mask"].unbind()]
    expected = -sum((row * mask).sum() for row, mask in zip(replayed, masks, strict=True)) / sum(m.sum() for m in masks)
    assert losses[0] == pytest.approx(expected.item(), abs=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-5


def _sorted(ids: torch.Tensor) -> torch.Tensor:
    return ids.long().sort(-1).values


@pytest.mark.parametrize("mode", ["R2", "R3"])
def test_the_reference_policy_routes_by_itself(folders, mode):
    engine, tokens = replaying(folders["qwen3_moe"], mode), sequences()
    randomise(engine)
    with engine.disable_adapter():
        own = log_probs(engine, tokens)
        assert max_difference(log_probs(engine, tokens, records=random_record(tokens)), own) == 0
        assert max_difference(log_probs(engine, tokens, enable_routing_replay=True), own) == 0


@pytest.mark.parametrize("router_of, scores_of", [(FrozenRouter, "softmax"), (FrozenBiasedRouter, "sigmoid")])
def test_a_router_weighs_the_experts_that_it_is_told(router_of, scores_of):
    """Weights are its own scores of these experts, and gradients flow through them."""
    torch.manual_seed(0)
    groups = {"num_groups": 2, "top_groups": 1} if router_of is FrozenBiasedRouter else {}
    moe = MixtureOfExperts(layers=frozenset({0}), num_experts=6, top_k=2, ffn_size=16, normalized=True, **groups)
    router = router_of(moe=moe, hidden_size=8, dtype=torch.float32)
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter)
    x_TD = torch.randn(len(RECORDED_TK), 8, requires_grad=True)
    own_TK, own_weights_TK = router(x_TD)
    has_record_T1 = torch.tensor([[True], [False], [True], [False]])
    with router.overridden_by(lambda own_TK: torch.where(has_record_T1, RECORDED_TK, own_TK)):
        ids_TK, weights_TK = router(x_TD)
    assert torch.equal(ids_TK, torch.where(has_record_T1, RECORDED_TK, own_TK))
    assert torch.equal(weights_TK[1], own_weights_TK[1]) and not torch.equal(ids_TK[0].sort().values, own_TK[0])
    logits_TE = x_TD @ router.weight.T
    scores_TE = logits_TE.softmax(-1) if scores_of == "softmax" else logits_TE.sigmoid()
    expected_TK = scores_TE.gather(1, ids_TK)
    expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    torch.testing.assert_close(weights_TK, expected_TK)
    factors_TK = torch.randn_like(weights_TK)
    gradients = [torch.autograd.grad((w * factors_TK).sum(), x_TD)[0] for w in (weights_TK, expected_TK)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().min(dim=-1).values.min() > 0
    assert torch.equal(router(x_TD)[0], own_TK)


def test_what_does_not_fit_the_batch_is_refused(folders):
    engine, tokens = replaying(folders["qwen3_moe"]), sequences()
    compute = functools.partial(log_probs, engine, tokens)
    with pytest.raises(ValueError, match="the batch has no routed_experts; R3 needs a server that reports them"):
        compute(enable_routing_replay=True)
    with pytest.raises(ValueError, match=r"routed_experts of shapes .*\(30, 2, 2\).* must be \[\(30, 3, 2\), "):
        compute(records=[record[:, :2] for record in random_record(tokens)])
    shifted = [*random_record(tokens)[1:], random_record(tokens)[0]]
    with pytest.raises(ValueError, match=r"must be \[\(30, 3, 2\), \(17, 3, 2\)\]"):
        compute(records=shifted)
    with pytest.raises(ValueError, match="holds ids from 0 to 8: the model's experts are 0 to 7"):
        compute(records=[record + (record == 7) for record in random_record(tokens)])


def test_models_and_options_that_cannot_replay_are_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="router_replay.mode=R3: the model is dense, it has no routers"):
        replaying(save_trained("qwen3", tmp_path / "dense", torch.float32))
    with pytest.raises(ValueError, match="takes one expert, so a record of expert 0 looks like none"):
        replaying(save_trained("qwen3_moe", tmp_path / "one", torch.float32, num_experts_per_tok=1), "R2")
