"""The largest input of every linear of a model, for formats whose kernels quantise inputs with a static scale."""

import logging
from collections.abc import Collection
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

# Random tokens after the start token, which itself draws the largest activations of most models.
NUM_SEQUENCES, SEQUENCE_TOKENS, SEED = 4, 128, 0
# Real text reaches further than a few random tokens; E4M3 scales have range to spare below.
HEADROOM = 2.0


def largest_inputs(model_folder: Path, modules: Collection[str]) -> dict[str, float]:
    """Twice the largest input magnitude of each linear over 4 sequences of 128 random tokens.

    There is no calibration text here, so the range is set by a fixed synthetic one. It runs the whole unquantised model
    with transformers, on the CPU.

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
    linears = dict(model.named_modules())
    missing = sorted(set(modules) - linears.keys())
    if missing:
        raise ValueError(f"{model_folder}: transformers' model has no modules {missing}; cannot calibrate their inputs")
    largest = dict.fromkeys(modules, 0.0)

    def record(name: str):
        def hook(_module: torch.nn.Module, inputs: tuple[torch.Tensor]) -> None:
            largest[name] = max(largest[name], inputs[0].abs().max().item())

        return hook

    for name in modules:
        linears[name].register_forward_pre_hook(record(name))
    with torch.no_grad():
        model(_random_tokens(model.config))
    unused = sorted(name for name, value in largest.items() if value == 0)
    if unused:
        raise ValueError(f"{model_folder}: no input reached {unused} during calibration; their range is unknown")
    logger.info("calibrated %d linears on %d random tokens", len(largest), NUM_SEQUENCES * SEQUENCE_TOKENS)
    return {name: HEADROOM * value for name, value in largest.items()}


def _random_tokens(config) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(config.vocab_size, (NUM_SEQUENCES, SEQUENCE_TOKENS), generator=generator)
    if isinstance(config.bos_token_id, int):
        tokens[:, 0] = config.bos_token_id
    return tokens
