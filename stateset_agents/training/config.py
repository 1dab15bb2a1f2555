"""Every setting of a training run, in one flat model made of sections.

`runs.settings` and `training.settings` hold the sections, and `training.settings.profiles` the tables of
overrides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from stateset_agents.algorithms.baselines import BASELINES, is_over_batch
from stateset_agents.algorithms.group_sizes import LARGEST, SMALLEST, adaptive_group_size
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.runs.settings import OptimizerSettings, RunSettings
from stateset_agents.training.estimators.base import UNBIASED_LOSS
from stateset_agents.training.estimators.registry import ESTIMATORS, estimators_with
from stateset_agents.training.settings.curriculum import CurriculumSettings
from stateset_agents.training.settings.faults import FaultSettings
from stateset_agents.training.settings.profiles import PROFILES as PROFILES
from stateset_agents.training.settings.profiles import TrainingProfile as TrainingProfile
from stateset_agents.training.settings.profiles import (
    canonical,
    defaults,
    distillation_defaults,
    estimator_defaults,
)
from stateset_agents.training.settings.rollout import RolloutSettings
from stateset_agents.training.settings.schedule import ScheduleSettings
from stateset_agents.training.settings.update import UpdateSettings
from stateset_agents.types.settings import alternatives

# Training settings that cannot work together; `training.config` asks when it is made.


def contradiction(config: TrainingConfig) -> str | None:
    """The first thing in these settings that cannot be, with the cure; None where all of it can."""
    rules = (_credit, _learning, _distillation, _rollouts, _curriculum, _processes, _run)
    return next((wrong for rule in rules for wrong in rule(config)), None)


def _credit(config: TrainingConfig) -> Iterator[str]:
    if BASELINES[config.baseline_type].refuses_scaling and config.advantage_normalization != "none":
        yield f"{config.baseline_type} is unbiased only unscaled: set advantage_normalization to none"
    yield from _unused_by_estimator(config)
    if config.min_group_size > config.num_generations:
        yield (
            f"min_group_size {config.min_group_size} exceeds num_generations {config.num_generations}: "
            "lower it"
        )


def _unused_by_estimator(config: TrainingConfig) -> Iterator[str]:
    """Settings that differ from their default and mean nothing to this estimator."""
    name, estimator = config.advantage_estimator, ESTIMATORS[config.advantage_estimator]
    scaling, smallest = config.advantage_normalization, estimator.smallest_group
    if scaling not in estimator.normalizations:
        allowed = " or ".join(estimator.normalizations)
        yield f"advantage_normalization {scaling} does not go with advantage_estimator {name}: use {allowed}"
    if config.group_strategy != "none" and scaling != "batch":
        yield (
            f"group_strategy {config.group_strategy} divides the step's deviation among families, and "
            f"advantage_normalization {scaling} has none of the step: set it to batch"
        )
    if config.num_generations < smallest:
        yield (
            f"advantage_estimator {name} compares conversations: num_generations must be at least "
            f"{smallest}, got {config.num_generations}"
        )
    if config.min_group_size < smallest:
        lone = alternatives(estimators_with(lambda other: other.group_default == 1))
        yield (
            f"advantage_estimator {name} compares conversations, and one alone has none to compare with: "
            f"min_group_size must be at least {smallest}, or use {lone}"
        )
    fields = type(config).model_fields
    changed = {field for field in fields if getattr(config, field) != fields[field].default}
    if "baseline_type" in changed and not estimator.baseline:
        yield (
            f"advantage_estimator {name} has a baseline of its own: leave baseline_type out, "
            f"or use {alternatives(estimators_with(lambda other: other.baseline))}"
        )
    if "gamma" in changed and estimator.per == "conversation":
        per_turn = estimators_with(lambda other: other.per != "conversation" and not other.critic)
        yield (
            f"gamma discounts between turns, which {name} does not tell apart: leave it at 1, "
            f"or set advantage_estimator to {alternatives([*per_turn, 'one with a critic'])}"
        )
    if "num_branches" in changed and not estimator.branches:
        yield (
            f"advantage_estimator {name} plays no branches: leave num_branches out, "
            f"or set advantage_estimator to {alternatives(estimators_with(lambda other: other.branches))}"
        )
    yield from _parts(config)
    for field in _OF_A_CRITIC:
        if field in changed and estimator.critic is None:
            critics = ", ".join(estimators_with(lambda other: other.critic))
            yield f"advantage_estimator {name} has no critic: leave {field} out, or use one of {critics}"


def _parts(config: TrainingConfig) -> Iterator[str]:
    by_parts = config.multi_objective_aggregation == "normalize_then_sum"
    asked = [f"multi_objective_aggregation {config.multi_objective_aggregation}"] * by_parts
    asked += ["reward_weights"] * (config.reward_weights is not None)
    asked += ["a stage's weights"] * any(stage.weights is not None for stage in config.stages)
    if asked and ESTIMATORS[config.advantage_estimator].per != "conversation":
        whole = alternatives(estimators_with(lambda other: other.per == "conversation"))
        yield (
            f"{asked[0]} goes with whole conversations, and advantage_estimator {config.advantage_estimator} "
            f"asks what turns earned: use {whole}, or leave it out"
        )
    if not by_parts:
        return
    if is_over_batch(config.baseline_type):
        yield (
            f"{asked[0]} compares each part within its group, and baseline_type {config.baseline_type} with "
            "the whole step: use another baseline_type"
        )
    if config.group_strategy != "none":
        yield (
            f"{asked[0]} scales the parts of the reward, and group_strategy {config.group_strategy} the "
            "families: use one of them"
        )
    if config.advantage_normalization == "none":
        yield (
            f"{asked[0]} divides each part by a deviation, and advantage_normalization none forbids it: set "
            "it to population, or multi_objective_aggregation to sum_then_normalize"
        )


def _curriculum(config: TrainingConfig) -> Iterator[str]:
    yield from _stages(config)
    yield from _group_sizes(config)
    follows = ["stages"] * bool(config.stages)
    follows += ["scenario_order success"] * (config.scenario_order == "success")
    follows += ["track_success"] * config.track_success
    follows += [f"group_sizes {config.group_sizes}"] * (config.group_sizes != "fixed")
    if config.max_staleness and follows:
        yield (
            f"with max_staleness conversations begin before it is known what {follows[0]} will say of their "
            "step: set max_staleness to 0, or leave it out"
        )
    defaults = type(config).model_fields
    if config.success_memory != defaults["success_memory"].default and not config.uses_success:
        yield (
            "success_memory is of measured success, which nothing here follows: leave it out, or set "
            "scenario_order or group_sizes to success, or track_success"
        )
    uses_strata = config.scenario_order == "stratified" or config.uses_success
    if config.strata != defaults["strata"].default and not uses_strata:
        yield (
            f"strata {', '.join(config.strata_keys)} changes nothing in a shuffled order: leave it out, or "
            "set scenario_order to stratified or success"
        )


def _group_sizes(config: TrainingConfig) -> Iterator[str]:
    base, smallest = config.num_generations, config.num_generations
    if config.group_sizes == "difficulty":
        smallest = adaptive_group_size("easy", base)
    elif config.group_sizes == "success":
        smallest = SMALLEST
        if not SMALLEST <= base <= LARGEST:
            yield (
                f"group_sizes success makes groups of {SMALLEST} to {LARGEST}, num_generations on average: "
                f"set it between them, got {base}"
            )
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
                f"stage {number} ends with step {last}, and one before it with step {latest}: each needs a "
                "step at least"
            )
        latest = max(latest, last or 0)


_OF_A_CRITIC = (
    "gae_lambda",
    "value_learning_rate",
    "value_iterations",
    "value_clip",
    "value_dropout",
    "bootstrap_truncated",
)


def _learning(config: TrainingConfig) -> Iterator[str]:
    if config.kl_placement == "reward" and config.kl_estimator != "k1":
        yield "kl_placement reward is exact with k1 only: set kl_estimator to k1"
    if config.kl_controller != "fixed" and not config.uses_reference:
        yield "a moving beta needs beta > 0 and use_reference_model true"
    if config.lr_min_ratio and config.lr_scheduler_type == "constant":
        yield "a constant learning rate has no lowest: leave lr_min_ratio at 0"
    if config.dual_clip is not None and LOSSES[config.loss_type].clips != "both":
        yield f"{config.loss_type} has no dual clip: leave dual_clip unset"


def _distillation(config: TrainingConfig) -> Iterator[str]:
    settings = config.distillation
    if settings is None:
        return
    if LOSSES[config.loss_type].level == "sequence":
        yield (
            f"distillation gives each token an advantage of its own, and {config.loss_type} weighs whole "
            f"conversations: leave loss_type at {UNBIASED_LOSS}"
        )
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


def _rollouts(config: TrainingConfig) -> Iterator[str]:
    cooling = config.temperature_schedule == "adaptive"
    if cooling and config.temperature_min > config.temperature:
        yield (
            f"temperature_min {config.temperature_min:g} exceeds the temperature {config.temperature:g} that "
            "the schedule starts at: lower it"
        )
    if config.log_learner_logprobs and not config.log_rollouts:
        yield (
            "log_learner_logprobs writes into rollouts.jsonl, which log_rollouts false leaves out: set "
            "log_rollouts to true"
        )
    if config.max_staleness and config.scheduling == "deterministic":
        yield (
            f"with max_staleness {config.max_staleness} conversations go on while the weights change, and no "
            "two runs are alike: set scheduling to throughput or auto, or max_staleness to 0"
        )
    if config.max_staleness and cooling:
        yield (
            "with max_staleness a step's conversations may have begun at different temperatures: leave "
            "temperature_schedule at none, or set max_staleness to 0"
        )
    if config.max_staleness and config.rollout_sleep:
        yield (
            "with max_staleness conversations go on during the update, and nothing of theirs can be freed: "
            "set rollout_sleep to false, or max_staleness to 0"
        )
    if config.max_staleness and ESTIMATORS[config.advantage_estimator].branches:
        yield (
            f"advantage_estimator {config.advantage_estimator} plays its branches when all groups of a step "
            "are scored: set max_staleness to 0, or use another estimator"
        )
    compares = ESTIMATORS[config.advantage_estimator].critic is None
    if config.max_resamples and not (compares and not is_over_batch(config.baseline_type)):
        yield (
            "max_resamples replaces groups whose members are alike, and "
            + (
                f"baseline_type {config.baseline_type}"
                if compares
                else f"advantage_estimator {config.advantage_estimator}"
            )
            + " learns from those, too: set max_resamples to 0"
        )


def _processes(config: TrainingConfig) -> Iterator[str]:
    several, sharded = config.num_processes > 1, config.parallelism == "fsdp2"
    if sharded and not several:
        yield "parallelism fsdp2 cuts weights into one shard for each process: set num_processes to 2 or more"
    if several and config.max_staleness:
        yield (
            "with max_staleness conversations go on during the update, and the processes' rollouts would no "
            "longer be those of one policy: set max_staleness to 0, or num_processes to 1"
        )
    if sharded and ESTIMATORS[config.advantage_estimator].critic is not None:
        without = alternatives(estimators_with(lambda other: not other.critic))
        yield (
            f"advantage_estimator {config.advantage_estimator} has a critic, and its head is not cut into "
            f"shards: set parallelism to ddp, or use {without}"
        )
    if sharded and config.lora is not None:
        yield "an adapter is small, and its model is not trained: set parallelism to ddp, or leave lora out"
    if sharded and config.precision == "fp16":
        yield "fp16's gradient scaler looks at whole gradients: set precision to bf16, or parallelism to ddp"


def _run(config: TrainingConfig) -> Iterator[str]:
    if not config.eval_steps and (config.early_stopping_patience or config.load_best_at_end):
        asked = "early_stopping_patience" if config.early_stopping_patience else "load_best_at_end"
        yield f"{asked} needs evaluations: set eval_steps, for example to 10"


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

    profile: TrainingProfile = Field(
        default=TrainingProfile.BALANCED, description="Which table of defaults is used."
    )

    def __init__(self, **settings: Any) -> None:
        """`settings` win over the loss's own clip range and the estimator's own loss, those over the
        profile's table."""
        given = canonical(settings, _CANONICAL)
        super().__init__(**{**defaults(given), **given})
        self.model_fields_set.intersection_update(given)  # what the user said, for with_recommended

    @model_validator(mode="after")
    def _refuse_what_cannot_be(self) -> Self:
        wrong = contradiction(self)
        if wrong is not None:
            raise ValueError(wrong)
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
        own = {name: getattr(self, name) for name in self.model_fields_set}
        taken = own.keys() | (_LENGTHS if _LENGTHS & own.keys() else set())
        if "loss_type" in estimator_defaults(own.get("advantage_estimator")):
            taken |= {"loss_type"}
        taken |= distillation_defaults(self.distillation).keys()
        applied = {
            name: value for name, value in canonical(overrides, _CANONICAL).items() if name not in taken
        }
        config = type(self)(**{**applied, **own})
        config.model_fields_set.intersection_update(own)
        return config, applied

    @property
    def branches_per_turn(self) -> int:
        """`num_branches` where the estimator has branches played, else 0."""
        return self.num_branches if ESTIMATORS[self.advantage_estimator].branches else 0

    def rollout_limits(self) -> RolloutLimits:
        """How many conversations at once, how long they may take, and what is tried again."""
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
