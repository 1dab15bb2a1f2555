"""The settings of a training that say how conversations are played."""

from __future__ import annotations

from typing import Literal

from pydantic import AliasChoices, Field

from stateset_agents.training.estimators.registry import estimators_with
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
    temperature: float = Field(
        default=1.0, gt=0.0, description="Of training rollouts; the log-probs follow it."
    )
    temperature_schedule: Literal["none", "adaptive"] = Field(
        default="none",
        description="adaptive: after each step whose mean reward reaches temperature_target the temperature "
        "is multiplied by temperature_decay, after any other by 1.01; it stays between temperature_min and "
        "`temperature`.",
    )
    temperature_min: float = Field(default=0.3, gt=0.0, description="Lowest temperature of the schedule.")
    temperature_decay: float = Field(
        default=0.995, gt=0.0, le=1.0, description="Factor on it after a step that reached the target."
    )
    temperature_target: float = Field(default=0.7, description="Mean reward from which it cools.")
    max_concurrent: int = Field(default=64, ge=1, description="Conversations at once.")
    scheduling: Literal["auto", "deterministic", "throughput"] = Field(
        default="auto",
        description="deterministic waits for every local reply before a decode step; auto is deterministic "
        "when the environment is local.",
    )
    max_staleness: int = Field(
        default=0,
        ge=0,
        description="0 plays, learns, plays again. From 1 on the next steps' conversations go on while an "
        "update runs, and what trains was begun at most so many steps before; see docs/overlap.md.",
    )
    max_resamples: int = Field(
        default=0,
        ge=0,
        description="Groups without signal (all members earned the same, or too few have a score) that the "
        "next scenarios replace in one step, DAPO's dynamic sampling; further ones train as they are.",
    )
    rollout_sleep: bool = Field(
        default=False,
        description="Free what only generation needs, its cache and packed weights, before each update, and "
        "give back what that used after each of its micro-batches: less peak memory, and more time.",
    )
    log_rollouts: bool = Field(default=True, description="Write every conversation to rollouts.jsonl.")
    log_learner_logprobs: bool = Field(
        default=False,
        description="Write to rollouts.jsonl, too, each trained token's log-prob under the policy that its "
        "ratio is to (verl's old_log_prob) and under the learner before its last optimiser step on the batch "
        "(TRL's per_token_logps), so that `learn` shows the true ratios and what was clipped.",
    )
    metric_for_best: Literal["auto", "eval/success", "eval/reward"] = Field(
        default="auto",
        description="By which evaluation a checkpoint is the best; auto is eval/success where the "
        "environment gives a verdict, else eval/reward.",
    )
