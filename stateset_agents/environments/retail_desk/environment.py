"""The desk as an environment: opens conversations, runs the agent's tool calls, lets the caller answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from stateset_agents.core.environment import Observation
from stateset_agents.core.scenario import Scenario, expect_split
from stateset_agents.core.trajectory import Outcome
from stateset_agents.environments.retail_desk.database import Database
from stateset_agents.environments.retail_desk.grading import Answers, Record, answers_of, grade
from stateset_agents.environments.retail_desk.policy import Call, Case, policy_text
from stateset_agents.environments.retail_desk.scenarios import NUM_TEST, NUM_VALIDATION, make_scenarios
from stateset_agents.environments.retail_desk.tools import (
    SCHEMAS,
    TOOLS,
    Desk,
    Result,
    call_tool,
    normalised_arguments,
)
from stateset_agents.environments.retail_desk.user import Caller, ShortCaller
from stateset_agents.errors import ConfigurationError
from stateset_agents.messages import Message, ToolCall

__all__ = ["DeskConversation", "RetailDesk"]

MAX_CALLS = 4
"""Calls of one reply that are run; the rest get an error."""


class DeskConversation:
    """One call at the desk."""

    def __init__(
        self,
        answers: Answers,
        desk: Desk,
        caller: Caller,
        record: Record,
        opening: tuple[Message, ...],
        max_turns: int,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        self.opening = opening
        self.tools = tools
        self.record = record
        self._answers = answers
        self._desk = desk
        self._caller = caller
        self._max_turns = max_turns
        self._num_replies = 0
        self._over = False

    async def step(self, reply: Message) -> Observation:
        """Run the reply's tool calls, or else pass its text to the caller."""
        if self._over:
            raise ConfigurationError("this desk conversation is over: start a new one")
        self._num_replies += 1
        reward = self.record.charge("replies")
        if reply.tool_calls:
            messages = []
            for place, call in enumerate(reply.tool_calls):
                message, cost = self._run(call, refused=place >= MAX_CALLS)
                messages.append(message)
                reward += cost
            terminated = False
        else:
            message, terminated, cost = self._pass_on(reply.content)
            messages = [message]
            reward += cost
        truncated = not terminated and self._num_replies >= self._max_turns
        self._over = terminated or truncated
        return Observation(
            messages=tuple(messages), reward=reward, terminated=terminated, truncated=truncated
        )

    def _run(self, call: ToolCall, refused: bool) -> tuple[Message, float]:
        """One tool message, and what the call cost."""
        record, cost = self.record, 0.0
        if call.error is not None or refused:
            result = Result(fields={"error": "bad call" if call.error else "too many calls"}, failed=True)
        else:
            desk = replace(self._desk, customer_id=record.verified)
            result = call_tool(desk, call.name, call.arguments)
        if call.name in TOOLS and not result.failed:
            made = _as_written(call)
            if call.name == "find_customer" and self._caller.gave(made):
                [record.verified] = result.owners
            consented = not TOOLS[call.name].writes or self._caller.consents(made)
            record.note_call(self._answers, made, result, consented=consented)
            cost += self._charge_repeat(repr(made))
        else:
            if "nobody" not in result.shown or self._caller.gave(_as_written(call)):
                record.shown |= result.shown
            cost += record.charge("tool_errors")
        message = Message(
            role="tool",
            content=result.content,
            tool_call_id=call.id or None,
            name=call.name if call.name in TOOLS else None,
        )
        return message, cost

    def _charge_repeat(self, act: str) -> float:
        if act in self.record.seen_acts:
            return self.record.charge("repeats")
        self.record.seen_acts.add(act)
        return 0.0

    def _pass_on(self, text: str) -> tuple[Message, bool, float]:
        """The caller's answer to a reply in words, whether they are gone, and what the reply cost."""
        record = self.record
        claims = self._caller.read(text)
        untrue = record.note_claims(self._answers, claims, self._desk.database)
        heard = self._caller.hear(text, claims, untrue)
        cost = self._charge_repeat(f"text {text[:400]}")
        if heard.missed:
            cost += record.charge("user_miss")
        return Message(role="user", content=heard.says), heard.leaves, cost

    async def outcome(self) -> Outcome:
        """The verdict on the shop and the record as they stand."""
        return grade(self._answers, self.record, self._desk.database.changes())

    def fork(self) -> DeskConversation:
        """An independent copy: the shop's image, the caller and the record."""
        copy = DeskConversation(
            self._answers,
            replace(self._desk, database=self._desk.database.fork()),
            self._caller.copy(),
            self.record.copy(),
            self.opening,
            self._max_turns,
            self.tools,
        )
        copy._num_replies, copy._over = self._num_replies, self._over
        return copy

    async def close(self) -> None:
        """Drop the shop."""
        self._desk.database.close()


def _as_written(call: ToolCall) -> Call:
    """A call that ran, with its arguments in order and in the case in which the shop keeps them."""
    arguments = normalised_arguments(call.arguments)
    return Call(
        call.name,
        tuple(
            (name, value.upper() if name == "order_id" else value.lower())
            for name, value in sorted(arguments.items())
            if value
        ),
    )


class RetailDesk:
    """An online shop's service desk with six kinds of request.

    `prompt="short"` gives one line, for the small embedded model, which knows policy and tools by heart;
    `prompt="full"` gives the policy's text and the tools' schemas as well, for any other model. `seed`
    chooses the training scenarios only.
    """

    local = True

    def __init__(
        self,
        *,
        num_train: int = 4000,
        seed: int = 0,
        max_turns: int = 6,
        prompt: Literal["short", "full"] = "short",
    ) -> None:
        if max_turns < 1:
            raise ConfigurationError(f"max_turns must be at least 1, got {max_turns!r}")
        if num_train < 1:
            raise ConfigurationError(f"num_train must be at least 1, got {num_train!r}")
        if prompt not in ("short", "full"):
            raise ConfigurationError(f"prompt must be short or full, got {prompt!r}")
        self.max_turns = max_turns
        self._prompt = prompt
        self._seed = seed
        self._counts: dict[str, int] = {"train": num_train, "validation": NUM_VALIDATION, "test": NUM_TEST}
        self._made: dict[str, Sequence[Scenario]] = {}

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """The scenarios of a split; validation and test do not depend on the seed."""
        if split not in self._made:
            known = expect_split(split)
            made = make_scenarios(known, self._counts[split], self._seed)
            self._made[split] = made
        return self._made[split]

    async def start(self, scenario: Scenario, seed: int) -> DeskConversation:
        """Open a conversation; the same scenario, seed and replies give the same transcript."""
        case = Case.from_context({"family": scenario.family, **scenario.context})
        answers = answers_of(case)
        text = f"shop desk. customer {case.customer_id} is signed in."
        if self._prompt == "full":
            text = f"{text}\npolicy:\n{policy_text()}"
        opening = (Message(role="system", content=text), Message(role="user", content=scenario.opening))
        return DeskConversation(
            answers,
            Desk(Database(answers.image), case.customer_id),
            ShortCaller(case, scenario.split, seed),
            Record(verified=case.customer_id),
            opening,
            self.max_turns,
            SCHEMAS if self._prompt == "full" else (),
        )
