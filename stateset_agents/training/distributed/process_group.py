"""The event loop's side of `processes.Processes`: waits for all processes, and ends with them.

The exchanges block, so they run in the worker thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from stateset_agents.evaluation.evaluator import PlayPart
from stateset_agents.runtime.tasks import shielded
from stateset_agents.runtime.worker_thread import Worker
from stateset_agents.training.distributed.processes import Processes
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.timeline import Span
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

_T = TypeVar("_T")
_SAME_CLOCK = 0.1
"""Seconds between two readings of one clock."""


class ProcessGroup:
    """Alone until it joins the others. Exchanges wait in `worker`, one after the other."""

    def __init__(self, worker: Worker) -> None:
        self.processes = Processes()
        """Who trains together."""
        self._worker = worker
        self._clock_offsets = [0.0]
        """Seconds to add to each process's monotonic clock for the first one's."""

    @property
    def is_first(self) -> bool:
        """Does this process write the run folder?"""
        return self.processes.is_first

    @property
    def is_alone(self) -> bool:
        """Are there no others, or none any more?"""
        return self.processes.is_alone

    async def join(self, number: int) -> None:
        """Raises ConfigurationError where the launcher started another number of processes."""
        self.processes = await self._worker.run(Processes.join, number)
        clocks = await self.barrier("the clocks", time.time() - time.monotonic())
        self._clock_offsets = [clock - clocks[0] for clock in clocks]

    async def barrier(self, operation: str, value: Any = None) -> list[Any]:
        """Wait until every process is at this `operation`; returns the value of each, by rank.

        Raises PeerFailed where one cannot go on. A process that has lost the others is alone.
        """
        if self.processes.is_alone:
            return [value]
        return await self._worker.run(self.processes.gather, operation, value)

    async def gather_results(self, operation: str, work: Awaitable[_T]) -> list[_T]:
        """The result of every process's `work`, by rank; where one fails or is cancelled all of them stop.

        An error of this process's own work is raised rather than the failure of another.
        """
        if self.processes.is_alone:
            return [await work]
        try:
            result = await work
        except (Exception, asyncio.CancelledError) as error:
            await self.abort(error)
            raise
        return await shielded(self.barrier(operation, result))

    async def abort(self, error: BaseException) -> None:
        """Tell the others, once, that this process cannot go on."""
        if not self.processes.is_alone:
            await shielded(self._worker.run(self.processes.abort, error))

    async def divide(
        self, scenarios: Sequence[Scenario], play: PlayPart, operation: str = "an evaluation"
    ) -> list[TrajectoryGroup]:
        """The groups of all scenarios, in order; each process plays its part of them."""
        part = self.processes.slice_of(len(scenarios))
        operation = f"{operation} ({len(scenarios)} scenarios)"
        played = await self.gather_results(operation, play(scenarios[part], scenarios[: part.start]))
        return [
            group if abs(offset) < _SAME_CLOCK else _on_first_clock(group, offset)
            for groups, offset in zip(played, self._clock_offsets, strict=True)
            for group in groups
        ]


def _on_first_clock(group: TrajectoryGroup, seconds: float) -> TrajectoryGroup:
    def moved(trajectory: Trajectory) -> Trajectory:
        spans = (Span(span.doing, span.begin + seconds, span.end + seconds) for span in trajectory.spans)
        return replace(trajectory, spans=tuple(spans))

    branches = tuple(replace(branch, trajectory=moved(branch.trajectory)) for branch in group.branches)
    return replace(group, trajectories=tuple(map(moved, group.trajectories)), branches=branches)
