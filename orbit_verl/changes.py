"""This module lists every change to verl 0.9.1 and what it stands on, by process, in the order of one step.

``orbit doctor --changes`` prints the list. A GPU needs all but the last two sections, which replace what verl and
Megatron-Core do with CUDA. verl imports this in every process, so what makes a change is named and not imported.
"""

from hydra.plugins.search_path_plugin import SearchPathPlugin

from orbit_kernels.upstream.ledger import Added, Change, Device, OnInstance, Overridden, Registered, Replaced
from orbit_verl.upstream import methods
from orbit_verl.upstream.imports import ConfigFile, Process, RegisteredAfterImport, Wrapped

VERSIONS = "verl has adapters whose versions change while its servers generate"
FROZEN = "verl trains an adapter over a base in its deployment precision"
_V1 = "verl.trainer.ppo.v1."
_CHECKPOINTS = "verl.checkpoint_engine.base."
_WORKERS = "verl.workers."
_ROLLOUT = _WORKERS + "rollout."
_SGLANG = _ROLLOUT + "sglang_rollout.async_sglang_server."
_CORE = "megatron.core."
_CPU = "orbit_verl.cpu.megatron."
_ASKS = "Megatron-Core asks its configuration for the device instead of CUDA"


def sections() -> dict[str, list[Change]]:
    """Returns every change by the process that needs it."""
    return {
        Process.EVERY: _every_process(),
        Process.DRIVER: _driver(),
        Process.WORKER: _worker(),
        Process.ROLLOUT: _rollout(),
        Process.CPU_EVERY: _cpu_every_process(),
        Process.CPU_WORKER: _cpu_worker(),
    }


def _every_process() -> list[Change]:
    return [
        Registered(
            target="hydra.core.plugins.Plugins",
            by="orbit_verl.config.composing.OrbitSearchPath",
            read=_search_path,
            why="Hydra finds Orbit's choices of verl's configuration groups",
            until="verl lets a plugin add configuration groups",
        ),
        *(
            ConfigFile(
                name=name,
                base=base,
                why="the run's configuration builds Orbit's engine, with its keys and their defaults",
                until="verl lets a plugin register an engine with its configuration",
            )
            for name, base in (
                ("model_engine/orbit", None),
                ("actor/orbit_actor", "actor/megatron_actor"),
                ("ref/orbit_ref", "ref/megatron_ref"),
                ("critic/orbit_critic", "critic/dp_critic"),
            )
        ),
        Registered(
            target="hydra.core.config_store.ConfigStore",
            by="orbit_verl.config.group.store",
            read=lambda stores: stores.instance().load("orbit/default.yaml").node["_target_"],
            why="a run has every key of orbit.* at its default, as the dataclasses declare it",
            until="verl lets a plugin register an engine with its configuration",
        ),
        Wrapped(
            module="hydra._internal.config_loader_impl",
            name="ConfigLoaderImpl.load_configuration",
            parameters=("self", "config_name", "overrides"),
            by="orbit_verl.config.composing.load_configuration",
            why="trainer.strategy=orbit chooses those groups, however a run says it",
            until="verl chooses configuration groups by trainer.strategy",
        ),
        RegisteredAfterImport(
            target="transformers.models.auto.configuration_auto.CONFIG_MAPPING",
            module="verl.utils.tokenizer",
            by="orbit_verl.plugin.register_configurations",
            read=lambda mapping: mapping["kimi_k2"],
            owners=("orbit_", "sglang."),  # SGLang's own takes its place where both are imported
            why="Kimi's configurations are read without running a checkpoint's own Python files",
            until="transformers knows kimi_k2 and kimi_k25",
        ),
    ]


def _driver() -> list[Change]:
    return [
        Wrapped(
            module="verl.utils.config",
            name="validate_config",
            parameters=("config", "use_reference_policy", "use_critic"),
            by="orbit_verl.driver.start.around_validate_config",
            why="what cannot work is refused before Ray starts, and what follows from the strategy is filled in",
            until="verl lets an engine check a run's configuration",
        ),
        *(
            RegisteredAfterImport(
                target=_V1 + "trainer_base.TRAINER_REGISTRY",
                module="verl.trainer.ppo.v1",
                by=f"orbit_verl.driver.trainer.register_{mode}",
                read=lambda registry, mode=mode: registry[mode],
                why=f"trainer_mode={mode} builds Orbit's trainer for a run with the strategy",
                until="verl chooses the trainer of a mode by strategy",
            )
            for mode in ("sync", "separate_async")
        ),
        Overridden(
            target=_V1 + "trainer_base.PPOTrainer",
            by="orbit_verl.driver.trainer.OrbitTrainer",
            names=(
                "_init_dataloader",
                "_init_resource_pool_mgr",
                "_save_checkpoint",
                "_setup",
                "fit",
                "_build_replay_buffer",
                "_validate",
                "_submit_batch_to_rollout",
                "_balance_batch",
                "_compute_old_log_prob",
                "_update_actor",
                "_consume_sync_metrics",
                "checkpoint_manager",
            ),
            why="versions in place of weights, parity at every step, servers that are looked after, steps that are saved whole",
            until=VERSIONS,
        ),
        Overridden(
            target=_V1 + "trainer_base.PPOTrainer",
            by="orbit_verl.driver.trainer.OrbitTrainer.ref_in_actor",
            names=("ref_in_actor",),
            why="the reference is the actor with its adapter off, which verl knows of its own LoRA only",
            until="verl asks the engine whether the actor holds the reference",
        ),
        Overridden(
            target=_V1 + "trainer_sync.PPOTrainerSync",
            by="orbit_verl.driver.trainer.OrbitTrainerSync",
            names=("on_step_end",),
            why="verl drops the metrics of publishing a step",
            until="verl keeps them",
        ),
        Overridden(
            target=_V1 + "trainer_separate_async.PPOTrainerSeparateAsync",
            by="orbit_verl.driver.trainer.OrbitTrainerSeparateAsync",
            names=("_setup", "get_llm_client", "standalone_checkpoint_manager"),
            why="no request is aborted for a new version, so none has to be resumed",
            until=VERSIONS,
        ),
        Replaced(
            target=_V1 + "trainer_separate_async.logger",
            by="orbit_verl.driver.trainer.OrbitTrainerSeparateAsync._setup",
            why="verl logs with print's flush= where there are no hybrid replicas, a TypeError: the level is raised meanwhile",
            until="verl's PPOTrainerSeparateAsync._setup logs without flush",
        ),
        Added(
            target=_ROLLOUT + "replica.RolloutReplicaRegistry.register",
            by="orbit_verl.driver.trainer.load_replica",
            why="verl's SGLang replica reports versions, keeps the base resident and drops aborted samples",
            until=VERSIONS,
        ),
        OnInstance(
            method=methods.WAIT_FOR_NEXT_POLL,
            by="orbit_verl.driver.trainer.OrbitTrainer._build_replay_buffer",
            why="a server that died is found while the trainer waits for samples",
            until="verl ends a run whose server does not answer",
        ),
        OnInstance(
            method=methods.SAMPLE,
            by="orbit_verl.driver.trainer.OrbitTrainer._build_replay_buffer",
            why="a validation says which versions it was of, and a batch how many groups failed by their rewards",
            until=VERSIONS,
        ),
        OnInstance(
            method=methods.SYNC_METADATA,
            by="orbit_verl.driver.trainer.OrbitTrainer._build_replay_buffer",
            why="a group with a reward that is no finite number fails: verl makes all of its advantages NaN with it, and a sample "
            "without a reward ends the run with a KeyError",
            until="verl fails a sample whose reward is no finite number",
        ),
    ]


def _worker() -> list[Change]:
    return [
        Registered(
            target=_WORKERS + "engine.base.EngineRegistry",
            by="orbit_verl.worker.engine.OrbitEngine",
            read=lambda registry: registry._engines["language_model"]["orbit"]["cuda"],
            why="verl's engine for an adapter over a frozen base",
            until=FROZEN,
        ),
        Registered(
            target=_CHECKPOINTS + "CheckpointEngineRegistry",
            by="orbit_verl.publishing.checkpoint_engine.OrbitCheckpointEngine",
            read=lambda registry: registry._registry["orbit"],
            why="only the adapter travels, to an inactive slot of every server",
            until=VERSIONS,
        ),
        Registered(
            target=_ROLLOUT + "base._ROLLOUT_REGISTRY",
            by="orbit_verl.publishing.checkpoint_engine.FrozenBaseRollout",
            read=lambda registry: registry["sglang", "async"],
            why="verl's own would import SGLang in the trainer's worker, to move weights that are frozen",
            until=FROZEN,
        ),
        Overridden(
            target="verl.experimental.separation.engine_workers.DetachActorWorker",
            by="orbit_verl.worker.actor.OrbitActorWorker",
            names=(
                "enable_routing_replay",
                "copy_handler",
                "restore_handler",
                "update_actor",
                "update_weights",
                "save_checkpoint",
            ),
            why="the adapter is published, kept by version and swapped in place of the weights",
            until=VERSIONS,
        ),
        Overridden(
            target=_WORKERS + "config.McoreEngineConfig",
            by="orbit_verl.worker.engine_config.OrbitEngineConfig",
            names=("__post_init__", "_mutable_fields"),
            why="verl's asserts that the strategy is megatron",
            until="verl lets an engine's configuration name its strategy",
        ),
        Overridden(
            target=_WORKERS + "engine.megatron.transformer_impl.MegatronEngineWithLMHead",
            by="orbit_verl.worker.engine.OrbitEngine",
            names=(
                "initialize",
                "_build_tf_config",
                "_build_megatron_module",
                "_build_optimizer",
                "_build_lr_scheduler",
                "optimizer_zero_grad",
                "optimizer_step",
                "forward_step",
                "forward_backward_batch",
                "to",
                "disable_adapter",
                "get_per_tensor_param",
                "save_checkpoint",
                "load_checkpoint",
            ),
            why="what is built, stepped, saved and exported is the adapter's",
            until=FROZEN,
        ),
        Overridden(
            target=_CHECKPOINTS + "CheckpointEngineManager",
            by="orbit_verl.publishing.checkpoint_engine.OrbitCheckpointManager",
            names=("update_weights", "resume_kv_cache_replicas", "actor_wg", "replicas", "backend", "backend_cls"),
            why="replicas are not paused while a version is staged",
            until=VERSIONS,
        ),
    ]


def _rollout() -> list[Change]:
    return [
        Overridden(
            target="verl.experimental.agent_loop.agent_loop.AgentLoopWorker",
            by="orbit_verl.rollout.agent_loop.OrbitAgentLoopWorker",
            names=("_run_agent_loop",),
            why="orbit.seed gives every sample a seed of its own",
            until="verl sends a seed with every sample",
        ),
        Overridden(
            target=_V1 + "agent_loop_tq.AgentLoopManagerTQ",
            by="orbit_verl.rollout.agent_loop.OrbitAgentLoopManager",
            names=("agent_loop_workers_class", "generate_sequences"),
            why="builds these workers, and numbers equal prompts of a step for their seeds",
            until="verl sends a seed with every sample",
        ),
        Overridden(
            target=_SGLANG + "SGLangReplica",
            by="orbit_verl.rollout.replica.OrbitReplica",
            names=("server_class",),
            why="builds the server actor with slots",
            until=VERSIONS,
        ),
        Overridden(
            target=_SGLANG + "SGLangHttpServer",
            by="orbit_verl.rollout.replica.OrbitHttpServer",
            names=(
                "launch_server",
                "generate",
                "release_kv_cache",
                "resume_kv_cache",
                "sleep",
                "wake_up",
                "tokenizer_manager",
            ),
            why="SGLang's plugins are loaded before its arguments are built; samples have versions; the base stays",
            until=VERSIONS,
        ),
        OnInstance(
            method=methods.GENERATE_REQUEST,
            by="orbit_verl.rollout.replica.OrbitHttpServer._keep_replies",
            why="verl passes on neither versions nor the reason of an abort",
            until="verl returns SGLang's meta_info with a sample",
        ),
    ]


def _cpu_every_process() -> list[Change]:
    return [
        Registered(
            target="verl.plugin.platform.PlatformRegistry",
            by="orbit_verl.cpu.platform.CpuPlatform",
            read=lambda registry: registry._platforms["orbit_cpu"],
            why="verl has no platform without an accelerator",
            until="verl has one",
            device=Device.CPU,
        )
    ]


def _cpu_worker() -> list[Change]:
    return [
        Replaced(target=target, by=_CPU + by, why=why, until=_ASKS, device=Device.CPU)
        for target, by, why in (
            ("torch.cuda.current_device", "current_device", "Megatron-Core allocates rotary tables and messages on it"),
            ("torch.cuda.synchronize", "synchronize", "Megatron-Core waits for CUDA between pipeline stages"),
            (
                _CORE + "tensor_parallel.model_parallel_cuda_manual_seed",
                "seed_generators",
                "it reads CUDA's generators; dropout is 0, so nothing draws from its seeds",
            ),
            (
                _CORE + "tensor_parallel.get_cuda_rng_tracker",
                "rng_tracker",
                "transformer block and embedding fork CUDA's generators for the dropout of a sequence's part",
            ),
            (
                _CORE + "tensor_parallel.random._get_all_rng_states",
                "rng_states",
                "CUDA's generators are saved around recomputed activations",
            ),
            (
                _CORE + "tensor_parallel.random._set_all_rng_states",
                "set_rng_states",
                "CUDA's generators are restored around recomputed activations",
            ),
            (
                _CORE + "pipeline_parallel.schedules.torch",
                "CpuTorch",
                "the schedules count tokens in a tensor on the device cuda",
            ),
        )
    ]


def _search_path(plugins: type) -> type:
    """Returns Orbit's search path among those that Hydra knows."""
    known = plugins.instance().discover(SearchPathPlugin)
    return next(plugin for plugin in known if plugin.__module__.startswith("orbit_verl."))
