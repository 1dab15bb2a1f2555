"""What one step learns: credit, update, and the figures of both. Blocking work goes to the worker thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stateset_agents.backends.base import Backend
from stateset_agents.core.reward import RewardFunction
from stateset_agents.core.scoring.base import result_of
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.user_code import format_error
from stateset_agents.runtime.worker_thread import Worker
from stateset_agents.tracking.monitors import Finding
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.admission import refuse_stale
from stateset_agents.training.loop.metrics import (
    rollout_metrics,
    staleness_metrics,
    why_nothing_trained,
)
from stateset_agents.training.loop.rollouts import EventSink, Played, RolloutSource
from stateset_agents.training.update.credit import Credited
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.types.errors import PROGRAMMING_ERRORS, StatesetError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.trajectory import TrajectoryGroup

__all__ = ["FinishedStep", "Observed", "Update", "observe", "update_policy"]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """What one step's update did."""

    metrics: dict[str, float]
    credited: Credited
    failure: str | None
    """Why the step could not train; None where it did, or where all were equally good."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that is in the logs."""

    metrics: dict[str, float]
    findings: Sequence[Finding]
    """What it showed for the first time."""
    failure: str | None
    """Why the training must end with it."""


async def update_policy(
    learner: PolicyLearner,
    backend: Backend,
    played: Played,
    source: RolloutSource,
    config: TrainingConfig,
    worker: Worker,
    event: EventSink,
    *,
    step: int,
    temperature: float,
    versions: Sequence[int],
) -> Update:
    """Credit the groups, then learn from them.

    `temperature`: of the rollouts; `versions`: of the policies so far. Raises TrainingStopped for a token
    that is older than `max_staleness` allows.
    """
    event("update begun", groups=list(played.batch.taken))
    overlap = source.watch_overlap()
    learner.set_temperature(temperature)
    if config.rollout_sleep:
        await backend.sleep()
    lesson = await worker.run(partial(learner.credit, played.taken))
    credited = lesson.credited
    metrics = await worker.run(rollout_metrics, played.everyone)  # thousands of turns: not in the loop
    stale = staleness_metrics(played.taken, versions)
    if source.max_staleness is not None:
        refuse_stale(int(stale.get("staleness/max", 0.0)), source.max_staleness)
    if source.max_staleness is not None or stale.get("staleness/max"):
        metrics |= stale
    metrics["group/dropped"] = float(credited.num_dropped_groups)
    if config.max_resamples:
        metrics["group/resampled"] = float(len(played.batch.passed_over))
    metrics["rollout/temperature"] = temperature
    metrics |= await worker.run(partial(learner.learn, lesson, step=step))
    metrics |= overlap()
    event("update ended")
    scaled = learner.scales_gradients
    return Update(metrics, credited, why_nothing_trained(played.everyone, metrics, config, scaled=scaled))


@dataclass(frozen=True, slots=True)
class Observed:
    """What the reward made of its own scores."""

    state: dict[str, Any] | None = None
    """Its running statistics; None where it failed."""
    failure: str | None = None
    """In one line: the training goes on."""
    mistake: Exception | None = None
    """An error that must travel, once the step is whole."""


async def observe(reward_fn: RewardFunction, groups: Sequence[TrajectoryGroup]) -> Observed:
    """Show the reward its scores. It is user code: what it raises is one line, and the step goes on."""

    def look() -> dict[str, Any]:
        reward_fn.observe([result_of(member) for group in groups for member in group.scored])
        return reward_fn.state()

    try:
        return Observed(await in_thread(look))
    except (*PROGRAMMING_ERRORS, StatesetError) as error:
        return Observed(mistake=error)
    except Exception as error:  # the boundary to user code
        failure = f"{reward_fn.name}.observe failed: {format_error(error)}"
        _log.error(f"reward {failure}; training goes on")
        return Observed(failure=failure)
