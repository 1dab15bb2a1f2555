"""Which conversation a list of messages goes on from, whoever repeats it, and however."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stateset_agents import Message
from stateset_agents.core.chat.history import KnownConversations, SentConversation
from stateset_agents.types.messages import ToolCall


def said(role: Any, content: str, **more: Any) -> Message:
    return Message(role=role, content=content, **more)


def looks(order: Any, id: str) -> Message:
    call = ToolCall(name="look", arguments={"order": order}, id=id)
    return said("assistant", "Wait.", reasoning="so", tool_calls=(call,))


def found(id: str) -> Message:
    return said("tool", "Oslo", tool_call_id=id, name="look")


ASK = said("user", "where?")
TALK = (ASK, looks(3.0, "call_0_0"), found("call_0_0"), looks(4, "call_1_0"), found("call_1_0"))
BYE = said("assistant", "Bye.")


def known_to_be(*conversations: tuple[Message, ...]) -> KnownConversations[SentConversation]:
    known = KnownConversations[SentConversation](max_size=10)
    for conversation in conversations:
        known.add(SentConversation(conversation, conversation))
    return known


def test_the_latest_of_the_longest_is_found_and_what_is_new_behind_it() -> None:
    known = known_to_be(TALK[:2], (*TALK, BYE))
    latest = SentConversation((*TALK, BYE), (*TALK, BYE))
    known.add(latest)
    found, following = known.find((*TALK, BYE, ASK)) or (None, ())
    assert found is latest
    assert following == (ASK,)
    found, following = known.find((*TALK[:3], ASK)) or (None, ())
    assert found is not None
    assert (found.conversation, following) == (TALK[:2], (TALK[2], ASK))
    found, following = known.find((*TALK, BYE)) or (None, ())  # nothing answers its last words yet
    assert found is not None
    assert found.conversation == TALK[:2]
    assert known.find((ASK, ASK)) is None


def test_whoever_numbers_calls_anew_in_each_round_is_understood() -> None:
    known = known_to_be(TALK[:4])
    mine = (ASK, looks(3, "mine"), found("mine"), looks(4.0, "mine"), found("mine"))
    goes_on = known.find(mine)
    assert goes_on is not None
    assert goes_on[1] == (found("call_1_0"),)
    other = (ASK, looks(3, "mine"), found("call_1_0"), looks(4.0, "mine"), found("mine"))
    assert known.find(other) is None  # its first result answers a call that comes later


@pytest.mark.parametrize(
    ("change", "is_found"),
    [
        ({"reasoning": None}, True),
        ({"reasoning": ""}, True),
        ({"reasoning": "but"}, False),
        ({"content": " Wait.\n"}, True),
        ({"content": "Wait"}, False),
        ({"tool_calls": ()}, False),
    ],
)
def test_what_may_be_left_out_and_what_is_another_conversation(
    change: dict[str, Any], is_found: bool
) -> None:
    known = known_to_be(TALK[:2])
    assert (known.find((ASK, replace(TALK[1], **change), ASK)) is not None) == is_found


def test_the_oldest_are_forgotten_but_never_the_latest() -> None:
    known = known_to_be()
    for number in range(3):
        conversation = (said("user", f"{number}"), BYE)
        known.add(SentConversation(conversation, conversation, 5))
    assert known.size == 10
    assert known.find((said("user", "0"), BYE, ASK)) is None
    assert known.find((said("user", "1"), BYE, ASK)) is not None
    known.add(SentConversation((ASK, BYE), (ASK, BYE), 100))
    assert known.size == 100
    assert known.find((ASK, BYE, ASK)) is not None
