"""Before Ray starts, ``trainer.strategy=orbit`` fills in and checks verl's configuration.

Settings that follow from the strategy are filled in where the run still has verl's default; any other value of the
user's is either right or refused, never replaced.
"""

import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import AutoConfig, AutoTokenizer
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass

from orbit_kernels.contract.options import ENABLE_FLAG, SEEDED_SAMPLING_FLAG
from orbit_kernels.families import DecoderArchitecture, read_architecture
from orbit_verl.config.keys import AdapterSettings, Keys, OrbitConfig, check_key
from orbit_verl.driver.run_folder import check_saving
from orbit_verl.model.replay import MODE_KEY as REPLAY
from orbit_verl.model.targets import adapted_shapes, check_served
from orbit_verl.model.tensors import open_checkpoint

logger = logging.getLogger(__name__)

TRAINER_MODES = ("sync", "separate_async")
ROLLOUT = "actor_rollout_ref.rollout"
SGLANG = f"{ROLLOUT}.engine_kwargs.sglang"
RECORDS = f"{ROLLOUT}.enable_rollout_routing_replay"
LOOPBACK = "127.0.0.2"  # Ray 2.60 replaces 127.0.0.1 by the machine's outward address (ray/_private/services.py::resolve_ip_for_localhost)


@dataclasses.dataclass(frozen=True)
class Implied:
    """An `Implied` is a setting that follows from the strategy, with verl's default for it and the value that works.

    Any other value is refused where the setting is ``required``, and kept where it is only a better default.
    """

    key: str
    default: Any
    value: Any
    reason: str
    required: bool = True


def is_orbit(config: DictConfig) -> bool:
    """Says whether the run asked for the strategy."""
    return OmegaConf.select(config, "trainer.strategy") == "orbit"


def resolve(config: DictConfig) -> OrbitConfig:
    """Checks the run, fills in what follows from the strategy (in place), and returns Orbit's own keys.

    Raises:
        ValueError: an unknown key, or a value or combination that cannot work, with the fix.
    """
    orbit = read_orbit_config(config)
    checkpoint = read_model_config(config)
    with open_dict(config):
        for implied in _implied_settings(config, orbit, checkpoint):
            _fill_in(config, implied)
    _check_run(config)
    check_saving(config)
    _check_tokenizer(config, checkpoint)
    _check_base(config, orbit.adapter)
    return orbit


def read_orbit_config(config: DictConfig) -> OrbitConfig:
    """Returns the validated ``orbit`` group.

    Raises:
        ValueError: an unknown key or a bad value.
    """
    for key in _keys(config.orbit, "orbit"):
        check_key(key)
    return _instantiated(config.orbit)


def read_model_config(config: DictConfig) -> dict[str, Any]:
    """Returns the checkpoint's ``config.json``.

    Raises:
        ValueError: the folder or the file is missing.
    """
    path = _model_path(config)
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path={str(path)!r}: no config.json there; "
            "give the folder of a Hugging Face checkpoint on this machine"
        )
    return json.loads(file.read_text())


def _instantiated(group: DictConfig) -> Any:
    """Returns the dataclass of a group, which checks its values."""
    try:
        return omega_conf_to_dataclass(group)
    except Exception as error:  # Hydra wraps the ValueError of a dataclass in its own type
        raise ValueError(str(error.__cause__ or error)) from error


def _model_path(config: DictConfig) -> Path:
    return Path(os.path.expanduser(str(config.actor_rollout_ref.model.path)))


def _keys(node: DictConfig, prefix: str) -> Iterator[str]:
    for key, value in node.items():
        if key == "_target_":
            continue
        yield f"{prefix}.{key}"
        if isinstance(value, DictConfig):
            yield from _keys(value, f"{prefix}.{key}")


def _implied_settings(config: DictConfig, orbit: OrbitConfig, checkpoint: dict[str, Any]) -> list[Implied]:
    dtype = _checkpoint_dtype(config, checkpoint)
    # By itself a server takes 8 bits for a checkpoint that says so (model_executor/model_runner.py::ModelRunner.configure_kv_cache_dtype).
    kv_cache = "bfloat16" if dtype == "bfloat16" else "auto"
    implied = [
        Implied(f"{ROLLOUT}.name", None, "sglang", "adapter slots exist in SGLang servers"),
        Implied(f"{ROLLOUT}.mode", "async", "async", "requests run while a version is staged"),
        Implied(f"{ROLLOUT}.checkpoint_engine.backend", "naive", "orbit", "only the adapter travels"),
        Implied(
            f"{ROLLOUT}.checkpoint_engine.custom_backend_module",
            None,
            "orbit_verl.publishing.checkpoint_engine",
            "registers the backend",
        ),
        Implied(f"{ROLLOUT}.load_format", "dummy", "auto", "the base comes from the checkpoint and is never sent"),
        Implied(f"{ROLLOUT}.dtype", "bfloat16", dtype, "trainer and server hold the checkpoint's bits"),
        Implied(
            f"{SGLANG}.kv_cache_dtype", None, kv_cache, "the trainer attends to keys and values in the base's dtype"
        ),
        Implied(f"{ROLLOUT}.calculate_log_probs", True, True, "parity compares them with the trainer's"),
        Implied(f"{SGLANG}.{ENABLE_FLAG}", None, True, "the server side of the strategy"),
        *_passed_on(orbit.adapter),
        *_passed_on(orbit.base),
        Implied(
            "trainer.v1.sampler.max_off_policy_threshold",
            8,
            orbit.staleness.max_versions,
            "orbit.staleness.max_versions",
        ),
    ]
    failed = "a group that failed is replaced by another prompt"
    implied += [
        Implied("data.gen_batch_size", None, 1, failed),
        Implied("trainer.v1.sampler.sync_refill_failed_groups", False, True, failed),
    ]
    if _replay_mode(config) == "R3":
        reason = f"{REPLAY}=R3 replays what the servers record"
        implied += [
            Implied(RECORDS, False, True, reason),
            Implied(f"{SGLANG}.enable_return_routed_experts", None, True, reason),
            Implied(f"{SGLANG}.enable_hierarchical_cache", None, False, f"{reason}, which a cache on the host loses"),
            Implied(f"{ROLLOUT}.skip_tokenizer_init", True, True, f"{reason}, and verl reads it only so"),
        ]
    if orbit.seed is not None:
        manager = "orbit_verl.rollout.agent_loop.OrbitAgentLoopManager"
        implied += [
            Implied(f"{ROLLOUT}.agent.agent_loop_manager_class", None, manager, "orbit.seed"),
            Implied(f"{SGLANG}.{SEEDED_SAMPLING_FLAG}", None, True, "orbit.seed"),
        ]
    if config.trainer.v1.trainer_mode == "separate_async":
        reason = "servers keep generating while training"
        implied += [
            Implied("actor_rollout_ref.hybrid_engine", True, False, reason),
            Implied(f"{ROLLOUT}.free_cache_engine", True, False, reason),
        ]
    if get_platform().device_name == "cpu":
        implied += _implied_on_cpu(config)
    return implied


def _passed_on(keys: Keys) -> Iterator[Implied]:
    """Yields what a server must be told of these keys, which are those that it has a flag for."""
    for field, rule in keys.declared():
        if rule.flag is not None:
            yield Implied(f"{SGLANG}.{rule.flag}", None, getattr(keys, field.name), f"{keys.group}.{field.name}")


def _replay_mode(config: DictConfig) -> str:
    return OmegaConf.select(config, REPLAY)


def _checkpoint_dtype(config: DictConfig, checkpoint: dict[str, Any]) -> str:
    """Returns the base's dtype, which trainer and server must both read from the checkpoint."""
    dtype = checkpoint.get("dtype") or checkpoint.get("torch_dtype")
    if dtype is None:
        raise ValueError(
            "the checkpoint's config.json has no dtype, so trainer and server could differ; add its dtype there"
        )
    widened = OmegaConf.select(config, "actor_rollout_ref.actor.megatron.override_transformer_config.params_dtype")
    if widened not in (None, dtype):
        raise ValueError(
            f"override_transformer_config.params_dtype={widened}: the server holds {dtype}; leave it out, or convert the "
            "checkpoint"
        )
    return dtype


def _implied_on_cpu(config: DictConfig) -> list[Implied]:
    rollout = config.actor_rollout_ref.rollout
    workers = config.trainer.n_gpus_per_node * config.trainer.nnodes + rollout.n_gpus_per_node * rollout.nnodes
    reason = "no accelerator on this machine"
    return [
        Implied("trainer.device", "cuda", "cpu", reason),
        Implied(f"{ROLLOUT}.enforce_eager", False, True, reason),
        Implied(f"{SGLANG}.device", None, "cpu", reason),
        Implied(f"{SGLANG}.attention_backend", None, "torch_native", reason, required=False),
        Implied(
            f"{SGLANG}.chunked_prefill_size", None, -1, "a prompt in chunks rounds attention otherwise", required=False
        ),
        Implied(f"{SGLANG}.enable_memory_saver", None, False, reason),
        Implied(f"{SGLANG}.sleep_on_idle", None, True, "an idle server would keep a core busy", required=False),
        Implied("actor_rollout_ref.actor.use_torch_compile", True, False, reason),
        Implied(
            "ray_kwargs.ray_init.num_gpus", None, workers, "verl counts workers in Ray's logical GPUs", required=False
        ),
        Implied("ray_kwargs.ray_init.num_cpus", None, 4 * workers + 8, "Ray's CPUs are logical", required=False),
        Implied("ray_kwargs.ray_init._node_ip_address", None, LOOPBACK, "nothing beyond loopback", required=False),
        Implied("ray_kwargs.ray_init.include_dashboard", None, False, "one machine", required=False),
    ]


def _fill_in(config: DictConfig, implied: Implied) -> None:
    current = None if _is_missing(config, implied.key) else OmegaConf.select(config, implied.key)
    if current == implied.value:
        return
    if current != implied.default:
        if not implied.required:
            return
        raise ValueError(
            f"{implied.key}={current!r}: trainer.strategy=orbit needs {implied.value!r} ({implied.reason}); "
            "leave the key out"
        )
    OmegaConf.update(config, implied.key, implied.value, force_add=True)
    logger.info("orbit: %s=%r (%s)", implied.key, implied.value, implied.reason)


def _check_run(config: DictConfig) -> None:
    """Refuses combinations of verl's own keys that cannot work."""
    rollout = config.actor_rollout_ref.rollout
    mode = config.trainer.v1.trainer_mode
    if not config.trainer.use_v1 or mode not in TRAINER_MODES:
        raise ValueError(
            f"trainer.v1.trainer_mode={mode!r}, trainer.use_v1={config.trainer.use_v1}: trainer.strategy=orbit runs in "
            f"verl's V1 trainer with one of {', '.join(TRAINER_MODES)}"
        )
    if rollout.top_p != 1 or rollout.top_k != -1:
        raise ValueError(
            f"{ROLLOUT}.top_p={rollout.top_p}, top_k={rollout.top_k}: a truncated distribution is not the one whose "
            "log-probs are trained, so every ratio would be wrong; use top_p=1 and top_k=-1"
        )
    if OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        raise ValueError(
            "algorithm.rollout_correction.bypass_mode=true skips the trainer's own log-probs, so parity could not be "
            "measured; set it to false"
        )
    if _replay_mode(config) == "R2" and OmegaConf.select(config, RECORDS):
        raise ValueError(
            f"{RECORDS}=true with {REPLAY}=R2: the servers' record would take the place of the trainer's; set it to false, or "
            "the mode to R3"
        )
    if config.algorithm.adv_estimator == "gae":
        raise ValueError(
            "algorithm.adv_estimator=gae needs a critic, which trainer.strategy=orbit does not train; "
            "use grpo or another estimator without a value model"
        )
    for key in ("api_key", "admin_api_key"):
        if OmegaConf.select(config, f"{SGLANG}.{key}"):
            raise ValueError(
                f"{SGLANG}.{key}: the trainer sends no key yet; servers of a run listen on the node's own address"
            )
    key = "trainer" if mode == "sync" else ROLLOUT
    ranks, devices = rollout.tensor_model_parallel_size, OmegaConf.select(config, f"{key}.n_gpus_per_node")
    if ranks < 1 or devices % ranks:
        raise ValueError(
            f"{ROLLOUT}.tensor_model_parallel_size={ranks}: a server of {ranks} ranks does not fit the {devices} devices of "
            f"{key}.n_gpus_per_node; choose a divisor, e.g. 1"
        )
    model = config.actor_rollout_ref.model
    if model.get("lora_rank", 0) > 0 or model.get("lora", {}).get("rank", 0) > 0 or model.get("lora_adapter_path"):
        raise ValueError(
            "actor_rollout_ref.model.lora*: verl's own LoRA is not Orbit's adapter; describe the adapter under orbit.adapter"
        )


def _check_base(config: DictConfig, settings: AdapterSettings) -> None:
    """Refuses what does not fit the model: a layout, an adapter, or files without what ``config.json`` says."""
    path = _model_path(config)
    architecture = read_architecture(AutoConfig.from_pretrained(path))
    engine = _instantiated(config.actor_rollout_ref.actor.megatron)
    engine.check(architecture, config.trainer.n_gpus_per_node * config.trainer.nnodes)
    check_served(settings.to_adapter_config(), adapted_shapes(architecture, settings), get_platform().device_name)
    if architecture.moe is None and OmegaConf.select(config, RECORDS):
        raise ValueError(f"{RECORDS}=true: the model is dense, a server has no experts to record; set it to false")
    _compare_tensor_parallelism(config, engine.tensor_model_parallel_size, architecture)
    open_checkpoint(architecture, path)


def _compare_tensor_parallelism(config: DictConfig, size: int, architecture: DecoderArchitecture) -> None:
    served = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if served != size and architecture.dtype != torch.float32:
        logger.warning(
            "orbit: %s.tensor_model_parallel_size=%d, and %d in the trainer: each rounds the partial sums of its own ranks, so "
            "log-probs differ by up to 2e-2 nats; with equal sizes they round alike",
            ROLLOUT,
            served,
            size,
        )


def _check_tokenizer(config: DictConfig, checkpoint: dict[str, Any]) -> None:
    """Refuses a tokeniser that is missing, belongs to another model, or cannot render a conversation."""
    model = config.actor_rollout_ref.model
    path = os.path.expanduser(str(model.get("tokenizer_path") or model.path))
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.get("trust_remote_code", False))
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokeniser can be loaded from {path!r}: {error}") from error
    vocab_size = checkpoint.get("vocab_size")
    if vocab_size is not None and len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokeniser in {path!r} has {len(tokenizer)} tokens, the model {vocab_size}: it belongs to another model; "
            "set actor_rollout_ref.model.tokenizer_path to the model's own"
        )
    if not tokenizer.chat_template and not model.get("custom_chat_template"):
        raise ValueError(
            f"the tokeniser in {path!r} has no chat template, so prompts cannot be rendered; "
            "set actor_rollout_ref.model.custom_chat_template"
        )


def _is_missing(config: DictConfig, key: str) -> bool:
    parent, _, leaf = key.rpartition(".")
    node = OmegaConf.select(config, parent)
    return node is None or leaf not in node or OmegaConf.is_missing(node, leaf)
