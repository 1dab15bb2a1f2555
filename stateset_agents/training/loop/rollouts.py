"""The groups that a step learns from: their admission, and a source of conversations, played when the step
asks for them.

`overlapped_rollouts.py` has the other source, whose conversations go on while the trainer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.runs.lifecycle import NothingBeside, Pausable
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.plan import Curriculum
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.loop.weight_sync import WeightSync
from stateset_agents.training.processes import ProcessGroup
from stateset_agents.training.update.batch import assign_credit
from stateset_agents.types.errors import TrainingStopped
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import TrajectoryGroup

# Which groups may begin, which train next, how stale they may be: bookkeeping without waiting or tensors.
#
# Both sources of rollouts use it. A group is one scenario with its conversations. Groups are admitted in the
# order of their scenarios, finish in any order, and train in the order of their admission: a step waits for
# its first group, so that slow conversations train as often as quick ones. No group is dropped for its age;
# the age is bounded where groups are admitted:
#
#     capacity = min(max_concurrent - running, (max_staleness + step + 1) B - (accepted + running))
#
# The rule is AReaL's (https://arxiv.org/abs/2505.24298), which trains whatever finished first; by itself it
# bounds nothing. With admission order it does: the n-th accepted group trains in step n // B, and it began at
# a step that is at most `max_staleness` earlier.


class Verdict(StrEnum):
    """The use of a finished group."""

    SIGNAL = "signal"
    """The members differ."""
    NO_SIGNAL = "alike"
    """All members earned the same: no advantage, no gradient."""
    FAILED = "failed"
    """Too few members have a score."""


class End(StrEnum):
    """The end of a group; each has one end, whatever happened in between."""

    TRAINED = "trained"
    """It was selected for its step's update, which may leave out what has no gradient."""
    FILTERED = "filtered"
    """The members were alike, and another group took its place."""
    FAILED = "failed"
    """Fewer than `min_group_size` members have a score."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one step; a group's index counts the groups of the run from 0."""

    selected: tuple[int, ...]
    """The step's groups, in order of admission."""
    filtered: tuple[int, ...]
    """Groups without signal that others replaced."""
    ends: Mapping[int, End]
    """The end of each of them when the step has trained, in order of admission."""


@dataclass(slots=True)
class _Group:
    began: int
    """Steps done when it was admitted."""
    num_live: int
    """Conversations that have not ended."""
    verdict: Verdict | None = None
    """The verdict; None while the group runs."""


@dataclass(slots=True)
class _Step:
    num_missing: int
    """Groups that it needs before it can train."""
    selected: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)


class Admission:
    """Counts groups in and out; `submitted == accepted + rejected + running` holds at all times."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        remaining: int,
        max_staleness: int = 0,
        max_concurrent: int | None = None,
        group_size: int = 1,
        max_resamples: int = 0,
        first: int = 0,
    ) -> None:
        """`remaining`: groups that are still to train, the last step may be short; `max_concurrent`:
        conversations at once, of which a group has `group_size`; `max_resamples`: how many groups without
        signal are replaced in one step, further ones train; `first`: index of the first group."""
        self._groups_per_step = groups_per_step
        self._remaining = remaining
        self._max_staleness = max_staleness
        self._max_concurrent = max_concurrent
        self._group_size = group_size
        self._max_resamples = max_resamples
        self._groups: dict[int, _Group] = {}
        """Groups that have not ended, by index."""
        self._next = self._next_unassigned = first
        """Index of the next group to admit, and of the first that no step has yet."""
        self._conversations = 0
        self._steps: list[_Step] = []
        """The coming steps; all but the last are full."""
        self._num_selected = 0
        """Groups that steps train on, the finished steps included."""
        self._in_training = False
        self.steps_done = 0
        self.submitted = self.accepted = self.rejected = self.running = 0
        """Groups: admitted; finished and selected; finished and filtered; running."""

    @property
    def capacity(self) -> int:
        """Groups that may begin now."""
        allowed = min((self._max_staleness + self.steps_done + 1) * self._groups_per_step, self._remaining)
        free = allowed - (self.accepted + self.running)
        if self._max_concurrent is not None:
            slots = self._max_concurrent - self._conversations
            free = min(free, -(-slots // self._group_size))
        return max(0, free)

    @property
    def num_waiting(self) -> int:
        """Finished groups that wait for their step."""
        finished = len(self._groups) - self.running
        if not self._in_training:
            return finished
        return finished - len(self._steps[0].selected) - len(self._steps[0].filtered)

    def admit(self) -> int:
        """Begin the next group, where `capacity` allows it; returns its index."""
        index, self._next = self._next, self._next + 1
        self._groups[index] = _Group(began=self.steps_done, num_live=self._group_size)
        self._conversations += self._group_size
        self.submitted += 1
        self.running += 1
        return index

    def conversation_ended(self, index: int) -> None:
        """One of the group's conversations has ended, its siblings go on."""
        self._groups[index].num_live -= 1
        self._conversations -= 1

    def finish(self, index: int, verdict: Verdict) -> None:
        """The whole group is played and scored."""
        group = self._groups[index]
        self._conversations -= group.num_live
        group.num_live, group.verdict = 0, verdict
        self.running -= 1
        self.accepted += 1
        # Steps get the finished groups in order, up to the first that still runs.
        while (head := self._groups.get(self._next_unassigned)) is not None and head.verdict is not None:
            if not self._steps or not self._steps[-1].num_missing:
                size = min(self._groups_per_step, self._remaining - self._num_selected)
                self._steps.append(_Step(size))
            step = self._steps[-1]
            if head.verdict is not Verdict.SIGNAL and len(step.filtered) < self._max_resamples:
                step.filtered.append(self._next_unassigned)
                self.accepted -= 1
                self.rejected += 1
            else:
                step.selected.append(self._next_unassigned)
                step.num_missing -= 1
                self._num_selected += 1
            self._next_unassigned += 1

    @property
    def is_ready(self) -> bool:
        """True when the next step can begin."""
        return bool(self._steps) and not self._steps[0].num_missing and not self._in_training

    def next_batch(self) -> Batch:
        """The groups of the next step, once `is_ready`; call `complete_step` when it has trained.

        Raises TrainingStopped where a group began earlier than `max_staleness` allows.
        """
        step = self._steps[0]
        for index in step.selected:
            check_staleness(self.steps_done - self._groups[index].began, self._max_staleness)
        self._in_training = True
        ends = dict.fromkeys(step.selected, End.TRAINED) | dict.fromkeys(step.filtered, End.FILTERED)
        failed = [index for index in ends if self._groups[index].verdict is Verdict.FAILED]
        ends |= dict.fromkeys(failed, End.FAILED)
        return Batch(tuple(step.selected), tuple(step.filtered), dict(sorted(ends.items())))

    def complete_step(self) -> None:
        """The step of `next_batch` has trained, and groups that begin from now on are of its policy."""
        step = self._steps.pop(0)
        self._in_training = False
        self.steps_done += 1
        for index in (*step.selected, *step.filtered):
            del self._groups[index]


def check_staleness(staleness: int, max_staleness: int) -> None:
    """Raises TrainingStopped above the bound; called as a step begins to train."""
    if staleness > max_staleness:
        raise TrainingStopped(
            f"a group of staleness {staleness} came, and max_staleness is {max_staleness}: please report it"
        )


class EventSink(Protocol):
    """Writes an event, with the step that it belongs to."""

    def __call__(self, name: str, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Played:
    """The groups of one step."""

    groups: Mapping[int, TrajectoryGroup]
    """Groups by their place in the run, in order; those that were passed over too."""
    batch: Batch
    advantages: Sequence[Sequence[float]] | None = None
    """[groups][members] to learn from in place of the estimator's."""

    @classmethod
    def by_hand(
        cls,
        groups: Sequence[TrajectoryGroup],
        first: int,
        config: TrainingConfig,
        advantages: Sequence[Sequence[float]] | None = None,
    ) -> Played:
        """Groups that somebody else had played: all of them train."""
        ends = {
            place: End.FAILED if verdict_of(group, config) is Verdict.FAILED else End.TRAINED
            for place, group in enumerate(groups, start=first)
        }
        return cls(dict(enumerate(groups, start=first)), Batch(tuple(ends), (), ends), advantages)

    @property
    def all_groups(self) -> list[TrajectoryGroup]:
        """Every group, in order."""
        return list(self.groups.values())

    @property
    def selected(self) -> list[TrajectoryGroup]:
        """The groups that train, in order."""
        return [self.groups[place] for place in self.batch.selected]


def verdict_of(group: TrajectoryGroup, config: TrainingConfig) -> Verdict:
    """The use of a group. Whether members are alike is asked only where such groups are replaced."""
    if len(group.scored) < config.min_group_size:
        return Verdict.FAILED
    if config.max_resamples:
        samples = assign_credit([group], config).samples
        if not any(any(sample.advantages) for sample in samples):
            return Verdict.NO_SIGNAL
    return Verdict.SIGNAL


class RolloutSource(Pausable, Protocol):
    """Gives each step its groups."""

    @property
    def max_staleness(self) -> int | None:
        """Most updates between a token's policy and the step that learns from it; None where the policy of
        the step plays everything."""

    async def next(self, state: RunState) -> Played:
        """The groups of the step after `state`."""

    def watch_overlap(self) -> Callable[[], dict[str, float]]:
        """Begin to measure how far an update goes on beside rollouts; the function that it returns ends
        that."""

    def release(self, played: Played, state: RunState) -> None:
        """Forget groups that have trained; the agent has the weights of `state` by now."""


class Rollouts(NothingBeside):
    """Plays when asked, by the policy of the step: a `RolloutSource` with nothing under way between steps."""

    max_staleness = None

    def __init__(
        self,
        engine: ComputationalEngine,
        curriculum: Curriculum,
        weights: WeightSync,
        group: ProcessGroup,
        event: EventSink,
    ) -> None:
        self._engine = engine
        self._curriculum = curriculum
        self._weights = weights
        self._group = group
        self._event = event

    async def next(self, state: RunState) -> Played:
        """The next scenarios' groups; those without signal are replaced by further ones, where that is asked
        for."""
        config = self._curriculum.config
        number = config.episodes_per_step()
        if config.max_steps is None:
            # At least one, though steps by hand may have used up more than their share.
            number = max(1, min(number, config.num_episodes - state.num_trained))
        plan = self._curriculum.plan(state.frontier, state.curriculum)
        admission = Admission(
            groups_per_step=number,
            remaining=number,
            max_resamples=config.max_resamples,
            first=state.frontier,
        )
        groups: dict[int, TrajectoryGroup] = {}
        while not admission.is_ready:
            places = [admission.admit() for _ in range(admission.capacity)]
            scenarios = plan.order.take(places[0], len(places))
            for place, scenario in zip(places, scenarios, strict=True):
                self._event("group admitted", group=place, scenario=scenario.id)
            earlier = [group.trajectories[0].scenario for group in groups.values()]

            def on_scored(number: int, places: Sequence[int] = places) -> None:
                self._event("group finished", group=places[number])

            played = await self.play(scenarios, state, earlier=earlier, on_scored=on_scored)
            for place, group in zip(places, played, strict=True):
                groups[place] = group
                admission.finish(place, verdict_of(group, config))
        return Played(groups, admission.next_batch())

    async def play(
        self,
        scenarios: Sequence[Scenario],
        state: RunState,
        *,
        earlier: Sequence[Scenario] = (),
        on_scored: Callable[[int], None] = lambda number: None,
    ) -> list[TrajectoryGroup]:
        """One scored group per scenario by the policy of `state`; each process plays its part of them.

        `earlier`: the scenarios that came before in this step; `on_scored` is called with the place of a
        group among the scenarios.
        """
        config = self._curriculum.config
        plan = self._curriculum.plan(state.frontier, state.curriculum)
        part = self._group.processes.slice_of(len(scenarios))
        sizes = plan.sizes(scenarios)

        async def play(share: Sequence[Scenario], before: Sequence[Scenario]) -> list[TrajectoryGroup]:
            return await self._engine.rollout(
                share,
                seed=config.seed,
                step=state.step,
                temperature=state.temperature or config.temperature,
                earlier=[*earlier, *before],
                sizes=None if sizes is None else sizes[part],
                on_scored=lambda number: on_scored(part.start + number),
            )

        with self._weights.exclusive():
            await self._weights.ensure_current(state)
            self._engine.agent.call_bias = config.call_bias * max(
                0.0, 1 - state.step / max(config.call_bias_steps, 1)
            )
            try:
                played = await self._group.divide(scenarios, play, f"a rollout of step {state.step + 1}")
            finally:
                self._engine.agent.call_bias = 0.0
            groups = self._curriculum.put_together(played, plan)
        for number in (*range(part.start), *range(part.stop, len(scenarios))):  # heard of just now
            on_scored(number)
        return groups

    def watch_overlap(self) -> Callable[[], dict[str, float]]:
        """Nothing goes on beside an update."""
        return dict

    def release(self, played: Played, state: RunState) -> None:
        """Nothing is kept."""
