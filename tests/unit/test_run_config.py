"""What trainer.strategy=orbit makes of verl's configuration, composed by Hydra from verl's own files."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import verl.trainer.main_ppo  # noqa: F401  loads verl and with it the plugin
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.utils.config import omega_conf_to_dataclass

from orbit_kernels.adapters import LoRAMethod
from orbit_kernels.formats import Int4Format
from orbit_kernels.formats.scheme.write import quantization_config
from orbit_verl.config.keys import AdapterSettings, BaseSettings, OrbitConfig
from orbit_verl.driver.run_config import (
    _implied_settings,
    is_orbit,
    read_model_config,
    read_orbit_config,
    resolve,
)
from orbit_verl.driver.run_folder import LOCK_FILE, take_run_folder
from orbit_verl.model.targets import check_served
from orbit_verl.worker.engine_config import OrbitActorConfig
from recipes.tiny_arithmetic.tokenizer import build_tokenizer

BASICS = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "trainer.nnodes=1")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory) -> Path:
    """A random Qwen3 of one layer in fp32 with its tokeniser."""
    folder = tmp_path_factory.mktemp("model")
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


@pytest.fixture
def model(saved_model: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(saved_model, tmp_path / "model")


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


def test_wrong_tokenisers_are_refused(run_config, model):
    edit_config(model, vocab_size=16)
    with pytest.raises(ValueError, match="has 32 tokens, the model 16: it belongs to another model"):
        resolve(run_config())
    edit_config(model, vocab_size=64)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        resolve(run_config())
    (model / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="no tokeniser can be loaded"):
        resolve(run_config())


def test_checkpoints_that_do_not_hold_what_they_say_are_refused(run_config, model):
    edit_config(model, intermediate_size=128)
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight: shape \(96, 64\), expected \(128, 64\)"):
        resolve(run_config())
    edit_config(model, intermediate_size=96)
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="model.safetensors: truncated, the bytes of these tensors are missing: model"):
        resolve(run_config())
    file.unlink()
    with pytest.raises(ValueError, match="safetensors not found"):
        resolve(run_config())


def test_scales_of_a_quantised_checkpoint_are_checked(run_config, model):
    """What no weight can have is refused by name before Ray starts.

    docs/field-cases.md: zero points and activation order; blocks that do not fit.
    """
    weight_format = Int4Format(group_size=32, scale_dtype=torch.float32)
    tensors = safetensors.torch.load_file(model / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored = weight_format.quantize(tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in stored.items()}
    edit_config(model, quantization_config=quantization_config(weight_format, ["lm_head"]))
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    resolve(run_config())
    tensors["model.layers.0.mlp.up_proj.weight_scale"][3, 1] = torch.nan
    safetensors.torch.save_file(tensors, model / "model.safetensors")
    with pytest.raises(ValueError, match="model.layers.0.mlp.up_proj.weight_scale: 1 of 192 scales are NaN"):
        resolve(run_config())
    edit_config(model, quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="quant_method is 'awq'"):
        resolve(run_config())


def test_a_validation_that_would_train_is_refused(run_config):
    resolve(run_config("trainer.val_only=true"))
    with pytest.raises(ValueError, match="verl would train; set val_before_train=true"):
        resolve(run_config("trainer.val_only=true", "trainer.val_before_train=false"))


def saved_step(folder: Path, step: int) -> Path:
    state = folder / f"global_step_{step}" / "actor" / "state.json"
    state.parent.mkdir(parents=True)
    state.write_text("{}")
    return state.parents[1]


def test_a_step_to_resume_from_must_be_there(run_config, tmp_path):
    folder = tmp_path / "run"
    here = f"trainer.default_local_dir={folder}"
    take_run_folder(run_config(here))
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(ValueError, match="names step 4, and .*global_step_4 is not there"):
        take_run_folder(run_config(here))
    take_run_folder(run_config(here, "trainer.resume_mode=disable"))
    saved_step(folder, 4)
    take_run_folder(run_config(here))

    def resume(path):
        take_run_folder(run_config(here, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"))

    resume(folder / "global_step_4")
    for path in ("null", folder, f"{folder}/global_step_4/actor"):
        with pytest.raises(ValueError, match="must be the folder of a step"):
            resume(path)
    with pytest.raises(ValueError, match=r"no whole step there; whole steps in .*run: \[4\]"):
        resume(folder / "global_step_5")


def test_a_folder_that_another_run_has_is_refused(run_config, tmp_path):
    """The driver of that run is named; a run in another folder starts."""
    here = run_config(f"trainer.default_local_dir={tmp_path}/run")
    (tmp_path / "run").mkdir()
    held = "import fcntl, os, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); f.write(str(os.getpid()))"
    code = f"{held}; f.flush(); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "run" / LOCK_FILE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=f"another run writes there \\(process {other.pid} holds"):
            take_run_folder(here)
        take_run_folder(run_config(f"trainer.default_local_dir={tmp_path}/another"))
        other.kill()
    take_run_folder(here)


@pytest.fixture
def without_privileges():
    """Root may write anywhere."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield
    os.seteuid(user)


def test_a_folder_that_is_read_only_is_refused(run_config, without_privileges):
    with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\); name another folder"):
        take_run_folder(run_config("trainer.default_local_dir=/run_of_nobody"))


def test_a_folder_that_cannot_be_written_is_refused(run_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be written \(Not a directory\); name another folder"):
        take_run_folder(run_config(f"trainer.default_local_dir={tmp_path}/file/run"))
