"""Expressions that an agent has solved part by part: its tool opens an episode of the same policy.

scripts/decomposed_domains.py measures it.

compute 2 + 3 * 4 - 1
  -> solve("2 + 3 * 4")   a conversation of its own: compute 2 + 3 * 4 -> <answer> 14 </answer>
  <- = 14 , left 14 - 1
  -> solve("14 - 1") ... <- = 13 , left 13
  -> <answer> 13 </answer>
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stateset_agents.core.environment import Conversation
from stateset_agents.environments.decomposed import (
    DecomposedConversation,
    DecomposedProblems,
    SolvedPart,
)
from stateset_agents.environments.problems.arithmetic import ArithmeticProblems, steps_of
from stateset_agents.environments.problems.environment import Trace, choose_habit, reply_of
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Outcome

_TEXTS = read_yaml(Path(__file__).with_name("decomposed_arithmetic.yaml"))
DECOMPOSE: str = _TEXTS["prompt"]
"""The system message of who decomposes, unless another is set."""
SOLVE: Mapping[str, Any] = _TEXTS["tool"]

_NUMBER = re.compile(r"-?[0-9]{1,9}")
_EXPRESSION = re.compile(r"[0-9]{1,9}(?: [-+*] [0-9]{1,9})+")


class DecomposedArithmetic(DecomposedProblems):
    """`ArithmeticProblems` with a tool `solve(problem)`.

        DecomposedArithmetic(min_operations=2, max_operations=4)

    A call opens a conversation of one reply, without tools, in which the same agent computes the part; its
    answer takes the part's place, and the agent goes on with what is left. The environment does that
    replacing and nothing else: whether a part may be computed by itself (in 2 + 3 * 4 the part 2 + 3 may not)
    is for the agent to know, and the verdict is that of `ArithmeticProblems`. The problems of equal settings
    and seed are the same as there, too.
    """

    def __init__(self, *, decompose_prompt: str = DECOMPOSE, max_calls: int = 16, **settings: Any) -> None:
        """
        Args:
            decompose_prompt: Opens the conversation of who decomposes; empty for none. Who solves a part has
                `system_prompt`.
            max_calls: A conversation that calls more often is cut.
            settings: Those of `ArithmeticProblems`.
        """
        self.problems = ArithmeticProblems(**settings)
        super().__init__(self.problems, decomposer=decompose_prompt, max_calls=max_calls)

    async def conversation(self, scenario: Scenario, seed: int) -> DecomposedConversation:
        """A conversation in which nobody has said anything."""
        return _ArithmeticConversation(
            whole=await self.problems.start(scenario, seed),
            roles=self.roles,
            answer=self.answer,
            max_calls=self.max_calls,
            seed=seed,
            left=scenario.context["expression"],
        )

    def scenario_of(self, problem: str) -> Scenario:
        """A problem of one's own. Raises ConfigurationError for what is no expression of whole numbers with
        + - and *."""
        expression = " ".join(problem.split())
        if not _EXPRESSION.fullmatch(expression):
            raise ConfigurationError(
                f"a problem must be whole numbers with + - * between, got {problem!r:.60}: write '2 + 3 * 4'"
            )
        steps = steps_of(expression)
        context = {"answer": int(steps[-1]), "expression": expression, "difficulty": len(steps)}
        return Scenario(id=f"arithmetic {expression}", opening=f"compute {expression}", context=context)

    def honest_agent(self, scenario: Scenario) -> _Scripted:
        """A scripted agent that plays all roles, the solver with one of `habits`."""
        rng = random.Random(derive(self.problems._seed, "habit", scenario.id))
        return _Scripted(habits=self.problems._habits, rng=rng)


@dataclass(slots=True, kw_only=True, eq=False)
class _ArithmeticConversation(DecomposedConversation):
    """One expression, in which results take the place of the parts that are solved."""

    left: str
    """The expression, with results in place of the parts that are solved."""
    num_right: int = 0
    """Parts that got the right answer."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """`solve`, in this problem's words, for who decomposes; none for a part."""
        return (SOLVE,) if self.role == "decomposer" else ()

    def part_of(self, call: ToolCall) -> tuple[str | None, str]:
        """A part stands in what is left, word for word."""
        part, fault = DecomposedConversation.part_of(self, call)
        if part is None:
            return None, fault
        words = part.split()
        if len(words) < 3 or not (_NUMBER.fullmatch(words[0]) and _NUMBER.fullmatch(words[-1])):
            return None, "a part has numbers at its ends and an operation between them"
        if put_in_place(self.left, part, "0") is None:
            return None, f"that is no part of {self.left}"
        return part, ""

    def open_part(self, problem: str) -> Conversation:
        """A question with one reply."""
        return DecomposedConversation.open_part(self, f"compute {problem}")

    def result_of(self, part: SolvedPart) -> str:
        """The number, and what is left with it in the part's place."""
        value = (part.answer or "").strip()
        if not _NUMBER.fullmatch(value):
            return f"error: {part.problem} got no number as its answer"
        self.num_right += value == steps_of(part.problem)[-1]
        self.left, result = _placed(self.left, part.problem, value)
        return result

    async def outcome(self) -> Outcome:
        """The verdict, and how many parts were right."""
        outcome = await DecomposedConversation.outcome(self)
        breakdown = {name: outcome.breakdown[name] for name in ("answered", "calls")}
        if self.parts:
            breakdown["parts_right"] = self.num_right / len(self.parts)
        return replace(outcome, breakdown=breakdown)


@dataclass(slots=True, kw_only=True, eq=False)
class _Scripted:
    """Plays all roles by the last message it reads."""

    habits: Mapping[str, float]
    rng: random.Random
    has_begun: bool = False

    def reply(self, messages: Sequence[Message]) -> Message:
        """A call, a part's answer, or the problem's."""
        last = messages[-1]
        if last.role == "tool":
            return _decomposed(last.content.rpartition("left ")[2])
        expression = last.content.removeprefix("compute ")
        if not self.has_begun:
            self.has_begun = True
            return _decomposed(expression)
        steps = steps_of(expression)
        trace = Trace(steps=tuple(steps), answer=steps[-1], between=" = ")
        return reply_of(trace, choose_habit(self.habits, self.rng), self.rng)


def _decomposed(left: str) -> Message:
    if _NUMBER.fullmatch(left):
        return Message(role="assistant", content=f"<answer> {left} </answer>")
    call = ToolCall(name="solve", arguments={"problem": next_part(left)})
    return Message(role="assistant", content="", tool_calls=(call,))


def _placed(left: str, part: str, value: str) -> tuple[str, str]:
    """The expression with a value in a part's place, and what the call is told."""
    placed = put_in_place(left, part, value)
    assert placed is not None, (left, part)
    return placed, f"= {value} , left {placed}"


def next_part(expression: str) -> str:
    """The shortest beginning with an operation that may be computed by itself: a sum's sign follows it.

    >>> next_part("2 + 3 * 4 - 1"), next_part("2 * 3 - 1"), next_part("2 * 3")
    ('2 + 3 * 4', '2 * 3', '2 * 3')
    """
    words = expression.split()
    ends = (place for place in range(3, len(words)) if words[place] in ("+", "-"))
    return " ".join(words[: next(ends, len(words))])


def put_in_place(expression: str, part: str, value: str) -> str | None:
    """The expression with a value where a part stands first; None where it does not, word for word.

    >>> put_in_place("2 + 3 * 4 - 1", "3 * 4", "12"), put_in_place("12 + 3", "2 + 3", "5")
    ('2 + 12 - 1', None)
    """
    words, wanted = expression.split(), part.split()
    for place in range(len(words) - len(wanted) + 1):
        if words[place : place + len(wanted)] == wanted:
            return " ".join([*words[:place], value, *words[place + len(wanted) :]])
    return None
