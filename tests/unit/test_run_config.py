"""What trainer.strategy=orbit makes of verl's configuration, composed by Hydra from verl's own files."""

import copy
import json
import sys
from pathlib import Path

import pytest
import verl.trainer.main_ppo  # noqa: F401  loads verl and with it the plugin
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from orbit_verl.config import AdapterSettings, OrbitConfig
from orbit_verl.engine_config import OrbitActorConfig
from orbit_verl.run_config import is_orbit, resolve
from recipes.tiny_arithmetic.tokenizer import build_tokenizer

MODEL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "dtype": "float32",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
BASICS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.nnodes=1")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    build_tokenizer(64).save_pretrained(tmp_path)
    return tmp_path


def compose_run(*overrides: str, strategy: str = "trainer.strategy=orbit"):
    """Compose as ``python -m verl.trainer.main_ppo`` does, with these arguments on its command line."""
    arguments = [*([strategy] if strategy else []), *BASICS, *overrides]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["main_ppo", *arguments])
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=arguments)


@pytest.fixture(scope="module")
def composed():
    return compose_run()


@pytest.fixture
def run_config(composed, model):
    """A run's configuration with overrides, composed once for the module: composing takes seconds."""

    def build(*overrides: str):
        config = copy.deepcopy(composed)
        config.actor_rollout_ref.model.path = str(model)
        for override in overrides:
            key, _, value = override.lstrip("+").partition("=")
            OmegaConf.update(config, key, yaml.safe_load(value), force_add=override.startswith("+"))
        return config

    return build


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
    assert actor.engine.adapter == AdapterSettings()


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
    with pytest.raises(ValueError, match="orbit.adapter.rnak: unknown key; the keys of orbit.adapter are block_size"):
        compose_run("orbit.adapter.rnak=8")
    with pytest.raises(ValueError, match="orbit.adapter.rnak: unknown key; the keys of orbit.adapter are block_size"):
        resolve(run_config("+orbit.adapter.rnak=8"))


@pytest.mark.parametrize(
    "override, message",
    [
        ("orbit.adapter.block_size=40", "q_proj: width 64 is not a multiple of the OFT block size 40"),
        ("orbit.adapter.block_size=64", "down_proj: width 96 is not a multiple of the OFT block size 64"),
        ("orbit.adapter.block_size=1", "block_size 1: must be an integer of at least 2"),
        ("orbit.adapter.type=lora", "only 'oft' is implemented"),
        ("orbit.adapter.fused=both", "must be one of tied, split"),
        ("orbit.adapter.reference=init", "set init_path"),
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
    ],
)
def test_what_cannot_work_is_refused_with_the_fix(run_config, override, message):
    """field-cases #25 (top_p) and #38 (block size) among them."""
    with pytest.raises(ValueError, match=message):
        resolve(run_config(override))


def test_parallel_layouts_that_do_not_exist_yet_are_refused(run_config):
    config = run_config("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")
    with pytest.raises(Exception, match="tensor parallel size 2: not implemented yet"):
        omega_conf_to_dataclass(config.actor_rollout_ref.actor)


def test_wrong_tokenisers_are_refused(run_config, model):
    (model / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 16}))
    with pytest.raises(ValueError, match="has 32 tokens, the model 16: it belongs to another model"):
        resolve(run_config())
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        resolve(run_config())
    (model / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokeniser can be loaded"):
        resolve(run_config())
