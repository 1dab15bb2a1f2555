"""What a conversation's reward is compared with, by the name of `baseline_type`; a new one is one entry."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal


@dataclass(frozen=True, slots=True)
class Baseline:
    """A rule for what each reward is compared with.

    Unbiased or not is said for scaling `none` and a loss that averages by a constant
    (tests/unit/training/update/test_credit_gradient.py).
    """

    compute: Callable[[Sequence[float]], list[float]]
    """[N] rewards, two of which differ -> [N] what each is compared with."""
    over: Literal["group", "batch"] = "group"
    """Whose rewards it is given: those of the scored members of one group, or of all groups."""
    refuses_scaling: bool = False
    """Is it there for an unbiased gradient, which any scaling but `none` would bend?"""


def mean(values: Sequence[float]) -> float:
    """Of at least one value; the order changes nothing."""
    return math.fsum(values) / len(values)


def _mean_of_all(rewards: Sequence[float]) -> list[float]:
    return [mean(rewards)] * len(rewards)


def _median_of_all(rewards: Sequence[float]) -> list[float]:
    return [median(rewards)] * len(rewards)


def _mean_of_the_others(rewards: Sequence[float]) -> list[float]:
    total, others = math.fsum(rewards), len(rewards) - 1
    return [(total - reward) / others for reward in rewards]


BASELINES: Mapping[str, Baseline] = {
    # The member's own reward included, which shrinks the gradient by 1 - 1/G
    # (DeepSeekMath, https://arxiv.org/abs/2402.03300).
    "group_mean": Baseline(_mean_of_all),
    # Unmoved by one outlier; biased, as a member's own reward moves it unevenly.
    "group_median": Baseline(_median_of_all),
    # Every scored reward of the batch, which shrinks the gradient by 1 - 1/(number of rewards).
    "global_mean": Baseline(_mean_of_all, over="batch"),
    # Keeps the gradient unbiased (RLOO, https://arxiv.org/abs/2402.14740).
    "leave_one_out": Baseline(_mean_of_the_others, refuses_scaling=True),
}


def is_over_batch(name: object) -> bool:
    """Does this `baseline_type` compare groups with each other, so that a group whose members tie teaches?"""
    return name in BASELINES and BASELINES[str(name)].over == "batch"
