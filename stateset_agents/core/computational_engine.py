"""Many episodes at once: scenarios in, scored groups out. The trainer and the evaluator call it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Protocol, TypeVar

from stateset_agents.backends.base import Session
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.environment import Environment, expect_environment
from stateset_agents.core.reward import Reward, as_reward, score_trajectories
from stateset_agents.core.rollout.episode import EpisodeSeeds, Fork, Forks, Player, run_branch, run_episode
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.core.rollout.time_limited_environment import TimeLimitedEnvironment
from stateset_agents.core.scoring.base import with_score
from stateset_agents.core.sources.scenario_files import as_scenarios
from stateset_agents.runtime.circuit_breakers import FaultTolerance
from stateset_agents.runtime.pending_calls import awaitable
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.runtime.user_code import RateLimitedWarnings
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Scenarios
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect, expect_that
from stateset_agents.types.trajectory import UNANSWERED, Branch, Span, Status, Trajectory, TrajectoryGroup

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    place: int
    """Index of the scenario in the call."""
    session: Session
    scenario: Scenario
    seeds: EpisodeSeeds


@dataclass(frozen=True, slots=True)
class _BranchJob:
    place: int
    session: Session
    stream: int
    fork: Fork
    owner: Session
    """The session of the conversation that the branch leaves."""


class Kept(Protocol):
    """Conversations that were played before and need not be played again."""

    def find(self, scenario: Scenario, *, seed: int, member: int) -> Trajectory | None:
        """The one of this scenario, user's seed and member, unscored."""
        ...

    def add(self, trajectory: Trajectory) -> None:
        """Remember a played conversation until its group is scored; it must not have failed."""
        ...


TakeStep = Callable[[Sequence[Trajectory], Sequence[float]], Awaitable[float]]
"""(trajectories, an advantage of each) -> the policy's mean loss before the gradient step on them."""
J = TypeVar("J", bound=_Job | _BranchJob)


class _EpisodeFailed(Exception):
    """A conversation that environment or backend broke; the error never leaves the engine."""

    def __init__(self, trajectory: Trajectory) -> None:
        super().__init__(trajectory.error)
        self.trajectory = trajectory


class ComputationalEngine:
    """Plays every scenario `num_generations` times, within `limits`, and scores the groups.

    With `num_branches` it also plays other ways on: after every turn that is not a conversation's last it
    takes that many forks, and when all groups are scored, plays each fork to an end of its own.
    """

    def __init__(
        self,
        agent: Player,
        environment: Environment,
        reward_fn: Reward,
        *,
        num_generations: int = 8,
        num_branches: int = 0,
        deterministic: bool = True,
        limits: RolloutLimits | None = None,
    ) -> None:
        """`deterministic`: no decode step starts while any conversation's reply is outstanding, so the
        batches do not depend on how long anyone takes. Leave it off where users or tools are slow.
        """
        if isinstance(agent, type) or not isinstance(agent, Player):
            expect("agent", agent, MultiTurnAgent, "write MultiTurnAgent(AgentConfig(...))")
        expect_environment(environment)
        expect_that(num_generations >= 1, "num_generations", "be at least 1", num_generations)
        expect_that(num_branches >= 0, "num_branches", "be at least 0", num_branches)
        if num_branches and not isinstance(agent, MultiTurnAgent):
            raise ConfigurationError(
                f"branches need a MultiTurnAgent, got {type(agent).__name__}: give the engine num_branches=0"
            )
        reward = as_reward(reward_fn)
        if num_branches and reward.scope == "group":
            raise ConfigurationError(
                f"reward {reward.name} compares the members of a group, and a branch is none: use "
                "a reward that scores each conversation by itself, or another advantage_estimator"
            )
        self._player = agent
        self.environment = environment
        self.reward_fn = reward
        self.num_generations = num_generations
        self.num_branches = num_branches
        self.deterministic = deterministic
        self.limits = limits or RolloutLimits()
        self.fault_tolerance = FaultTolerance(self.limits.faults)
        """Circuit breakers and counts of what was tried again, over the engine's life."""
        self._environment = TimeLimitedEnvironment(
            environment, self.limits.turn_timeout, self.fault_tolerance
        )
        self._warnings = RateLimitedWarnings()
        self.take_step: TakeStep | None = None
        """Updates the policy; the trainer of these weights sets it."""

    @property
    def agent(self) -> MultiTurnAgent:
        """Raises ConfigurationError where the agent's model is behind an endpoint."""
        expect("agent", self._player, MultiTurnAgent, "write MultiTurnAgent(AgentConfig(...))")
        assert isinstance(self._player, MultiTurnAgent)
        return self._player

    @property
    def num_retries(self) -> int:
        """Episodes, answers and scores that were asked for again, over the engine's life."""
        return self.fault_tolerance.num_retries.total()

    @property
    def num_timeouts(self) -> int:
        """Answers and scores that came too late, and conversations that were cut, over the engine's life."""
        return self.fault_tolerance.num_timeouts

    @property
    def repeatable(self) -> bool:
        """True as long as another run would repeat all: no retry, no time limit exceeded."""
        return self.fault_tolerance.repeatable

    async def rollout(
        self,
        scenarios: Scenarios,
        *,
        seed: int,
        step: int,
        temperature: float | None = None,
        earlier: Sequence[Scenario] = (),
        sizes: Sequence[int] | None = None,
        on_scored: Callable[[int], None] | None = None,
        kept: Kept | None = None,
    ) -> list[TrajectoryGroup]:
        """One scored group per scenario, in the order given.

        `sizes`: [scenarios] members of each group, `num_generations` where it is left out.

        `earlier`: what was played in this step before; a scenario that comes again meets another user.
        `on_scored` is called with the place of each scenario as its group's members have been scored.
        `kept`: conversations of an earlier call, which are scored without being played; it gets this one's.
        A member whose environment or backend failed is played again up to `episode_retries` times and
        then stays FAILED and unscored; a reward that fails leaves its member unscored. A branch that fails
        is not played again, its fork is spent; those of an unscored member are not played at all.

        Raises ConfigurationError, before anything is played, for a scenario that the reward cannot score by.
        """
        scenarios = as_scenarios(scenarios)
        for scenario in scenarios:
            self.reward_fn.check_scenario(scenario)
        sizes = [self.num_generations] * len(scenarios) if sizes is None else sizes
        times = Counter(scenario.id for scenario in earlier)
        jobs: list[_Job] = []
        episodes = self._player.new_episodes(len(scenarios))
        for place, (episode, scenario, size) in enumerate(zip(episodes, scenarios, sizes, strict=True)):
            jobs += self._members(place, episode, scenario, seed, step, times[scenario.id], size)
            times[scenario.id] += 1
        branching: AbstractAsyncContextManager[Forks | None] = nullcontext()
        if self.num_branches:
            of, bounded = self._environment.name, self._environment.bounded
            branching = Forks(self.num_branches, of=of, bounded=bounded)
        try:
            async with branching as forks:
                play = partial(self._play, forks=forks, temperature=temperature, kept=kept)
                scored = await self._in_groups(jobs, play, self._rewarded, on_scored)
                branches: dict[int, list[Branch]] = {}
                if forks is not None:
                    branch_jobs = list(self._branch_jobs(jobs, scored, forks))
                    play_branch = partial(self._play_branch, forks=forks, temperature=temperature)
                    branches = await self._in_groups(branch_jobs, play_branch, self._branches_rewarded)
        finally:
            if self.num_branches:  # until then the backend keeps what their members have cached
                for job in jobs:
                    await self._player.release(job.session)
        return [
            TrajectoryGroup(
                key=f"{step}/{scenario.id}",
                trajectories=tuple(scored[place]),
                branches=tuple(branches.get(place, ())),
            )
            for place, scenario in enumerate(scenarios)
        ]

    async def play_group(
        self,
        scenario: Scenario,
        *,
        seed: int,
        step: int,
        times: int = 0,
        slots: asyncio.Semaphore,
        temperature: float | None = None,
        on_end: Callable[[], None] | None = None,
    ) -> TrajectoryGroup:
        """One scored group by itself, for a caller that keeps several under way; as in `rollout`, without
        branches and without deterministic scheduling.

        `step` and `times`: how often the scenario comes before in that step; users and samples are those of a
        `rollout` of it. `slots` are held one by each conversation; `on_end` is called as each of them ends.
        """
        if self.num_branches or self.deterministic:
            raise ConfigurationError(
                "groups that are played one by one have no branches and no deterministic batches: give the "
                "engine num_branches=0 and deterministic=False"
            )
        [episode] = self._player.new_episodes(1)

        async def member(job: _Job) -> Trajectory:
            async with slots:
                trajectory = await self._play(job, None, temperature)
            if on_end is not None:
                on_end()
            return trajectory

        jobs = self._members(0, episode, scenario, seed, step, times, self.num_generations)
        played = await gather_or_cancel(member(job) for job in jobs)
        return TrajectoryGroup(key=f"{step}/{scenario.id}", trajectories=tuple(await self._rewarded(played)))

    @awaitable
    async def _update_policy(self, trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> float:
        """One gradient step on sampled trajectories, each weighted by its advantage; the policy's mean loss.

        The learner takes it, with its loss, masks, clipping and optimiser, and the agent has the new weights.
        Raises ConfigurationError for an engine of no trainer, and for another number of advantages.
        """
        if self.take_step is None:
            raise ConfigurationError(
                "this engine has no learner to update: take trainer.engine of an initialised trainer"
            )
        return await self.take_step(trajectories, advantages)

    def flush_warnings(self) -> None:
        """Say how often the warnings of groups that were played one by one have come, and begin anew."""
        self._warnings.flush()

    async def _in_groups(
        self,
        jobs: Sequence[J],
        play: Callable[[J], Awaitable[T]],
        finish: Callable[[list[T]], Awaitable[list[T]]],
        on_finished: Callable[[int], None] | None = None,
    ) -> dict[int, list[T]]:
        """Play jobs in order, `max_concurrent` at a time; each group is finished as soon as it is played.

        Returns what `finish` made of each place's results, which are given in the order of the jobs.
        """
        queue = deque(enumerate(jobs))
        played: dict[int, dict[int, T]] = {job.place: {} for job in jobs}
        sizes = Counter(job.place for job in jobs)
        complete = {place: asyncio.Event() for place in sizes}
        finished: dict[int, list[T]] = {}
        num_participants = min(self.limits.max_concurrent, len(queue))
        all_ready = asyncio.Barrier(max(1, num_participants))

        async def participant() -> None:
            with self._player.participate() if self.deterministic else nullcontext():
                await all_ready.wait()  # all participate before any turn is asked for
                while queue:
                    number, job = queue.popleft()
                    results = played[job.place]
                    results[number] = await play(job)
                    if len(results) == sizes[job.place]:
                        complete[job.place].set()

        async def group(place: int) -> None:
            await complete[place].wait()
            finished[place] = await finish([result for _, result in sorted(played[place].items())])
            if on_finished is not None:
                on_finished(place)

        try:
            await gather_or_cancel([*(participant() for _ in range(num_participants)), *map(group, sizes)])
        finally:
            self._warnings.flush()
        return finished

    def _members(
        self,
        place: int,
        episode: int,
        scenario: Scenario,
        seed: int,
        step: int,
        times: int,
        size: int,
    ) -> Iterator[_Job]:
        """The members of one group, which share a user seed; `times`: how often its scenario came before in
        the step."""
        path: list[int | str] = [step, scenario.id, *([times] if times else [])]
        user = derive(seed, "user", *path)
        for member in range(size):
            seeds = EpisodeSeeds(user=user, agent=derive(seed, "agent", *path, member))
            yield _Job(place, Session(episode, member), scenario, seeds)

    def _branch_jobs(
        self, jobs: Sequence[_Job], scored: Mapping[int, Sequence[Trajectory]], forks: Forks
    ) -> Iterator[_BranchJob]:
        """The branches to play, by group, member and turn; a group's sessions go on counting after its
        members'."""
        members = {place: {t.member: t for t in group} for place, group in scored.items()}
        sessions = {place: count(len(group)) for place, group in scored.items()}
        for job in jobs:
            if members[job.place][job.session.member].reward is None:
                continue  # it trains nothing: what its states are worth is nobody's question
            for number, fork in enumerate(forks.held(job.session)):
                session = Session(job.session.episode, next(sessions[job.place]))
                stream = derive(job.seeds.agent, "branch", number)
                yield _BranchJob(job.place, session, stream, fork, job.session)

    async def _play(
        self, job: _Job, forks: Forks | None, temperature: float | None, kept: Kept | None = None
    ) -> Trajectory:
        member = job.session.member
        if kept is not None and (episode := kept.find(job.scenario, seed=job.seeds.user, member=member)):
            return episode

        async def attempt(_: int) -> Trajectory:
            trajectory = await run_episode(
                self._player,
                self._environment,
                job.scenario,
                seeds=job.seeds,
                session=job.session,
                temperature=temperature,
                between_turns=None if forks is None else forks.taken(job.session),
                seconds=self.limits.episode_timeout,
            )
            self.fault_tolerance.num_timeouts += "timed_out" in trajectory.metadata
            if trajectory.status is Status.FAILED:
                if forks is not None:
                    await forks.discard(job.session)
                self._warn("conversation failed", trajectory)
                raise _EpisodeFailed(trajectory)
            return trajectory

        try:
            played = await self.fault_tolerance.retry(
                attempt,
                name="episode",
                times=self.limits.episode_retries,
                stream=derive(job.seeds.agent, "retry"),
                service=self._environment.service,
                counts=_may_be_played_again,
            )
        except _EpisodeFailed as failure:
            return failure.trajectory
        if kept is not None:
            kept.add(played)
        return played

    async def _play_branch(self, job: _BranchJob, forks: Forks, temperature: float | None) -> Branch:
        forks.take(job.owner, job.fork)
        trajectory = await run_branch(
            self._player,
            job.fork,
            stream=job.stream,
            session=job.session,
            temperature=temperature,
            seconds=self.limits.episode_timeout,
        )
        self.fault_tolerance.num_timeouts += "timed_out" in trajectory.metadata
        if trajectory.status is Status.FAILED:
            self._warn("branch failed", trajectory)
        return Branch(turn=len(job.fork.trajectory.turns), trajectory=trajectory)

    async def _branches_rewarded(self, branches: list[Branch]) -> list[Branch]:
        scored = await self._rewarded([branch.trajectory for branch in branches])
        return [replace(old, trajectory=new) for old, new in zip(branches, scored, strict=True)]

    async def _rewarded(self, trajectories: list[Trajectory]) -> list[Trajectory]:
        """The same ones; those that did not fail have been shown to the reward."""
        able = [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]
        began = time.monotonic()
        results = iter(
            await score_trajectories(
                self.reward_fn, able, seconds=self.limits.reward_timeout, fault_tolerance=self.fault_tolerance
            )
        )
        scoring = Span("reward", began, time.monotonic())
        scored = []
        for trajectory in trajectories:
            if trajectory.status is not Status.FAILED:
                trajectory, failure = with_score(trajectory, next(results))
                if failure is not None:
                    self._warnings.warn("reward failed", str(failure), scenario=trajectory.scenario.id)
            scored.append(replace(trajectory, spans=(*trajectory.spans, scoring)))
        return scored

    def _warn(self, what: str, trajectory: Trajectory) -> None:
        self._warnings.warn(
            what, trajectory.error or "", scenario=trajectory.scenario.id, member=trajectory.member
        )


def _may_be_played_again(error: Exception) -> bool:
    """An endpoint that did not answer was asked several times already."""
    return not (isinstance(error, _EpisodeFailed) and error.trajectory.metadata.get(UNANSWERED))


def create_computational_engine(
    agent: Player, environment: Environment, reward_fn: Reward, **settings: Any
) -> ComputationalEngine:
    """A `ComputationalEngine`; settings as `ComputationalEngine` takes them."""
    return ComputationalEngine(agent, environment, reward_fn, **settings)
