"""This module finds the largest input of every linear of a model.

Formats whose kernels quantise inputs with a static scale need it.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Random tokens after the start token, which itself draws the largest activations of most models.
NUM_SEQUENCES, SEQUENCE_TOKENS, SEED = 4, 128, 0
# Real text reaches further than a few random tokens; E4M3 scales have range to spare below.
HEADROOM = 2.0


def largest_inputs(model_folder: Path, modules: Collection[str]) -> dict[str, float]:
    """Returns twice the largest input magnitude of each linear over 4 sequences of 128 random tokens.

    There is no calibration text here, so the range is set by a fixed synthetic one. It runs the whole unquantised model
    with transformers, on the CPU. Experts of a layer, some of which so few tokens may not reach, all get the largest of any.

    Args:
        model_folder: checkpoint of the unquantised model.
        modules: names of the linears.

    Raises:
        ValueError: transformers' model has no such linears.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto").eval()
    by_name = dict(model.named_modules())
    owners = {name: _owner(name, by_name) for name in modules}
    missing = sorted(name for name, owner in owners.items() if owner is None)
    if missing:
        raise ValueError(f"{model_folder}: transformers' model has no modules {missing}; cannot calibrate their inputs")
    largest = _record(by_name, set(owners.values()))
    with torch.no_grad():
        model(_random_tokens(model.config))
    largest = {name: largest.get(owner, 0.0) for name, owner in owners.items()}
    unused = sorted(name for name, value in largest.items() if value == 0)
    if unused:
        raise ValueError(f"{model_folder}: no input reached {unused} during calibration; their range is unknown")
    logger.info("calibrated %d linears on %d random tokens", len(largest), NUM_SEQUENCES * SEQUENCE_TOKENS)
    return {name: HEADROOM * value for name, value in largest.items()}


def _owner(name: str, by_name: Mapping[str, torch.nn.Module]) -> str | None:
    """Returns the linear itself, or for one of an expert what stands for all experts of its layer.

    That is ``...experts.down_proj``, for example.
    """
    if name in by_name:
        return name
    expert, _, leaf = name.rpartition(".")
    experts = expert.rpartition(".")[0]
    return f"{experts}.{leaf}" if hasattr(by_name.get(experts), "gate_up_proj") else None


def _record(by_name: Mapping[str, torch.nn.Module], owners: Collection[str]) -> dict[str, float]:
    """Watches the inputs of linears, and of the experts that transformers 5 stacks.

    The result is filled while the model runs.
    """
    largest: dict[str, float] = {}

    def see(name: str, x: torch.Tensor) -> None:
        if x.numel():
            largest[name] = max(largest.get(name, 0.0), x.abs().max().item())

    def watch_experts(name: str, module: torch.nn.Module) -> None:
        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x_TD, ids_TK, _ = inputs
            see(f"{name}.gate_proj", x_TD)
            see(f"{name}.up_proj", x_TD)
            for expert, weight in enumerate(module.gate_up_proj):
                x = x_TD[(ids_TK == expert).any(dim=1)]
                gate, up = torch.nn.functional.linear(x, weight).chunk(2, dim=-1)
                see(f"{name}.down_proj", module.act_fn(gate) * up)

        module.register_forward_pre_hook(hook)

    for owner in owners:
        if owner in by_name:
            by_name[owner].register_forward_pre_hook(lambda _module, inputs, owner=owner: see(owner, inputs[0]))
    for name in {owner.rpartition(".")[0] for owner in owners if owner not in by_name}:
        watch_experts(name, by_name[name])
    return largest


def _random_tokens(config) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(config.vocab_size, (NUM_SEQUENCES, SEQUENCE_TOKENS), generator=generator)
    if isinstance(config.bos_token_id, int):
        tokens[:, 0] = config.bos_token_id
    return tokens
