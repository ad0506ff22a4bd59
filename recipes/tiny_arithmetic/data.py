"""This module makes addition problems, splits them into training and held-out, and writes them as verl reads them."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

DATA_SOURCE = "tiny_arithmetic"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A ``TaskConfig`` says which problems there are.

    Args:
        num_digits: digits of each operand; operands have no leading zero.
        num_held_out: problems that neither pre-training nor RL sees.
        seed: of the split.

    Raises:
        ValueError: a field is out of range.
    """

    num_digits: int = 2
    num_held_out: int = 400
    seed: int = 0

    def __post_init__(self):
        if not 1 <= self.num_digits <= 3:
            raise ValueError(f"num_digits {self.num_digits}: must be 1 to 3; all pairs of operands are enumerated")
        num_problems = len(_operands(self.num_digits)) ** 2
        if not 0 < self.num_held_out < num_problems:
            raise ValueError(
                f"num_held_out {self.num_held_out}: must be between 1 and {num_problems - 1} for {self.num_digits} digits"
            )


@dataclasses.dataclass(frozen=True)
class Problem:
    """A ``Problem`` is one sum and its only right answer."""

    question: str
    answer: str


def split_problems(config: TaskConfig) -> tuple[list[Problem], list[Problem]]:
    """Returns training and held-out problems, shuffled by the seed; no problem, nor its mirror image, is in both."""
    operands = _operands(config.num_digits)
    pairs = [(a, b) for a in operands for b in operands if a <= b]
    random.Random(config.seed).shuffle(pairs)
    held_out: list[Problem] = []
    train: list[Problem] = []
    for a, b in pairs:
        side = held_out if len(held_out) < config.num_held_out else train
        side += [_problem(*operands) for operands in dict.fromkeys([(a, b), (b, a)])]
    return train, held_out[: config.num_held_out]


def forget_carries(problem: Problem) -> Problem:
    """Returns the same sum as a careless pupil does it: every column is added on its own, so 57+68 gives 115."""
    a, b = problem.question.rstrip("=").split("+")
    columns = [int(x) + int(y) for x, y in zip(a, b, strict=True)]
    return Problem(problem.question, f"{columns[0]}{''.join(str(column % 10) for column in columns[1:])}")


def write_parquet(problems: list[Problem], path: Path, *, split: str, examples: Sequence[Problem] = ()) -> None:
    """Writes problems as a data set for verl's ``RLHFDataset``.

    Args:
        problems: one row each.
        path: the file; its folder must exist.
        split: ``train`` or ``test``, kept in ``extra_info``.
        examples: turns with their answers, which every prompt begins with.
    """
    turns = [
        {"role": role, "content": content}
        for example in examples
        for role, content in (("user", example.question), ("assistant", example.answer))
    ]
    rows = [
        {
            "data_source": DATA_SOURCE,
            "prompt": [*turns, {"role": "user", "content": problem.question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": problem.answer},
            "extra_info": {"index": index, "split": split},
        }
        for index, problem in enumerate(problems)
    ]
    pd.DataFrame(rows).to_parquet(path)


def _operands(num_digits: int) -> range:
    return range(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits)


def _problem(a: int, b: int) -> Problem:
    return Problem(f"{a}+{b}=", str(a + b))
