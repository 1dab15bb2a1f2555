"""A model behind an endpoint plays conversations: what goes over the wire, and what counts as whose fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from chat_server import ChatServer, Fault, answer, body, hang, status
from environments import ChattyConversation, ChattyEnvironment, scenarios

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.core.agent import AgentConfig
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import ConversationEnvironment, Environment, Observation, ReplyLimits
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.core.rollout.endpoint_agent import EndpointAgent, Usage
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Status, Trajectory

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


class Shop(ChattyEnvironment):
    """Answers every call with "found", and words as its base does."""

    def __init__(self, turns: int = 3, **fields: Any) -> None:
        super().__init__(turns=turns, **fields)
        self.heard: list[Message] = []

    async def start(self, scenario: Any, seed: int) -> Any:
        conversation: Any = await super().start(scenario, seed)
        conversation.tools = (TOOL,)
        step = conversation.step

        async def answered(reply: Message) -> Observation:
            self.heard.append(reply)
            observation: Observation = await step(reply)
            if not reply.tool_calls or observation.terminated:
                return observation
            results = [
                Message(role="tool", content=call.error or "found", tool_call_id=call.id, name=call.name)
                for call in reply.tool_calls
            ]
            return Observation(messages=tuple(results))

        conversation.step = answered
        return conversation


def agent_of(server: ChatServer, config: AgentConfig | None = None, **settings: Any) -> EndpointAgent:
    send_thoughts = settings.pop("send_thoughts", True)
    client = ChatClient(server.url, "m", **{"backoff": 0.001, "timeout": 5.0, **settings})
    return EndpointAgent(client, config, send_thoughts=send_thoughts)


async def played(
    agent: EndpointAgent, environment: Environment, number: int = 1, **settings: Any
) -> list[Trajectory]:
    engine = ComputationalEngine(
        agent, environment, EnvironmentReward(), num_generations=1, deterministic=False
    )
    groups = await engine.rollout(scenarios(number), **{"seed": 0, "step": 0, **settings})
    return [trajectory for group in groups for trajectory in group.trajectories]


def call(arguments: Any = '{"at": 1}', **fields: Any) -> dict[str, Any]:
    return {
        "id": "c1",
        "type": "function",
        "function": {"name": "look", "arguments": arguments},
        **fields,
    }


def said(*messages: dict[str, Any], **fields: Any) -> list[Fault]:
    return [body(json.dumps(answer(message, **fields))) for message in messages]


async def test_a_conversation_goes_over_the_wire_as_a_client_sends_it() -> None:
    first = {"content": None, "tool_calls": [call()], "refusal": None, "annotations": []}
    async with ChatServer(*said(first, {"content": "It is here."})) as server:
        config = AgentConfig(persona="Mia", system_prompt="Be brief.", max_new_tokens=33, stop=("END",))
        environment = Shop(turns=3)
        [trajectory] = await played(agent_of(server, config), environment, temperature=0.7)
    opening = [
        {"role": "system", "content": "You are Mia.\nBe brief."},
        {"role": "user", "content": "hi"},
    ]
    one, two, three = server.bodies
    assert one["messages"] == opening
    assert (one["tools"], one["temperature"], one["max_tokens"]) == ([TOOL], 0.7, 33)
    assert one["stop"] == ["END"]
    assert len({sent["seed"] for sent in server.bodies}) == 3
    assert two["messages"] == [
        *opening,
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "tool", "content": "found", "tool_call_id": "c1", "name": "look"},
    ]
    assert three["messages"][4:] == [
        {"role": "assistant", "content": "It is here."},
        {"role": "user", "content": "go on"},
    ]
    assert (trajectory.status, trajectory.success, trajectory.reward) == (Status.TERMINATED, True, 1.75)
    assert [turn.follows for turn in trajectory.turns] == [-1, -1, -1]
    assert trajectory.num_agent_tokens == 0
    [made] = trajectory.replies[0].tool_calls
    assert (made.name, made.arguments, made.id) == ("look", {"at": 1}, "c1")


async def test_seeds_are_the_same_in_every_run_and_others_for_every_try() -> None:
    async with ChatServer() as server:
        for seed in (0, 0, 1):
            await played(agent_of(server), ChattyEnvironment(turns=1), seed=seed)
    first, again, other = (sent["seed"] for sent in server.bodies)
    assert first == again != other


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("send_thoughts", [True, False])
async def test_thoughts_are_kept_shown_to_nobody_and_sent_back_under_their_name(
    name: str, send_thoughts: bool
) -> None:
    odd = call(extra_content={"signature": "s"})
    thinking = {"content": "Let me look.", name: "where?", "tool_calls": [odd]}
    async with ChatServer(*said(thinking)) as server:
        environment = Shop(turns=2)
        [trajectory] = await played(agent_of(server, send_thoughts=send_thoughts), environment)
    assert trajectory.replies[0].reasoning == "where?"
    assert [message.reasoning for message in environment.heard] == [None, None]
    thought = {name: "where?"} if send_thoughts else {}
    assert server.bodies[1]["messages"][1] == {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [odd],  # with what else the endpoint wrote into it
        **thought,
    }


@pytest.mark.parametrize("send_thoughts", [True, False])
async def test_thoughts_in_the_content_go_back_as_they_came(send_thoughts: bool) -> None:
    content = "<think>where?</think>\n\nHello."
    async with ChatServer(*said({"content": content})) as server:
        [trajectory] = await played(
            agent_of(server, send_thoughts=send_thoughts), environment := Shop(turns=2)
        )
    assert (trajectory.replies[0].content, trajectory.replies[0].reasoning) == ("Hello.", "where?")
    assert environment.heard[0].content == "Hello."
    assert server.bodies[1]["messages"][1]["content"] == (content if send_thoughts else "Hello.")


async def test_the_same_words_twice_go_back_each_with_their_own_thought() -> None:
    thoughts = [{"content": "ok", "reasoning": reasoning} for reasoning in ("first", "second")]
    async with ChatServer(*said(*thoughts)) as server:
        await played(agent_of(server), ChattyEnvironment(turns=3))
    sent = [message.get("reasoning") for message in server.bodies[2]["messages"]]
    assert sent == [None, "first", None, "second", None]


async def test_broken_arguments_are_the_agent_s_mistake_and_go_back_as_an_empty_object() -> None:
    broken = {"content": None, "tool_calls": [call('{"at": ', id=""), call("[1]", id=""), call({"at": 2})]}
    async with ChatServer(*said(broken)) as server:
        [trajectory] = await played(agent_of(server), Shop(turns=2))
    assert trajectory.status is Status.TERMINATED
    torn, no_object, whole = trajectory.replies[0].tool_calls
    assert torn.error == "the arguments of look are not a JSON object, got '{\"at\": '"
    assert (no_object.arguments, whole.arguments, whole.error) == ({}, {"at": 2}, None)
    assistant, *results = server.bodies[1]["messages"][1:]
    ids = [item["id"] for item in assistant["tool_calls"]]
    assert ids == ["call_0_0", "call_0_1", "c1"] == [result["tool_call_id"] for result in results]
    arguments = [item["function"]["arguments"] for item in assistant["tool_calls"]]
    assert arguments == ["{}", "{}", '{"at": 2}']
    assert results[0]["content"] == torn.error


async def test_no_words_at_all_are_a_reply() -> None:
    async with ChatServer(*said({"content": None})) as server:
        [trajectory] = await played(agent_of(server), ChattyEnvironment(turns=2))
    assert (trajectory.status, trajectory.replies[0].content) == (Status.TERMINATED, "")
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": ""}


class Limited(Shop):
    """Asks for these limits, and offers its tool or none."""

    def __init__(self, limits: ReplyLimits, *, offers: bool = True) -> None:
        super().__init__(turns=1)
        self.limits, self.offers = limits, offers

    async def start(self, scenario: Any, seed: int) -> Any:
        conversation: Any = await super().start(scenario, seed)
        conversation.reply_limits = self.limits
        conversation.tools = (TOOL,) if self.offers else ()
        return conversation


async def test_what_the_environment_asks_of_a_reply_is_asked_of_the_endpoint() -> None:
    async with ChatServer() as server:
        limits = ReplyLimits(max_new_tokens=5, stop=("\n",))
        await played(agent_of(server, AgentConfig(stop=("END",))), Limited(limits))
    assert (server.bodies[0]["max_tokens"], server.bodies[0]["stop"]) == (5, ["END", "\n"])


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
NAMED_LOOK = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("limits", "fields"),
    [
        (ReplyLimits(), {}),
        (ReplyLimits(tool_choice="required"), {"tool_choice": "required"}),
        (ReplyLimits(tool_choice="none"), {"tool_choice": "none"}),
        (ReplyLimits(tool_choice="look"), {"tool_choice": NAMED_LOOK}),
        (ReplyLimits(parallel_tool_calls=False), {"parallel_tool_calls": False}),
        (
            ReplyLimits(answer_schema=SCHEMA),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
        ),
    ],
)
async def test_calls_and_schemas_are_asked_for_in_the_api_s_own_fields(
    limits: ReplyLimits, fields: dict[str, Any]
) -> None:
    async with ChatServer() as server:
        await played(agent_of(server), Limited(limits))
    names = {"tool_choice", "parallel_tool_calls", "response_format"}
    assert {name: value for name, value in server.bodies[0].items() if name in names} == fields


async def test_without_tools_none_is_nothing_to_ask_for() -> None:
    async with ChatServer() as server:
        limits = ReplyLimits(tool_choice="none", parallel_tool_calls=False)
        await played(agent_of(server), Limited(limits, offers=False))
    assert not {"tool_choice", "parallel_tool_calls", "tools"} & server.bodies[0].keys()


async def test_a_first_reply_calls_and_later_ones_are_as_they_come() -> None:
    def look() -> str:
        """Look."""
        return "found"

    environment = ConversationEnvironment(
        scenarios=[{"opening": "hi"}], tools=[look], first_reply="call", max_turns=2
    )
    first = {"content": None, "tool_calls": [call("{}")]}
    async with ChatServer(*said(first, {"content": "It is here."})) as server:
        await played(agent_of(server), environment)
    assert [sent.get("tool_choice") for sent in server.bodies] == ["required", None]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (ReplyLimits(thinks=True), "set reply_format to free"),
        (ReplyLimits(answer_between=("<a>", "</a>")), "set reply_format to free"),
        (ReplyLimits(tool_choice="required"), "tool_choice required, and its prompt does not list the tools"),
        (ReplyLimits(tool_choice="required", callable_tools=[TOOL]), "may be called and no others"),
        (ReplyLimits(tool_choice="required", callable_tools=[]), "may be called and no others"),
    ],
)
async def test_what_no_request_can_ask_for_is_refused(limits: ReplyLimits, words: str) -> None:
    async with ChatServer() as server:
        with pytest.raises(ConfigurationError, match=words):
            await played(agent_of(server), Limited(limits, offers=limits.callable_tools == []))
    assert not server.bodies


async def test_an_edited_conversation_is_sent_as_it_reads_now() -> None:
    async def edit(conversation: ChattyConversation, reply: Message) -> Observation | None:
        if conversation.turn > 1:
            return Observation(terminated=True)
        edited = (Message(role="user", content="summary"), Message(role="assistant", content="other"))
        user = Message(role="user", content="go on")
        return Observation(messages=(user,), conversation=(*edited, reply, user))

    async with ChatServer(*said({"content": "one", "reasoning": "why"})) as server:
        await played(agent_of(server), ChattyEnvironment(turns=9, answer=edit))
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "summary"},
        {"role": "assistant", "content": "other"},
        {"role": "assistant", "content": "one", "reasoning": "why"},
        {"role": "user", "content": "go on"},
    ]


async def test_what_does_not_fit_any_more_cuts_a_conversation_and_is_judged() -> None:
    too_long = status(400, '{"error": {"code": "context_length_exceeded"}}')
    async with ChatServer(None, too_long) as server:
        [trajectory] = await played(agent_of(server), ChattyEnvironment(turns=3))
    assert (trajectory.status, trajectory.success) == (Status.TRUNCATED, True)
    assert trajectory.metadata == {"context_overflow": True}
    assert len(trajectory.turns) == 1


async def test_a_conversation_without_an_answer_fails_is_told_apart_and_not_played_again() -> None:
    async with ChatServer(None, *[status(500)] * 2) as server:
        agent = agent_of(server, max_attempts=2)
        [silent] = await played(agent, environment := ChattyEnvironment(turns=2))
        [later] = await played(agent, environment)
    assert (silent.status, silent.reward, silent.metadata) == (Status.FAILED, None, {"unanswered": True})
    assert "status 500" in (silent.error or "")
    assert len(silent.turns) == 1
    assert later.status is Status.TERMINATED
    assert len(server.bodies) == 5
    assert environment.num_open == 0


async def test_slow_and_failing_answers_are_asked_for_again() -> None:
    async with ChatServer(hang, status(500), status(429, Retry_After="0.01")) as server:
        agent = agent_of(server, timeout=0.2)
        [trajectory] = await played(agent, ChattyEnvironment(turns=1))
    assert trajectory.status is Status.TERMINATED
    assert agent.usage == Usage(num_requests=4, prompt_tokens=10, completion_tokens=5)


@pytest.mark.parametrize("code", [401, 402, 404, 405, 307])
async def test_what_every_request_would_meet_ends_the_evaluation(code: int) -> None:
    async with ChatServer(None, status(code, "odd", Location="http://there")) as server:
        with pytest.raises(ConfigurationError, match=f"status {code}: ") as caught:
            await played(agent_of(server, api_key_env="SOME_KEY"), ChattyEnvironment(turns=5))
    assert ("SOME_KEY" in str(caught.value)) is (code == 401)
    assert len(server.bodies) == 2


async def test_an_endpoint_that_refuses_everything_ends_the_evaluation() -> None:
    refused = status(400, "temperature is not supported")
    async with ChatServer(*[refused] * 9) as server:
        with pytest.raises(ConfigurationError, match="nothing was answered, and 3 requests were refused"):
            await played(agent_of(server, max_concurrent=1), ChattyEnvironment(turns=1), number=9)
    assert len(server.bodies) < 9
    async with ChatServer(None, *[refused] * 4) as server:  # it has answered: these four alone are refused
        agent = agent_of(server, max_concurrent=1)
        trajectories = await played(agent, ChattyEnvironment(turns=1), number=6)
    assert [trajectory.status is Status.FAILED for trajectory in trajectories].count(True) == 4


async def test_a_temperature_can_be_left_out() -> None:
    async with ChatServer() as server:
        await played(agent_of(server, temperature=None), ChattyEnvironment(turns=1))
        with pytest.raises(ConfigurationError, match="temperature must be at least 0"):
            await played(agent_of(server), ChattyEnvironment(turns=1), temperature=-1.0)
    assert "temperature" not in server.bodies[0]


@pytest.mark.parametrize("url", ["http://me:pass@host/v1", "http://host/v1?key=pass", "http://me@host/v1"])
def test_a_url_that_holds_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the url of host holds more than an address") as caught:
        EndpointAgent(ChatClient(url, "m"))
    assert "pass" not in str(caught.value)


def test_only_agents_play() -> None:
    engine = ComputationalEngine(
        EndpointAgent(ChatClient("http://host/v1", "m")), ChattyEnvironment(), EnvironmentReward()
    )
    with pytest.raises(ConfigurationError, match="agent must be a MultiTurnAgent, got EndpointAgent"):
        _ = engine.agent
    agent = EndpointAgent(ChatClient("http://host/v1", "m"))
    with pytest.raises(ConfigurationError, match="need a MultiTurnAgent, got EndpointAgent: give"):
        ComputationalEngine(agent, ChattyEnvironment(), EnvironmentReward(), num_branches=1)
    for other in (object(), EndpointAgent):
        with pytest.raises(ConfigurationError, match="agent must be a MultiTurnAgent"):
            ComputationalEngine(other, ChattyEnvironment(), EnvironmentReward())  # type: ignore[arg-type]  # refused


def test_a_cost_is_by_the_million() -> None:
    usage = Usage(num_requests=3, prompt_tokens=2_000_000, completion_tokens=500_000)
    assert usage.cost(0.5, 2.0) == 2.0
    assert usage + usage - usage == usage
