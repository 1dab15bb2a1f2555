"""A training that several processes do together, seen from one: waiting for all, and ending with them.

The event loop's side of `processes.Processes`, whose exchanges wait in the worker thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from stateset_agents.evaluation.evaluator import PlayPart
from stateset_agents.runs.lifecycle import Controlled
from stateset_agents.runtime.tasks import uninterrupted
from stateset_agents.runtime.worker_thread import Worker
from stateset_agents.training.distributed.processes import Processes
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.timeline import Span
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

__all__ = ["Joined"]

_T = TypeVar("_T")
_ALIKE = 0.1
"""Seconds between two readings of one clock."""


class Joined(Controlled):
    """Alone until it joins the others."""

    def __init__(self) -> None:
        super().__init__()
        self._worker = Worker()
        self.processes = Processes()
        """Who trains together."""
        self._ahead = [0.0]
        """Seconds to add to each process's monotonic clock for the first one's."""

    async def _join(self, number: int) -> None:
        """Raises ConfigurationError where the launcher started another number of processes."""
        self.processes = await self._worker.run(Processes.join, number)
        clocks = await self._all("the clocks", time.time() - time.monotonic())
        self._ahead = [clock - clocks[0] for clock in clocks]

    async def _all(self, what: str, value: Any = None) -> list[Any]:
        """Wait until every process is at `what`; what each of them says, by rank.

        Raises ProcessLeft where one cannot go on. A process that has lost the others is alone.
        """
        if self.processes.is_alone:
            return [value]
        return await self._worker.run(self.processes.gather, what, value)

    async def _together(self, what: str, work: Awaitable[_T]) -> list[_T]:
        """What every process's `work` gives, by rank; where one's breaks or is cancelled all of them stop.

        What this one's work raises goes before what becomes of the others.
        """
        if self.processes.is_alone:
            return [await work]
        try:
            mine = await work
        except (Exception, asyncio.CancelledError) as error:
            await self._part(error)
            raise
        return await uninterrupted(self._all(what, mine))

    async def _part(self, error: BaseException) -> None:
        """Tell the others that this one cannot go on; they are told once."""
        if not self.processes.is_alone:
            await uninterrupted(self._worker.run(self.processes.part, error))

    async def divide(
        self, scenarios: Sequence[Scenario], play: PlayPart, what: str = "an evaluation"
    ) -> list[TrajectoryGroup]:
        """The groups of all scenarios, in order; each process plays its part of them."""
        own = self.processes.part_of(len(scenarios))
        what = f"{what} ({len(scenarios)} scenarios)"
        parts = await self._together(what, play(scenarios[own], scenarios[: own.start]))
        return [
            group if abs(ahead) < _ALIKE else _later(group, ahead)
            for part, ahead in zip(parts, self._ahead, strict=True)
            for group in part
        ]


def _later(group: TrajectoryGroup, seconds: float) -> TrajectoryGroup:
    def moved(one: Trajectory) -> Trajectory:
        spans = (Span(span.doing, span.begin + seconds, span.end + seconds) for span in one.spans)
        return replace(one, spans=tuple(spans))

    branches = tuple(replace(branch, trajectory=moved(branch.trajectory)) for branch in group.branches)
    return replace(group, trajectories=tuple(map(moved, group.trajectories)), branches=branches)
