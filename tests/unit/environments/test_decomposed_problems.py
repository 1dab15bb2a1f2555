"""Any environment's problems in parts: who reads what, whose row a turn is, and who may play a role."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Conversation, Observation
from stateset_agents.environments.decomposed import (
    DecomposedProblems,
    OneReply,
    demonstrate,
    updated,
    with_roles,
)
from stateset_agents.environments.problems import ArithmeticProblems
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario

SUMS = ArithmeticProblems(system_prompt="think", num_train=20)
PROBLEM = Scenario(id="sum", opening="compute 2 + 3 + 4", context={"answer": 9, "expression": "2 + 3 + 4"})


def call(*problems: str) -> Message:
    calls = tuple(ToolCall(name="solve", arguments={"problem": problem}) for problem in problems)
    return Message(role="assistant", content="", tool_calls=calls)


def says(answer: object) -> Message:
    return Message(role="assistant", content=f"<answer> {answer} </answer>")


def texts(messages: Sequence[Message] | None) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages or ()]


async def test_without_a_synthesizer_whoever_decomposes_goes_on_with_the_parts_answers() -> None:
    talk = await DecomposedProblems(SUMS, decomposer="split").start(PROBLEM, 0)
    assert texts(talk.opening) == [("system", "split"), ("user", "compute 2 + 3 + 4")]
    first = await talk.step(call("2 + 3", "5 + 4"))
    assert texts(first.conversation) == [("system", "think"), ("user", "2 + 3")]
    await talk.step(says(5))
    last = await talk.step(says(8))
    assert texts(last.conversation)[3:] == [("tool", "5"), ("tool", "8")]
    assert talk.tools  # it may ask for more
    assert (await talk.step(says(9))).terminated
    outcome = await talk.outcome()
    assert (outcome.reward, outcome.success, outcome.breakdown["calls"]) == (1.0, True, 2.0)
    assert outcome.metadata["roles"] == ["decomposer", "solver", "solver", "synthesizer"]
    assert [part["answer"] for part in outcome.metadata["parts"]] == ["5", "8"]
    assert outcome.metadata["answer"] == "9"


async def test_a_synthesizer_with_a_prompt_reads_the_thread_under_it_and_has_no_tools() -> None:
    environment = DecomposedProblems(SUMS, decomposer="split", solver="part", synthesizer="add")
    talk = await environment.start(PROBLEM, 0)
    assert texts((await talk.step(call("2 + 3"))).conversation) == [("system", "part"), ("user", "2 + 3")]
    last = await talk.step(says(5))
    assert texts(last.conversation)[0] == ("system", "add")
    assert not talk.tools
    await talk.step(says(9))
    assert (await talk.outcome()).metadata["roles"] == ["decomposer", "solver", "synthesizer"]


async def test_functions_play_roles_and_only_the_agents_turns_are_its_own() -> None:
    class Adder:
        def combine(self, solutions: list[str]) -> Message:
            return says(sum(int(number) for number in solutions))

    environment = DecomposedProblems(SUMS, decomposer=lambda text: ["2 + 3", "4 + 0"], synthesizer=Adder())
    talk = await environment.start(PROBLEM, 0)
    assert texts(talk.opening) == [("system", "think"), ("user", "2 + 3")]
    await talk.step(says(5))
    assert (await talk.step(says(4))).terminated
    outcome = await talk.outcome()
    assert outcome.success
    assert outcome.metadata["roles"] == ["solver", "solver"]


async def test_another_agent_plays_a_role_from_a_stream_that_members_of_a_group_share() -> None:
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(["<answer> 5 </answer>"]))
    environment = DecomposedProblems(SUMS, decomposer="split", solver=agent)
    assert not environment.local  # its batches are its own
    async with agent:
        talk = await environment.start(PROBLEM, 0)
        back = await talk.step(call("2 + 3"))
        assert texts(back.messages)[-1] == ("tool", "5")
        await talk.step(says(9))
        outcome = await talk.outcome()
    assert outcome.metadata["roles"] == ["decomposer", "synthesizer"]
    assert outcome.metadata["tokens_elsewhere"]["solver"] > 0


async def test_a_problem_that_others_answer_before_the_agent_has_a_turn_fails() -> None:
    environment = DecomposedProblems(SUMS, decomposer=lambda text: [], synthesizer=lambda solutions: "9")
    with pytest.raises(EnvironmentFailure, match="before the agent had a turn"):
        await environment.start(PROBLEM, 0)


class Dialogue(OneReply):
    """Hears two replies and pays for each."""

    heard = 0

    async def step(self, reply: Message) -> Observation:
        self.heard += 1
        again = (Message(role="user", content="more"),)
        return Observation(messages=again, reward=1.0, terminated=self.heard == 2)

    def part(self, problem: str) -> Conversation:
        return Dialogue(opening=(Message(role="user", content=f"about {problem}"),))


class Talks:
    local = True

    def scenarios(self, split: str) -> list[Scenario]:
        return [PROBLEM]

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        return Dialogue(opening=scenario.messages())


async def test_parts_may_be_conversations_and_the_whole_may_go_on_and_pay_turn_by_turn() -> None:
    talk = await DecomposedProblems(Talks(), decomposer="split").start(PROBLEM, 0)
    assert texts((await talk.step(call("x"))).conversation) == [("user", "about x")]
    within = await talk.step(says(1))
    assert texts(within.conversation)[-1] == ("user", "more")
    assert within.reward is None  # a part is not paid, the whole is
    await talk.step(says(2))
    middle = await talk.step(says(3))
    assert (middle.reward, texts(middle.messages)) == (1.0, [("user", "more")])
    assert (await talk.step(says(4))).reward == 1.0


async def test_a_fork_goes_on_by_itself() -> None:
    talk = await DecomposedProblems(SUMS, decomposer="split").start(PROBLEM, 0)
    await talk.step(call("2 + 3"))
    other = talk.fork()
    await talk.step(says(5))
    assert texts((await other.step(says(6))).messages) == [("tool", "6")]


class Scripted:
    """Splits the sum in two, and adds up what it reads."""

    def __init__(self, error: int = 0) -> None:
        self.error = error

    def reply(self, messages: Sequence[Message]) -> Message:
        if messages[0].content == "split":
            return call("2 + 3", "4 + 0")
        numbers = [message.content for message in messages if message.role == "tool"]
        summands = numbers or messages[-1].content.split(" + ")
        return says(sum(map(int, summands)) + self.error)


async def test_demonstrations_are_rows_and_a_wrong_answer_is_refused() -> None:
    environment = DecomposedProblems(SUMS, decomposer="split", synthesizer="add")
    rows = await demonstrate(environment, PROBLEM, Scripted())
    assert [row[0].content for row in rows] == ["split", "add", "think", "think"]
    assert [row[-1] for row in rows] == [call("2 + 3", "4 + 0"), says(9), says(5), says(4)]
    with pytest.raises(ConfigurationError, match="is wrong"):
        await demonstrate(environment, PROBLEM, Scripted(error=1))


async def test_what_can_play_no_role_and_what_gives_no_parts_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="solver must be a prompt, a MultiTurnAgent"):
        DecomposedProblems(SUMS, solver=3)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigurationError, match="cannot give parameter"):
        DecomposedProblems(SUMS, synthesizer=lambda solutions, colour: "")
    with pytest.raises(ConfigurationError, match="max_calls"):
        DecomposedProblems(SUMS, max_calls=0)
    with pytest.raises(ConfigurationError, match="no problems"):
        DecomposedProblems().scenarios("train")
    with pytest.raises(ConfigurationError, match="what the decomposer returns"):
        await DecomposedProblems(SUMS, decomposer=lambda text: "2 + 3").start(PROBLEM, 0)


async def test_the_roles_of_an_environment_can_be_changed_without_changing_it() -> None:
    environment = DecomposedProblems(SUMS, decomposer="split")
    other = with_roles(environment, updated(environment.roles, {"decomposer": "cut"}))
    assert (await environment.start(PROBLEM, 0)).opening[0].content == "split"
    assert (await other.start(PROBLEM, 0)).opening[0].content == "cut"


def test_a_file_names_the_environment_whose_problems_are_decomposed() -> None:
    spec = {"name": "decomposed", "environment": {"name": "arithmetic", "num_train": 20}, "max_calls": 3}
    environment = make_environment(spec)
    assert isinstance(environment, DecomposedProblems)
    assert environment.max_calls == 3
    assert environment.scenarios("train") == ArithmeticProblems(num_train=20).scenarios("train")
    assert make_environment({**spec, "environment": "arithmetic"}).scenarios("test") == SUMS.scenarios("test")
    with pytest.raises(ConfigurationError, match=r"write .*\{name: decomposed, environment: arithmetic\}"):
        make_environment({"name": "decomposed"}).scenarios("train")
    with pytest.raises(ConfigurationError, match="'decomposed' has no argument 'decompose_prompt'"):
        make_environment({**spec, "decompose_prompt": "in parts"})
