"""What holds where a training run's settings are not given, by profile, loss and estimator; other names.

Called by `training.config`, which holds the settings themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from stateset_agents.algorithms.policy_losses import LOSSES, Clip
from stateset_agents.training.estimators.base import UNBIASED_LOSS
from stateset_agents.training.estimators.registry import DEFAULT_ESTIMATOR, ESTIMATORS
from stateset_agents.types.errors import ConfigurationError


class TrainingProfile(StrEnum):
    """How careful a run is."""

    CONSERVATIVE = "conservative"
    """Stability first: small learning rate, larger groups, a tighter clip, gradients held shorter."""
    BALANCED = "balanced"
    """The default."""
    AGGRESSIVE = "aggressive"
    """Speed first: larger steps, weaker KL, two passes over each batch, a wider upper clip."""


PROFILES: Mapping[TrainingProfile, Mapping[str, Any]] = {
    TrainingProfile.CONSERVATIVE: {
        "learning_rate": 1e-6,
        "num_generations": 16,
        "clip_ratio": 0.1,
        "max_grad_norm": 0.5,
    },
    TrainingProfile.BALANCED: {},
    TrainingProfile.AGGRESSIVE: {
        "learning_rate": 2e-5,
        "beta": 0.01,
        "clip_ratio_high": 0.28,
        "num_iterations": 2,
        "warmup_ratio": 0.03,
        "lr_scheduler_type": "constant",
    },
}
"""What each profile changes; the balanced one is the fields' own defaults."""

_FLAG = {True: "population", False: "none"}


def canonical(settings: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The settings under their fields' own names; bf16, fp16 and use_amp become `precision`,
    and a bool in `advantage_normalization` the estimator's own, or none.

    `aliases`: other name -> field. Raises ConfigurationError where one field is given twice.
    """
    given: dict[str, Any] = {}
    flags: dict[str, bool] = {}
    for name, value in settings.items():
        if name in ("bf16", "fp16", "use_amp"):
            if not isinstance(value, bool):
                raise ConfigurationError(f"{name} must be true or false, got {value!r}")
            flags[name] = value
            continue
        field = aliases.get(name, name)
        if field in given:
            raise ConfigurationError(f"{name} is another name of {field}, which is given too: leave one out")
        given[field] = value
    if flags and "precision" in given:
        raise ConfigurationError(f"give precision or {' / '.join(flags)}, not both")
    if flags.get("bf16") and flags.get("fp16"):
        raise ConfigurationError("bf16 and fp16 cannot both be true")
    if flags:
        chosen = next((name for name in ("bf16", "fp16") if flags.get(name)), None)
        given["precision"] = chosen or ("auto" if flags.get("use_amp") else "fp32")
    scaling = given.get("advantage_normalization")
    if isinstance(scaling, bool):
        estimator = given.get("advantage_estimator", DEFAULT_ESTIMATOR)
        default = estimator_defaults(estimator).get("advantage_normalization")
        given["advantage_normalization"] = "batch" if scaling and default == "batch" else _FLAG[scaling]
    return given


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """What profile, loss and estimator set where nothing else is given."""
    profile = given.get("profile")
    known = profile if isinstance(profile, str) and profile in set(TrainingProfile) else "balanced"
    table = dict(PROFILES[TrainingProfile(known)])
    table |= estimator_defaults(given.get("advantage_estimator", DEFAULT_ESTIMATOR))
    table |= distillation_defaults(given.get("distillation"))
    clip = loss_defaults(given.get("loss_type", table.get("loss_type")))
    table = {name: value for name, value in table.items() if name not in clip}
    low = {name: value for name, value in clip.items() if name == "clip_ratio"}
    return {**table, **(low if {"clip_ratio", "clip_ratio_high"} & given.keys() else clip)}


def estimator_defaults(name: Any) -> dict[str, Any]:
    """What an estimator sets where the user says nothing; nothing for a name that is none."""
    estimator = ESTIMATORS.get(name) if isinstance(name, str) else None
    if estimator is None:
        return {}
    settings: dict[str, Any] = {
        "advantage_normalization": estimator.normalizations[0],
        "min_group_size": estimator.group_default,
    }
    return settings if estimator.loss is None else {**settings, "loss_type": estimator.loss}


def distillation_defaults(distillation: Any) -> dict[str, Any]:
    """What a teacher sets where the user says nothing: it stands in the reference's place, and all tokens
    count alike."""
    return {} if distillation is None else {"loss_type": UNBIASED_LOSS, "beta": 0.0}


def loss_defaults(name: Any) -> dict[str, float]:
    """The clip range of a loss's paper where it is not the usual one, by setting."""
    loss = LOSSES.get(name) if isinstance(name, str) else None
    if loss is None or loss.clip == Clip():
        return {}
    return {"clip_ratio": loss.clip.low, "clip_ratio_high": loss.clip.high}
