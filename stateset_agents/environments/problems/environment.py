"""Problems as an environment: the question, one reply, and whether its answer is right.

The conversation ends with the reply: nobody speaks after it, so it is terminated and not cut.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from stateset_agents.answers.agreement import check_truth, math_agreement
from stateset_agents.core.chat.replies.thoughts import answer_of, num_steps, read_reasoned, words_of
from stateset_agents.core.environment import Conversation, Observation, ReplyLimits
from stateset_agents.environments.problems.attacks import ATTACKS
from stateset_agents.environments.problems.traces import Solver, Trace, check_habits, choose_habit, reply_of
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.comparison import composed, nfc
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario, Split, expect_split
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Outcome

INSTRUCTION = (
    "Think step by step between <think> and </think>. Then write only the result between <answer> and "
    "</answer>."
)
"""The system message unless another is set."""

AnswerIn = Literal["tags", "reply"]


class ProblemEnvironment(ABC):
    """Base of families of problems: a subclass makes scenarios, and may judge and solve them.

    A scenario's `opening` is the problem, its context has `answer`, unless `judge` is another, and
    `difficulty`. The environment's own reward is 1 for a right answer and 0 for any other; a training takes
    `reward: reasoning`, which also pays for the format.
    """

    local = True
    degenerate_agents = ATTACKS
    """Scripted agents that must not be paid; an audit plays them."""

    def __init__(
        self,
        *,
        system_prompt: str = INSTRUCTION,
        answer_in: AnswerIn = "tags",
        habits: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            system_prompt: Opens every conversation; empty for none.
            answer_in: `tags`: what stands between `<answer>` and `</answer>`; `reply`: all that is said
                behind a thought, for agents that answer without tags.
            habits: Of the scripted solver (`traces.HABITS`), with their shares; unset, it is always careful.
                A `bare` reply has no tags, so that `demonstrate` needs `--keep-failures` for it.
            seed: Of the problems to train on, and of the habits.
        """
        if not isinstance(system_prompt, str):
            raise ConfigurationError(f"system_prompt must be text, got {system_prompt!r:.60}")
        if answer_in not in get_args(AnswerIn):
            raise ConfigurationError(f"answer_in must be tags or reply, got {answer_in!r:.60}")
        if habits is not None:
            check_habits(habits)
        self._system = (Message(role="system", content=system_prompt),) if system_prompt else ()
        self._answer_in = answer_in
        self._habits = {"careful": 1.0} if habits is None else dict(habits)
        self._seed = seed
        self._made: dict[Split, Sequence[Scenario]] = {}

    @abstractmethod
    def make(self, split: Split) -> Sequence[Scenario]:
        """The problems of a split; asked once for each."""

    @abstractmethod
    def solve(self, scenario: Scenario) -> Trace:
        """The way to the answer, for the scripted solver."""

    def judge(self, scenario: Scenario, answer: str) -> float | None:
        """What an answer is worth, from 0 to 1; None where the environment cannot tell. In a thread."""
        return float(math_agreement(answer, scenario.context["answer"]))

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """The problems of a split; no problem stands in two. Raises ConfigurationError for one whose own
        answer would be wrong."""
        known = expect_split(split)
        if known not in self._made:
            made = self.make(known)
            if type(self).judge is ProblemEnvironment.judge:
                for scenario in made:
                    check_truth(scenario.context.get("answer"), where=f"the answer of {scenario.id!r}")
            self._made[known] = made
        return self._made[known]

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Ask the problem."""
        return ProblemConversation(
            opening=scenario.messages(self._system),
            scenario=scenario,
            environment=self,
        )

    def answer(self, reply: Message) -> str | None:
        """What a reply answers; None for nothing that can be told."""
        if self._answer_in == "tags":
            return answer_of(reply)
        return (words_of(reply) or "").strip() or None

    def honest_agent(self, scenario: Scenario) -> Solver:
        """A scripted agent that knows the answer; for demonstrations, and for an audit to compare with."""
        rng = random.Random(derive(self._seed, "habit", scenario.id))
        return Solver(message=reply_of(self.solve(scenario), choose_habit(self._habits, rng), rng))


@dataclass(slots=True, kw_only=True, eq=False)
class ProblemConversation:
    """One problem and the reply to it."""

    opening: tuple[Message, ...]
    scenario: Scenario
    environment: ProblemEnvironment
    reply: Message | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    reply_limits: ReplyLimits = field(default_factory=lambda: ReplyLimits(with_reasoning=True))
    """The verdict tells thoughts from words itself."""

    async def step(self, reply: Message) -> Observation:
        """Take the reply; it is the only one."""
        if self.reply is not None:
            raise ConfigurationError("this problem has its reply: start a new conversation")
        self.reply = reply
        return Observation(terminated=True)

    async def outcome(self) -> Outcome:
        """The verdict; 0 where there is no reply or no answer in it."""
        reply = self.reply or Message(role="assistant", content="")
        answer = self.environment.answer(reply)
        reasoned = read_reasoned(reply)
        breakdown = {
            "answered": float(answer is not None),
            "format": float(reasoned is not None),
            "steps": float(num_steps(reasoned.thinking) if reasoned is not None else 0),
        }
        problem = replace(self.scenario, context=composed(self.scenario.context))
        score = await in_thread(self.environment.judge, problem, nfc(answer or ""))
        success = None if score is None else answer is not None and score >= 1
        return Outcome(reward=score, success=success, breakdown=breakdown)

    def fork(self) -> ProblemConversation:
        """An independent copy."""
        return replace(self)

    async def close(self) -> None:
        """Nothing is held."""
