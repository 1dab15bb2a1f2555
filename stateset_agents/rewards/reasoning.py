"""Rewards for replies that think before they answer: the format, the answer, and both together.

What is right comes from the scenario's context alone, and so does the kind of task: a key there names the
reward of the answer (`ANSWER_REWARDS`). Nothing is guessed from the prompt, which an agent may have a part
in.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

from stateset_agents.answers.agreement import Form, check_truth, math_agreement
from stateset_agents.answers.tokens import closing_brace
from stateset_agents.core.chat.replies.thoughts import answer_of, num_steps, read_reasoned, words_of
from stateset_agents.core.reward import RewardOfRewards, parts_of
from stateset_agents.core.scoring.base import Result, RewardFunction, RewardResult, score_trajectories
from stateset_agents.rewards.verifiable import NOTHING_TO_CHECK, CheckedReward
from stateset_agents.runtime.named_code import imported
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.settings import expect_that, is_number, is_whole
from stateset_agents.types.trajectory import Trajectory, Turn

_log = get_logger(__name__)

ANSWER_REWARDS: Mapping[str, str] = {
    "answer": "stateset_agents.rewards.reasoning:create_math_answer_reward",
    "verdict": "stateset_agents.core.reward:EnvironmentReward",
    "tests": "stateset_agents.rewards.code:create_code_reward",
}
"""Key of a scenario's context -> "package.module:function" that makes the reward of its answer.

`verdict` says that only the environment can tell, for problems with many right answers.
"""

AnswerIn = Literal["tags", "boxed", "reply"]


class ReasoningFormatReward(CheckedReward):
    """1 where the last reply is one thought and one answer in their tags, and nothing else; else 0.

        <think> 2 + 12 - 1 = 14 - 1 = 13 </think> <answer> 13 </answer>

    A thought with fewer than `min_steps` steps (`reasoning.num_steps`) is none, or empty tags would be the
    quickest way to be paid. The steps are in the breakdown.
    """

    name = "reasoning_format"
    needs = "a reply"

    def __init__(self, *, min_steps: int = 1) -> None:
        expect_that(is_whole(min_steps, 0), "min_steps", "be a whole number from 0 on", min_steps)
        self._min_steps = min_steps

    def _checked(self, trajectory: Trajectory) -> RewardResult:
        reasoned = read_reasoned(trajectory.replies[-1]) if trajectory.replies else None
        steps = 0 if reasoned is None else num_steps(reasoned.thinking)
        right = reasoned is not None and steps >= self._min_steps
        return RewardResult(score=float(right), breakdown={"steps": float(steps)})


class MathAnswerReward(CheckedReward):
    """1 where the answer is `context["answer"]` by `reasoning.math_agreement`, else 0.

    The answer is what stands between `<answer>` and `</answer>` of the last reply, once; the format need not
    be kept otherwise. `answer_in="boxed"` takes the one `\\boxed{}` of a reply instead, outside of thoughts,
    and `"reply"` all that the reply says. `answered` in the breakdown says whether there was one at all.
    """

    name = "math_answer"
    needs = 'context["answer"]'

    def __init__(self, *, form: Form = "value", answer_in: AnswerIn = "tags") -> None:
        expect_that(form in get_args(Form), "form", "be value or expression", form, length=60)
        if answer_in not in get_args(AnswerIn):
            raise ConfigurationError(f"answer_in must be tags, boxed or reply, got {answer_in!r:.60}")
        self._form: Form = form
        self._answer_in = answer_in

    def check_scenario(self, scenario: Scenario) -> None:
        expected = scenario.context.get("answer")
        if expected is not None:
            check_truth(expected, form=self._form, where=f'context["answer"] of scenario {scenario.id!r}')

    def _checked(self, trajectory: Trajectory) -> RewardResult:
        expected = trajectory.scenario.context.get("answer")
        if expected is None:
            return RewardResult(score=None)
        self.check_scenario(trajectory.scenario)  # a truth that is none is told of whatever was said
        answer = self._given(trajectory.replies[-1]) if trajectory.replies else None
        right = answer is not None and math_agreement(answer, expected, form=self._form)
        return RewardResult(score=float(right), breakdown={"answered": float(answer is not None)})

    def _given(self, reply: Message) -> str | None:
        if self._answer_in == "tags":
            return answer_of(reply)
        words = words_of(reply)
        if words is None or self._answer_in == "boxed":
            return None if words is None else _boxed(words)
        return words.strip() or None


_BOX = re.compile(r"\\boxed\s*\{")


def _boxed(text: str) -> str | None:
    r"""The content of the one `\boxed{...}` of a text; None without one, with several, or where it does not
    end."""
    boxes = list(_BOX.finditer(text))
    if len(boxes) != 1:
        return None
    start = boxes[0].end()
    end = closing_brace(text, start - 1)
    return None if end is None else text[start:end].strip() or None


class ReasoningReward(RewardOfRewards):
    """`format` for the format plus `answer` for a right answer: by default .1 and 1, so from 0 to 1.1.

    The breakdown has both as they were, before they are weighed, so that runs with other weights compare. A
    scenario without a key of `ANSWER_REWARDS` in its context has no truth, and no score.
    """

    def __init__(
        self,
        *,
        format: float = 0.1,
        answer: float = 1.0,
        min_steps: int = 1,
        answer_rewards: Mapping[str, RewardFunction] | None = None,
    ) -> None:
        """`answer_rewards`: rewards that stand in for those of `ANSWER_REWARDS`, by the context's key."""
        for name, weight in (("format", format), ("answer", answer)):
            expect_that(is_number(weight) and 0 <= weight < math.inf, name, "be a number from 0 on", weight)
        self._weights = {"format": float(format), "answer": float(answer)}
        self._format = ReasoningFormatReward(min_steps=min_steps)
        self._by_key = dict(answer_rewards or {})
        super().__init__("reasoning", {"format": self._format, **self._by_key})

    @property
    def part_weights(self) -> Mapping[str, float]:
        return dict(self._weights)

    def check_scenario(self, scenario: Scenario) -> None:
        if scenario.context.get("answer") is not None:
            self._reward_of("answer").check_scenario(scenario)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        formats = await score_trajectories(self._format, trajectories)
        answers: list[Result] = [RewardResult(score=None)] * len(trajectories)
        keys = [self._key(trajectory.scenario) for trajectory in trajectories]
        for key in dict.fromkeys(key for key in keys if key is not None):
            places = [place for place, other in enumerate(keys) if other == key]
            scored = await score_trajectories(self._reward_of(key), [trajectories[place] for place in places])
            for place, result in zip(places, scored, strict=True):
                answers[place] = result
        return [self._joined(*pair) for pair in zip(formats, answers, strict=True)]

    def _joined(self, form: Result, answer: Result) -> Result:
        if isinstance(form, RewardFailure):
            return form
        if isinstance(answer, RewardFailure):
            return answer
        breakdown = {**parts_of("format", form), **parts_of("answer", answer)}
        if form.score is None or answer.score is None:
            return RewardResult(score=None, breakdown=breakdown)
        total = self._weights["format"] * form.score + self._weights["answer"] * answer.score
        return RewardResult(score=total, breakdown=breakdown)

    def _key(self, scenario: Scenario) -> str | None:
        """Return the key of the context that says what is right; None where there is none."""
        rewards = {**ANSWER_REWARDS, **self._by_key}
        keys = [key for key in rewards if scenario.context.get(key) is not None]
        if len(keys) > 1:
            raise ConfigurationError(
                f"scenario {scenario.id} has {' and '.join(keys)} in its context: give one of them"
            )
        if not keys:
            self.warn_once(_log, NOTHING_TO_CHECK, mend=f"give context {' or '.join(rewards)}")
        return keys[0] if keys else None

    def _reward_of(self, key: str) -> RewardFunction:
        if key not in self._by_key:
            self._by_key[key] = imported("reward", ANSWER_REWARDS[key])()
        return self._by_key[key]


create_reasoning_format_reward = ReasoningFormatReward
create_math_answer_reward = MathAnswerReward


def create_reasoning_reward(
    *,
    format: float = 0.1,
    answer: float = 1.0,
    min_steps: int = 1,
    form: Form = "value",
    answer_in: AnswerIn = "tags",
) -> ReasoningReward:
    """`format` for the format plus `answer` for a right answer; the rest is of the two rewards.

    In a YAML file: `reward: reasoning`, or `reward: {name: reasoning, format: 0.5}`.
    """
    maths = MathAnswerReward(form=form, answer_in=answer_in)
    return ReasoningReward(
        format=format, answer=answer, min_steps=min_steps, answer_rewards={"answer": maths}
    )


class DeepSeekRewardFunction:
    """The reward of a prompt and a response, without a conversation: `ReasoningReward` as a plain call.

    >>> reward = DeepSeekRewardFunction()
    >>> reward.compute_reward("2 + 3?", "<think>2 + 3 = 5</think><answer>5</answer>", truth=5)
    1.1

    DeepSeek-R1-Zero's rule-based rewards (https://arxiv.org/abs/2501.12948, section 2.2.2): accuracy and
    format, no model.
    """

    def __init__(self, **settings: Any) -> None:
        """`settings` are those of `create_reasoning_reward`."""
        self._reward = create_reasoning_reward(**settings)

    def compute_reward(self, prompt: str, response: str, truth: object = None) -> float:
        """Return what the response earns.

        Args:
            prompt: Text that the chat template rendered. One that ends with `<think>` has opened the thought.
            response: Text that was sampled behind it.
            truth: The right answer, or a mapping as a scenario's context has it, {"tests": ...} say. It
                comes from your data and is never read out of the prompt, which may say anything.

        Raises RewardFailure where it cannot be scored, and ConfigurationError for a truth that is none.
        """
        if truth is None:
            raise ConfigurationError(
                "what is right comes from your data, not from the prompt: write compute_reward(prompt, "
                "response, truth=answer), or give GRPOTrainer Scenario(id=..., opening=prompt, "
                'context={"answer": ...}) in the place of the prompt'
            )
        score = self.explain(prompt, response, truth=truth).score
        if score is None:
            raise ConfigurationError(
                f"the truth must be an answer or have one of {', '.join(ANSWER_REWARDS)}, got {truth!r:.60}"
            )
        return score

    def explain(self, prompt: str, response: str, *, truth: object) -> RewardResult:
        """Return what the response earns, with its breakdown."""
        opened = "<think>" if prompt.rstrip().endswith("<think>") else ""
        reply = Message(role="assistant", content=opened + response)
        completion = Completion(message=reply, prompt_ids=(), token_ids=(), logprobs=(), finish_reason="stop")
        trajectory = Trajectory(
            scenario=Scenario(
                id="prompt", context=truth if isinstance(truth, Mapping) else {"answer": truth}
            ),
            opening=(Message(role="user", content=prompt),),
            turns=(Turn(prompt_ids=(), completion=completion),),
        )
        with ThreadPoolExecutor(1) as thread:  # a loop of its own, wherever this is called
            return thread.submit(asyncio.run, self._reward.score(trajectory)).result()
