"""The desk as an environment: opens conversations, runs the agent's tool calls, lets the caller answer."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from stateset_agents.core.environment import Observation, ReplyLimits
from stateset_agents.environments.retail_desk.agents import DEGENERATE, HonestAgent
from stateset_agents.environments.retail_desk.claims import normalized_text
from stateset_agents.environments.retail_desk.database import Database
from stateset_agents.environments.retail_desk.full.caller import FullCaller
from stateset_agents.environments.retail_desk.full.policy import FAMILIES as FULL_FAMILIES
from stateset_agents.environments.retail_desk.full.policy import RULES as FULL_RULES
from stateset_agents.environments.retail_desk.full.policy import FullCase
from stateset_agents.environments.retail_desk.grading import COSTS, Answers, Record, grade
from stateset_agents.environments.retail_desk.policy import RULES, Case, DeskCall
from stateset_agents.environments.retail_desk.scenarios import (
    TEST_EACH,
    VALIDATION_EACH,
    answers_of,
    decision_of,
    desk_of,
    families_named,
    make_scenario,
)
from stateset_agents.environments.retail_desk.tools import (
    SCHEMAS,
    TOOLS,
    WRITES,
    Desk,
    Result,
    call_tool,
    normalised_arguments,
)
from stateset_agents.environments.retail_desk.user import Caller, ShortCaller
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import expect_that
from stateset_agents.types.trajectory import Outcome

SHORT_TURNS, FULL_TURNS = 6, 24
"""Maximum replies of a learnable call and of a full one."""
MAX_CALLS = 4
"""Calls of one reply that are run; the rest get an error each, and cost what one failed call costs."""


ToolChoice = Literal["auto", "first", "required", "read, write"]
_WRITING = tuple(schema for schema in SCHEMAS if schema["function"]["name"] in WRITES)
_READING = tuple(schema for schema in SCHEMAS if schema["function"]["name"] not in WRITES)


@dataclass(slots=True, kw_only=True, eq=False)
class DeskConversation:
    """One call at the desk."""

    opening: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]]
    record: Record
    answers: Answers
    desk: Desk
    caller: Caller
    max_turns: int
    tool_choice: ToolChoice = "auto"
    """Which replies must call a tool; where any must, all calls are valid ones, by a grammar."""
    num_replies: int = 0
    is_over: bool = False

    @property
    def reply_limits(self) -> ReplyLimits | None:
        if self.tool_choice == "auto":
            return None
        choice = "auto" if self.tool_choice == "first" and self.num_replies else "required"
        tools = SCHEMAS
        if self.tool_choice == "read, write":
            tools = _WRITING if self.num_replies else _READING
        # A model that calls by a grammar alone opens one call behind the other, until its length runs out.
        return ReplyLimits(tool_choice=choice, callable_tools=tools, parallel_tool_calls=False)

    async def step(self, reply: Message) -> Observation:
        """Run the reply's tool calls, or else pass its text to the caller, who answers or leaves."""
        if self.is_over:
            raise ConfigurationError("this desk conversation is over: start a new one")
        self.num_replies += 1
        before = Counter(self.record.counts)
        reward = self.record.charge("replies")
        if reply.tool_calls:
            messages = []
            for index, call in enumerate(reply.tool_calls):
                message, cost = self.run(call, index)
                messages.append(message)
                reward += cost
            terminated = False
        else:
            # The same letters in another shape must not hide a lie beside the truth.
            text = normalized_text(reply.content)
            claims = self.answers.read(text, self.caller.subject)
            untrue = self.record.note_claims(self.answers, claims, self.desk.database)
            reaction = self.caller.react(text, claims, untrue)
            cost = self._charge_repeat(f"text {reply.content[:400]}")
            if reaction.missed:
                cost += self.record.charge("user_miss")
            messages, terminated = [Message(role="user", content=reaction.says)], reaction.leaves
            reward += cost
        truncated = not terminated and self.num_replies >= self.max_turns
        self.is_over = terminated or truncated
        return Observation(
            messages=tuple(messages),
            reward=reward,
            breakdown={name: -COSTS[name] * count for name, count in (self.record.counts - before).items()},
            terminated=terminated,
            truncated=truncated,
        )

    def run(self, call: ToolCall, index: int) -> tuple[Message, float]:
        """The tool message of call `index` of a reply, and what the call cost."""
        record, cost = self.record, 0.0
        if index >= MAX_CALLS:
            result = Result(fields={"error": "too many calls"}, failed=True)
        elif call.error is not None:
            result = Result(fields={"error": "bad call"}, failed=True)
        else:
            result = call_tool(replace(self.desk, customer_id=record.verified), call.name, call.arguments)
        if not result.failed:
            plain_call = _as_written(call)
            # Verified first: the look-up that finds the caller shows their own data.
            if call.name == "find_customer" and self.caller.has_given(plain_call):
                (record.verified,) = result.owners
            consented = call.name not in WRITES or self.caller.consents(plain_call)
            record.note_call(self.answers, plain_call, result, consented=consented)
            cost = self._charge_repeat(repr(plain_call))
        else:
            if "nobody" not in result.shown or self.caller.has_given(_as_written(call)):
                record.note_failure(self.answers, result)
            if index <= MAX_CALLS:  # a flood of calls must not make a reward without bounds
                cost = record.charge("tool_errors")
        name = call.name if call.name in TOOLS else None
        content = json.dumps(result.fields)
        return Message(role="tool", content=content, tool_call_id=call.id or None, name=name), cost

    def _charge_repeat(self, act: str) -> float:
        if act in self.record.seen_actions:
            return self.record.charge("repeats")
        self.record.seen_actions.add(act)
        return 0.0

    async def outcome(self) -> Outcome:
        return grade(self.answers, self.record, self.desk.database.changes())

    def fork(self) -> DeskConversation:
        """An independent copy: the shop's image, the caller and the record."""
        desk = replace(self.desk, database=self.desk.database.fork())
        return replace(self, desk=desk, caller=self.caller.copy(), record=self.record.copy())

    async def close(self) -> None:
        self.desk.database.close()


def _as_written(call: ToolCall) -> DeskCall:
    """A call that ran, with its arguments in order and in the case in which the shop keeps them."""
    arguments = sorted(normalised_arguments(call.arguments).items())
    return DeskCall(
        call.name,
        tuple((name, value if name == "order_id" else value.lower()) for name, value in arguments if value),
    )


def _case_of(scenario: Scenario) -> Case | FullCase:
    context = {"family": scenario.family, **scenario.context}
    kind = FullCase if context["family"] in FULL_FAMILIES else Case
    return kind.from_context(context)


class RetailDesk:
    """An online shop's service desk.

    `families` chooses the calls: `learnable` are six short kinds that the embedded model can learn, with
    callers who are signed in and whose opening is their consent; `full` are fourteen with the whole policy,
    callers who must be verified and asked before every write; `all` are both; or give a list of names
    (`FAMILIES`, `FULL_FAMILIES`).

    `prompt="short"` gives one line, for the embedded model, which knows policy and tools by heart;
    `prompt="named"` adds the name of each topic's look-up, for a model whose calls a grammar writes;
    `prompt="full"` gives the policy's text and the tools' schemas as well, for any other model; unset, the
    learnable calls have the short one, and the others the full one. `offer_tools` gives the schemas, or not,
    whatever the prompt: a model behind an endpoint calls only what it is offered. `max_turns` is 6 for the
    learnable calls and 24 for the others unless set. `seed` chooses the training scenarios only.

    With `tool_choice="first"` a conversation's first reply calls a tool, with "required" each of them does,
    with "read, write" the first one looks something up and all others change something: by a grammar
    (`AgentConfig(constrain="strict")`), whatever the prompt shows.
    """

    local = True
    honest_agent = HonestAgent
    """A scripted agent that is right on every scenario; an audit compares with it."""
    degenerate_agents = DEGENERATE
    """Scripted agents that must not be paid; an audit plays them."""

    def __init__(
        self,
        *,
        families: str | Sequence[str] = "learnable",
        num_train: int = 4000,
        seed: int = 0,
        max_turns: int | None = None,
        prompt: Literal["short", "named", "full"] | None = None,
        offer_tools: bool | None = None,
        tool_choice: ToolChoice = "auto",
    ) -> None:
        self.families = families_named(families)
        expect_that(max_turns is None or max_turns >= 1, "max_turns", "be at least 1", max_turns)
        expect_that(num_train >= 1, "num_train", "be at least 1", num_train)
        expect_that(prompt in ("short", "named", "full", None), "prompt", "be short, named or full", prompt)
        self._max_turns = max_turns
        if not isinstance(offer_tools, bool | None):
            raise ConfigurationError(f"offer_tools must be true, false or absent, got {offer_tools!r:.60}")
        choices = get_args(ToolChoice)
        expect_that(
            tool_choice in choices, "tool_choice", f"be one of {', '.join(map(repr, choices))}", tool_choice
        )
        self._tool_choice = tool_choice
        self._prompt = prompt
        self._offer_tools = offer_tools
        self._seed = seed
        many = len(self.families)
        self._counts = {"train": num_train, "validation": VALIDATION_EACH * many, "test": TEST_EACH * many}
        self._made: dict[str, Sequence[Scenario]] = {}

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """The scenarios of a split; validation and test do not depend on the seed."""
        if split not in self._made:
            split_name = expect_split(split)
            number = self._counts[split_name]
            self._made[split] = tuple(
                make_scenario(split_name, index, self._seed, self.families) for index in range(number)
            )
        return self._made[split]

    def is_denial(self, scenario: Scenario) -> bool:
        """True where the right answer to the scenario is no."""
        return decision_of(_case_of(scenario)).is_denial

    async def start(self, scenario: Scenario, seed: int) -> DeskConversation:
        """Open a conversation; the same scenario, seed and replies give the same transcript."""
        case = _case_of(scenario)
        answers = answers_of(case)
        caller: Caller
        if isinstance(case, FullCase):
            caller = FullCaller.after_opening(case, scenario.split, seed)
            customer_id, text = "", "shop desk. the caller is not signed in."
            max_turns, prompt = FULL_TURNS, "full"
        else:
            caller = ShortCaller(case, scenario.split, seed=seed, subject=case.order_id)
            customer_id, text = case.customer_id, f"shop desk. customer {case.customer_id} is signed in."
            max_turns, prompt = SHORT_TURNS, "short"
        desk = desk_of(case, Database(answers.image), customer_id)
        is_full = (self._prompt or prompt) == "full"
        offers = is_full if self._offer_tools is None else self._offer_tools
        if is_full:
            policy = "\n".join(f"{topic}: {rule}" for topic, rule in desk.topics.items())
            text = f"{text}\npolicy:\n{policy}"
        elif self._prompt == "named":
            rules = FULL_RULES if isinstance(case, FullCase) else RULES
            lines = (f"{rule.topic}: {rule.looks_up}" for rule in rules.values())
            text = "\n".join([text, *lines])
        return DeskConversation(
            opening=(Message(role="system", content=text), Message(role="user", content=scenario.opening)),
            tools=SCHEMAS if offers else (),
            record=Record(verified=desk.customer_id),
            answers=answers,
            desk=desk,
            caller=caller,
            max_turns=self._max_turns or max_turns,
            tool_choice=self._tool_choice,
        )
