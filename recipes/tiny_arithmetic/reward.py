"""This module is the rule-based reward, which is loaded by path through ``reward.custom_reward_function.path``.

It imports nothing else of Orbit.
"""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **_: Any
) -> dict[str, float]:
    """Scores 1 when the answer is the bare number and nothing else, 0 otherwise.

    Args:
        data_source: unused; verl passes it.
        solution_str: the decoded response, special tokens left out.
        ground_truth: the number's decimal digits.
        extra_info: unused; verl passes it.

    Returns:
        ``score``, the reward, and ``acc``, which makes verl report validation accuracy under that name.
    """
    correct = float(solution_str.strip() == ground_truth)
    return {"score": correct, "acc": correct}
