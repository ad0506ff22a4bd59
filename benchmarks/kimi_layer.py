"""This script measures memory and time of one layer of Kimi-K2.6 in the trainer, with real sizes and random bits.

    python -m benchmarks.kimi_layer [--tokens N] [--experts N] [--experts-per-chunk N] [--adapter each|common]

It builds the layer as a run does (latent attention and shared expert in BF16, 384 routed experts in INT4), puts an OFT
adapter on all of its linears, and runs one forward and backward pass. It prints a Markdown table. The layer takes 10 GB
of memory.
"""

import argparse
import os
import re
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from orbit_kernels.families import read_architecture
from orbit_kernels.families.kimi_k2 import KimiK25Config
from orbit_verl.config.keys import AdapterSettings, BaseSettings
from orbit_verl.cpu import megatron as megatron_cpu
from orbit_verl.model.build import empty_model, transformer_config
from orbit_verl.model.layout import ParallelLayout
from orbit_verl.model.modules import FrozenGPTModel
from orbit_verl.model.naming import adapted_linears, named_tensors
from orbit_verl.model.targets import adapted_shapes
from orbit_verl.worker.adapter import TrainerAdapter

# Kimi-K2.6's sizes, but for one layer and a small vocabulary, which is no part of a layer; positions without yarn.
TEXT = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "norm_topk_prob": True,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
TARGETS = (
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
_GIB = 2**30


def build(settings: AdapterSettings, base: BaseSettings, num_experts: int) -> tuple[FrozenGPTModel, TrainerAdapter]:
    """Builds one layer with an adapter, between embeddings and a head of a few tokens."""
    config = KimiK25Config(
        architectures=["KimiK25ForConditionalGeneration"],
        dtype="bfloat16",
        text_config=TEXT | {"n_routed_experts": num_experts},
        quantization_config=QUANTIZATION,
    )
    architecture = read_architecture(config)
    layout = ParallelLayout(num_experts=num_experts)
    model = empty_model(architecture, base, transformer_config(architecture, {}), torch.device("cpu"), layout)
    fill_with_random_bits(model)
    shapes = adapted_shapes(architecture, settings)
    return model, TrainerAdapter(list(adapted_linears(model, settings)), shapes, settings, layout)


@torch.no_grad()
def fill_with_random_bits(model: FrozenGPTModel) -> None:
    """Fills packed codes with any value, scales and plain tensors with small ones, so that activations stay finite."""
    for name, tensor in named_tensors(model):
        if name.endswith("weight_shape"):
            continue
        if tensor.dtype == torch.int32:
            tensor.random_(-(2**31), 2**31 - 1)
        elif tensor.dim() < 2:
            tensor.fill_(1.0)
        elif name.endswith("weight_scale"):
            tensor.fill_(2e-3)
        else:
            tensor.normal_(std=0.02)


def measure(tokens: int, settings: AdapterSettings, base: BaseSettings, num_experts: int) -> dict[str, float]:
    """Measures the GiB held and at the peak of a pass, and the seconds of both halves."""
    started = time.monotonic()
    model, adapter = build(settings, base, num_experts)
    held = sum(tensor.nbytes for _, tensor in named_tensors(model))
    report = {
        "building, s": time.monotonic() - started,
        "base, GiB": held / _GIB,
        "adapter, GiB": adapter.num_bytes / _GIB,
    }
    resident = _status("VmRSS")
    _reset_peak()
    ids = torch.randint(0, TEXT["vocab_size"], (1, tokens))
    started = time.monotonic()
    logits = model(input_ids=ids, position_ids=torch.arange(tokens)[None])
    report["forward, s"] = time.monotonic() - started
    started = time.monotonic()
    logits.square().mean().backward()
    report["backward, s"] = time.monotonic() - started
    gradients = [parameter.grad for parameter in adapter.named_parameters().values()]
    assert logits.isfinite().all() and all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    report["experts with tokens"] = _experts_with_gradients(adapter)
    report["resident before the pass, GiB"] = resident / _GIB
    report["peak of the pass beyond that, GiB"] = (_status("VmHWM") - resident) / _GIB
    report["peak of the process, GiB"] = _status("VmHWM") / _GIB
    return report


def _experts_with_gradients(adapter: TrainerAdapter) -> int:
    found = (
        re.search(r"\.experts\.(\d+)\.", name) for name, p in adapter.named_parameters().items() if p.grad is not None
    )
    return len({match[1] for match in found if match})


def _status(field: str) -> int:
    """Returns the bytes of a field of the process's memory accounts."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Memory and time of one layer of Kimi-K2.6's shape in the trainer.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--experts-per-chunk", type=int, default=4)
    parser.add_argument("--adapter", choices=["each", "common"], default="each", help="of the routed experts")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        megatron_cpu.install()
        mpu.initialize_model_parallel()
        settings = AdapterSettings(target_modules=TARGETS, experts=arguments.adapter)
        base = BaseSettings(experts_per_chunk=arguments.experts_per_chunk)
        report = measure(arguments.tokens, settings, base, arguments.experts)
        dist.destroy_process_group()
    print("| what | value |\n| --- | ---: |")
    for name, value in report.items():
        print(f"| {name} | {value:.4g} |")


if __name__ == "__main__":
    main()
