"""What each `advantage_estimator` needs and which settings it knows; update/credit.py has the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["ESTIMATORS", "Estimator", "estimator_defaults", "foreign_setting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """What an estimator is, as far as settings go."""

    critic: Literal["turn", "token"] | None = None
    """Where it needs a value: before every turn, before every agent token, or nowhere."""
    baseline: bool = False
    """Does it compare whole conversations, so that `baseline_type` says with what?"""
    sees_shaping: bool = True
    """False where all that it compares starts from one state, so that potential-based shaping cancels."""
    branches: bool = False
    """Are other ways on played from its turns, `num_branches` from each?"""
    normalizations: tuple[str, ...]
    """Values of `advantage_normalization` it knows; the first is its default."""
    smallest_group: int = 1
    """Scored members below which a group teaches it nothing."""
    group_default: int = 2
    """Its default of `min_group_size`."""
    loss: str | None = None
    """Its default of `loss_type`; None leaves the field's own."""


ESTIMATORS: Mapping[str, Estimator] = {
    "group": Estimator(
        sees_shaping=False,
        baseline=True,
        normalizations=("population", "sample", "batch", "none"),
        smallest_group=2,
    ),
    "turn_group": Estimator(normalizations=("none",), loss="dr_grpo"),
    "branch": Estimator(sees_shaping=False, branches=True, normalizations=("none",), loss="dr_grpo"),
    "turn_gae": Estimator(critic="turn", normalizations=("batch", "none"), group_default=1),
    "token_gae": Estimator(critic="token", normalizations=("batch", "none"), group_default=1),
    "hybrid": Estimator(critic="turn", baseline=True, normalizations=("batch", "none"), smallest_group=2),
}
"""Every `advantage_estimator`.

turn_group and branch have unbiased advantages, and the loss that keeps them so: the policy chooses how
long a conversation is, and a mean over its tokens, or over the step's, weighs its turns by that choice.
"""

_CRITIC = ("value_learning_rate", "value_iterations", "value_clip", "value_dropout", "bootstrap_truncated")
_WITH_CRITIC = ", ".join(name for name, estimator in ESTIMATORS.items() if estimator.critic)


def estimator_defaults(name: Any) -> dict[str, Any]:
    """What an estimator sets where the user says nothing; nothing for a name that is none."""
    estimator = ESTIMATORS.get(name) if isinstance(name, str) else None
    if estimator is None:
        return {}
    own: dict[str, Any] = {
        "advantage_normalization": estimator.normalizations[0],
        "min_group_size": estimator.group_default,
    }
    return own if estimator.loss is None else {**own, "loss_type": estimator.loss}


def foreign_setting(name: str, settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    """The first setting that differs from its default and means nothing to this estimator, with the cure."""
    estimator = ESTIMATORS[name]
    scaling = settings["advantage_normalization"]
    if scaling not in estimator.normalizations:
        allowed = " or ".join(estimator.normalizations)
        return f"advantage_normalization {scaling} does not go with advantage_estimator {name}: use {allowed}"
    if settings["num_generations"] < estimator.smallest_group:
        return (
            f"advantage_estimator {name} compares conversations: num_generations must be at least "
            f"{estimator.smallest_group}, got {settings['num_generations']}"
        )
    if settings["min_group_size"] < estimator.smallest_group:
        return (
            f"advantage_estimator {name} compares conversations, and one alone has none to compare with: "
            f"min_group_size must be at least {estimator.smallest_group}, or use turn_gae or token_gae"
        )
    changed = {field for field, default in defaults.items() if settings[field] != default}
    if "baseline_type" in changed and not estimator.baseline:
        return (
            f"advantage_estimator {name} has a baseline of its own: leave baseline_type out, "
            "or use group or hybrid"
        )
    if "gamma" in changed and name == "group":
        return (
            "gamma discounts between turns, which group does not tell apart: leave it at 1, "
            "or set advantage_estimator to turn_group or one with a critic"
        )
    if "num_branches" in changed and not estimator.branches:
        return (
            f"advantage_estimator {name} plays no branches: leave num_branches out, "
            "or set advantage_estimator to branch"
        )
    for field in ("gae_lambda", *_CRITIC):
        if field in changed and estimator.critic is None:
            return (
                f"advantage_estimator {name} has no critic: leave {field} out, or use one of {_WITH_CRITIC}"
            )
    return None
