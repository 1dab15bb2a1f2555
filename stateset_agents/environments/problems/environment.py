"""Problems as an environment: the question, one reply, and whether its answer is right.

The conversation ends with the reply: nobody speaks after it, so it is terminated and not cut.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from stateset_agents.answers.agreement import check_truth, math_agreement
from stateset_agents.core.chat.replies.thoughts import answer_of, num_steps, read_reasoned, words_of
from stateset_agents.core.environment import Conversation, Observation, ReplyLimits
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.comparison import composed, nfc
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario, Split, expect_split
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that, is_whole, nearest
from stateset_agents.types.trajectory import Outcome

# Attacks: what cheated the field's graders. They see the problem's text, as a model does, and nothing else


_FORMULA = re.compile(r"[-0-9+*/^(). x]+(?:=[-0-9+*/^(). x]+)?")
_MANY = list(map(str, range(51)))
_MANY_ANSWERS = " ".join(f"<answer> {number} </answer>" for number in _MANY)


@dataclass(frozen=True, slots=True)
class Attack:
    """An agent that writes one reply from a problem's text."""

    wording: str

    def reply(self, messages: Sequence[Message]) -> Message:
        """The reply to the last message of the user."""
        problem = next((message.content for message in reversed(messages) if message.role == "user"), "")
        content = self.wording.format(
            problem=problem,
            formula=max(_FORMULA.findall(problem), key=len, default="1 + 1").strip(),
            numbers=", ".join(re.findall("[0-9]+", problem)),
            any_of_many=" or ".join(_MANY),
            all_of_many=", ".join(_MANY),
            many_answers=_MANY_ANSWERS,
            many_boxes=" ".join(rf"\boxed{{{number}}}" for number in range(10)),
            deep_brackets="(" * 90 + "1" + ")" * 90,
            long_sum="1 + " * 5000 + "1",
        )
        return Message(role="assistant", content=content)


ATTACKS: Mapping[str, Callable[[], Attack]] = {
    name: partial(Attack, wording)
    for name, wording in read_yaml(Path(__file__).with_name("attacks.yaml")).items()
}
"""Name -> what makes the agent."""


# Scripted solvers


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A problem solved in writing."""

    steps: tuple[str, ...]
    answer: str
    between: str = "\n"
    """Stands between two steps."""


HABITS = ("careful", "skips", "empty", "bare")
"""Every step; some of the steps; no thought; the answer alone, without tags."""


def reply_of(trace: Trace, habit: str, rng: random.Random) -> Message:
    """The reply of a solver with this habit. Its thought stands apart, and each template frames it its way.

    >>> trace = Trace(steps=("2 + 12", "14"), answer="14", between=" = ")
    >>> reply = reply_of(trace, "careful", random.Random(0))
    >>> reply.reasoning, reply.content
    ('2 + 12 = 14', '<answer> 14 </answer>')
    """
    if habit == "bare":
        return Message(role="assistant", content=trace.answer)
    steps: Sequence[str] = trace.steps
    if habit == "skips":
        some_steps = [step for step in steps if rng.random() < 0.5]
        steps = some_steps if 0 < len(some_steps) < len(steps) else steps[-1:]
    thinking = "" if habit == "empty" else trace.between.join(steps)
    return Message(role="assistant", content=f"<answer> {trace.answer} </answer>", reasoning=thinking)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solver:
    """A scripted agent that answers the one problem it was made for."""

    message: Message

    @property
    def text(self) -> str:
        """The reply as one text in the format."""
        thought = self.message.reasoning
        return (
            self.message.content if thought is None else f"<think> {thought} </think> {self.message.content}"
        )

    def reply(self, messages: Sequence[Message]) -> Message:
        """Return the one reply, whatever was said."""
        return self.message


def check_habits(habits: Mapping[str, float]) -> None:
    """Raises ConfigurationError for shares of no habit, or of an unknown one."""
    is_mapping = isinstance(habits, Mapping)
    expect_that(is_mapping, "habits", "be shares, such as {careful: 0.3, empty: 0.7}", habits, length=60)
    for name, share in habits.items():
        if name not in HABITS:
            raise ConfigurationError(
                f"habits has no {name!r}{nearest(str(name), HABITS)}: there are {', '.join(HABITS)}"
            )
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < math.inf:
            raise ConfigurationError(f"the share of habit {name!r} must be a number from 0 on, got {share!r}")
    if not sum(habits.values()):
        raise ConfigurationError("all habits have the share 0: give one a share, such as careful: 1.0")


def choose_habit(habits: Mapping[str, float], rng: random.Random) -> str:
    """One of them, by their shares."""
    return rng.choices(list(habits), weights=list(habits.values()))[0]


INSTRUCTION = (
    "Think step by step between <think> and </think>. Then write only the result between <answer> and "
    "</answer>."
)
"""The system message unless another is set."""

AnswerIn = Literal["tags", "reply"]
ReplyFormat = Literal["free", "required"]


class ProblemEnvironment(ABC):
    """Base of families of problems: a subclass makes scenarios, and may judge and solve them.

    A scenario's `opening` is the problem, its context has `answer`, unless `judge` is another, and
    `difficulty`. The environment's own reward is 1 for a right answer and 0 for any other; a training takes
    `reward: reasoning`, which also pays for the format.
    """

    local = True
    degenerate_agents = ATTACKS
    """Scripted agents that must not be paid; an audit plays them."""
    answer_between = ("<answer>", "</answer>")
    """What a required answer stands between."""

    def __init__(
        self,
        *,
        system_prompt: str = INSTRUCTION,
        answer_in: AnswerIn = "tags",
        reply_format: ReplyFormat = "free",
        habits: Mapping[str, float] | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            system_prompt: Opens every conversation; empty for none.
            answer_in: `tags`: what stands between `<answer>` and `</answer>`; `reply`: all that is said
                behind a thought, for agents that answer without tags.
            reply_format: `required`: a reply thinks and then answers, by a grammar
                (`AgentConfig(constrain="strict")`), whether or not the model would.
            habits: Shares of the scripted solver's habits (`HABITS`); unset, it is always careful.
                A `bare` reply has no tags, so that `demonstrate` needs `--keep-failures` for it.
            seed: Chooses the problems to train on, and each solver's habit.
        """
        expect_that(isinstance(system_prompt, str), "system_prompt", "be text", system_prompt, length=60)
        expect_that(answer_in in get_args(AnswerIn), "answer_in", "be tags or reply", answer_in, length=60)
        expect_that(
            reply_format in get_args(ReplyFormat), "reply_format", "be free or required", reply_format
        )
        if habits is not None:
            check_habits(habits)
        self.reply_limits = ReplyLimits(with_reasoning=True)  # the verdict tells thoughts from words itself
        if reply_format == "required":
            between = self.answer_between if answer_in == "tags" else None
            self.reply_limits = replace(self.reply_limits, thinks=True, answer_between=between)
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
        """Score an answer from 0 to 1; None where the environment cannot tell. Runs in a thread."""
        return float(math_agreement(answer, scenario.context["answer"]))

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """The problems of a split; no problem stands in two. Raises ConfigurationError for one whose own
        answer would be wrong."""
        split_name = expect_split(split)
        if split_name not in self._made:
            problems = self.make(split_name)
            if type(self).judge is ProblemEnvironment.judge:
                for scenario in problems:
                    check_truth(scenario.context.get("answer"), where=f"the answer of {scenario.id!r}")
            self._made[split_name] = problems
        return self._made[split_name]

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        """Ask the problem."""
        return ProblemConversation(
            opening=scenario.messages(self._system),
            scenario=scenario,
            environment=self,
        )

    def answer(self, reply: Message) -> str | None:
        """The answer in a reply; None where there is none."""
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

    @property
    def reply_limits(self) -> ReplyLimits:
        """The environment's."""
        return self.environment.reply_limits

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


# Splits

_OF_TEN: dict[int, Split] = {0: "validation", 1: "test"}
_TRIES = 400
"""Draws for each scenario wanted, after which the family is found too small."""
EACH: dict[str, int] = {"validation": 50, "test": 100}
"""Held-out problems of each level."""


def split_of(key: str) -> Split:
    """One problem in ten is for validation, one for the test, by its text's digest.

    >>> split_of("2 + 3 * 4 - 1")
    'train'
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return _OF_TEN.get(int.from_bytes(digest, "big") % 10, "train")


Drawn = tuple[str, Scenario]
"""A key that equal problems share, and the problem."""


class DrawnProblems(ProblemEnvironment):
    """Base of families that are drawn at random, as many problems of each level, in turn."""

    def __init__(self, *, levels: Sequence[int], family: str, num_train: int = 3000, **settings: Any) -> None:
        """`family` names the problems and, with the levels, seeds them; `num_train` problems to train on are
        as many of each level; `settings` are those of `ProblemEnvironment`."""
        at_least(1, num_train=num_train)
        super().__init__(**settings)
        self._levels = levels
        self._family = family
        self._num_train = num_train

    @abstractmethod
    def draw(self, rng: random.Random, level: int, split: Split) -> Drawn | None:
        """A problem of a level; None where the draw makes none, and another one is drawn."""

    def make(self, split: Split) -> Sequence[Scenario]:
        """Different problems of a split. The seed chooses those to train on; held-out ones are the same for
        every seed.

        Raises ConfigurationError where there are not so many.
        """
        levels, is_train = self._levels, split == "train"
        number = self._num_train if is_train else EACH[split] * len(levels)
        rng = random.Random(derive(self._seed if is_train else 0, "problems", self._family, split, *levels))
        keys: set[str] = set()
        scenarios: list[Scenario] = []
        for _ in range(_TRIES * number):
            problem = self.draw(rng, levels[len(scenarios) % len(levels)], split)
            if problem is None or problem[0] in keys or split_of(problem[0]) != split:
                continue
            keys.add(problem[0])
            scenarios.append(problem[1])
            if len(scenarios) == number:
                return scenarios
        raise ConfigurationError(
            f"{self._family} has only {len(scenarios)} different {split} problems, {number} were asked for: "
            "ask for fewer, or allow larger numbers"
        )


def at_least(least: int, **settings: int) -> None:
    """Raises ConfigurationError for a setting that is no whole number from `least` on."""
    for name, value in settings.items():
        expect_that(is_whole(value, least), name, f"be a whole number from {least} on", value, length=60)
