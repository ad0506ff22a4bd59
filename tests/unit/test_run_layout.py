"""Layouts of a run, and records of experts, that do not fit the model or the devices, before Ray starts."""

import pytest
import safetensors.torch
from verl.utils.config import omega_conf_to_dataclass

from orbit_verl.config.keys import AdapterSettings
from orbit_verl.driver.run_config import (
    resolve,
)
from orbit_verl.model.targets import check_served
from tests.support.run_configs import edit_config, save_mixture


def test_parallel_layouts_that_do_not_exist_are_refused(run_config):
    with pytest.raises(
        ValueError, match=r"^actor_rollout_ref\.actor\.megatron\.context_parallel_size=2: not implemented"
    ):
        resolve(run_config("actor_rollout_ref.actor.megatron.context_parallel_size=2"))
    stage = "actor_rollout_ref.actor.megatron.override_transformer_config.num_layers_in_last_pipeline_stage"
    stages = ("actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    with pytest.raises(ValueError, match=f"{stage}=2: of 1 layers in .*=2 stages, -1 are left for the other 1"):
        resolve(run_config(*stages, f"+{stage}=2"))
    with pytest.raises(ValueError, match="pipeline_model_parallel_size=2: 1 layers cannot be divided evenly"):
        resolve(run_config(*stages, f"+{stage}=null"))


def test_transformer_overrides_without_an_effect_are_refused(run_config):
    key = "actor_rollout_ref.actor.megatron.override_transformer_config"
    with pytest.raises(ValueError, match=r"override_transformer_config \['orbit'\]: no such field"):
        resolve(run_config(f"+{key}.orbit=1"))
    with pytest.raises(ValueError, match=r"override_transformer_config \['sequence_parallel'\]: follow from the sizes"):
        resolve(run_config(f"+{key}.sequence_parallel=true"))
    recomputed = (f"+{key}.recompute_granularity=full", f"+{key}.recompute_method=uniform")
    with pytest.raises(ValueError, match="override_transformer_config: .*recompute_num_layers must be"):
        resolve(run_config(*recomputed))
    resolve(run_config(*recomputed, f"+{key}.recompute_num_layers=1"))


def test_a_trainer_that_is_divided_otherwise_than_the_servers_is_told_so(run_config, model, caplog):
    """In BF16 it rounds other sums."""
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    narrow = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    safetensors.torch.save_file(narrow, model / "model.safetensors", metadata={"format": "pt"})
    edit_config(model, dtype="bfloat16")
    served = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=2")
    served += ("actor_rollout_ref.rollout.tensor_model_parallel_size=2",)
    resolve(run_config(*served))
    assert "tensor_model_parallel_size=2, and 1 in the trainer" in caplog.text
    caplog.clear()
    divided = ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    divided += ("orbit.adapter.block_size=16",)
    resolve(run_config(*served, *divided))
    assert "in the trainer: each rounds" not in caplog.text
    with pytest.raises(ValueError, match="tensor_model_parallel_size=4: 2 key and value heads cannot be divided"):
        resolve(run_config(*served, divided[0].replace("=2", "=4"), "trainer.n_gpus_per_node=4"))


def test_experts_and_ranks_must_be_divisible(run_config, tmp_path):
    key = "actor_rollout_ref.actor.megatron.expert_model_parallel_size"
    with pytest.raises(ValueError, match=f"{key}=2: the model is dense"):
        resolve(run_config(f"{key}=2"))
    path = f"actor_rollout_ref.model.path={save_mixture(tmp_path / 'moe')}"
    with pytest.raises(ValueError, match=f"{key}=3: 4 experts cannot be divided evenly"):
        resolve(run_config(f"{key}=3", path))
    with pytest.raises(ValueError, match=f"{key}=4, .* the trainer's 2 ranks cannot be divided"):
        resolve(run_config(f"{key}=4", path, "trainer.n_gpus_per_node=2"))
    resolve(run_config(f"{key}=2", path, "trainer.n_gpus_per_node=2"))


def test_targets_without_slots_on_a_gpu_are_refused():
    modules = [
        "model.layers.0.mlp.down_proj",
        *(f"model.layers.1.mlp.experts.{leaf}" for leaf in ("up_proj", "down_proj")),
    ]
    shared = AdapterSettings(experts="common", target_modules=["experts.up_proj", "mlp.down_proj"]).to_adapter_config()
    check_served(shared, modules, "cuda")
    everything = AdapterSettings(experts="common").to_adapter_config()
    check_served(everything, modules, "cpu")
    with pytest.raises(ValueError, match=r"match model\.layers\.1\.mlp\.experts\.down_proj: SGLang's own kernels"):
        check_served(everything, modules, "cuda")
    each = AdapterSettings(target_modules=["up_proj"]).to_adapter_config()
    with pytest.raises(
        ValueError, match=r"match model\.layers\.1\.mlp\.experts\.3\.up_proj: .* orbit.adapter.experts=common"
    ):
        check_served(each, ["model.layers.1.mlp.experts.3.up_proj"], "cuda")


REPLAY = "actor_rollout_ref.actor.megatron.router_replay.mode"
RECORDS = "actor_rollout_ref.rollout.enable_rollout_routing_replay"


def test_router_replay_tells_the_servers_to_record(run_config, tmp_path):
    path = f"actor_rollout_ref.model.path={save_mixture(tmp_path / 'moe')}"
    for mode, records in (("disabled", False), ("R2", False), ("R3", True)):
        config = run_config(path, f"{REPLAY}={mode}")
        resolve(config)
        assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay is records
        assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).engine.router_replay.mode == mode


@pytest.mark.parametrize(
    "dense, overrides, message",
    [
        (True, (f"{REPLAY}=R2",), "router_replay.mode=R2: the model is dense, it has no routers; set it to disabled"),
        (True, (f"{REPLAY}=R3",), "router_replay.mode=R3: the model is dense"),
        (True, (f"{RECORDS}=true",), f"{RECORDS}=true: the model is dense, a server has no experts to record"),
        (False, (f"{REPLAY}=R2", f"{RECORDS}=true"), "the servers' record would take the place of the trainer's"),
        (
            False,
            (f"{REPLAY}=R3", "actor_rollout_ref.rollout.skip_tokenizer_init=false"),
            "skip_tokenizer_init=False: trainer.strategy=orbit needs True",
        ),
        (
            False,
            (f"{REPLAY}=R3", "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_return_routed_experts=false"),
            "enable_return_routed_experts=False: trainer.strategy=orbit needs True",
        ),
        (
            False,
            (f"{REPLAY}=R3", "+actor_rollout_ref.rollout.engine_kwargs.sglang.enable_hierarchical_cache=true"),
            "enable_hierarchical_cache=True: trainer.strategy=orbit needs False",
        ),
    ],
)
def test_router_replay_that_cannot_work_is_refused(run_config, tmp_path, dense, overrides, message):
    path = () if dense else (f"actor_rollout_ref.model.path={save_mixture(tmp_path / 'moe')}",)
    with pytest.raises(ValueError, match=message):
        resolve(run_config(*path, *overrides))


def test_a_model_of_one_expert_a_token_cannot_be_replayed(run_config, tmp_path):
    folder = save_mixture(tmp_path / "moe")
    edit_config(folder, num_experts_per_tok=1)
    with pytest.raises(ValueError, match="a token of this model takes one expert"):
        resolve(run_config(f"actor_rollout_ref.model.path={folder}", f"{REPLAY}=R3"))


def test_servers_of_several_ranks_need_their_devices(run_config):
    """verl's default is two ranks."""
    tensor_parallel = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    with pytest.raises(ValueError, match=f"{tensor_parallel}=2: .* 1 devices of trainer.n_gpus_per_node; .* e.g. 1"):
        resolve(run_config("trainer.n_gpus_per_node=1"))
    with pytest.raises(ValueError, match=f"{tensor_parallel}=0"):
        resolve(run_config(f"{tensor_parallel}=0"))
    asynchronous = ("trainer.v1.trainer_mode=separate_async", "actor_rollout_ref.rollout.n_gpus_per_node=2")
    config = run_config("trainer.n_gpus_per_node=1", *asynchronous, f"{tensor_parallel}=2")
    resolve(config)
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2
    with pytest.raises(
        ValueError, match="4: a server of 4 ranks does not fit the 2 devices of actor_rollout_ref.rollout"
    ):
        resolve(run_config(*asynchronous, f"{tensor_parallel}=4"))
