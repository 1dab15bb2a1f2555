"""tau2's verdict on a conversation, without tau2's replay of it: only rows that were touched are compared.

tau2's evaluators build two databases, replay the talk in one and the gold actions in the other, and hash
both: a third of a second. Here the conversation's own world is the first; the second is made once a task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stateset_agents.environments.tau2.library import library
from stateset_agents.environments.tau2.tasks import TaskEntry
from stateset_agents.environments.tau2.world import Called, Domain, Event, Said, World, plain_environment


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
    """True where it takes so long that it has to run in a thread."""

    def __call__(self, entry: TaskEntry, world: World, events: Sequence[Event]) -> Verdict: ...


def verdict_of(entry: TaskEntry, parts: Mapping[str, float]) -> Verdict:
    """The verdict of the parts that count for this task."""
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
        """The changes of the gold actions; one that the tools refuse changes nothing, as with tau2."""
        changes = self._gold.get(entry.scenario.id)
        if changes is None:
            world = self._domain.open(entry.task)
            for action in entry.actions:
                _make_gold_call(world.environment, action)
            changes = self._gold[entry.scenario.id] = world.changes()
        return changes


def _make_gold_call(environment: Any, action: Any) -> None:
    requestor = action.requestor
    if environment.solo_mode and requestor == "user":  # the agent itself has the phone
        requestor = "assistant"
    try:
        environment.make_tool_call(tool_name=action.name, requestor=requestor, **action.arguments)
    except Exception:  # whatever a tool raises: tau2 logs it and goes on
        return


def _was_done(action: Any, events: Sequence[Event]) -> bool:
    """True where anybody called the gold action; tau2's `Action.compare_with_tool_call`."""
    return any(isinstance(event, Called) and _matches(action, event) for event in events)


def _matches(action: Any, call: Called) -> bool:
    if action.name != call.name:
        return False
    compared = call.arguments.keys() if action.compare_args is None else action.compare_args
    theirs = {name: value for name, value in call.arguments.items() if name in compared}
    gold = {name: value for name, value in action.arguments.items() if name in compared}
    return not compared or theirs == gold


def _was_told(info: str, events: Sequence[Event]) -> bool:
    """True where the agent's words have it, commas aside; tau2's `CommunicateEvaluator`."""
    texts = (event.text for event in events if isinstance(event, Said) and event.speaker == "assistant")
    return any(text.strip() and info.lower() in text.lower().replace(",", "") for text in texts)


# The same by tau2's own evaluators, which the fast verdict is tested against


class Tau2Verdict:
    """The verdict of tau2's environment, action and communicate evaluators; a third of a second for retail,
    three quarters for airline."""

    is_slow = True

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def __call__(self, entry: TaskEntry, world: World, events: Sequence[Event]) -> Verdict:
        """Raises ValueError, tau2's own, where its replay does not show what the talk showed."""
        tau2 = library()
        talk = list(_messages(events))
        task, parts = entry.task, {}
        infos = [
            tau2.env_evaluator.EnvironmentEvaluator.calculate_reward(
                environment_constructor=self._made,
                task=task,
                full_trajectory=talk,
                solo_mode=self._domain.solo,
            ),
            tau2.action_evaluator.ActionEvaluator.calculate_reward(task=task, full_trajectory=talk),
            tau2.communicate_evaluator.CommunicateEvaluator.calculate_reward(task=task, full_trajectory=talk),
        ]
        for info in infos:
            parts.update({part.value: float(value) for part, value in (info.reward_breakdown or {}).items()})
        if not (infos[0].reward_breakdown or {}):  # no gold action and no assertion: tau2 pays it
            parts = {"DB": infos[0].reward, "ENV_ASSERTION": infos[0].reward, **parts}
        return verdict_of(entry, parts)

    def _made(self, solo_mode: bool = False) -> Any:
        return plain_environment(self._domain.name, solo_mode)


def _messages(events: Sequence[Event]) -> Iterator[Any]:
    """The talk as tau2 records it, one call a message."""
    kinds = library().messages
    roles = {"assistant": kinds.AssistantMessage, "user": kinds.UserMessage}
    for index, event in enumerate(events):
        if isinstance(event, Called):
            call = kinds.ToolCall(
                id=str(index), name=event.name, arguments=dict(event.arguments), requestor=event.requestor
            )
            yield roles[event.requestor](role=event.requestor, tool_calls=[call])
            yield kinds.ToolMessage(
                id=str(index),
                role="tool",
                content=event.result.content,
                requestor=event.requestor,
                error=event.result.failed,
            )
        else:
            yield roles[event.speaker](role=event.speaker, content=event.text)
