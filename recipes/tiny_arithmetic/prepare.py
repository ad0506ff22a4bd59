"""This script makes the frozen base and the data sets of the ``tiny_*.sh`` recipes.

    python -m recipes.tiny_arithmetic.prepare --out DIR [--seed N] [--num-experts N [--latent-attention]]

It writes ``DIR/model`` (Hugging Face checkpoint and tokeniser), ``DIR/train.parquet`` and ``DIR/val.parquet``. That
takes about a minute and a half on two cores; it does nothing when DIR already holds them.
"""

import argparse
import dataclasses
import logging
from pathlib import Path

from recipes.cache import build_once, source_digest
from recipes.tiny_arithmetic.data import TaskConfig, split_problems, write_parquet
from recipes.tiny_arithmetic.pretrain import PretrainConfig, pretrain


def prepare(out: Path, task: TaskConfig, base: PretrainConfig) -> None:
    """Builds ``out`` unless it is there already, made with the same settings by the same code."""

    def build(folder: Path) -> None:
        train, held_out = split_problems(task)
        write_parquet(train, folder / "train.parquet", split="train")
        write_parquet(held_out, folder / "val.parquet", split="test")
        pretrain(base, train, folder / "model")

    settings = {
        "task": dataclasses.asdict(task),
        "base": dataclasses.asdict(base),
        "sources": source_digest(Path(__file__).parent.glob("*.py")),
    }
    build_once(out, settings, build)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Make the base model and the data of the tiny arithmetic recipe.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    parser.add_argument("--seed", type=int, default=0, help="of the base's weights and corpus")
    parser.add_argument("--num-experts", type=int, default=0, help="experts in a layer; 0 for a dense model")
    parser.add_argument("--latent-attention", action="store_true", help="DeepSeek-V3 in place of Qwen3")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    base = PretrainConfig(
        seed=arguments.seed, num_experts=arguments.num_experts, latent_attention=arguments.latent_attention
    )
    prepare(arguments.out, TaskConfig(), base)


if __name__ == "__main__":
    main()
