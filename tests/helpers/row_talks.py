"""Conversations of several rows, in bytes: `from row_talks import RowTalk, thinking_talk`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.backends.tokenizers import ByteTokenizer
from stateset_agents.types.messages import Completion, Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory, Turn

__all__ = ["TOKENIZER", "RowTalk", "agent", "compacted_talk", "forked_talk", "thinking_talk", "tool", "user"]

TOKENIZER = ByteTokenizer()


def user(content: str) -> Message:
    return Message(role="user", content=content)


def tool(content: str) -> Message:
    return Message(role="tool", content=content, tool_call_id="1")


def agent(content: str, reasoning: str | None = None, *calls: str) -> Message:
    made = tuple(ToolCall(name=name, arguments={"order_id": "K27"}, id="1") for name in calls)
    return Message(role="assistant", content=content, reasoning=reasoning, tool_calls=made)


class RowTalk:
    """Turns as they are sampled; `trajectory` is the conversation so far."""

    def __init__(self, *opening: Message) -> None:
        self._opening = opening
        self._turns: list[Turn] = []

    def says(
        self,
        reply: Message,
        *feedback: Message,
        shown: Sequence[Message] | None = None,
        follows: int | None = -1,
        **fields: Any,
    ) -> RowTalk:
        """`shown`: what the prompt holds, or adds to the turn that is followed; else what is new."""
        if shown is None:
            shown = self._turns[-1].feedback if self._turns else self._opening
        before: tuple[int, ...] = ()
        index = len(self._turns) - 1 if follows == -1 else follows
        if index is not None and index >= 0:
            followed = self._turns[index].completion
            before = followed.prompt_ids + followed.token_ids
        prompt = tuple(TOKENIZER.encode_markup("".join(map(_written, shown)) + "<|assistant|>"))
        sampled = tuple(TOKENIZER.encode_markup(_written(reply).removeprefix("<|assistant|>")))
        completion = Completion(
            message=reply,
            prompt_ids=before + prompt,
            token_ids=sampled,
            logprobs=(-0.25,) * len(sampled),
            finish_reason="stop",
        )
        turn = Turn(prompt_ids=prompt, completion=completion, follows=follows, feedback=feedback, **fields)
        self._turns.append(turn)
        return self

    def trajectory(self, **fields: Any) -> Trajectory:
        return Trajectory(
            scenario=Scenario(id="rows", family="refund"),
            opening=self._opening,
            turns=tuple(self._turns),
            outcome=Outcome(reward=1.0, success=True),
            reward=1.0,
            **fields,
        )


def _written(message: Message) -> str:
    thought = "" if message.reasoning is None else f"<think>\n{message.reasoning}\n</think>\n\n"
    calls = "".join(json.dumps({"name": call.name, **call.arguments}) for call in message.tool_calls)
    return f"<|{message.role}|>{thought}{message.content}{calls}<|end|>"


def without_thought(message: Message) -> Message:
    return replace(message, reasoning=None)


def thinking_talk() -> RowTalk:
    """A look-up, an answer, thanks: the user's second message drops the two thoughts before it."""
    opening = (Message(role="system", content="Be kind."), user("Where is K27?"))
    look = agent("", "I do not know yet: look it up first.", "get_order")
    found = tool('{"status": "sent", "city": "Oslo"}')
    answer = agent("It is on its way to Oslo. ✓", "The order was sent.\nSo I tell where it is.")
    thanks = user("Thank you, bye!")
    talk = RowTalk(*opening).says(look, found, reward=-0.01).says(answer, thanks)
    shown = (*opening, without_thought(look), found, without_thought(answer), thanks)
    return talk.says(agent("Have a nice day.", "They said goodbye."), shown=shown, follows=None)


def compacted_talk() -> RowTalk:
    """Two exchanges, then a summary that stands for them in the next row."""
    first = (user("My name is Ada."), agent("Hello Ada, what can I do?", "Greet her by name."))
    second = (user("Order me a blue kettle."), agent("Which size would you like?"))
    last = user("The small one, please.")
    summary = agent("Ada wants a blue kettle.", "Keep the name and the wish.")
    talk = RowTalk(first[0]).says(first[1], second[0]).says(second[1], last)
    talk.says(summary, shown=(user("Summarize."),), is_summary=True)
    joined = user(f"My name is Ada.\n\nSummary of the conversation so far:\n{summary.content}")
    return talk.says(agent("Ordered."), shown=(joined, second[1], last), follows=None)


def forked_talk() -> RowTalk:
    """A question to a sub-agent between two turns of the conversation."""
    talk = RowTalk(user("Plan my trip to Rome.")).says(
        agent("When do you travel?"), user("In the last week of May.")
    )
    talk.says(agent("Mild and dry."), shown=(user("What is the weather there?"),), follows=None)
    return talk.says(agent("Take light clothes."), shown=(user("In the last week of May."),), follows=0)
