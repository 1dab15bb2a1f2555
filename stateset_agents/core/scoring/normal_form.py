"""A conversation as rewards compare it: every text in one Unicode form, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stateset_agents.types.comparison import composed, nfc
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Trajectory


def in_normal_form(trajectory: Trajectory) -> Trajectory:
    """The conversation with all that was said and called, and its scenario's context, in NFC.

    Only for comparing: its tokens stay as they were sampled.
    """
    scenario = replace(
        trajectory.scenario,
        opening=nfc(trajectory.scenario.opening),
        context=composed(trajectory.scenario.context),
    )
    turns = tuple(
        replace(
            turn,
            completion=replace(turn.completion, message=_composed(turn.completion.message)),
            feedback=_all(turn.feedback),
        )
        for turn in trajectory.turns
    )
    return replace(trajectory, scenario=scenario, opening=_all(trajectory.opening), turns=turns)


def _all(messages: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(map(_composed, messages))


def _composed(message: Message) -> Message:
    return replace(
        message,
        content=nfc(message.content),
        reasoning=None if message.reasoning is None else nfc(message.reasoning),
        tool_calls=tuple(replace(call, arguments=composed(call.arguments)) for call in message.tool_calls),
    )
