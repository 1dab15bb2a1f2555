"""ConversationEnvironment: scenarios in, users and tools answering, limits and verdicts out."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from stateset_agents.core.environment import Conversation, ConversationEnvironment, Environment, Observation
from stateset_agents.core.tools import tool
from stateset_agents.core.users.simulated_user import RuleBasedUser, ScriptedUser, User
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome

REFUND = {"topic": "refund", "context": "Order delayed"}


def say(text: str, *calls: ToolCall) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls)


async def begin(environment: Environment, seed: int = 0) -> Conversation:
    return await environment.start(environment.scenarios("train")[0], seed)


def scripted(*lines: str) -> ConversationEnvironment:
    return ConversationEnvironment([REFUND], user=lambda scenario, seed: ScriptedUser(lines))


async def test_the_minimal_program_talks_and_ends_by_itself():
    environment = ConversationEnvironment(scenarios=[REFUND], max_turns=6)
    conversation = await begin(environment)
    assert [message.role for message in conversation.opening] == ["user"]
    assert "refund" in conversation.opening[0].content
    assert "Order delayed." in conversation.opening[0].content
    turns = 1
    while not (observation := await conversation.step(say("Let me see to it."))).terminated:
        assert [message.role for message in observation.messages] == ["user"]
        assert not observation.truncated
        turns += 1
    assert 2 <= turns < 6
    assert await conversation.outcome() == Outcome(reward=None, success=None)
    await conversation.close()


async def test_the_same_seed_meets_the_same_user():
    environment = ConversationEnvironment([REFUND])

    async def heard(seed: int) -> list[str]:
        conversation = await begin(environment, seed)
        observations = [await conversation.step(say("Let me see to it.")) for _ in range(3)]
        return [m.content for m in (*conversation.opening, *(m for o in observations for m in o.messages))]

    runs = [await heard(seed) for seed in range(8)]
    assert runs == [await heard(seed) for seed in range(8)]
    assert len({tuple(run) for run in runs}) > 3


async def test_max_turns_truncates_but_a_user_who_leaves_terminates():
    environment = ConversationEnvironment(
        [REFUND], max_turns=2, user=lambda scenario, seed: ScriptedUser(["Hi", "And?", "Well?"])
    )
    conversation = await begin(environment)
    first, second = await conversation.step(say("a")), await conversation.step(say("b"))
    assert (first.terminated, first.truncated) == (False, False)
    assert (second.terminated, second.truncated) == (False, True)
    assert second.messages[0].content == "Well?"
    leaver = ConversationEnvironment([REFUND], max_turns=1, user=lambda s, seed: ScriptedUser(["Hi"]))
    assert await (await begin(leaver)).step(say("a")) == Observation(terminated=True)


async def test_the_scenarios_own_opening_stands_before_the_users_lines():
    environment = ConversationEnvironment(
        [{**REFUND, "opening": "Where is my lamp?"}],
        user=lambda scenario, seed: ScriptedUser(["K27"]),
        system_prompt="Be kind.",
    )
    conversation = await begin(environment)
    assert [(m.role, m.content) for m in conversation.opening] == [
        ("system", "Be kind."),
        ("user", "Where is my lamp?"),
    ]
    assert (await conversation.step(say("Which order?"))).messages[0].content == "K27"


async def test_tool_calls_are_answered_by_the_tools_and_count_as_a_turn():
    @tool
    def status(order_id: str, scenario: Scenario) -> dict[str, str]:
        return {"order": order_id, "status": str(scenario.context["status"])}

    environment = ConversationEnvironment(
        [{"topic": "status", "context": {"status": "shipped"}}],
        max_turns=2,
        tools=[status],
        user=lambda scenario, seed: ScriptedUser(["Hi", "Thanks"]),
    )
    conversation = await begin(environment)
    assert [schema["function"]["name"] for schema in conversation.tools] == ["status"]
    calls = (
        ToolCall(name="status", arguments={"order_id": "K27"}, id="c1"),
        ToolCall(name="statsu", id="c2"),
    )
    first = await conversation.step(say("", *calls))
    assert [(m.role, m.tool_call_id, m.content) for m in first.messages] == [
        ("tool", "c1", '{"order":"K27","status":"shipped"}'),
        ("tool", "c2", "error: unknown tool 'statsu'; did you mean status?"),
    ]
    second = await conversation.step(say("It is shipped."))
    assert (second.messages[0].content, second.truncated) == ("Thanks", True)


async def test_endless_tool_calls_are_cut_by_max_turns():
    conversation = await begin(ConversationEnvironment([REFUND], max_turns=3))
    observations = [await conversation.step(say("", ToolCall(name="x"))) for _ in range(3)]
    assert [observation.truncated for observation in observations] == [False, False, True]


async def test_expected_facts_give_a_typed_success():
    environment = ConversationEnvironment([{"topic": "refund", "expected_facts": ["5 days"]}])

    async def outcome(reply: str) -> Outcome:
        conversation = await begin(environment)
        await conversation.step(say(reply))
        return await conversation.outcome()

    assert await outcome("Your refund takes 5 days.") == Outcome(reward=1.0, success=True)
    assert await outcome("Your refund takes a while.") == Outcome(reward=0.0, success=False)


async def test_a_success_function_reads_the_messages():
    def refunded(scenario: Scenario, messages: Sequence[Message]) -> bool:
        return any(message.role == "tool" and message.content == "refunded" for message in messages)

    @tool
    def refund() -> str:
        return "refunded"

    environment = ConversationEnvironment([REFUND], tools=[refund], success=refunded)
    conversation = await begin(environment)
    await conversation.step(say("I refunded it."))
    assert (await conversation.outcome()).success is False
    await conversation.step(say("", ToolCall(name="refund")))
    assert await conversation.outcome() == Outcome(reward=1.0, success=True)


async def test_a_success_that_is_no_truth_value_is_one_line():
    environment = ConversationEnvironment([REFUND], success=lambda scenario, messages: "yes")  # type: ignore[arg-type, return-value]  # the mistake under test
    with pytest.raises(ConfigurationError, match="success must return True, False or None, got 'yes'"):
        await (await begin(environment)).outcome()


async def test_a_fork_goes_on_from_the_same_state_and_apart():
    conversation = await begin(scripted("Hi", "one", "two"))
    await conversation.step(say("a"))
    twin = conversation.fork()
    assert (await conversation.step(say("b"))).messages[0].content == "two"
    assert (await twin.step(say("c"))).messages[0].content == "two"
    assert (await conversation.step(say("d"))).terminated


class Caller:
    """A user of one's own; `local` and what `reply` does are set by the test."""

    def __init__(self, *, local: bool = False, error: Exception | None = None, words: object = "Hm.") -> None:
        self.local = local
        self.error = error
        self.words = words

    async def reply(self, messages: Sequence[Message]) -> str | None:
        await asyncio.sleep(0)
        if self.error and len(messages) > 1:
            raise self.error
        return self.words  # type: ignore[return-value]  # some tests return what is no text

    def fork(self) -> User:
        return self


async def test_a_broken_user_fails_the_conversation_and_a_mistake_in_it_travels():
    async def step(user: Caller) -> Observation:
        environment = ConversationEnvironment([{"opening": "Hi"}], user=lambda scenario, seed: user)
        return await (await begin(environment)).step(say("a"))

    with pytest.raises(EnvironmentFailure, match="user failed: OSError: line dropped"):
        await step(Caller(error=OSError("line dropped")))
    with pytest.raises(NameError):
        await step(Caller(error=NameError("oops")))
    with pytest.raises(ConfigurationError, match=r"Caller.reply must return text or None, got 3"):
        await step(Caller(words=3))


async def test_a_user_without_an_opening_is_an_environment_failure():
    with pytest.raises(EnvironmentFailure, match="left without opening: give it an `opening`"):
        await begin(scripted())


async def test_local_is_read_off_the_parts():
    @tool
    async def fetch() -> str:
        return ""

    def user(local: bool) -> ConversationEnvironment:
        return ConversationEnvironment([REFUND], user=lambda scenario, seed: Caller(local=local))

    assert ConversationEnvironment([REFUND]).local
    assert user(True).local
    assert not user(False).local
    assert not ConversationEnvironment([REFUND], tools=[fetch]).local
    assert ConversationEnvironment([REFUND], tools=[fetch], local=True).local


async def test_one_remote_user_among_local_ones_is_refused():
    scenarios = [{"id": "near", "opening": "Hi"}, {"id": "far", "opening": "Hi"}]
    environment = ConversationEnvironment(
        scenarios, user=lambda scenario, seed: Caller(local=scenario.id == "near")
    )
    near, far = environment.scenarios("train")
    await environment.start(near, 0)
    with pytest.raises(ConfigurationError, match=r"user of scenario far is not local.*local=False"):
        await environment.start(far, 0)


def test_splits_never_stand_in_for_one_another():
    rows = [{"id": "a", "topic": "x"}, {"id": "b", "topic": "x", "split": "test"}, Scenario(id="c")]
    environment = ConversationEnvironment(rows)
    assert [scenario.id for scenario in environment.scenarios("train")] == ["a", "c"]
    assert [scenario.id for scenario in environment.scenarios("test")] == ["b"]
    assert environment.scenarios("validation") == []


def test_scenarios_can_come_from_a_file(tmp_path: Path):
    path = tmp_path / "scenarios.jsonl"
    path.write_text(f"{json.dumps(REFUND)}\n\n{json.dumps({'topic': 'status'})}\n", encoding="utf-8")
    for given in (path, str(path)):
        families = [scenario.family for scenario in ConversationEnvironment(given).scenarios("train")]
        assert families == ["refund", "status"]
    path.write_text('{"topic": "refund"}\n{"topic": \n', encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"scenarios.jsonl, line 2: not JSON"):
        ConversationEnvironment(path)


def test_settings_that_cannot_work_are_refused_in_one_line():
    for turns in (0, -1, True, 1.5):
        with pytest.raises(
            ConfigurationError, match=f"max_turns must be a whole number from 1 on, got {turns!r}"
        ):
            ConversationEnvironment([REFUND], max_turns=turns)  # type: ignore[arg-type]  # some are no int
    with pytest.raises(ConfigurationError, match="scenarios is empty"):
        ConversationEnvironment([])
    with pytest.raises(ConfigurationError, match="must be a list of scenarios, got one mapping"):
        ConversationEnvironment(REFUND)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigurationError, match=r"user must be a function, got ScriptedUser"):
        ConversationEnvironment([REFUND], user=ScriptedUser(["Hi"]))  # type: ignore[arg-type]  # likewise


async def test_slow_sync_user_code_leaves_the_loop_free() -> None:
    def slow_goal(messages: Sequence[Message]) -> bool:
        time.sleep(0.3)
        return True

    def slow_user(scenario: Scenario, seed: int) -> RuleBasedUser:
        time.sleep(0.3)
        return RuleBasedUser([], opening=("hi",), goal=slow_goal, seed=seed)

    environment = ConversationEnvironment([{"topic": "refund"}], user=slow_user)
    worst = 0.0

    async def watch() -> None:
        nonlocal worst
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.01)
            worst = max(worst, time.perf_counter() - before)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    conversation = await environment.start(environment.scenarios("train")[0], 0)
    observation = await conversation.step(Message(role="assistant", content="hello"))
    watcher.cancel()
    assert observation.terminated
    assert worst < 0.25
