"""How good an agent is, on held-out scenarios, per family, and how sure that is."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from environments import ChattyConversation, ChattyEnvironment, scenarios

from stateset_agents.algorithms.intervals import wilson
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.cli.output import exclusions
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment, Observation
from stateset_agents.core.reward import EnvironmentReward, reward_function
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.evaluation import evaluator
from stateset_agents.evaluation.evaluator import Evaluation, FamilyResult, evaluate, held_out, spread
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.experiment import EvaluationConfig, measure
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory


class Judged(ChattyEnvironment):
    """Each scenario's verdict is what `verdicts` says."""

    def __init__(self, **verdicts: bool | None) -> None:
        super().__init__(turns=1)
        self.verdicts = verdicts

    async def start(self, scenario: Any, seed: int) -> Any:
        conversation: Any = await super().start(scenario, seed)
        success = self.verdicts.get(scenario.id)

        async def outcome() -> Outcome:
            return Outcome(reward=None if success is None else float(success), success=success)

        conversation.outcome = outcome
        return conversation


async def measured(environment: ChattyEnvironment, number: int = 4, **settings: Any) -> Evaluation:
    backend = settings.pop("backend", None) or ScriptedBackend(lambda request: "ok")
    reward = settings.pop("reward", None) or EnvironmentReward()
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        return await evaluate(agent, environment, reward, scenarios(number), **settings)


async def test_success_is_a_share_with_its_interval_and_its_families() -> None:
    result = await measured(Judged(s0=True, s1=False, s2=True, s3=True))
    assert result.success == 0.75
    assert result.interval == wilson(3, 4)
    assert result.families == {
        "family 0": FamilyResult(success=1.0, interval=wilson(2, 2), n=2),
        "family 1": FamilyResult(success=0.5, interval=wilson(1, 2), n=2),
    }
    assert (result.n, result.num_failed, result.temperature) == (4, 0, 1.0)
    assert result.mean_reward == pytest.approx((1.25 + 0.25 + 1.25 + 1.25) / 4)
    assert [group.key for group in result.groups] == ["0/s0", "0/s1", "0/s2", "0/s3"]


async def test_bootstraps_hold_up_no_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def noted(shares: Any) -> tuple[float, float]:
        threads.add(threading.current_thread())
        return 0.0, 1.0

    monkeypatch.setattr(evaluator, "share_interval", noted)
    await measured(Judged(s0=True, s1=False))
    assert threads
    assert threading.current_thread() not in threads


async def test_the_summary_is_plain_json() -> None:
    result = await measured(Judged(s0=True, s1=False, s2=False, s3=False))
    summary = json.loads(json.dumps(result.summary()))
    assert summary["success"] == 0.25
    assert summary["interval"] == list(wilson(1, 4))
    assert summary["families"]["family 0"] == {
        "success": 0.5,
        "interval": list(wilson(1, 2)),
        "n": 2,
    }
    assert set(summary) == {
        "success",
        "interval",
        "mean_reward",
        "reward_interval",
        "n",
        "tries",
        "num_failed",
        "num_scored",
        "num_unanswered",
        "num_unscored",
        "temperature",
        "families",
    }


async def test_a_conversation_without_a_verdict_is_not_counted_as_a_failure() -> None:
    result = await measured(Judged(s0=True, s1=None))
    assert (result.success, result.n, result.interval) == (1.0, 1, wilson(1, 1))
    assert result.families == {"family 0": FamilyResult(success=1.0, interval=wilson(1, 1), n=1)}


async def test_without_any_verdict_there_is_no_success_rate() -> None:
    result = await measured(Judged())
    assert (result.success, result.interval, result.families, result.n) == (None, None, {}, 4)
    assert json.loads(json.dumps(result.summary()))["success"] is None


async def test_evaluation_samples_with_the_agent_s_truncation() -> None:
    requests = []
    backend = ScriptedBackend(lambda request: requests.append(request.params) or "ok")
    async with MultiTurnAgent(AgentConfig(top_p=0.9), backend=backend) as agent:
        await evaluate(agent, Judged(s0=True), EnvironmentReward(), scenarios(1))
    assert {params.top_p for params in requests} == {0.9}


async def test_conversations_that_could_not_be_played_are_left_out() -> None:
    async def broken(conversation: ChattyConversation, reply: Message) -> Observation | None:
        if conversation.scenario.id in ("s1", "s3"):
            raise ConnectionError("no route")
        return None

    environment = Judged(s0=True, s2=False)
    environment.answer = broken
    result = await measured(environment)
    assert (result.success, result.n, result.num_failed) == (0.5, 2, 2)
    assert result.families == {"family 0": FamilyResult(success=0.5, interval=wilson(1, 2), n=2)}
    assert len(result.groups) == 4


async def test_when_none_could_be_played_the_first_cause_is_told() -> None:
    async def broken(conversation: ChattyConversation, reply: Message) -> Observation:
        raise ConnectionError("no route")

    with pytest.raises(EnvironmentFailure, match=r"none of 4 conversations .* ConnectionError: no route"):
        await measured(ChattyEnvironment(answer=broken))


async def test_rewards_that_say_nothing_leave_no_mean() -> None:
    @reward_function
    def silent(trajectory: Trajectory) -> None:
        return None

    assert (await measured(Judged(s0=True), reward=silent)).mean_reward is None


async def test_a_reward_that_breaks_is_counted_and_one_that_does_not_apply_is_not() -> None:
    @reward_function
    def fragile(trajectory: Trajectory) -> float | None:
        if trajectory.scenario.id == "s0":
            raise RuntimeError("the judge is away")
        return None if trajectory.scenario.id == "s1" else 0.5

    result = await measured(Judged(s0=True, s1=True, s2=False, s3=True), reward=fragile)
    assert (result.success, result.n, result.mean_reward) == (0.75, 4, 0.5)
    assert (result.num_failed, result.num_scored, result.num_unscored) == (0, 2, 1)
    assert exclusions(result.summary()) == ["left out: of the mean reward 1 that could not be scored"]
    assert exclusions({"num_failed": 2, "num_unscored": 0}) == ["left out: 2 conversations that failed"]
    assert exclusions({"num_failed": 0, "num_unscored": 0}) == []


async def test_the_same_seed_meets_the_same_users_at_any_temperature() -> None:
    async def users(**settings: Any) -> list[tuple[str, str, int]]:
        environment = ChattyEnvironment()
        await measured(environment, **settings)
        return sorted(entry for entry in environment.log if entry[0] == "start")

    first = await users(seed=3)
    assert await users(seed=3, temperature=0.0, limits=RolloutLimits(max_concurrent=1)) == first
    assert await users(seed=4) != first


async def test_greedy_is_temperature_zero() -> None:
    backend = ScriptedBackend(lambda request: "ok")
    result = await measured(ChattyEnvironment(), temperature=0.0, backend=backend)
    assert result.temperature == 0.0
    assert {request.params.temperature for request in backend.requests} == {0.0}


@pytest.mark.parametrize(
    ("number", "settings", "message"),
    [
        (0, {}, "there is no scenario to evaluate: give at least one"),
        (2, {"temperature": -0.5}, "temperature must be at least 0"),
    ],
)
async def test_what_cannot_be_evaluated_is_one_line(number: int, settings: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        await measured(ChattyEnvironment(), number, **settings)


def test_held_out_scenarios_are_the_first_of_their_split() -> None:
    environment = ChattyEnvironment()
    assert [scenario.id for scenario in held_out(environment, "test", 2)] == ["s0", "s1"]
    assert len(held_out(environment, "test", None)) == 4


def test_a_few_scenarios_are_of_every_family() -> None:
    given = [Scenario(id=f"{family}{index}", family=family) for family in "abc" for index in range(1, 4)]
    assert [one.id for one in spread(given, 4)] == ["a1", "b1", "c1", "a2"]
    assert [one.id for one in spread(given, 8)] == ["a1", "b1", "c1", "a2", "b2", "c2", "a3", "b3"]
    assert spread(given, 9) == given


@pytest.mark.parametrize(
    ("split", "number", "message"),
    [
        ("validation", None, "the environment has no validation scenario: give some split='validation'"),
        ("test", 5, "the environment has 4 test scenarios, got 5 to play: ask for fewer"),
        ("test", 0, "the number of test scenarios must be at least 1, got 0"),
    ],
)
def test_scenarios_that_are_not_there_cannot_be_played(split: str, number: int | None, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        held_out(ChattyEnvironment(), split, number)


async def test_the_measurement_around_training_has_the_training_s_time_limits() -> None:
    async def wait(conversation: ChattyConversation, reply: Message) -> None:
        await asyncio.sleep(60)

    limits = TrainingConfig(turn_timeout=0.1).rollout_limits()
    async with MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(lambda request: "ok")) as agent:
        with pytest.raises(
            EnvironmentFailure, match=r"answering a reply took the environment longer than 0\.1 s"
        ):
            await measure(
                agent, ChattyEnvironment(answer=wait), EnvironmentReward(), EvaluationConfig(), limits
            )


def test_an_unknown_split_is_named_and_a_list_is_none() -> None:
    environment = ConversationEnvironment([{"opening": "hi"}])
    for ask in (lambda: held_out(environment, "tset", None), lambda: environment.scenarios("tset")):
        with pytest.raises(
            ConfigurationError, match=r"^split must be train, validation or test, got 'tset'$"
        ):
            ask()
    with pytest.raises(
        ConfigurationError, match=r"^split must be a str, got list \[Scenario\(.*: scenarios of"
    ):
        held_out(environment, scenarios(9), None)  # type: ignore[arg-type]  # the mistake under test


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("test", r"got the text 'test': write environment\.scenarios\('test'\)"),
        (scenarios(1)[0], r"got one: write \[scenario\]"),
        ({"id": "a"}, "got dict {'id': 'a'}"),
        ([3], "got int 3 in it: write load_scenarios"),
    ],
)
async def test_what_is_no_list_of_scenarios_is_one_line(wrong: Any, said: str) -> None:
    async with MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(lambda request: "ok")) as agent:
        with pytest.raises(
            ConfigurationError, match=f"^scenarios must be a list of Scenarios or dicts, {said}"
        ):
            await evaluate(agent, ChattyEnvironment(), EnvironmentReward(), wrong)
