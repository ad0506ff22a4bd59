"""Configurations of runs, composed by Hydra from verl's own files, and the random models that they name."""

import copy
import json
import sys
from pathlib import Path

import pytest
import verl.trainer.main_ppo  # noqa: F401  loads verl and with it the plugin
import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from recipes.tiny_arithmetic.tokenizer import build_tokenizer

BASICS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.nnodes=1")


def save_dense(folder: Path) -> Path:
    """A random Qwen3 of one layer in fp32 with its tokeniser."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    build_tokenizer(64).save_pretrained(folder)
    return folder


def save_mixture(folder: Path, *, expert_width: int = 64, dense_width: int = 64) -> Path:
    """A random Qwen3-MoE of one layer and four experts in fp32 with its tokeniser."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=dense_width,
        moe_intermediate_size=expert_width,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    build_tokenizer(64).save_pretrained(folder)
    return folder


def edit_config(model: Path, **fields) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def compose_run(*overrides: str, strategy: str = "trainer.strategy=orbit"):
    """Compose as ``python -m verl.trainer.main_ppo`` does, with these arguments on its command line."""
    arguments = [*([strategy] if strategy else []), *BASICS, *overrides]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["main_ppo", *arguments])
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=arguments)


def with_overrides(composed: DictConfig, model: Path, *overrides: str) -> DictConfig:
    """A copy of a composed configuration, for this model."""
    config = copy.deepcopy(composed)
    config.actor_rollout_ref.model.path = str(model)
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=override.startswith("+"))
    return config
