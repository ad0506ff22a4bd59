"""Qwen3-MoE and DeepSeek-V3: the server against the trainer per token, adapters on all linears non-zero."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from orbit_kernels.checkpoint.manifest import BaseManifest, first_difference
from orbit_verl.config.keys import BaseSettings
from orbit_verl.worker.engine import OrbitEngine
from tests.support.engines import log_probs, make_engine, randomise
from tests.support.mixtures import LATENT_TARGETS
from tests.support.quantized import quantize, weight_format
from tests.support.tiny_models import save_trained

PROMPT = [5, 9, 2, 77, 31, 4, 120, 8]
NUM_TOKENS = 16
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Mean and largest difference; measured 3e-7 and 8e-7 in both dtypes, as the two compute the same bits.
BOUNDS = {"float32": (1e-5, 1e-4), "bfloat16": (5e-3, 0.1)}
WITHOUT_EXPERTS = ("q_b_proj", "kv_b_proj", "o_proj", "mlp.down_proj", "shared_experts.down_proj")
ADAPTERS = {
    "oft-tied": {},
    "oft-split": {"fused": "split"},
    "oft-common": {"experts": "common"},
    "lora-tied": {"type": "lora"},
    "lora-split": {"type": "lora", "fused": "split"},
    "own-kernels": {"target_modules": WITHOUT_EXPERTS},
    "own-kernels-shared": {
        "experts": "common",
        "target_modules": (*WITHOUT_EXPERTS, "experts.gate_proj", "experts.up_proj"),
    },
}
OWN_KERNELS = tuple(kind for kind in ADAPTERS if kind.startswith("own-kernels"))
KINDS = tuple(kind for kind in ADAPTERS if kind not in OWN_KERNELS)


OPTIONS = {"type": "adapter", "fused": "fused", "experts": "experts"}
FAMILIES = {"qwen3": ("qwen3_moe", {"mlp_only_layers": []}), "deepseek": ("deepseek_v3", {})}
CASES = [
    *(("qwen3", "plain", "float32", "none", kind) for kind in KINDS),
    ("qwen3", "int4", "float32", "none", "oft-split"),
    ("qwen3", "fp8_ue8m0", "float32", "deployed", "oft-tied"),
    ("qwen3", "mxfp4", "float32", "none", "lora-tied"),
    ("qwen3", "nvfp4", "float32", "deployed", "oft-split"),
    ("qwen3", "plain", "bfloat16", "none", "oft-tied"),
    ("qwen3", "int4", "bfloat16", "none", "oft-tied"),
    *(("deepseek", "plain", "float32", "none", kind) for kind in KINDS),
    ("deepseek", "int4", "float32", "none", "oft-split"),
    ("deepseek", "fp8_ue8m0", "float32", "deployed", "oft-tied"),
    ("deepseek", "mxfp4", "float32", "none", "lora-tied"),
    ("deepseek", "nvfp4", "float32", "deployed", "oft-split"),
    ("deepseek", "plain", "bfloat16", "none", "oft-tied"),
    ("deepseek", "int4", "bfloat16", "none", "oft-tied"),
    # Experts as SGLang computes them without the reference, recorded as they were loaded: without slots, or with one rotation
    # of their input.
    *(("deepseek", "plain", "float32", "none", kind) for kind in OWN_KERNELS),
]


@pytest.fixture(scope="module")
def results(forked_python, tmp_path_factory):
    """Checkpoint and what the server answers, by case; one process serves them all, as SGLang wants its own groups."""
    root = tmp_path_factory.mktemp("moe")
    cases = {case: _case(root, *case) for case in CASES}
    (root / "cases.json").write_text(json.dumps(list(cases.values())))
    command = [forked_python, "-m", "tests.support.serve_in_process", root / "cases.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, env=environment, check=True, timeout=300)
    return {case: (Path(told["folder"]), json.loads(Path(told["result"]).read_text())) for case, told in cases.items()}


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_server_equals_trainer_per_token(results, case):
    family, _, dtype, activations, kind = case
    folder, served = results[case]
    engine = _engine(folder, family, activations, kind)
    assert first_difference(engine.base_manifest(), BaseManifest(**served["manifest"]), ("trainer", "server")) is None
    mean, largest = BOUNDS[dtype]
    with engine.disable_adapter():
        base = _log_probs(engine, served["base"][0])
        without = _log_probs(engine, served["adapted"][0])
    adapted = _log_probs(engine, served["adapted"][0])
    for ours, (_, theirs) in ((base, served["base"]), (adapted, served["adapted"])):
        difference = (ours - torch.tensor(theirs)).abs()
        assert difference.mean() <= mean and difference.max() <= largest
    assert (adapted - without).abs().mean() > 10 * mean


@pytest.mark.parametrize("case", [case for case in CASES if case[-1] in ("oft-tied", "oft-split")], ids="-".join)
def test_the_servers_experts_are_the_trainers(results, case):
    """Prompt and answer but for its last token; replayed, the log-probs stay the server's."""
    folder, served = results[case]
    family, dtype = case[0], case[2]
    engine = _engine(folder, family, case[3], case[4])
    mean, largest = BOUNDS[dtype]
    tokens, theirs = served["adapted"]
    record = torch.tensor(served["adapted_experts"], dtype=torch.int16)
    assert len(record) == len(PROMPT + tokens) - 1
    assert _share_of_other_choices(engine, tokens, torch.tensor(served["base_experts"], dtype=torch.int16)) > 0.05
    replayed = _log_probs(engine, tokens, records=[_with_gap(record)])
    counts = engine.replay.metrics()
    assert counts["orbit/router_replay/replayed"] == len(record) / (len(record) + 1)
    assert counts["orbit/router_replay/other_choice"] == 0
    difference = (replayed - torch.tensor(theirs)).abs()
    assert difference.mean() <= mean and difference.max() <= largest


def _share_of_other_choices(engine: OrbitEngine, tokens: list[int], record: torch.Tensor) -> float:
    _log_probs(engine, tokens, records=[_with_gap(record)])
    return engine.replay.metrics()["orbit/router_replay/other_choice"]


def _with_gap(record: torch.Tensor) -> torch.Tensor:
    """With zeros for the last token, as verl fills them in."""
    return torch.cat([record, torch.zeros_like(record[:1])])


def _case(root: Path, family: str, name: str, dtype: str, activations: str, kind: str) -> dict:
    folder, plain = (root / f"{family}-{stored_as}-{dtype}" for stored_as in (name, "plain"))
    if not plain.exists():
        name_of_family, fields = FAMILIES[family]
        save_trained(name_of_family, plain, DTYPES[dtype], initializer_range=0.05, **fields)
    if not folder.exists():
        quantize(plain, folder, weight_format(name, DTYPES[dtype]))
    stem = "-".join((family, name, dtype, activations, kind))
    adapter = root / f"{stem}.safetensors"
    adapter.write_bytes(_engine(folder, family, activations, kind).export_adapter().encode())
    options = {
        "dtype": dtype,
        "orbit_base_activations": activations,
        "orbit_block_size": 16,
        **{f"orbit_{OPTIONS[key]}": value for key, value in ADAPTERS[kind].items() if key in OPTIONS},
    }
    return {
        "folder": str(folder),
        "adapter": str(adapter),
        "options": options,
        "prompt": PROMPT,
        "num_tokens": NUM_TOKENS,
        "own_kernels": kind in OWN_KERNELS,
        "result": str(root / f"{stem}.json"),
    }


def _engine(folder: Path, family: str, activations: str, kind: str) -> OrbitEngine:
    options = dict(ADAPTERS[kind])
    if family == "deepseek" and kind not in OWN_KERNELS:
        unlike = {"kv_b_proj"} if options.get("type") == "lora" else set()
        options["target_modules"] = tuple(target for target in LATENT_TARGETS if target not in unlike)
    engine = make_engine(folder, base=BaseSettings(activations=activations), **options)
    randomise(engine)
    assert any(".experts." in name for name in engine.export_adapter().tensors) != (kind == "own-kernels")
    return engine


def _log_probs(engine: OrbitEngine, tokens: list[int], **batch) -> torch.Tensor:
    (row,) = log_probs(engine, [torch.tensor(PROMPT + tokens)], micro_batch=1, **batch)
    return row[len(PROMPT) - 1 :]
