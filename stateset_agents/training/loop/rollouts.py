"""What a step learns from: groups of conversations, played when the step asks for them.

`overlapped_rollouts.py` has the other source, whose conversations go on while the trainer updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.runs.lifecycle import Pausable
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.distributed.process_group import ProcessGroup
from stateset_agents.training.loop.admission import Admission, Batch, End, Verdict
from stateset_agents.training.loop.curriculum.plan import Curriculum, StepPlan
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.loop.weight_sync import WeightSync
from stateset_agents.training.update.credit import assign_credit
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import TrajectoryGroup


class EventSink(Protocol):
    """Writes an event, with the step that it belongs to."""

    def __call__(self, name: str, **fields: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Played:
    """The groups of one step."""

    groups: Mapping[int, TrajectoryGroup]
    """By their place in the run, in order; those that were passed over too."""
    batch: Batch

    @classmethod
    def by_hand(cls, groups: Sequence[TrajectoryGroup], first: int, config: TrainingConfig) -> Played:
        """Groups that somebody else had played: all of them train."""
        known = dict(enumerate(groups, start=first))
        failed = {place for place, group in known.items() if verdict_of(group, config) is Verdict.FAILED}
        ends = {place: End.FAILED if place in failed else End.TRAINED for place in known}
        return cls(known, Batch(tuple(known), (), ends))

    @property
    def all_groups(self) -> list[TrajectoryGroup]:
        """In order."""
        return list(self.groups.values())

    @property
    def selected(self) -> list[TrajectoryGroup]:
        """Those that train, in order."""
        return [self.groups[place] for place in self.batch.selected]


def verdict_of(group: TrajectoryGroup, config: TrainingConfig) -> Verdict:
    """What a group can teach. Whether members are alike is asked only where such groups are replaced."""
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
        """To be called as an update begins; what it returns is called as the update ends, and says how far it
        went on beside rollouts."""

    def release(self, played: Played, state: RunState) -> None:
        """These groups have trained, and the agent has the weights of `state`: forget them."""

    async def close(self) -> list[int]:
        """Cancel what is under way and wait for it; the places of the groups that were."""


class Rollouts:
    """Plays when asked, by the policy of the step: a `RolloutSource` with nothing under way between steps."""

    max_staleness = None
    is_idle = True

    def __init__(
        self,
        engine: ComputationalEngine,
        curriculum: Curriculum,
        weights: WeightSync,
        group: ProcessGroup,
        config: TrainingConfig,
        event: EventSink,
    ) -> None:
        self._engine = engine
        self._curriculum = curriculum
        self._weights = weights
        self._group = group
        self.config = config
        self._event = event

    async def next(self, state: RunState) -> Played:
        """The next scenarios' groups; those without signal are replaced by further ones, where that is asked
        for."""
        number = _episodes_of_step(self.config, state)
        plan = self._curriculum.plan(state.frontier, state.curriculum)
        admission = Admission(
            groups_per_step=number,
            remaining=number,
            max_resamples=self.config.max_resamples,
            first=state.frontier,
        )
        groups: dict[int, TrajectoryGroup] = {}
        while not admission.is_ready:
            places = [admission.admit() for _ in range(admission.capacity)]
            scenarios = plan.order.take(places[0], len(places))
            for place, scenario in zip(places, scenarios, strict=True):
                self._event("group admitted", group=place, scenario=scenario.id)
            earlier = [group.trajectories[0].scenario for group in groups.values()]
            on_scored = partial(self._finished, places)
            played = await self._play(plan, scenarios, state, earlier, on_scored)
            for place, group in zip(places, played, strict=True):
                groups[place] = group
                admission.finish(place, verdict_of(group, self.config))
        return Played(groups, admission.next_batch())

    def _finished(self, places: Sequence[int], number: int) -> None:
        self._event("group finished", group=places[number])

    async def play(self, scenarios: Sequence[Scenario], state: RunState) -> list[TrajectoryGroup]:
        """One scored group per scenario by the policy of `state`; each process plays its part of them."""
        plan = self._curriculum.plan(state.frontier, state.curriculum)
        return await self._play(plan, scenarios, state, (), lambda number: None)

    async def _play(
        self,
        plan: StepPlan,
        scenarios: Sequence[Scenario],
        state: RunState,
        earlier: Sequence[Scenario],
        on_scored: Callable[[int], None],
    ) -> list[TrajectoryGroup]:
        part = self._group.processes.slice_of(len(scenarios))
        sizes = plan.sizes(scenarios)

        async def play(own: Sequence[Scenario], before: Sequence[Scenario]) -> list[TrajectoryGroup]:
            return await self._engine.rollout(
                own,
                seed=self.config.seed,
                step=state.step,
                temperature=state.temperature or self.config.temperature,
                earlier=[*earlier, *before],
                sizes=None if sizes is None else sizes[part],
                on_scored=lambda number: on_scored(part.start + number),
            )

        with self._weights.exclusive():
            await self._weights.ensure_current(state)
            played = await self._group.divide(scenarios, play, f"a rollout of step {state.step + 1}")
            groups = self._curriculum.put_together(played, plan)
        for number in (*range(part.start), *range(part.stop, len(scenarios))):  # heard of just now
            on_scored(number)
        return groups

    def watch_overlap(self) -> Callable[[], dict[str, float]]:
        """Nothing goes on beside an update."""
        return dict

    def release(self, played: Played, state: RunState) -> None:
        """Nothing is kept."""

    def pause(self) -> None:
        """Nothing begins by itself."""

    def resume(self) -> None:
        """Nothing begins by itself."""

    async def close(self) -> list[int]:
        """Nothing is under way."""
        return []


def _episodes_of_step(config: TrainingConfig, state: RunState) -> int:
    full = config.episodes_per_step()
    if config.max_steps is not None:
        return full
    # At least one, though steps by hand may have used up more than their share.
    return max(1, min(full, config.num_episodes - state.num_trained))
