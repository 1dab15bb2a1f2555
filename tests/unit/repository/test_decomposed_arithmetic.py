"""A problem solved in parts: who reads what, what a call is told, and which token trains where."""

from __future__ import annotations

import pytest

from scripts.decomposed_arithmetic import DecomposedArithmetic, next_part, put_in_place
from stateset_agents.environments.decomposed import demonstrate
from stateset_agents.environments.problems import ArithmeticProblems
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

DESK = DecomposedArithmetic(decompose_prompt="in parts", system_prompt="", num_train=60)
PROBLEM = DESK.scenario_of("2 + 3 * 4 - 1")


def call(*problems: str) -> Message:
    calls = tuple(ToolCall(name="solve", arguments={"problem": problem}) for problem in problems)
    return Message(role="assistant", content="", tool_calls=calls)


def question(part: str) -> tuple[Message, ...]:
    return (Message(role="user", content=f"compute {part}"),)


def says(answer: object) -> Message:
    return Message(role="assistant", content=f"<answer> {answer} </answer>")


async def test_a_call_opens_a_conversation_of_its_own_and_its_answer_takes_the_part_s_place() -> None:
    talk = await DESK.start(PROBLEM, 0)
    assert [message.role for message in talk.opening] == ["system", "user"]
    assert talk.tools
    asked = await talk.step(call("2 + 3 * 4"))
    assert asked.conversation == (Message(role="user", content="compute 2 + 3 * 4"),)
    assert not talk.tools
    back = await talk.step(says(14))
    assert back.conversation is not None
    assert back.conversation[:3] == (*talk.opening, call("2 + 3 * 4"))
    assert [message.content for message in back.conversation[3:]] == ["= 14 , left 14 - 1"]
    assert (await talk.step(says(13))).terminated
    outcome = await talk.outcome()
    assert (outcome.reward, outcome.success) == (1.0, True)
    assert outcome.breakdown == {"answered": 1.0, "calls": 1.0, "parts_right": 1.0}
    assert outcome.metadata["roles"] == ["decomposer", "solver", "synthesizer"]


async def test_several_calls_are_solved_one_after_the_other_before_the_agent_goes_on() -> None:
    talk = await DESK.start(DESK.scenario_of("2 * 3 + 4 * 5"), 0)
    assert (await talk.step(call("2 * 3", "4 * 5"))).conversation == question("2 * 3")
    assert (await talk.step(says(6))).conversation == question("4 * 5")
    back = await talk.step(says(21))
    assert back.conversation is not None
    told = [message.content for message in back.conversation if message.role == "tool"]
    assert told == ["= 6 , left 6 + 4 * 5", "= 21 , left 6 + 21"]
    await talk.step(says(27))
    outcome = await talk.outcome()
    assert outcome.success is False
    assert outcome.breakdown["parts_right"] == 0.5


@pytest.mark.parametrize(
    ("problem", "complaint"),
    [
        ("5 + 5", "no part of"),
        ("3", "numbers at its ends"),
        ("+ 3 * 4", "numbers at its ends"),
    ],
)
async def test_what_is_no_part_is_told_and_opens_nothing(problem: str, complaint: str) -> None:
    talk = await DESK.start(PROBLEM, 0)
    back = await talk.step(call(problem))
    assert complaint in back.messages[-1].content
    assert talk.tools


async def test_a_part_that_may_not_be_computed_by_itself_makes_the_verdict_wrong() -> None:
    talk = await DESK.start(PROBLEM, 0)
    await talk.step(call("2 + 3"))
    back = await talk.step(says(5))
    assert back.messages[-1].content == "= 5 , left 5 * 4 - 1"
    await talk.step(says(19))
    assert (await talk.outcome()).success is False


async def test_a_solver_without_a_number_leaves_the_problem_as_it_was() -> None:
    talk = await DESK.start(PROBLEM, 0)
    await talk.step(call("3 * 4"))
    back = await talk.step(says("twelve"))
    assert back.messages[-1].content == "error: 3 * 4 got no number as its answer"
    asked = await talk.step(call("3 * 4"))
    assert asked.conversation == question("3 * 4")


async def test_a_conversation_that_calls_too_often_is_cut() -> None:
    environment = DecomposedArithmetic(max_calls=1, num_train=60)
    talk = await environment.start(PROBLEM, 0)
    assert (await talk.step(call("3 * 4", "2 + 12"))).truncated
    assert (await talk.outcome()).reward == 0.0


async def test_a_fork_goes_on_by_itself() -> None:
    talk = await DESK.start(PROBLEM, 0)
    await talk.step(call("2 + 3 * 4"))
    other = talk.fork()
    await talk.step(says(14))
    back = await other.step(says(15))
    assert back.messages[-1].content == "= 15 , left 15 - 1"


async def test_the_honest_agent_is_always_right_and_shows_each_row_by_itself() -> None:
    for scenario in DESK.scenarios("train")[:20]:
        agent, talk = DESK.honest_agent(scenario), await DESK.start(scenario, 0)
        messages = list(talk.opening)
        while not (heard := await talk.step(agent.reply(messages))).terminated:
            messages = list(heard.messages)
        assert (await talk.outcome()).success
        thread, *parts = await demonstrate(DESK, scenario, DESK.honest_agent(scenario))
        assert thread[-1].content == f"<answer> {scenario.context['answer']} </answer>"
        assert len(parts) == sum(bool(message.tool_calls) for message in thread)
        assert all([message.role for message in part] == ["user", "assistant"] for part in parts)


def test_the_problems_are_those_of_plain_arithmetic() -> None:
    assert DESK.scenarios("test") == ArithmeticProblems(system_prompt="", num_train=60).scenarios("test")


def test_parts_and_places() -> None:
    assert next_part("7 - 1 * 2 * 2 + 3") == "7 - 1 * 2 * 2"
    assert next_part("14 - 1") == "14 - 1"
    assert put_in_place("12 + 3", "2 + 3", "5") is None


@pytest.mark.parametrize("settings", [{"max_calls": 0}, {"decompose_prompt": 3}])
def test_settings_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        DecomposedArithmetic(**settings)
    with pytest.raises(ConfigurationError, match="whole numbers"):
        DESK.scenario_of("2 ** 3")
