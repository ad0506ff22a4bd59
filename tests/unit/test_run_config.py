"""What trainer.strategy=orbit makes of verl's configuration."""

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from orbit_kernels.adapters import LoRAMethod
from orbit_verl.config.keys import AdapterSettings, BaseSettings, OrbitConfig
from orbit_verl.driver.run_config import (
    _implied_settings,
    is_orbit,
    read_model_config,
    read_orbit_config,
    resolve,
)
from orbit_verl.worker.engine_config import OrbitActorConfig
from tests.support.run_configs import compose_run, edit_config, save_mixture


def test_everything_that_follows_is_filled_in(run_config):
    config = run_config("trainer.v1.trainer_mode=separate_async")
    assert is_orbit(config)
    resolve(config)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.name == "sglang" and rollout.checkpoint_engine.backend == "orbit"
    assert rollout.load_format == "auto" and rollout.dtype == "float32"
    assert rollout.engine_kwargs.sglang.enable_orbit_slots is True
    assert rollout.engine_kwargs.sglang.orbit_block_size == 32
    assert config.actor_rollout_ref.hybrid_engine is False
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert isinstance(actor, OrbitActorConfig) and actor.engine.strategy == "orbit"
    assert actor.engine.adapter == AdapterSettings() and actor.engine.base == BaseSettings()
    assert rollout.engine_kwargs.sglang.orbit_base_activations == "deployed"
    assert rollout.engine_kwargs.sglang.orbit_dequant_chunk_mb == 64


def test_servers_keep_their_kv_cache_while_they_generate_during_training_and_its_dtype(run_config, model):
    """Released in ``sync`` alone; in the dtype in which the trainer attends, whatever the checkpoint says of a KV cache."""
    for mode, released in (("sync", True), ("separate_async", False)):
        config = run_config(f"trainer.v1.trainer_mode={mode}")
        resolve(config)
        assert config.actor_rollout_ref.rollout.free_cache_engine is released
        assert config.actor_rollout_ref.rollout.engine_kwargs.sglang.kv_cache_dtype == "auto"
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8_e4m3': trainer.strategy=orbit needs 'auto'"):
        resolve(run_config("+actor_rollout_ref.rollout.engine_kwargs.sglang.kv_cache_dtype=fp8_e4m3"))
    edit_config(model, dtype="bfloat16")
    config = run_config()
    implied = _implied_settings(config, read_orbit_config(config), read_model_config(config))
    assert [setting.value for setting in implied if setting.key.endswith(".kv_cache_dtype")] == ["bfloat16"]


def test_a_cpu_prefills_prompts_whole_unless_the_run_chooses_otherwise(run_config):
    """In chunks, attention rounds otherwise than in the trainer."""
    key = "actor_rollout_ref.rollout.engine_kwargs.sglang.chunked_prefill_size"
    for chosen, expected in ((), -1), ((f"+{key}=2048",), 2048):
        config = run_config(*chosen)
        resolve(config)
        assert OmegaConf.select(config, key) == expected


def test_resolving_twice_changes_nothing(run_config):
    config = run_config()
    resolve(config)
    once = OmegaConf.to_container(config, resolve=True)
    resolve(config)
    assert OmegaConf.to_container(config, resolve=True) == once


def test_other_strategies_are_untouched():
    config = compose_run(strategy="")
    assert not is_orbit(config) and "orbit" not in config
    assert config.actor_rollout_ref.actor.strategy == "fsdp"


def test_defaults_are_those_of_the_dataclasses(run_config):
    config = run_config()
    assert omega_conf_to_dataclass(config.orbit) == OrbitConfig()


def test_unknown_key_is_refused(run_config):
    with pytest.raises(
        ValueError, match="orbit.adapter.rnak: unknown key; the keys of orbit.adapter are alpha, block_size"
    ):
        compose_run("orbit.adapter.rnak=8")
    with pytest.raises(
        ValueError, match="orbit.adapter.rnak: unknown key; the keys of orbit.adapter are alpha, block_size"
    ):
        resolve(run_config("+orbit.adapter.rnak=8"))


@pytest.mark.parametrize(
    "override, message",
    [
        ("orbit.adapter.block_size=40", "q_proj: width 64 is not a multiple of the OFT block size 40"),
        ("orbit.adapter.block_size=64", "down_proj: width 96 is not a multiple of the OFT block size 64"),
        ("orbit.adapter.block_size=1", "orbit.adapter.block_size=1: must be at least 2, e.g. 32"),
        ("orbit.adapter.type=boft", "must be one of oft, lora"),
        ("orbit.adapter.target_modules=[q_proj,lm_head]", "tied to the embeddings shares their matrix"),
        ("orbit.adapter.target_modules=[q_b_proj]", r"orbit.adapter: target_modules \['q_b_proj'\] match no linear"),
        ("orbit.adapter.target_modules=[q_proj,o_proj]", "orbit.adapter: fused='tied' with only"),
        ("orbit.adapter.fused=both", "must be one of tied, split"),
        ("orbit.adapter.reference=init", "set init_path"),
        ("orbit.base.activations=fp8", "must be one of deployed, none"),
        ("orbit.base.dequant_chunk_mb=0", "orbit.base.dequant_chunk_mb=0: must be at least 1, e.g. 64"),
        ("orbit.slots.inflight=abort", "must be one of finish, switch"),
        ("orbit.slots.timeout_s=0", "must be greater than 0"),
        ("orbit.parity.max_mean=-1", "must be greater than 0"),
        ("actor_rollout_ref.rollout.name=vllm", "needs 'sglang'"),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend=nccl", "needs 'orbit'"),
        ("actor_rollout_ref.rollout.top_p=0.85", "truncated distribution"),
        ("actor_rollout_ref.rollout.top_k=20", "truncated distribution"),
        ("algorithm.rollout_correction.bypass_mode=true", "parity could not be measured"),
        ("algorithm.adv_estimator=gae", "needs a critic"),
        ("trainer.v1.trainer_mode=colocate_async", "sync, separate_async"),
        ("actor_rollout_ref.model.lora_rank=8", "verl's own LoRA"),
        ("actor_rollout_ref.model.path=/no/such/folder", "no config.json"),
        ("actor_rollout_ref.actor.checkpoint.async_save=true", "verl would commit no step"),
        ("trainer.default_hdfs_dir=hdfs://x/y", "trainer.default_hdfs_dir=hdfs://x/y: .* leave it null"),
        ("trainer.default_local_dir=hdfs://x/y", "trainer.default_local_dir=hdfs://x/y: .* local or mounted folder"),
        ("trainer.del_local_ckpt_after_load=true", "could not be resumed again until its next save"),
        ("trainer.total_training_steps=0", "trainer.total_training_steps=0: must be at least 1"),
        ("trainer.resume_mode=latest", "must be one of auto, disable, resume_path"),
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(run_config, override, message):
    """top_p and the block size among them. docs/field-cases.md: truncated sampling; width and block size."""
    with pytest.raises(ValueError, match=message):
        resolve(run_config(override))


@pytest.mark.parametrize(("expert_width", "refused"), [(64, False), (48, True)])
def test_the_block_size_is_held_against_the_experts_own_width(run_config, tmp_path, expert_width, refused):
    """The width of a dense MLP, which no layer of this model has, is the opposite case each time."""
    folder = save_mixture(tmp_path / "moe", expert_width=expert_width, dense_width=48 if expert_width == 64 else 64)
    config = run_config(f"actor_rollout_ref.model.path={folder}")
    if not refused:
        resolve(config)
        return
    with pytest.raises(
        ValueError, match="mlp.experts.0.down_proj: width 48 is not a multiple of the OFT block size 32"
    ):
        resolve(config)


def test_a_lora_run_tells_its_servers(run_config):
    config = run_config("orbit.adapter.type=lora", "orbit.adapter.rank=8", "orbit.adapter.block_size=40")
    orbit = resolve(config)
    assert orbit.adapter.to_adapter_config().method == LoRAMethod(rank=8, alpha=32)
    sglang = config.actor_rollout_ref.rollout.engine_kwargs.sglang
    assert (sglang.orbit_adapter, sglang.orbit_rank, sglang.orbit_fused) == ("lora", 8, "tied")


def test_a_lora_rank_below_one_is_refused(run_config):
    with pytest.raises(ValueError, match="orbit.adapter.rank=0: must be at least 1, e.g. 16"):
        resolve(run_config("orbit.adapter.type=lora", "orbit.adapter.rank=0"))
