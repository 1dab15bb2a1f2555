"""tau2's verdict by tau2's own evaluators, which replay the whole talk on databases of their own: slow, and
what the fast one is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from stateset_agents.environments.tau2.library import library
from stateset_agents.environments.tau2.record import Called, Event
from stateset_agents.environments.tau2.tasks import TaskEntry
from stateset_agents.environments.tau2.verdict import Verdict, verdict_of
from stateset_agents.environments.tau2.world import Domain, World, plain_environment


class Tau2Verdict:
    """By tau2's environment, action and communicate evaluators; a third of a second for retail,
    three quarters for airline."""

    is_slow = True

    def __init__(self, domain: Domain) -> None:
        self._domain = domain

    def __call__(self, entry: TaskEntry, world: World, events: Sequence[Event]) -> Verdict:
        """Raises ValueError, tau2's own, where its replay does not show what the talk showed."""
        tau2 = library()
        talk = list(_messages(events))
        task, parts = entry.task, {}
        found = [
            tau2.env_evaluator.EnvironmentEvaluator.calculate_reward(
                environment_constructor=self._made,
                task=task,
                full_trajectory=talk,
                solo_mode=self._domain.solo,
            ),
            tau2.action_evaluator.ActionEvaluator.calculate_reward(task=task, full_trajectory=talk),
            tau2.communicate_evaluator.CommunicateEvaluator.calculate_reward(task=task, full_trajectory=talk),
        ]
        for info in found:
            parts.update({part.value: float(value) for part, value in (info.reward_breakdown or {}).items()})
        if not (found[0].reward_breakdown or {}):  # no gold action and no assertion: tau2 pays it
            parts = {"DB": found[0].reward, "ENV_ASSERTION": found[0].reward, **parts}
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
