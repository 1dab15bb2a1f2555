"""The learning part of a step: credit, update, and the figures of both. Blocking work goes to the worker
thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stateset_agents.backends.base import Backend, TrainableBackend
from stateset_agents.core.reward import RewardFunction
from stateset_agents.core.scoring.base import result_of
from stateset_agents.runtime.event_loop import LoopLag
from stateset_agents.runtime.machine import peak_memory, trim_memory
from stateset_agents.runtime.tasks import Worker, in_thread
from stateset_agents.runtime.user_code import format_error
from stateset_agents.tracking.monitors import Finding
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.metrics import (
    rollout_metrics,
    staleness_metrics,
    untrained_tokens,
    why_nothing_trained,
)
from stateset_agents.training.loop.rollouts import EventSink, Played, RolloutSource, check_staleness
from stateset_agents.training.update.batch import CreditedBatch, given_credit
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.training.update.teacher import Teacher
from stateset_agents.types.errors import PROGRAMMING_ERRORS, StatesetError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import expect_that
from stateset_agents.types.trajectory import TokenLogprobs, TrajectoryGroup

_log = get_logger(__name__)


class StepWatch:
    """The cost of one step beside its time: the engine's counts, the event loop's longest wait."""

    def __init__(self, backend: Backend, lag: LoopLag) -> None:
        self.lag = lag
        self._backend = backend
        self._counts = dict(backend.counts())

    def metrics(self) -> dict[str, float]:
        """`engine/*`, where the backend counts and did anything, `time/loop_lag`, `time/loop_lag_user` and
        `memory/*`."""
        counts = self._backend.counts()
        done = {name: float(count - self._counts.get(name, 0)) for name, count in counts.items()}
        metrics = {"time/loop_lag": self.lag.longest, "time/loop_lag_user": self.lag.in_user_code}
        metrics |= peak_memory()
        if any(done.values()):
            idle, rows = done.pop("idle_rows", 0.0), done.get("decode_rows", 0.0)
            metrics |= {f"engine/{name}": count for name, count in done.items()}
            metrics["engine/occupancy"] = 1 - idle / rows if rows else 1.0
        return metrics


@dataclass(frozen=True, slots=True)
class Update:
    """One step's update; once the step is in the logs, with all of its metrics."""

    metrics: dict[str, float]
    batch: CreditedBatch
    logprobs: Sequence[TokenLogprobs | None]
    """Log-probs of `batch.samples`, where they were recorded; else empty."""
    failure: str | None
    """Why the step could not train; None where it did, or where all conversations were equally good. Of a
    step in the logs: why the training must end with it."""
    findings: Sequence[Finding] = ()
    """Warnings that came for the first time."""


async def update_policy(
    learner: PolicyLearner,
    backend: Backend,
    played: Played,
    source: RolloutSource,
    config: TrainingConfig,
    worker: Worker,
    event: EventSink,
    *,
    teacher: Teacher | None = None,
    step: int,
    temperature: float,
    versions: Sequence[int],
) -> Update:
    """Credit the groups, let the teacher add its word, then learn from them.

    `temperature`: of the rollouts; `versions`: of the policies so far. Raises TrainingStopped for a token
    that is older than `max_staleness` allows, BackendError where the teacher does not answer.
    """
    event("update begun", groups=list(played.batch.selected))
    overlap = source.watch_overlap()
    learner.set_temperature(temperature)
    if config.rollout_sleep:
        await backend.sleep()
    if played.advantages is None:
        batch = await worker.run(partial(learner.credit, played.selected))
    else:
        batch = given_credit(played.selected, played.advantages)
    metrics = await worker.run(rollout_metrics, played.all_groups)  # thousands of turns: not in the loop
    if isinstance(backend, TrainableBackend) and backend.trained_tokens is not None:
        metrics |= await worker.run(untrained_tokens, played.all_groups, backend.trained_tokens)
    stale = staleness_metrics(played.selected, versions)
    if source.max_staleness is not None:
        check_staleness(int(stale.get("staleness/max", 0.0)), source.max_staleness)
    if source.max_staleness is not None or stale.get("staleness/max"):
        metrics |= stale
    metrics["group/dropped"] = float(batch.num_dropped_groups)
    if config.max_resamples:
        metrics["group/resampled"] = float(len(played.batch.filtered))
    metrics["rollout/temperature"] = temperature
    if teacher is not None:
        batch, teacher_metrics = await teacher.guide(batch, temperature=temperature)
        metrics |= teacher_metrics
    learned = await worker.run(partial(learner.learn, batch, step=step))
    if config.rollout_sleep:  # the next rollouts' cache comes on top of what is not given back
        await worker.run(trim_memory)
    metrics |= learned.metrics
    metrics |= overlap()
    event("update ended")
    failure = learned.failure or (None if batch.samples else why_nothing_trained(played.all_groups, config))
    return Update(metrics, batch, learned.logprobs, failure)


@dataclass(frozen=True, slots=True)
class Observed:
    """The result of a reward function's `observe`."""

    state: dict[str, Any] | None = None
    """The reward's running statistics; None where it failed."""
    failure: str | None = None
    """The error in one line; the training goes on."""
    mistake: Exception | None = None
    """A programming error, to be raised once the step is finished."""


async def observe(reward_fn: RewardFunction, groups: Sequence[TrajectoryGroup]) -> Observed:
    """Call `reward_fn.observe` with the scores. It is user code: an error is logged, and the step goes on."""

    def observe_scores() -> dict[str, Any]:
        reward_fn.observe([result_of(member) for group in groups for member in group.scored])
        return reward_fn.state()

    try:
        return Observed(await in_thread(observe_scores))
    except (*PROGRAMMING_ERRORS, StatesetError) as error:
        return Observed(mistake=error)
    except Exception as error:  # the boundary to user code
        failure = f"{reward_fn.name}.observe failed: {format_error(error)}"
        _log.error(f"reward {failure}; training goes on")
        return Observed(failure=failure)


# A sampling temperature that follows the reward. The trainer steps it after every rollout.


class TemperatureScheduler:
    """Cools while the reward is at its target, warms again (slower) while it is below.

    An agent that is good enough samples closer to what it knows; one that falls back explores more.

    >>> scheduler = TemperatureScheduler(1.0, min_temp=0.3, decay_rate=0.5)
    >>> scheduler.step(0.9)  # at or above the target of .7: times the decay
    0.5
    >>> scheduler.step(0.2)  # below it: 1 % warmer
    0.505
    """

    WARMING = 1.01
    """Factor while the reward is below the target."""

    def __init__(self, initial_temp: float = 1.0, min_temp: float = 0.3, decay_rate: float = 0.995) -> None:
        """The temperature starts at `initial_temp`, and stays between that and `min_temp`."""
        rule = f"be above 0 and at most the initial {initial_temp!r}"
        expect_that(0 < min_temp <= initial_temp, "min_temp", rule, min_temp)
        expect_that(0 < decay_rate <= 1, "decay_rate", "be above 0 and at most 1", decay_rate)
        self.initial_temp = initial_temp
        self.min_temp = min_temp
        self.decay_rate = decay_rate
        self.current_temp = initial_temp
        """The present one; a resume sets it."""

    def step(self, mean_reward: float, target_reward: float = 0.7) -> float:
        """The temperature after a rollout with this mean reward."""
        if mean_reward < target_reward:
            self.current_temp = min(self.initial_temp, self.current_temp * self.WARMING)
        else:
            self.current_temp = max(self.min_temp, self.current_temp * self.decay_rate)
        return self.current_temp


def next_temperature(config: TrainingConfig, temperature: float, mean_reward: float | None) -> float:
    """The temperature after a rollout at `temperature` with this mean reward; None (nothing was scored) moves
    nothing."""
    if config.temperature_schedule == "none" or mean_reward is None:
        return temperature
    scheduler = TemperatureScheduler(
        config.temperature, min_temp=config.temperature_min, decay_rate=config.temperature_decay
    )
    scheduler.current_temp = temperature
    return scheduler.step(mean_reward, config.temperature_target)
