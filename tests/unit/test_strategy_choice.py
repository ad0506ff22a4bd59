"""However a run says ``trainer.strategy=orbit``, it gets Orbit's configuration groups, or it is refused."""

import re
import subprocess
import sys

import pytest
import verl  # noqa: F401  loads the plugin, as every run does
from hydra import compose, initialize_config_dir, initialize_config_module
from omegaconf import OmegaConf, open_dict

from orbit_verl.config.composing import check_composed

OWN_CONFIG = """
hydra:
  searchpath: [pkg://verl.trainer.config]
defaults:
  - ppo_trainer
  - _self_
trainer:
  strategy: orbit
  nnodes: 3
"""


def composed(*overrides: str):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


@pytest.fixture(scope="module")
def expected():
    return composed("model_engine=orbit")


@pytest.mark.parametrize(
    "override",
    [
        "trainer.strategy=orbit",
        "+trainer.strategy=orbit",
        "++trainer.strategy=orbit",
        "trainer.strategy='orbit'",
        '++trainer.strategy="orbit"',
    ],
)
def test_every_form_of_the_override_composes_the_same(expected, override):
    config = composed(override)
    assert config == expected
    assert config.trainer.strategy == config.actor_rollout_ref.actor.strategy == "orbit"
    assert config.orbit.adapter.type == "oft"
    check_composed(config)


def test_the_compose_api_sees_keys_of_the_strategy():
    assert composed("trainer.strategy=orbit", "orbit.adapter.block_size=16").orbit.adapter.block_size == 16
    with pytest.raises(ValueError, match="orbit.adapter.rnak: unknown key; the keys of orbit.adapter are alpha"):
        composed("trainer.strategy=orbit", "orbit.adapter.rnak=8")


def test_a_configuration_file_may_ask_for_the_strategy(tmp_path, expected):
    (tmp_path / "own.yaml").write_text(OWN_CONFIG)
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("own", overrides=["orbit.adapter.block_size=16"])
    with open_dict(config):
        assert (config.trainer.nnodes, config.orbit.adapter.block_size) == (3, 16)
        config.trainer.nnodes, config.orbit.adapter.block_size = expected.trainer.nnodes, 32
    assert config == expected


def test_a_run_without_the_strategy_is_verls_own():
    config = composed()
    assert config.model_engine == "dp" and "orbit" not in config and "strategy" not in config.trainer
    check_composed(config)


def test_another_engine_is_refused():
    with pytest.raises(ValueError, match="model_engine=megatron: trainer.strategy=orbit brings its own"):
        composed("trainer.strategy=orbit", "model_engine=megatron")


def test_a_strategy_that_hydra_did_not_see_is_refused_with_the_cure():
    config = composed()
    OmegaConf.update(config, "trainer.strategy", "orbit", force_add=True)
    with pytest.raises(ValueError, match="strategy=fsdp: both must be 'orbit', or neither; .* model_engine=orbit"):
        check_composed(config)
    config = composed("trainer.strategy=orbit")
    config.trainer.strategy = "fsdp"
    with pytest.raises(ValueError, match="trainer.strategy=fsdp, .*both must be 'orbit'"):
        check_composed(config)


def main_ppo(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [("++trainer.strategy='orbit'",), ("--config-path", "{folder}", "--config-name", "own")]
)
def test_verls_command_prints_what_runs(tmp_path, arguments):
    (tmp_path / "own.yaml").write_text(OWN_CONFIG)
    ran = main_ppo(*(argument.format(folder=tmp_path) for argument in arguments), "--cfg", "job")
    assert ran.returncode == 0, ran.stderr
    config = OmegaConf.create(ran.stdout[re.search("^orbit:$", ran.stdout, re.M).start() :])
    assert config.trainer.strategy == config.actor_rollout_ref.actor.strategy == "orbit"
    assert config.actor_rollout_ref.actor._target_ == "orbit_verl.worker.engine_config.OrbitActorConfig"
