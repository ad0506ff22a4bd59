"""This module trains a small Qwen3, or a small DeepSeek-V3, from scratch to a middling accuracy.

The result is the base that RL then keeps frozen.
"""

import dataclasses
import functools
import logging
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3MoeConfig,
)

from recipes.tiny_arithmetic.data import Problem, forget_carries
from recipes.tiny_arithmetic.tokenizer import build_tokenizer

logger = logging.getLogger(__name__)

CONTEXT_TOKENS = 64
EXPERTS_PER_TOKEN = 2
_GROUPED_QUERIES = {"num_key_value_heads": 2, "head_dim": 32}
_IGNORED_LABEL = -100
_LOG_EVERY_STEPS = 100
_WARMUP_STEPS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A ``PretrainConfig`` has the model's size, and the corpus that it learns from.

    The corpus is right at first and then full of one mistake, so that the base can add but mostly does not carry. What
    the reward asks for is in reach of sampling, and most greedy answers to sums with a carry are wrong.

    Args:
        hidden_size: width of the residual stream; a multiple of 64.
        num_layers: decoder layers.
        num_experts: experts in a layer, each as wide as the residual stream, two for each token; 0 for a dense model.
        latent_attention: DeepSeek-V3, which Kimi-K2 is too, in place of Qwen3: attention over latents, a shared expert, and a
            dense first layer.
        num_right_steps: optimiser steps on right sums.
        num_careless_steps: optimiser steps on the corpus with mistakes, while the learning rate falls to 0.
        forgotten_carry_rate: share of that corpus in which carries are forgotten.
        batch_size: problems a step.
        learning_rate: AdamW's, after a short warm-up.
        seed: of the initial weights and of the corpus.

    Raises:
        ValueError: a field is out of range.
    """

    hidden_size: int = 128
    num_layers: int = 4
    num_experts: int = 0
    latent_attention: bool = False
    num_right_steps: int = 500
    num_careless_steps: int = 200
    forgotten_carry_rate: float = 0.7
    batch_size: int = 64
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self):
        if self.hidden_size < 64 or self.hidden_size % 64:
            raise ValueError(f"hidden_size {self.hidden_size}: must be a multiple of 64, two heads of 32 a group")
        if self.num_experts and self.num_experts < EXPERTS_PER_TOKEN:
            raise ValueError(f"num_experts {self.num_experts}: must be 0 or at least {EXPERTS_PER_TOKEN}")
        if self.latent_attention and not self.num_experts:
            raise ValueError("latent_attention with num_experts 0: the family has experts; set num_experts, e.g. to 8")
        if not 0 <= self.forgotten_carry_rate <= 1:
            raise ValueError(f"forgotten_carry_rate {self.forgotten_carry_rate}: must be a share between 0 and 1")


def model_config(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    """Returns the architecture, with an untied head and BF16 on disk."""
    family, fields = Qwen3Config, _GROUPED_QUERIES
    if config.latent_attention:
        family, fields = DeepseekV3Config, _deepseek(config)
    elif config.num_experts:
        family, fields = Qwen3MoeConfig, fields | {"num_experts": config.num_experts} | _experts(config)
    return family(
        **fields,
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.hidden_size // 32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _experts(config: PretrainConfig) -> dict[str, Any]:
    return {
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": config.hidden_size,
        "norm_topk_prob": True,
    }


def _deepseek(config: PretrainConfig) -> dict[str, Any]:
    """Returns one group of experts and a dense first layer, as Kimi-K2 has; the widths are this model's own."""
    return _experts(config) | {
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "q_lora_rank": config.hidden_size // 2,
        "kv_lora_rank": config.hidden_size // 2,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        # SGLang reads these from the published configurations; transformers has no such fields.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
    }


def pretrain(config: PretrainConfig, problems: list[Problem], out: Path) -> None:
    """Trains on ``problems``, mistakes included, and saves a Hugging Face checkpoint in BF16 with its tokeniser.

    Args:
        config: size, corpus and length of the training.
        problems: the training problems; all questions have the same length.
        out: folder for the checkpoint.
    """
    torch.manual_seed(config.seed)
    rng = random.Random(config.seed)
    tokenizer = build_tokenizer(CONTEXT_TOKENS)
    model = AutoModelForCausalLM.from_config(model_config(config, tokenizer), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(_learning_rate_factor, config))
    num_steps = config.num_right_steps + config.num_careless_steps
    start = time.monotonic()
    for step in range(1, num_steps + 1):
        careless_rate = config.forgotten_carry_rate if step > config.num_right_steps else 0.0
        loss = _loss(model, tokenizer, _corpus_batch(problems, config.batch_size, careless_rate, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % _LOG_EVERY_STEPS == 0:
            logger.info("step %d of %d: loss %.3f, %.0f s", step, num_steps, loss.item(), time.monotonic() - start)
    model.to(torch.bfloat16)
    _keep_router_biases(model)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _keep_router_biases(model: PreTrainedModel) -> None:
    """Makes router biases fp32, as checkpoints of DeepSeek-V3 hold them.

    They stay 0 here, since nothing balances the experts.
    """
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()


def greedy_accuracy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> float:
    """Returns the share of problems whose greedy answer, up to the end token, is right."""
    max_new_tokens = max(len(problem.answer) for problem in problems) + 1
    prompts = _prompts(tokenizer, problems)
    with torch.inference_mode():
        output = model.eval().generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    answers = tokenizer.batch_decode(output[:, prompts.shape[1] :], skip_special_tokens=True)
    return sum(answer == problem.answer for answer, problem in zip(answers, problems, strict=True)) / len(problems)


def _learning_rate_factor(config: PretrainConfig, step: int) -> float:
    steps_left = config.num_right_steps + config.num_careless_steps - step
    return min(1.0, (step + 1) / _WARMUP_STEPS, steps_left / max(config.num_careless_steps, 1))


def _corpus_batch(problems: list[Problem], size: int, careless_rate: float, rng: random.Random) -> list[Problem]:
    return [
        forget_carries(problem) if rng.random() < careless_rate else problem
        for problem in rng.choices(problems, k=size)
    ]


def _loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> torch.Tensor:
    """Returns the cross-entropy of the answers and their end tokens; the questions are given, not learnt."""
    prompts = _prompts(tokenizer, problems)
    answers = tokenizer(
        [problem.answer + tokenizer.eos_token for problem in problems],
        padding=True,
        padding_side="right",
        return_tensors="pt",
    )
    labels = answers.input_ids.masked_fill(answers.attention_mask == 0, _IGNORED_LABEL)
    return model(
        input_ids=torch.cat([prompts, answers.input_ids], dim=1),
        labels=torch.cat([torch.full_like(prompts, _IGNORED_LABEL), labels], dim=1),
    ).loss


def _prompts(tokenizer: PreTrainedTokenizerFast, problems: list[Problem]) -> torch.Tensor:
    """Returns prompt tokens [problems, length], through the chat template as in RL."""
    rendered = tokenizer.apply_chat_template(
        [[{"role": "user", "content": problem.question}] for problem in problems],
        add_generation_prompt=True,
        tokenize=False,
    )
    return tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids
