"""What replies look like: how long they are, how many steps they think, and how they fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from stateset_agents import Trajectory
from stateset_agents.reasoning import num_steps, read_reasoned


def kind(trajectory: Trajectory) -> str:
    """How the reply of a problem ended: right, or the first thing that is wrong with it."""
    reply = trajectory.turns[-1].completion
    reasoned = read_reasoned(reply.message)
    if trajectory.success:
        return "right" if reasoned is not None else "right, without the format"
    if reply.finish_reason == "length":
        return "cut by max_new_tokens"
    if reasoned is None:
        return "not in the format"
    return "wrong after thinking" if reasoned.thinking else "wrong without thinking"


def analyse(trajectories: Iterable[Trajectory]) -> dict[str, Any]:
    """Shares of the kinds, and mean tokens and steps of right and wrong replies."""
    played = [trajectory for trajectory in trajectories if trajectory.turns]
    kinds = Counter(map(kind, played))
    found: dict[str, Any] = {"replies": len(played)}
    found["kinds"] = {name: count / len(played) for name, count in kinds.most_common()}
    for verdict in (True, False):
        chosen = [trajectory for trajectory in played if bool(trajectory.success) is verdict]
        if not chosen:
            continue
        thoughts = [read_reasoned(trajectory.replies[-1]) for trajectory in chosen]
        found["right" if verdict else "wrong"] = {
            "tokens": fmean(trajectory.num_agent_tokens for trajectory in chosen),
            "steps": fmean(num_steps(thought.thinking) if thought else 0 for thought in thoughts),
        }
    return found
