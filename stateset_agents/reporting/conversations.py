"""Which conversations a report shows: the same scenarios before and after training, side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from stateset_agents.messages import Message
from stateset_agents.tracking.run_log import Rollout

__all__ = ["Line", "Pair", "Transitions", "choose", "pairs", "spoken", "transitions"]


@dataclass(frozen=True, slots=True)
class Pair:
    """One scenario, played before and after training."""

    before: Rollout
    after: Rollout


@dataclass(frozen=True, slots=True)
class Transitions:
    """How the held-out scenarios moved."""

    n: int
    gained: int
    """Failed before, succeeded after."""
    lost: int


@dataclass(frozen=True, slots=True)
class Line:
    """One thing somebody said or did."""

    speaker: str
    """"system", "user", "agent" or "tool"."""
    text: str
    call: bool = False
    """A tool call, shown as code."""


def pairs(rollouts: Iterable[Rollout]) -> list[Pair]:
    """Scenarios with a conversation of both stages, in the order they were first written."""
    stages: dict[str, dict[tuple[str, int], Rollout]] = {"before": {}, "after": {}}
    for rollout in rollouts:
        if rollout.stage in stages:
            stages[rollout.stage][rollout.scenario, rollout.member] = rollout
    before, after = stages["before"], stages["after"]
    return [Pair(before[key], after[key]) for key in before if key in after]


def transitions(all_pairs: Sequence[Pair]) -> Transitions:
    """Failures that became successes, and the other way."""
    gained = sum(pair.after.success is True and pair.before.success is not True for pair in all_pairs)
    lost = sum(pair.before.success is True and pair.after.success is not True for pair in all_pairs)
    return Transitions(len(all_pairs), gained, lost)


def choose(all_pairs: Sequence[Pair], number: int = 3) -> list[Pair]:
    """Pairs that show what changed: a failure that became a success first, each of another family."""

    def rank(pair: Pair) -> tuple[bool, bool]:
        return (pair.after.success is not True, pair.before.success is True)

    ranked = sorted(all_pairs, key=rank)
    families: set[str] = set()
    chosen: list[Pair] = []
    rest: list[Pair] = []
    for pair in ranked:
        fresh = pair.before.family not in families
        families.add(pair.before.family)
        (chosen if fresh else rest).append(pair)
    return (chosen + rest)[:number]


def spoken(messages: Iterable[Message]) -> list[Line]:
    """Messages as lines of a transcript; an agent's tool calls follow its words."""
    lines = []
    for message in messages:
        speaker = "agent" if message.role == "assistant" else message.role
        if message.content or not message.tool_calls:
            lines.append(Line(speaker, message.content))
        for call in message.tool_calls:
            arguments = ", ".join(
                f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items()
            )
            said = f"{call.name}({arguments})" if call.error is None else f"{call.name}: {call.error}"
            lines.append(Line(speaker, said, call=True))
    return lines
