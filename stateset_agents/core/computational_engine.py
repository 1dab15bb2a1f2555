"""Many episodes at once: scenarios in, scored groups out. The trainer and the evaluator call it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from stateset_agents.backends.base import Session
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Environment
from stateset_agents.core.episode import EpisodeSeeds, run_episode
from stateset_agents.core.reward import Reward, RewardResult, as_reward, score_trajectories
from stateset_agents.core.scenario import Scenario
from stateset_agents.core.scoring import turn_rewards
from stateset_agents.core.trajectory import Status, Trajectory, TrajectoryGroup
from stateset_agents.core.waiting import all_or_cancel
from stateset_agents.errors import ConfigurationError, RewardFailure
from stateset_agents.streams import derive
from stateset_agents.tracking.logging import get_logger

__all__ = ["ComputationalEngine", "create_computational_engine"]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    place: int
    """Of the scenario in the call."""
    session: Session
    scenario: Scenario
    seeds: EpisodeSeeds


class ComputationalEngine:
    """Plays every scenario `num_generations` times, bounded by `max_concurrent`, and scores the groups."""

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment,
        reward_fn: Reward,
        *,
        num_generations: int = 8,
        max_concurrent: int = 64,
        episode_retries: int = 1,
        deterministic: bool = True,
    ) -> None:
        """`deterministic`: no decode step starts while any conversation's reply is outstanding, so the
        batches do not depend on how long anyone takes. Leave it off where users or tools are slow."""
        if num_generations < 1:
            raise ConfigurationError(f"num_generations must be at least 1, got {num_generations!r}")
        if max_concurrent < 1:
            raise ConfigurationError(f"max_concurrent must be at least 1, got {max_concurrent!r}")
        if episode_retries < 0:
            raise ConfigurationError(f"episode_retries must be at least 0, got {episode_retries!r}")
        self.agent = agent
        self.environment = environment
        self.reward_fn = as_reward(reward_fn)
        self.num_generations = num_generations
        self.max_concurrent = max_concurrent
        self.episode_retries = episode_retries
        self.deterministic = deterministic
        self.num_retries = 0
        """Episodes played again after a failure, over the engine's life."""

    async def rollout(
        self, scenarios: Sequence[Scenario], *, seed: int, step: int, temperature: float | None = None
    ) -> list[TrajectoryGroup]:
        """One scored group per scenario, in the order given.

        A member whose environment or backend failed is played again up to `episode_retries` times and
        then stays FAILED and unscored; a reward that fails leaves its member unscored.
        """
        queue = deque(self._jobs(scenarios, seed, step))
        members: list[list[Trajectory]] = [[] for _ in scenarios]
        complete = [asyncio.Event() for _ in scenarios]
        groups: dict[int, TrajectoryGroup] = {}
        num_lanes = min(self.max_concurrent, len(queue))
        everyone = asyncio.Barrier(max(1, num_lanes))

        async def lane() -> None:
            with self.agent.backend.lane() if self.deterministic else nullcontext():
                await everyone.wait()  # all lanes have joined the clock before any turn is asked for
                while queue:
                    job = queue.popleft()
                    own = members[job.place]
                    own.append(await self._play(job, temperature))
                    if len(own) == self.num_generations:
                        complete[job.place].set()

        async def group(place: int) -> None:
            await complete[place].wait()
            groups[place] = await self._score(f"{step}/{scenarios[place].id}", members[place])

        await all_or_cancel([*(lane() for _ in range(num_lanes)), *map(group, range(len(scenarios)))])
        return [groups[place] for place in range(len(scenarios))]

    def _jobs(self, scenarios: Sequence[Scenario], seed: int, step: int) -> Iterator[_Job]:
        """Members of one scenario share a user seed; a scenario that comes again meets another user."""
        numbers = self.agent.new_episodes(len(scenarios))
        times: Counter[str] = Counter()
        for place, (number, scenario) in enumerate(zip(numbers, scenarios, strict=True)):
            path: list[int | str] = [step, scenario.id]
            if times[scenario.id]:
                path.append(times[scenario.id])
            times[scenario.id] += 1
            user = derive(seed, "user", *path)
            for member in range(self.num_generations):
                seeds = EpisodeSeeds(user=user, agent=derive(seed, "agent", *path, member))
                yield _Job(place, Session(number, member), scenario, seeds)

    async def _play(self, job: _Job, temperature: float | None) -> Trajectory:
        for attempt in range(self.episode_retries + 1):
            trajectory = await run_episode(
                self.agent,
                self.environment,
                job.scenario,
                seeds=job.seeds,
                session=job.session,
                temperature=temperature,
            )
            if trajectory.status is not Status.FAILED:
                break
            _log.warning(
                "conversation failed",
                scenario=job.scenario.id,
                member=job.session.member,
                error=trajectory.error,
            )
            if attempt < self.episode_retries:
                self.num_retries += 1
        return trajectory

    async def _score(self, key: str, members: Sequence[Trajectory]) -> TrajectoryGroup:
        ordered = sorted(members, key=lambda trajectory: trajectory.member)
        able = [trajectory for trajectory in ordered if trajectory.status is not Status.FAILED]
        scored = dict(zip((t.member for t in able), await self._rewards(able), strict=True))
        return TrajectoryGroup(key=key, trajectories=tuple(scored.get(t.member, t) for t in ordered))

    async def _rewards(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        results = await score_trajectories(self.reward_fn, trajectories)
        scored = []
        for trajectory, result in zip(trajectories, results, strict=True):
            scored.append(_with_score(trajectory, result))
        return scored


def _with_score(trajectory: Trajectory, result: RewardResult | RewardFailure) -> Trajectory:
    try:
        if isinstance(result, RewardFailure):
            raise result
        earned = () if result.score is None else turn_rewards(result, len(trajectory.turns))
    except RewardFailure as failure:
        _log.warning("reward failed", scenario=trajectory.scenario.id, error=str(failure))
        return replace(trajectory, error=f"unscored: {failure}")
    return replace(trajectory, reward=result.score, breakdown=result.breakdown, turn_rewards=earned)


def create_computational_engine(
    agent: MultiTurnAgent, environment: Environment, reward_fn: Reward, **settings: Any
) -> ComputationalEngine:
    """A `ComputationalEngine`; settings as `ComputationalEngine` takes them."""
    return ComputationalEngine(agent, environment, reward_fn, **settings)
