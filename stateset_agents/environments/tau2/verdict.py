"""tau2's verdict on a conversation, without tau2's replay of it: only rows that were touched are compared.

tau2's evaluators build two databases, replay the talk in one and the gold actions in the other, and hash
both: a third of a second. Here the conversation's own world is the first; the second is made once a task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stateset_agents.environments.tau2.record import Called, Event, Said
from stateset_agents.environments.tau2.tasks import TaskEntry
from stateset_agents.environments.tau2.world import Domain, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """1 or 0 of each part that the task's `reward_basis` names; the reward is their product."""

    parts: Mapping[str, float]

    @property
    def reward(self) -> float:
        return float(all(self.parts.values()))


class Judge(Protocol):
    """Says what a conversation that came to its own end is worth."""

    is_slow: bool
    """Does it take so long that it has to run in a thread?"""

    def __call__(self, entry: TaskEntry, world: World, events: Sequence[Event]) -> Verdict: ...


def verdict_of(entry: TaskEntry, parts: Mapping[str, float]) -> Verdict:
    """Those parts that count for this task."""
    basis = [part.value for part in entry.task.evaluation_criteria.reward_basis]
    return Verdict(parts={name: parts[name] for name in basis})


class FastVerdict:
    """Equal to tau2's own evaluators (`Tau2Verdict`), in milliseconds; keeps each task's gold changes."""

    is_slow = False

    def __init__(self, domain: Domain) -> None:
        self._domain = domain
        self._gold: dict[str, Mapping[str, Mapping[str, str]]] = {}

    def __call__(self, entry: TaskEntry, world: World, events: Sequence[Event]) -> Verdict:
        criteria = entry.task.evaluation_criteria
        basis = {part.value for part in criteria.reward_basis}
        parts: dict[str, float] = {}
        checks_world = criteria.actions is not None or criteria.env_assertions is not None
        if "DB" in basis:
            parts["DB"] = float(not checks_world or world.changes() == self._gold_changes(entry))
        if "ENV_ASSERTION" in basis:
            assertions = criteria.env_assertions or []
            met = (
                world.environment.run_env_assertion(assertion, raise_assertion_error=False)
                for assertion in assertions
            )
            parts["ENV_ASSERTION"] = float(all(list(met)))
        if "ACTION" in basis:
            parts["ACTION"] = float(all(_was_done(action, events) for action in criteria.actions or []))
        if "COMMUNICATE" in basis:
            parts["COMMUNICATE"] = float(
                all(_was_told(info, events) for info in criteria.communicate_info or [])
            )
        return verdict_of(entry, parts)

    def _gold_changes(self, entry: TaskEntry) -> Mapping[str, Mapping[str, str]]:
        """What the gold actions change; one that the tools refuse changes nothing, as with tau2."""
        known = self._gold.get(entry.scenario.id)
        if known is None:
            world = self._domain.open(entry.task)
            for action in entry.actions:
                _make_gold_call(world.environment, action)
            known = self._gold[entry.scenario.id] = world.changes()
        return known


def _make_gold_call(environment: Any, action: Any) -> None:
    requestor = action.requestor
    if environment.solo_mode and requestor == "user":  # the agent itself has the phone
        requestor = "assistant"
    try:
        environment.make_tool_call(tool_name=action.name, requestor=requestor, **action.arguments)
    except Exception:  # whatever a tool raises: tau2 logs it and goes on
        return


def _was_done(action: Any, events: Sequence[Event]) -> bool:
    """Was the gold action called, by anybody? tau2's `Action.compare_with_tool_call`."""
    return any(isinstance(event, Called) and _matches(action, event) for event in events)


def _matches(action: Any, call: Called) -> bool:
    if action.name != call.name:
        return False
    compared = call.arguments.keys() if action.compare_args is None else action.compare_args
    theirs = {name: value for name, value in call.arguments.items() if name in compared}
    gold = {name: value for name, value in action.arguments.items() if name in compared}
    return not compared or theirs == gold


def _was_told(info: str, events: Sequence[Event]) -> bool:
    """Does it stand in words of the agent? Commas aside, as tau2's `CommunicateEvaluator` has it."""
    said = (event.text for event in events if isinstance(event, Said) and event.speaker == "assistant")
    return any(text.strip() and info.lower() in text.lower().replace(",", "") for text in said)
