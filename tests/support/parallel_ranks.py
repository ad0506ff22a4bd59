"""The ranks that divide a model in every way.

Every rank writes ``<case>_<rank>`` for each case, and the test compares them with one process.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from verl.workers.config.engine import EngineRouterReplayConfig

from tests.support.engines import make_batch, make_engine, nll, sequences
from tests.support.expert_parallel_engine import ADAPTERS, PLAIN, randomise_by_name, state
from tests.support.mixtures import LATENT_TARGETS, random_record
from tests.support.ranks import fork, module_arguments

LATENT_LORA = tuple(target for target in LATENT_TARGETS if target != "kv_b_proj")

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclasses.dataclass(frozen=True)
class Case:
    """A base and an adapter, divided in some way between some ranks."""

    base: str
    adapter: str = "oft"
    tensor: int = 1
    pipeline: int = 1
    last_stage: int | None = None
    expert: int = 1
    each_expert: int = 1
    recompute: bool = False
    packed: bool = True

    @property
    def sizes(self) -> dict[str, Any]:
        names = {"tensor_model": self.tensor, "pipeline_model": self.pipeline, "expert_model": self.expert}
        names["expert_tensor"] = self.each_expert
        sizes = {f"{name}_parallel_size": size for name, size in names.items()}
        overrides = {} if self.last_stage is None else {"num_layers_in_last_pipeline_stage": self.last_stage}
        return sizes | {"override_transformer_config": overrides | (RECOMPUTE if self.recompute else {})}

    @property
    def is_divided(self) -> bool:
        """Otherwise its ranks are data-parallel alone."""
        return max(self.tensor, self.pipeline, self.expert) > 1

    @property
    def replays(self) -> bool:
        """Whether experts are replayed and recorded in it too."""
        return self.base in ("moe", "latent") and self.adapter == "oft"

    def __str__(self) -> str:
        divided = {"TP": self.tensor, "EP": self.expert, "ETP": self.each_expert, "PP": self.pipeline}
        sizes = "".join(f" {kind}{size}" for kind, size in divided.items() if size > 1)
        return f"{self.base} {self.adapter}{sizes}{' uneven' if self.last_stage else ''}{' recomputed' if self.recompute else ''}{'' if self.packed else ' padded'}"


TP, TP_EP, TP_ETP, PP = (
    {"tensor": 2},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "each_expert": 2},
    {"pipeline": 2},
)
TWO = [
    *(Case("dense", adapter, **TP) for adapter in ("oft", "oft_split", "lora")),
    Case("dense", **PP),
    *(Case("tied", **sizes) for sizes in (TP, PP)),
    *(Case(base, **TP) for base in ("int4", "fp8_ue8m0", "nvfp4", "bf16")),
    *(Case("moe", **sizes) for sizes in (TP, TP_EP, TP_ETP, PP)),
    *(Case("moe", adapter, **sizes) for sizes in (TP_EP, TP_ETP) for adapter in ("oft_common", "lora")),
    *(Case("latent", **sizes) for sizes in (TP, TP_EP, TP_ETP)),
    Case("latent", "lora", **TP),
    Case("moe", pipeline=2, last_stage=1),
    *(Case("moe", recompute=True, **sizes) for sizes in (TP_EP, PP)),
    Case("latent", recompute=True, **TP),
    Case("latent", **PP),
    *(Case(base, packed=packed) for base in ("dense", "moe", "latent") for packed in (True, False)),
    *(Case(base, packed=False, **TP) for base in ("dense", "moe", "latent")),
    *(Case(base, packed=False, expert=2) for base in ("moe", "latent")),
]
TWO_MORE = [
    *(Case("dense", adapter, **PP) for adapter in ("oft_split", "lora")),
    *(Case("moe", adapter, **sizes) for sizes in (TP, PP) for adapter in ("oft_common", "lora")),
    *(Case("latent", "lora", **sizes) for sizes in (TP_EP, TP_ETP)),
    *(Case(base, packed=False, **PP) for base in ("dense", "moe", "latent")),
    *(Case(base, packed=False, **TP_EP) for base in ("moe", "latent")),
]
FOUR = [
    Case("dense", **TP),
    *(Case(base, **TP_EP) for base in ("moe", "latent")),
    Case("moe", tensor=2, expert=2, each_expert=2),
    Case("tied", tensor=2, pipeline=2),
    Case("moe", tensor=2, pipeline=2, expert=2),
]
FOUR_MORE = [
    *(Case(base, **TP) for base in ("moe", "latent")),
    *(Case("moe", adapter, tensor=2, expert=2, each_expert=2) for adapter in ("oft_common", "lora")),
    Case("moe", **TP_ETP),
    Case("moe", tensor=2, expert=4),
    Case("dense", tensor=2, pipeline=2),
    Case("moe", pipeline=2, expert=2),
]


def engine_of(folders: dict[str, str], case: Case, **options):
    """An engine with a random adapter: the same whatever the ranks."""
    targets = {"oft": LATENT_TARGETS, "lora": LATENT_LORA}
    engine = make_engine(
        folders[case.base],
        base=PLAIN,
        optim={"clip_grad": 0.1},
        engine=case.sizes | ({"router_replay": EngineRouterReplayConfig(mode="R2")} if case.replays else {}),
        packed=case.packed,
        **ADAPTERS[case.adapter],
        **({"target_modules": targets[case.adapter]} if case.base == "latent" else {}),
        **options,
    )
    randomise_by_name(engine)
    return engine


def own_sequences(engine, seed: int = 3) -> list[torch.Tensor]:
    """Those of this rank's place among the data-parallel ranks."""
    return sequences(seed)[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]


def rows(engine, kind: str = "log_probs", **batch) -> dict[str, torch.Tensor]:
    """Log-probs of this rank's sequences, and the experts that are recorded; of the last stage, where they are."""
    with engine.eval_mode():
        output = engine.infer_batch(make_batch(own_sequences(engine), **batch))
    if not mpu.is_pipeline_last_stage():
        return {}
    output = output["model_output"]
    found = {kind: [row[:-1] for row in output["log_probs"].unbind()]}
    if "routed_experts" in output:
        found["record"] = output["routed_experts"].unbind()
    return {
        f"{name}/{index * engine.get_data_parallel_size() + engine.get_data_parallel_rank()}": row
        for name, of_name in found.items()
        for index, row in enumerate(of_name)
    }


def replayed_rows(engine) -> dict[str, torch.Tensor]:
    """Log-probs with recorded experts, and the experts that the routers themselves choose."""
    records = random_record(sequences(), engine.tf_config.num_layers)
    own = records[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    return rows(engine, "replayed", records=own) | rows(engine, enable_routing_replay=True)


def step(engine, seed: int) -> float:
    """One optimiser step; the gradients' norm."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(make_batch(own_sequences(engine, seed), micro_batch=1), nll)
        norm = engine.optimizer_step()
    engine.lr_scheduler_step()
    return norm


def replayed_gradients(engine) -> dict[str, torch.Tensor]:
    """Norms of this rank's gradients with recorded experts, in micro-batches of one sequence."""
    records = random_record(sequences(), engine.tf_config.num_layers)
    own = records[engine.get_data_parallel_rank() :: engine.get_data_parallel_size()]
    with engine.train_mode():
        engine.forward_backward_batch(make_batch(own_sequences(engine), micro_batch=1, records=own), nll)
        gradients = engine.optimizer.gradients().items()
        return {f"replayed_gradient/{name}": gradient.norm().reshape(1) for name, gradient in gradients}


def train(case: Case, folders: dict[str, str], save) -> None:
    """Log-probs with and without the adapter, one step, the whole state, the base."""
    engine = engine_of(folders, case)
    found = rows(engine) | (replayed_rows(engine) | replayed_gradients(engine) if case.replays else {})
    with engine.disable_adapter():
        found |= {name.replace("log_probs", "base"): row for name, row in rows(engine).items()}
    found["norm"] = torch.tensor([step(engine, 1)], dtype=torch.float64)
    found |= {f"state/{name}": tensor for name, tensor in state(engine).items()}
    found["orthogonality"] = torch.tensor(list(engine.adapter.metrics().values()))
    manifest = engine.base_manifest()
    found["manifest"] = torch.frombuffer(bytearray(manifest.to_json().encode()), dtype=torch.uint8)
    found["base_bytes"] = torch.tensor(
        sum(t.nbytes for t in (*engine.module[0].parameters(), *engine.module[0].buffers()))
    )
    save(str(case), found)


def resume(case: Case, folders: dict[str, str], out: Path, save) -> None:
    """Go on from what one process saved, and save for one process."""
    engine = engine_of(folders, case)
    engine.load_checkpoint(folders[f"{case.base}_checkpoint"])
    save(f"resumed {case}", state(engine))
    step(engine, 2)
    save(f"resumed {case} and trained", state(engine))
    engine.save_checkpoint(str(out / f"saved {case}"), global_step=2)


RESUMED = [Case("moe", **sizes) for sizes in (TP, TP_EP, PP)] + [Case("dense", "lora", **TP)]


def cases(rank: int, folders: dict, out: Path, save, *, chosen: list[Case]) -> None:
    sizes = None
    for case in chosen:
        if case.sizes != sizes and mpu.is_initialized():
            mpu.destroy_model_parallel()
        sizes = case.sizes
        train(case, folders, save)
        if case in RESUMED and dist.get_world_size() == 2:
            resume(case, folders, out, save)


def main() -> None:
    folders, out, more = module_arguments()
    for ranks, usual, longer in ((2, TWO, TWO_MORE), (4, FOUR, FOUR_MORE)):
        in_order = sorted(usual + longer if more else usual, key=lambda case: str(case.sizes))
        assert fork(ranks, partial(cases, chosen=in_order), folders, Path(out) / str(ranks)) == [0] * ranks


if __name__ == "__main__":
    main()
