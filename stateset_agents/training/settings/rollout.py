"""The settings of a training that say how conversations are played."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, Self

from pydantic import AliasChoices, Field, model_validator

from stateset_agents.runtime.circuit_breakers import FaultPolicy
from stateset_agents.training.estimators import estimators_with
from stateset_agents.types.settings import Settings, alternatives

# What the descriptions list.
_LONE = alternatives(estimators_with(lambda estimator: estimator.group_default == 1), "and")
_BRANCHING = alternatives(estimators_with(lambda estimator: estimator.branches), "and")


class RolloutSettings(Settings):
    """Groups, branches, sampling, and what runs at once."""

    num_generations: int = Field(
        default=8,
        ge=1,
        validation_alias=AliasChoices("num_generations", "group_size"),
        description=f"Members of a group; one alone trains under {_LONE} only.",
    )
    num_branches: int = Field(
        default=2,
        ge=1,
        description=f"Of {_BRANCHING}: other ways on that are played, to their end, from after every "
        "turn that is not the last of its conversation. They cost as much as conversations do.",
    )
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature of training rollouts; the log-probs follow it."""
    temperature_schedule: Literal["none", "adaptive"] = "none"
    """adaptive: after each step whose mean reward reaches temperature_target the temperature is multiplied by
    temperature_decay, after any other by 1.01; it stays between temperature_min and `temperature`."""
    temperature_min: float = Field(default=0.3, gt=0.0)
    """Lowest temperature of the schedule."""
    temperature_decay: float = Field(default=0.995, gt=0.0, le=1.0)
    """Factor on it after a step that reached the target."""
    temperature_target: float = 0.7
    """Mean reward from which it cools."""
    call_bias: float = Field(default=0.0, ge=0.0, le=50.0)
    """Nats added to the logit of each token that opens a call, at the start of a reply that may call or speak
    under `AgentConfig.constrain`. They fall to 0 over `call_bias_steps`, and evaluations have none."""
    call_bias_steps: int = Field(default=0, ge=0)
    """Steps from the first on until `call_bias` is 0."""
    max_concurrent: int = Field(default=64, ge=1)
    """Conversations at once."""
    scheduling: Literal["auto", "deterministic", "throughput"] = "auto"
    """deterministic waits for every local reply before a decode step; auto is deterministic when the
    environment is local."""
    max_staleness: int = Field(default=0, ge=0)
    """0 plays, learns, plays again. From 1 on the next steps' conversations go on while an update runs, and
    what trains was begun at most so many steps before; see docs/overlap.md."""
    max_resamples: int = Field(default=0, ge=0)
    """Groups without signal (all members earned the same, or too few have a score) that the next scenarios
    replace in one step, DAPO's dynamic sampling; further ones train as they are."""
    rollout_sleep: bool = False
    """Free what only generation needs, its cache and packed weights, before each update, and give back what
    that used after each of its micro-batches: less peak memory, and more time."""
    log_rollouts: bool = True
    """Write every conversation to rollouts.jsonl."""
    log_learner_logprobs: bool = False
    """Write to rollouts.jsonl, too, each trained token's log-prob under the policy that its ratio is to
    (verl's old_log_prob) and under the learner before its last optimiser step on the batch (TRL's
    per_token_logps), so that `learn` shows the true ratios and what was clipped."""
    metric_for_best: Literal["auto", "eval/success", "eval/reward"] = "auto"
    """Metric by which a checkpoint is the best; auto is eval/success where the environment gives a
    verdict, else eval/reward."""

    @model_validator(mode="after")
    def _rollouts_can_be(self) -> Self:
        cools = self.temperature_schedule == "adaptive"
        if cools and self.temperature_min > self.temperature:
            raise ValueError(
                f"temperature_min {self.temperature_min:g} exceeds temperature {self.temperature:g}: lower it"
            )
        if (self.call_bias > 0) != (self.call_bias_steps > 0):
            raise ValueError(
                f"call_bias {self.call_bias:g} falls to 0 over call_bias_steps, which is "
                f"{self.call_bias_steps}: set both or neither"
            )
        if self.max_staleness and self.call_bias:
            raise ValueError(
                "with max_staleness evaluations go on beside rollouts, and call_bias is for these alone: "
                "leave call_bias at 0, or set max_staleness to 0"
            )
        if self.log_learner_logprobs and not self.log_rollouts:
            raise ValueError("log_learner_logprobs needs rollouts.jsonl: set log_rollouts to true")
        if self.max_staleness and self.scheduling == "deterministic":
            raise ValueError(
                f"with max_staleness {self.max_staleness} conversations go on while the weights change, and "
                "no two runs are alike: set scheduling to throughput or auto, or max_staleness to 0"
            )
        if self.max_staleness and cools:
            raise ValueError(
                "with max_staleness a step's conversations may have begun at different temperatures: leave "
                "temperature_schedule at none, or set max_staleness to 0"
            )
        if self.max_staleness and self.rollout_sleep:
            raise ValueError(
                "with max_staleness conversations go on during the update, and nothing of theirs can be "
                "freed: set rollout_sleep to false, or max_staleness to 0"
            )
        return self


# The settings of a training that say how long it is, and how much of it is one step.


class ScheduleSettings(Settings):
    """Episodes, steps and processes."""

    num_episodes: int = Field(default=1000, ge=1)
    """Scenarios to play, each `num_generations` times."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps; overrides num_episodes."""
    per_device_train_batch_size: int = Field(default=1, ge=1)
    """Scenarios of one forward-backward pass of one process, each with `num_generations` conversations."""
    gradient_accumulation_steps: int = Field(default=4, ge=1)
    """Passes summed into one optimiser step."""
    num_processes: int = Field(default=1, ge=1)
    """Processes that train together, each with its share of a step; as many as torchrun or accelerate must
    have started, see docs/several-gpus.md."""
    parallelism: Literal["ddp", "fsdp2"] = "ddp"
    """Division among several processes: each holds all weights (ddp), or weights, gradients and optimiser are
    cut into shards, one for each (fsdp2)."""

    @model_validator(mode="after")
    def _shards_need_processes(self) -> Self:
        if self.parallelism == "fsdp2" and self.num_processes == 1:
            raise ValueError(
                "parallelism fsdp2 cuts weights into one shard for each process: set num_processes above 1"
            )
        return self

    def episodes_per_step(self) -> int:
        """Scenarios of one step, over all processes."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps * self.num_processes

    def num_steps(self) -> int:
        """Steps of the run: `max_steps`, or as many as `num_episodes` fill (the last may be short)."""
        if self.max_steps is not None:
            return self.max_steps
        return -(-self.num_episodes // self.episodes_per_step())


# The settings of a training that say what is done when something fails; `TrainingConfig` has them.


class FaultSettings(Settings):
    """Time limits, retries, and when the run stops."""

    episode_retries: int = Field(default=1, ge=0)
    """Times a failed conversation is played again."""
    turn_retries: int = Field(default=0, ge=0)
    """Times an answer of the environment (user, tools) that failed is asked for again, on a copy of the
    conversation taken before it: the environment must be able to fork."""
    reward_retries: int = Field(default=1, ge=0)
    """Times a reward that broke is asked again before it is left unscored."""
    retry_backoff: float = Field(default=0.5, ge=0.0)
    """Seconds before the first such try; they double up to 30, and half of them is random."""
    turn_timeout: float | None = Field(default=300.0, gt=0.0)
    """Seconds the environment (its user, its tools) may take for one answer; a conversation that waits longer
    fails. None: for ever."""
    reward_timeout: float | None = Field(default=300.0, gt=0.0)
    """Seconds that a reward may take, each time it is asked; members without a score by then stay unscored.
    None: for ever."""
    episode_timeout: float | None = Field(default=None, gt=0.0)
    """Seconds that a conversation may take in all; then it is cut, judged and scored by what was said. None:
    as long as it lasts."""
    breaker_failures: int = Field(default=10, ge=0)
    """Failures in a row of the environment or of a reward after which all work waits for it, and one probe at
    a time asks whether it is back. 0: never."""
    breaker_pause: float = Field(default=5.0, gt=0.0)
    """Seconds until the first such probe; they double up to 60."""
    outage_patience: float = Field(default=300.0, ge=0.0)
    """Seconds that work waits for what is down; then its conversations fail at once, and max_failed_steps
    ends the run. What has never worked is not waited for."""
    max_failed_steps: int = Field(default=3, ge=1)
    """Steps in a row without a usable group that stop."""

    @property
    def faults(self) -> FaultPolicy:
        """The policy of what is tried again, and when work waits for what is down."""
        return FaultPolicy(**{field.name: getattr(self, field.name) for field in fields(FaultPolicy)})
