"""What two processes tell each other: by name, of the worst, and of how one broke."""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from several import in_two, met
from tiny_training import talk

from stateset_agents.runtime.tasks import Worker
from stateset_agents.training.processes import PeerFailed, Processes, ProcessGroup, max_or_nan
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Span, TrajectoryGroup


class Heavy:
    """What cannot be sent."""

    def __reduce__(self) -> Any:
        raise torch.OutOfMemoryError("no room")


async def begun() -> float:
    """When the second process's conversation began, by the first one's clock."""
    group = ProcessGroup(Worker())
    await group.join(2)

    async def play(scenarios: Any, earlier: Any) -> list[TrajectoryGroup]:
        now = time.monotonic()
        member = talk(([1], [2]), spans=(Span("model", now, now + 1),))
        return [TrajectoryGroup(key=one.id, trajectories=(member,)) for one in scenarios]

    groups = await group.divide([Scenario(id="a"), Scenario(id="b")], play)
    return groups[1].trajectories[0].spans[0].begin


def exchanged(folder: Path) -> list[str]:
    """What each of some exchanges came to."""
    clock = time.monotonic
    if os.environ["RANK"] == "1":
        time.monotonic = lambda: clock() - 1000  # of a node that started later
    apart = abs(clock() - asyncio.run(begun()))
    time.monotonic = clock
    processes = Processes.join(2)
    found = [str(apart < 100)]
    found += [str(processes.reduce("a", {"x": (math.nan, 1.0)[processes.rank]}, max_or_nan)["x"])]
    try:
        processes.gather(("evaluate", "the next step")[processes.rank], 0)
    except PeerFailed as error:
        found.append(str(error))
    found += [str(processes.gather("a", processes.rank)), str(processes.has_lost_others)]
    try:
        processes.gather("a", Heavy() if processes.rank else 0)
    except (PeerFailed, RuntimeError) as error:
        processes.abort(error)
        found.append(str(error))
    assert met(folder / "heard", writes=not processes.rank)
    return found


def test_exchanges_have_names_and_one_that_breaks_is_heard_of_while_its_process_lives(tmp_path):
    first, second = in_two(exchanged, tmp_path)
    told = "process 0 is at evaluate, process 1 at the next step: make the same calls"
    assert first == ["True", "nan", told, "[0, 1]", "False", "process 1 failed: no room"]
    assert second == ["True", "nan", told, "[0, 1]", "False", "no room"]
