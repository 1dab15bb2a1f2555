"""Every setting of a training run, in one flat model made of sections.

`runs.settings` and `training.settings` hold the sections; the tables of overrides are `PROFILES`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import ConfigDict, model_validator

from stateset_agents.algorithms.advantages import is_over_batch
from stateset_agents.algorithms.group_sizes import LARGEST, SMALLEST, adaptive_group_size
from stateset_agents.algorithms.policy_losses import LOSSES, Clip
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.runs.settings import OptimizerSettings, RunSettings
from stateset_agents.training.estimators import (
    DEFAULT_ESTIMATOR,
    ESTIMATORS,
    UNBIASED_LOSS,
    estimators_with,
)
from stateset_agents.training.settings.curriculum import CurriculumSettings
from stateset_agents.training.settings.rollout import FaultSettings, RolloutSettings, ScheduleSettings
from stateset_agents.training.settings.update import UpdateSettings
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives, expect_that

# What holds where a training run's settings are not given, by profile, loss and estimator; other names.
#
# Called by `training.config`, which holds the settings themselves.


class TrainingProfile(StrEnum):
    """The caution of a run."""

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
"""Settings that each profile changes; the balanced one is the fields' own defaults."""

_FLAG = {True: "population", False: "none"}


def canonical(settings: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """The settings under their fields' own names; bf16, fp16 and use_amp become `precision`,
    and a bool in `advantage_normalization` the estimator's own, or none.

    `aliases`: other name -> field. Raises ConfigurationError where one field is given twice.
    """
    values: dict[str, Any] = {}
    flags: dict[str, bool] = {}
    for name, value in settings.items():
        if name in ("bf16", "fp16", "use_amp"):
            expect_that(isinstance(value, bool), name, "be true or false", value)
            flags[name] = value
            continue
        field = aliases.get(name, name)
        if field in values:
            raise ConfigurationError(f"{name} is another name of {field}, which is given too: leave one out")
        values[field] = value
    if flags and "precision" in values:
        raise ConfigurationError(f"give precision or {' / '.join(flags)}, not both")
    if flags.get("bf16") and flags.get("fp16"):
        raise ConfigurationError("bf16 and fp16 cannot both be true")
    if flags:
        precision = next((name for name in ("bf16", "fp16") if flags.get(name)), None)
        values["precision"] = precision or ("auto" if flags.get("use_amp") else "fp32")
    scaling = values.get("advantage_normalization")
    if isinstance(scaling, bool):
        estimator = values.get("advantage_estimator", DEFAULT_ESTIMATOR)
        default = estimator_defaults(estimator).get("advantage_normalization")
        values["advantage_normalization"] = "batch" if scaling and default == "batch" else _FLAG[scaling]
    return values


def defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that profile, loss and estimator bring where nothing else is given."""
    profile = settings.get("profile")
    name = profile if isinstance(profile, str) and profile in set(TrainingProfile) else "balanced"
    table = dict(PROFILES[TrainingProfile(name)])
    table |= estimator_defaults(settings.get("advantage_estimator", DEFAULT_ESTIMATOR))
    table |= distillation_defaults(settings.get("distillation"))
    clip = loss_defaults(settings.get("loss_type", table.get("loss_type")))
    table = {name: value for name, value in table.items() if name not in clip}
    low = {name: value for name, value in clip.items() if name == "clip_ratio"}
    return {**table, **(low if {"clip_ratio", "clip_ratio_high"} & settings.keys() else clip)}


def estimator_defaults(name: Any) -> dict[str, Any]:
    """Settings that an estimator brings where the user says nothing; nothing for a name that is none."""
    estimator = ESTIMATORS.get(name) if isinstance(name, str) else None
    if estimator is None:
        return {}
    settings: dict[str, Any] = {
        "advantage_normalization": estimator.normalizations[0],
        "min_group_size": estimator.group_default,
    }
    return settings if estimator.loss is None else {**settings, "loss_type": estimator.loss}


def distillation_defaults(distillation: Any) -> dict[str, Any]:
    """Settings that a teacher brings where the user says nothing: it stands in the reference's place, and all
    tokens count alike."""
    return {} if distillation is None else {"loss_type": UNBIASED_LOSS, "beta": 0.0}


def loss_defaults(name: Any) -> dict[str, float]:
    """The clip range of a loss's paper where it is not the usual one, by setting."""
    loss = LOSSES.get(name) if isinstance(name, str) else None
    if loss is None or loss.clip == Clip():
        return {}
    return {"clip_ratio": loss.clip.low, "clip_ratio_high": loss.clip.high}


_LENGTHS = {"num_episodes", "max_steps"}


class TrainingConfig(
    FaultSettings,
    RunSettings,
    UpdateSettings,
    OptimizerSettings,
    CurriculumSettings,
    RolloutSettings,
    ScheduleSettings,
):
    """Settings of `MultiTurnGRPOTrainer`. Names are the field's; common aliases are accepted."""

    model_config = ConfigDict(allow_inf_nan=False)

    profile: TrainingProfile = TrainingProfile.BALANCED
    """The table of defaults."""

    def __init__(self, **settings: Any) -> None:
        """`settings` win over the loss's own clip range and the estimator's own loss, those over the
        profile's table."""
        choices = canonical(settings, _CANONICAL)
        super().__init__(**{**defaults(choices), **choices})
        self.model_fields_set.intersection_update(choices)  # what the user said, for with_recommended

    @model_validator(mode="after")
    def _refuse_what_cannot_be(self) -> Self:
        for contradictions in _RULES:
            for contradiction in contradictions(self):
                raise ValueError(contradiction)
        return self

    @classmethod
    def from_profile(cls, profile: TrainingProfile | str, **overrides: Any) -> Self:
        """The profile's values with `overrides` on top.

        >>> TrainingConfig.from_profile("aggressive", num_episodes=100).num_iterations
        2
        """
        return cls(**{**overrides, "profile": profile})

    def with_recommended(self, overrides: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """This configuration with a model card's `overrides` where the user set nothing.

        Returns the configuration and what was applied. What the card says stands above the profile; a
        length of the run (num_episodes or max_steps) only counts where the user gave neither, and a loss only
        where the estimator that the user chose brings none, nor a teacher.
        """
        by_user = {name: getattr(self, name) for name in self.model_fields_set}
        fixed = by_user.keys() | (_LENGTHS if _LENGTHS & by_user.keys() else set())
        if "loss_type" in estimator_defaults(by_user.get("advantage_estimator")):
            fixed |= {"loss_type"}
        fixed |= distillation_defaults(self.distillation).keys()
        applied = {
            name: value for name, value in canonical(overrides, _CANONICAL).items() if name not in fixed
        }
        config = type(self)(**{**applied, **by_user})
        config.model_fields_set.intersection_update(by_user)
        return config, applied

    @property
    def branches_per_turn(self) -> int:
        """`num_branches` where the estimator has branches played, else 0."""
        return self.num_branches if ESTIMATORS[self.advantage_estimator].branches else 0

    def rollout_limits(self) -> RolloutLimits:
        """Limits of rollouts: conversations at once, their time, and what is tried again."""
        return RolloutLimits(
            max_concurrent=self.max_concurrent,
            turn_timeout=self.turn_timeout,
            reward_timeout=self.reward_timeout,
            episode_timeout=self.episode_timeout,
            episode_retries=self.episode_retries,
            faults=self.faults,
        )


_CANONICAL: Mapping[str, str] = {
    alias: name
    for name, field in TrainingConfig.model_fields.items()
    for alias in getattr(field.validation_alias, "choices", ())
}


# ------------------------------------------------------------------------------ rules across sections


# Each yields contradictions between settings of several sections, with the cure; a section checks its own.


def _groups(config: TrainingConfig) -> Iterator[str]:
    name, estimator = config.advantage_estimator, ESTIMATORS[config.advantage_estimator]
    size, smallest = config.num_generations, estimator.smallest_group
    if size < smallest:
        yield f"{name} compares conversations: num_generations must be at least {smallest}, got {size}"
    if config.min_group_size > size:
        yield f"min_group_size {config.min_group_size} exceeds num_generations {size}: lower it"
    if config.num_branches != TrainingConfig.model_fields["num_branches"].default and not estimator.branches:
        yield (
            f"advantage_estimator {name} plays no branches: leave num_branches out, "
            f"or set advantage_estimator to {alternatives(estimators_with(lambda other: other.branches))}"
        )
    compares = estimator.critic is None
    if config.max_resamples and not (compares and not is_over_batch(config.baseline_type)):
        kind = f"baseline_type {config.baseline_type}" if compares else f"advantage_estimator {name}"
        yield f"max_resamples replaces groups of like members, and {kind} learns from those: set it to 0"


def _reward_parts(config: TrainingConfig) -> Iterator[str]:
    by_parts = config.multi_objective_aggregation == "normalize_then_sum"
    named = [f"multi_objective_aggregation {config.multi_objective_aggregation}"] * by_parts
    named += ["reward_weights"] * (config.reward_weights is not None)
    named += ["a stage's weights"] * any(stage.weights is not None for stage in config.stages)
    if named and ESTIMATORS[config.advantage_estimator].per != "conversation":
        whole = alternatives(estimators_with(lambda other: other.per == "conversation"))
        yield (
            f"{named[0]} goes with whole conversations, and advantage_estimator {config.advantage_estimator} "
            f"asks what turns earned: use {whole}, or leave it out"
        )
    if not by_parts:
        return
    if is_over_batch(config.baseline_type):
        yield (
            f"{named[0]} compares each part within its group, and baseline_type {config.baseline_type} with "
            "the whole step: use another baseline_type"
        )
    if config.group_strategy != "none":
        yield (
            f"{named[0]} scales reward parts, and group_strategy {config.group_strategy} families: use one"
        )
    if config.advantage_normalization == "none":
        yield (
            f"{named[0]} divides each part by a deviation, and advantage_normalization none forbids it: set "
            "it to population, or multi_objective_aggregation to sum_then_normalize"
        )


def _optimizer(config: TrainingConfig) -> Iterator[str]:
    if config.lr_min_ratio and config.lr_scheduler_type == "constant":
        yield "a constant learning rate has no lowest: leave lr_min_ratio at 0"
    if not config.eval_steps and (config.early_stopping_patience or config.load_best_at_end):
        setting = "early_stopping_patience" if config.early_stopping_patience else "load_best_at_end"
        yield f"{setting} needs evaluations: set eval_steps, for example to 10"


def _distillation(config: TrainingConfig) -> Iterator[str]:
    settings = config.distillation
    if settings is None:
        return
    if config.max_staleness:
        yield (
            "distillation compares the teacher with the policy that sampled, which with max_staleness is an "
            "earlier one: set max_staleness to 0"
        )
    if config.max_resamples and not settings.reward_weight:
        yield (
            "max_resamples replaces groups whose rewards are alike, and a teacher teaches as much from those "
            "as from others: set it to 0, or distillation.reward_weight above 0"
        )
    cools = config.temperature_schedule != "none"
    if settings.is_served and (config.temperature != 1.0 or cools):
        yield (
            "a vLLM server scores at temperature 1 only, and the student samples at "
            f"{'others' if cools else format(config.temperature, 'g')}: set temperature to 1 and "
            "temperature_schedule to none, or load the teacher in this process"
        )


def _curriculum(config: TrainingConfig) -> Iterator[str]:
    settings = ["stages"] * bool(config.stages)
    settings += ["scenario_order success"] * (config.scenario_order == "success")
    settings += ["track_success"] * config.track_success
    settings += [f"group_sizes {config.group_sizes}"] * (config.group_sizes != "fixed")
    if config.max_staleness and settings:
        yield (
            f"with max_staleness conversations begin before it is known what {settings[0]} will say of their "
            "step: set max_staleness to 0, or leave it out"
        )


def _group_sizes(config: TrainingConfig) -> Iterator[str]:
    base, smallest = config.num_generations, config.num_generations
    if config.group_sizes == "difficulty":
        smallest = adaptive_group_size("easy", base)
    elif config.group_sizes == "success":
        smallest = SMALLEST
        if not SMALLEST <= base <= LARGEST:
            yield f"group_sizes success makes {SMALLEST} to {LARGEST}: set num_generations so, got {base}"
    if smallest < config.min_group_size <= base:
        yield (
            f"group_sizes {config.group_sizes} makes groups of {smallest}, and min_group_size "
            f"{config.min_group_size} leaves them out: lower it"
        )


def _stages(config: TrainingConfig) -> Iterator[str]:
    latest = 0
    for number, stage in enumerate(config.stages, start=1):
        is_last = number == len(config.stages)
        if is_last and stage.until is not None:
            yield f"stage {number} is the last and goes on to the end of the run: leave its until out"
        if not is_last and stage.until is None:
            yield f"stage {number} needs until, since another follows: a step, a share, or a condition"
        last = None if is_last else stage.last_step(config.num_steps())
        if last is not None and last <= latest:
            yield (
                f"stage {number} ends with step {last}, and one before with step {latest}: each needs a step"
            )
        latest = max(latest, last or 0)


def _staleness(config: TrainingConfig) -> Iterator[str]:
    if config.max_staleness and ESTIMATORS[config.advantage_estimator].branches:
        yield (
            f"advantage_estimator {config.advantage_estimator} plays its branches when all groups of a step "
            "are scored: set max_staleness to 0, or use another estimator"
        )
    if config.max_staleness and config.num_processes > 1:
        yield (
            "with max_staleness conversations go on during the update, and the processes' rollouts would no "
            "longer be those of one policy: set max_staleness to 0, or num_processes to 1"
        )


def _processes(config: TrainingConfig) -> Iterator[str]:
    if config.parallelism != "fsdp2":
        return
    if ESTIMATORS[config.advantage_estimator].critic is not None:
        without = alternatives(estimators_with(lambda other: not other.critic))
        yield (
            f"advantage_estimator {config.advantage_estimator} has a critic, and its head is not cut into "
            f"shards: set parallelism to ddp, or use {without}"
        )
    if config.lora is not None:
        yield "an adapter is small, and its model is not trained: set parallelism to ddp, or leave lora out"
    if config.precision == "fp16":
        yield "fp16's gradient scaler looks at whole gradients: set precision to bf16, or parallelism to ddp"


_RULES = (
    *(_groups, _reward_parts, _optimizer, _distillation),
    *(_stages, _group_sizes, _curriculum, _staleness, _processes),
)
