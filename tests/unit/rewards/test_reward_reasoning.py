"""What thinking and answering pays, and what cheating at it does not."""

from __future__ import annotations

import asyncio
import time

import pytest
from builders import trajectory
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.chat.replies.parsing import HERMES
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import RewardFunction, RewardResult, reward_function, score_trajectories
from stateset_agents.evaluation.evaluator import evaluate
from stateset_agents.rewards import (
    DeepSeekRewardFunction,
    ReasoningReward,
    create_math_answer_reward,
    create_reasoning_format_reward,
    create_reasoning_reward,
)
from stateset_agents.runtime.circuit_breakers import FaultPolicy, FaultTolerance
from stateset_agents.training.components import make_reward
from stateset_agents.types.errors import ConfigurationError, RewardFailure, RewardTimeout
from stateset_agents.types.scenario import Scenario

GOOD = "<think> 6 * 7 = 42 </think> <answer> 42 </answer>"


async def paid(reward: RewardFunction, reply: str, **context: object) -> float | None:
    """The score of a reply whose thoughts its template leaves in the words; the same where it reads them."""
    raw = await reward.score(trajectory("6 * 7?", reply, context=dict(context)))
    parsed = await reward.score(trajectory("6 * 7?", HERMES.read(reply), context=dict(context)))
    assert raw == parsed
    return raw.score


@pytest.mark.parametrize(
    ("reply", "score"),
    {
        GOOD: 1.1,
        "<think> 6 * 7 = 41 </think> <answer> 41 </answer>": 0.1,
        "<think></think><answer>42</answer>": 1.0,
        "<think> = ... </think><answer>42</answer>": 1.0,
        "<answer>42</answer>": 1.0,
        "<think></think><answer>41</answer>": 0.0,
        "<answer>41</answer>": 0.0,
        "42": 0.0,
        "": 0.0,
        "<think> it is 42 </think>": 0.0,
        "<think> it is 42": 0.0,
        "<think>6 * 7</think><answer>6 * 7</answer>": 0.1,
        "<think>a</think><answer>41 or 42</answer>": 0.1,
        "<think>a</think><answer>41</answer><answer>42</answer>": 0.0,
        "<answer>42</answer><think>a</think>": 0.0,
        "<think>a</think><think>b</think><answer>42</answer>": 0.0,
        "I think: <think>a</think><answer>42</answer>": 0.0,
        "<think>a<think>b</think><answer>42</answer>": 0.0,
        "a</think><answer>42</answer>": 0.0,
        "<think>a</think> The answer: <answer>42</answer>": 1.0,
        "<think><answer>42</answer></think><answer>41</answer>": 0.0,
    }.items(),
)
async def test_the_format_earns_a_tenth_and_the_answer_one(reply: str, score: float) -> None:
    assert await paid(create_reasoning_reward(), reply, answer=42) == pytest.approx(score)


async def test_the_breakdown_has_both_before_they_are_weighed() -> None:
    reward = create_reasoning_reward(format=0.5, answer=2)
    result = await reward.score(trajectory("?", GOOD, context={"answer": 42}))
    assert result.score == 2.5
    assert result.breakdown == {"format": 1.0, "format/steps": 2.0, "answer": 1.0, "answer/answered": 1.0}


@pytest.mark.parametrize(("min_steps", "score"), [(0, 1.0), (1, 1.0), (2, 1.0), (3, 0.0)])
async def test_a_thought_of_too_few_steps_is_no_thought(min_steps: int, score: float) -> None:
    assert await paid(create_reasoning_format_reward(min_steps=min_steps), GOOD) == score


async def test_empty_thoughts_pass_where_no_step_is_asked_for() -> None:
    reward = create_reasoning_reward(min_steps=0)
    assert await paid(reward, "<think></think><answer>42</answer>", answer=42) == 1.1


async def test_the_truth_is_the_context_s_and_never_the_prompt_s(caplog: pytest.LogCaptureFixture) -> None:
    talk = trajectory(
        "The answer is 41. What is 6 * 7?", "<think>a</think><answer>41</answer>", context={"answer": 42}
    )
    assert (await create_reasoning_reward().score(talk)).score == pytest.approx(0.1)
    reward = create_reasoning_reward()
    for _ in range(2):
        assert (await reward.score(trajectory("6 * 7?", GOOD))).score is None
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("nothing in the scenario can be checked" in message for message in warnings) == 1


async def test_a_group_is_scored_by_each_scenario_s_kind_of_task() -> None:
    @reward_function
    def passes(replies: tuple) -> float:
        return 0.5

    reward = ReasoningReward(answer_rewards={"tests": passes})
    talks = [
        trajectory("?", GOOD, context={"answer": 42}),
        trajectory("?", GOOD, context={"tests": ["assert f(1) == 2"]}),
        trajectory("?", GOOD, context={"verdict": "environment"}, success=True),
        trajectory("?", GOOD),
    ]
    results = await reward.score_group(talks)
    scores = [result.score for result in results if not isinstance(result, RewardFailure)]
    assert scores == [pytest.approx(1.1), pytest.approx(0.6), pytest.approx(1.1), None]


async def test_two_kinds_of_truth_are_refused() -> None:
    talk = trajectory("?", GOOD, context={"answer": 42, "tests": ["assert True"]})
    with pytest.raises(ConfigurationError, match="has answer and tests in its context"):
        await create_reasoning_reward().score(talk)


async def test_an_answer_that_the_machine_had_no_time_for_is_asked_again_and_else_unscored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def overloaded_once(given: str, expected: str) -> bool:
        asked.append(given)
        if len(asked) % 3:
            raise RewardTimeout("the machine is overloaded")
        return True

    monkeypatch.setattr("stateset_agents.answers.symbolic.has_math_verify", lambda: True)
    monkeypatch.setattr("stateset_agents.answers.symbolic._compared", overloaded_once)
    reward = create_reasoning_reward(form="expression")
    talk = trajectory("?", r"<think>a</think><answer>\sin x</answer>", context={"answer": r"\cos x"})
    faults = FaultTolerance(FaultPolicy(reward_retries=1, retry_backoff=0.01))
    [unscored] = await score_trajectories(reward, [talk], seconds=60, fault_tolerance=faults)
    assert isinstance(unscored, RewardFailure)
    assert "the machine is overloaded" in str(unscored)
    assert len(asked) == 2
    [scored] = await score_trajectories(reward, [talk], seconds=60, fault_tolerance=faults)
    assert isinstance(scored, RewardResult)
    assert scored.score == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("answer_in", "reply", "score"),
    [
        ("boxed", r"so \boxed{42}.", 1.0),
        ("boxed", r"<think>\boxed{1}</think>it is \boxed{ \frac{84}{2} }", 0.0),
        ("boxed", r"<think>\boxed{1}</think>it is \boxed{42}", 1.0),
        ("boxed", r"\boxed{41} \boxed{42}", 0.0),
        ("boxed", r"\boxed{42", 0.0),
        ("boxed", "42", 0.0),
        ("boxed", "<answer>42</answer>", 0.0),
        ("reply", " 42 ", 1.0),
        ("reply", "<think>6 * 7</think> 42", 1.0),
        ("reply", "<think>42", 0.0),
        ("reply", "it is 42", 0.0),
        ("reply", "<answer>42</answer>", 0.0),
        ("tags", r"\boxed{42}", 0.0),
    ],
)
async def test_the_answer_is_looked_for_where_the_setting_says(
    answer_in: str, reply: str, score: float
) -> None:
    reward = make_reward({"name": "math_answer", "answer_in": answer_in})
    assert await paid(reward, reply, answer=42) == score


async def test_a_form_may_be_asked_for() -> None:
    reply = "<answer>(x+1)^2</answer>"
    assert await paid(create_math_answer_reward(), reply, answer="x^2+2x+1") == 0.0
    assert await paid(create_math_answer_reward(form="expression"), reply, answer="x^2+2x+1") == 1.0


@pytest.mark.parametrize("name", ["math_answer", "reasoning"])
async def test_a_truth_that_is_not_its_own_answer_is_refused_before_anything_is_played(name: str) -> None:
    scenario = Scenario(id="power", opening="2^10?", context={"answer": "2^{10}"})
    line = r"scenario 'power': its own answer '2\^\{10\}' would be wrong: write it evaluated"
    backend = ScriptedBackend(["<answer>1024</answer>"])
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        with pytest.raises(ConfigurationError, match=line):
            await evaluate(
                agent, ConversationEnvironment(scenarios=[scenario]), make_reward({"name": name}), [scenario]
            )
    assert not backend.requests
    make_reward({"name": name, "form": "expression"}).check_scenario(scenario)


async def test_the_names_lead_to_the_rewards() -> None:
    assert await paid(make_reward({"name": "reasoning", "format": 0.5}), GOOD, answer=42) == 1.5
    assert await paid(make_reward({"name": "reasoning_format"}), GOOD) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "reasoning", "format": -1}, "format must be a number from 0 on, got -1"),
        ({"name": "reasoning", "answer": True}, "answer must be a number from 0 on, got True"),
        ({"name": "reasoning", "min_steps": -1}, "min_steps must be a whole number from 0 on, got -1"),
        ({"name": "math_answer", "form": "sum"}, "form must be value or expression, got 'sum'"),
        ({"name": "math_answer", "answer_in": "end"}, "answer_in must be tags, boxed or reply, got 'end'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_reward(settings)


def test_a_plain_call_scores_a_response() -> None:
    reward = DeepSeekRewardFunction()
    assert reward.compute_reward("6 * 7?", GOOD, truth=42) == pytest.approx(1.1)
    assert reward.compute_reward("6 * 7?", GOOD, truth={"answer": "42"}) == pytest.approx(1.1)
    assert reward.compute_reward("6 * 7?", GOOD, truth=41) == pytest.approx(0.1)
    assert reward.explain("6 * 7?", GOOD, truth=42).breakdown["answer"] == 1.0
    with pytest.raises(ConfigurationError, match="truth must be an answer"):
        reward.compute_reward("6 * 7?", GOOD, truth={})


def test_a_prompt_that_has_opened_the_thought_is_seen() -> None:
    reward = DeepSeekRewardFunction()
    rest = "6 * 7 = 42 </think> <answer> 42 </answer>"
    assert reward.compute_reward("user: 6 * 7?\nassistant: <think>\n", rest, truth=42) == pytest.approx(1.1)
    assert reward.compute_reward("user: 6 * 7?\nassistant: ", rest, truth=42) == 0
    assert reward.compute_reward("user: 6 * 7?\nassistant: <think>\n", GOOD, truth=42) == 0


async def test_a_plain_call_works_inside_a_running_program() -> None:
    assert DeepSeekRewardFunction(answer=2).compute_reward("?", GOOD, truth=42) == pytest.approx(2.1)


@given(
    st.text(max_size=400),
    st.sampled_from(["{}", "<answer>{}</answer>", "<think>a</think><answer>{}</answer>"]),
)
def test_any_reply_scores_between_nothing_and_all(text: str, frame: str) -> None:
    talk = trajectory("?", frame.format(text), context={"answer": 987654321})
    score = asyncio.run(create_reasoning_reward().score(talk)).score
    assert score is not None
    assert 0 <= score <= (1.1 if "987654321" in text else 0.1 + 1e-9)


async def test_replies_of_200_000_characters_take_no_time() -> None:
    begun = time.process_time()
    for reply in ("<think>" * 30_000, "<answer>42" * 20_000, "1 = " * 50_000, r"\boxed{" * 25_000):
        for frame in ("{}", "<think>{}</think><answer>42</answer>", "<think>a</think><answer>{}</answer>"):
            for settings in ({}, {"answer_in": "boxed"}, {"answer_in": "reply"}):
                await create_reasoning_reward(**settings).score(
                    trajectory("?", frame.replace("{}", reply), context={"answer": 42})
                )
    assert time.process_time() - begun < 5
