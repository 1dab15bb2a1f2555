"""`serve` shows an agent its conversations as rollouts do, though clients leave out what it thought."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from chat_templates import trl_tokenizer

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.base import Session
from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.backends.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from stateset_agents.cli.main import command_parser
from stateset_agents.cli.serve import agent_config_of
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.rollout.episode import EpisodeSeeds, run_episode
from stateset_agents.core.tools import Toolbox
from stateset_agents.serving.chat_session import ChatSession
from stateset_agents.serving.limits import Limits
from stateset_agents.serving.saved_conversations import load_conversations, save_conversation
from stateset_agents.serving.served_agent import ClientHistories, ClientHistory
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, ToolCall
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Status, Trajectory

QUESTION = "Sum up."
SAYINGS = [f"where is number {number}?" for number in range(5)]


def look_up(order: str) -> str:
    """Where an order is."""
    return f"{order} is in Oslo"


def reply(request: ScriptedRequest) -> str:
    """A thought and words, beside a call after every second thing that a user says."""
    if request.text.count(QUESTION):
        return "<think>all of it</think>It is long."
    at = max(range(len(SAYINGS)), key=lambda number: request.text.rfind(SAYINGS[number]))
    after = request.text.rpartition(SAYINGS[at])[2]
    if at % 2 == 0 and "Oslo" not in after:
        return (
            f'<think>look {at}</think>Wait. <tool_call>{{"name": "look_up", "arguments": '
            f'{{"order": "K{at}"}}}}</tool_call>'
        )
    return f"<think>plan {at}</think>ok {at}"


TOOLS = Toolbox([look_up]).schemas


class User:
    """Says one thing after the other."""

    def __init__(self) -> None:
        self._left = list(SAYINGS)

    async def reply(self, messages: Sequence[Message]) -> str | None:
        return self._left.pop(0) if self._left else None


def agent_with(
    context: int, tokenizer: Any = None, **settings: Any
) -> tuple[MultiTurnAgent, ScriptedBackend]:
    backend = ScriptedBackend(reply, tokenizer=tokenizer, context_length=context)
    config = AgentConfig(model_name="mine", compact_prompt=QUESTION, max_new_tokens=120, **settings)
    return MultiTurnAgent(config, backend=backend), backend


async def rollout(context: int, tokenizer: Any = None, **settings: Any) -> ScriptedBackend:
    """The requests of a rollout."""
    backend, _ = await played(context, tokenizer, **settings)
    return backend


async def played(context: int, tokenizer: Any = None, **settings: Any) -> tuple[ScriptedBackend, Trajectory]:
    agent, backend = agent_with(context, tokenizer, **settings)
    environment = ConversationEnvironment(
        scenarios=[{"id": "s", "topic": "order"}], user=lambda *_: User(), tools=[look_up], max_turns=20
    )
    (scenario,) = environment.scenarios("train")
    seeds = EpisodeSeeds(user=1, agent=2)
    async with agent:
        trajectory = await run_episode(agent, environment, scenario, seeds=seeds, session=Session(0, 0))
    assert (trajectory.status, trajectory.error) == (Status.TERMINATED, None)
    return backend, trajectory


@asynccontextmanager
async def served(agent: MultiTurnAgent, **limits: int) -> AsyncIterator[Any]:
    async with (
        agent,
        AgentServer(agent, limits=Limits(**limits)) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        yield client.chat.completions


class Client:
    """Sends its whole conversation each time, with ids of its own; thoughts only if it `keeps` them."""

    def __init__(self, chat: Any, *, keeps: bool = False) -> None:
        self._chat, self._keeps = chat, keeps
        self.messages: list[dict[str, Any]] = []
        self.call_ids: list[str] = []
        """As the server gave them."""

    async def say(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        while True:
            answer = await self.ask()
            message: dict[str, Any] = {"role": "assistant", "content": answer.content}
            if self._keeps and answer.model_extra.get("reasoning") is not None:
                message["reasoning"] = answer.model_extra["reasoning"]
            if not answer.tool_calls:
                self.messages.append(message)
                return str(answer.content)
            self.call_ids += [call.id for call in answer.tool_calls]
            ids = [f"mine-{len(self.messages)}-{number}" for number, _ in enumerate(answer.tool_calls)]
            calls = [
                {"id": id, "type": "function", "function": call.function.model_dump()}
                for id, call in zip(ids, answer.tool_calls, strict=True)
            ]
            self.messages.append({**message, "tool_calls": calls})
            for id, call in zip(ids, calls, strict=True):
                order = call["function"]["arguments"].partition(": ")[2].strip('"}')
                result = {"role": "tool", "tool_call_id": id, "content": look_up(order)}
                self.messages.append(result)

    async def ask(self, **fields: Any) -> Any:
        fields = {"model": "mine", "messages": self.messages, "tools": TOOLS, **fields}
        return (await self._chat.create(**fields)).choices[0].message


def tokenizer_of(template: str) -> ByteTokenizer | HuggingFaceTokenizer:
    return ByteTokenizer() if template == "plain" else trl_tokenizer(template)


READINGS = [
    (history, template)
    for history in ("template", "slide", "keep", "compact")
    for template in ("plain", "qwen3", "qwen2_5", "lfm2_2_5")
    if (history, template) != ("slide", "plain")  # it writes thoughts longer: its window slides earlier
]


@pytest.mark.parametrize(("history", "template"), READINGS)
@pytest.mark.first(2)
async def test_a_server_prompts_as_a_rollout_does(history: str, template: str) -> None:
    """Ids where the history is remembered; else text without white space, as a template writes replies."""
    room = {"slide": 1100, "compact": 1100}.get(history, 4000)
    settings = {"history": history, **({"compact_room": 350} if history == "compact" else {})}
    expected = await rollout(room, tokenizer_of(template), **settings)
    agent, backend = agent_with(room, tokenizer_of(template), **settings)
    async with served(agent) as chat:
        client = Client(chat, keeps=history in ("template", "slide"))
        for saying in SAYINGS:
            await client.say(saying)
    told, wanted = list(backend.requests), list(expected.requests)
    if history in ("keep", "compact"):
        assert [request.prompt_ids for request in told] == [request.prompt_ids for request in wanted]
    else:
        assert ["".join(r.text.split()) for r in told] == ["".join(r.text.split()) for r in wanted]
    is_thought_kept = "plan 1" in told[-1].text
    assert is_thought_kept == (
        history == "keep" or (history == "template" and template in ("plain", "qwen2_5"))
    )


async def test_calls_have_the_ids_that_they_have_in_a_rollout_summaries_or_not() -> None:
    settings: dict[str, Any] = {"history": "compact", "compact_room": 350}
    _, trajectory = await played(1100, **settings)
    assert any(turn.is_summary for turn in trajectory.turns[:-3])
    agent, _ = agent_with(1100, **settings)
    async with served(agent) as chat:
        client = Client(chat)
        for saying in SAYINGS:
            await client.say(saying)
    ids = [call.id for reply in trajectory.replies for call in reply.tool_calls]
    assert client.call_ids == ids == ["call_0_0", "call_3_0", "call_6_0"]


async def test_what_was_forgotten_is_rendered_by_the_template() -> None:
    agent, backend = agent_with(4000, history="keep")
    async with served(agent, max_remembered=1) as chat:
        client, other = Client(chat), Client(chat)
        other.messages = [{"role": "system", "content": "Be brief."}]
        for saying in SAYINGS[:2]:
            await client.say(saying)
        assert backend.requests[-1].text.count("<think>") == 2  # a client's last turn is always there
        await other.say(SAYINGS[1])
        assert await client.say(SAYINGS[3]) == "ok 3"
        assert "<think>" not in backend.requests[-1].text
        assert await client.say(SAYINGS[3]) == "ok 3"
        assert backend.requests[-1].text.count("<think>") == 1


@pytest.mark.parametrize("context", [1100, 800])
async def test_a_conversation_that_was_forgotten_is_summed_up_as_long_as_it_fits(context: int) -> None:
    room: dict[str, Any] = {"history": "compact", "compact_room": 350}
    agent, _ = agent_with(context, **room)
    async with served(agent) as chat:
        client = Client(chat)
        for saying in SAYINGS:
            await client.say(saying)
    restarted, backend = agent_with(context, **room)
    client.messages.append({"role": "user", "content": "and " * 75})
    async with served(restarted) as chat:
        if context == 1100:
            assert (await chat.create(model="mine", messages=client.messages, tools=TOOLS)).choices
            assert QUESTION in backend.requests[0].text
            assert len(backend.requests) == 2
            return
        with pytest.raises(openai.BadRequestError) as caught:
            await chat.create(model="mine", messages=client.messages, tools=TOOLS)
        assert caught.value.code == "context_length_exceeded"


async def test_a_summary_is_nobody_s_answer() -> None:
    agent, backend = agent_with(1100, history="compact", compact_room=350)
    texts: list[str] = []
    async with served(agent) as chat:
        client = Client(chat)
        for saying in SAYINGS[:3]:
            await client.say(saying)
        num_before = len(backend.requests)
        asked = [*client.messages, {"role": "user", "content": SAYINGS[3]}]
        options = {"stream_options": {"include_usage": True}}
        async for chunk in await chat.create(
            model="mine", messages=asked, tools=TOOLS, stream=True, **options
        ):
            texts += [choice.delta.content or "" for choice in chunk.choices]
            usage = chunk.usage or None
    summary, answer = list(backend.requests)[num_before:]
    assert summary.text.rpartition("user: ")[2].startswith(QUESTION)
    assert "It is long." in answer.text
    assert "".join(texts) == "ok 3"
    assert usage.prompt_tokens == len(answer.prompt_ids)
    assert usage.completion_tokens == len("<think>plan 3</think>ok 3") + 1


async def test_a_client_s_sampling_is_the_answer_s_and_not_the_summary_s() -> None:
    agent, backend = agent_with(1100, history="compact", compact_room=350, temperature=0.5, stop=("STOP",))
    fields = {"temperature": 0.2, "top_p": 0.9, "max_tokens": 4, "stop": " is", "seed": 7}
    async with served(agent) as chat:
        client = Client(chat)
        for saying in SAYINGS[:3]:
            await client.say(saying)
        num_before = len(backend.requests)
        asked = [*client.messages, {"role": "user", "content": SAYINGS[3]}]
        await chat.create(model="mine", messages=asked, tools=TOOLS, **fields)
    summary, answer = (request.params for request in list(backend.requests)[num_before:])
    assert (answer.temperature, answer.top_p, answer.max_new_tokens, answer.stop) == (0.2, 0.9, 4, (" is",))
    settings = agent.config
    assert (summary.temperature, summary.top_p, summary.stop) == (0.5, 1.0, ("STOP",))
    assert summary.max_new_tokens == settings.max_new_tokens
    assert answer.stream == derive(7, "response") != summary.stream
    assert "It is long." in backend.requests[-1].text


def calling(order: Any) -> ToolCall:
    return ToolCall(name="look_up", arguments={"order": order}, id="call_0_0")


SAID = Message(role="assistant", content="Wait.", reasoning="so", tool_calls=(calling("K1"),))
OPENING = (Message(role="system", content="Be brief."), Message(role="user", content="where?"))
RESULT = Message(role="tool", content="Oslo", tool_call_id="call_0_0", name="look_up")


@pytest.mark.parametrize(
    "sent",
    [
        SAID,
        replace(SAID, reasoning=None),
        replace(SAID, reasoning=""),
        replace(SAID, content=" Wait.\n", reasoning=None),
    ],
)
async def test_what_a_client_leaves_out_is_put_back(sent: Message) -> None:
    async with MultiTurnAgent(AgentConfig(), backend=ScriptedBackend([])) as agent:
        history = ClientHistory(agent.history(), max_characters=10_000)
        history.add([*OPENING, SAID], (*OPENING, SAID))
        mine = replace(sent, tool_calls=(replace(calling("K1"), id="x"),))
        restored = history.restored([*OPENING, mine, replace(RESULT, tool_call_id="x")])
    assert restored == (*OPENING, SAID, RESULT)
    assert restored[2] is SAID


@pytest.mark.parametrize(
    "sent",
    [
        replace(SAID, content="Wait!"),
        replace(SAID, reasoning="but"),
        replace(SAID, tool_calls=()),
        replace(SAID, tool_calls=(calling("K2"),)),
        replace(SAID, tool_calls=(replace(calling("K1"), name="look"),)),
    ],
)
async def test_what_a_client_has_edited_stays_so(sent: Message) -> None:
    async with MultiTurnAgent(AgentConfig(), backend=ScriptedBackend([])) as agent:
        history = ClientHistory(agent.history(), max_characters=10_000)
        history.add([*OPENING, SAID], (*OPENING, SAID))
        messages = (*OPENING, sent, RESULT)
        assert history.restored(messages) == messages
        edited = (OPENING[0], Message(role="user", content="where"), SAID, RESULT)
        assert history.restored(edited) == edited


async def test_a_number_and_the_ids_of_earlier_rounds_may_be_written_otherwise() -> None:
    async with MultiTurnAgent(AgentConfig(), backend=ScriptedBackend([])) as agent:
        history = ClientHistory(agent.history(), max_characters=10_000)
        first = replace(SAID, tool_calls=(calling(3.0),))
        second = replace(SAID, reasoning="more", tool_calls=(replace(calling("K2"), id="call_1_0"),))
        history.add([*OPENING, first], (*OPENING, first))
        sampled = (*OPENING, first, RESULT, second)
        history.add(sampled, sampled)
        mine = [*OPENING, replace(first, reasoning=None, tool_calls=(replace(calling(3), id="a"),))]
        mine += [
            replace(RESULT, tool_call_id="a"),
            replace(second, tool_calls=(replace(calling("K2"), id="b"),)),
        ]
        assert history.restored([*mine, replace(RESULT, tool_call_id="b")]) == (
            *sampled,
            replace(RESULT, tool_call_id="call_1_0"),
        )
        mine[3:] = [replace(RESULT, tool_call_id="b"), replace(mine[4], reasoning=None), RESULT]
        restored = history.restored(mine)  # its first result answers a call that comes later
        assert [message.reasoning for message in restored] == [None, None, "so", None, None, None]


def completed(prompt_ids: Sequence[int], message: Message) -> Completion:
    return Completion(
        message=message, prompt_ids=tuple(prompt_ids), token_ids=(1,), logprobs=(0.0,), finish_reason="stop"
    )


async def test_a_turn_among_a_thousand_is_found_at_once() -> None:
    async with MultiTurnAgent(AgentConfig(history="keep"), backend=ScriptedBackend([])) as agent:
        history = ClientHistories(agent, max_tokens=2**24).of("a")
        talk: tuple[Message, ...] = ()
        for number in range(1000):
            if number % 20 == 0:
                talk = (OPENING[0],)
            talk = (*talk, Message(role="user", content=f"what about {number}? " * 10))
            message = Message(role="assistant", content=f"It is {number}. " * 10, reasoning="so")
            history.turns.add(history.turns.next(history.turns.place(talk)), completed(range(100), message))
            talk = (*talk, message)
            history.add([replace(each, reasoning=None) for each in talk], talk)
        asked = [replace(each, reasoning=None) for each in talk] + [Message(role="user", content="and?")]
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            restored = history.restored(asked)
            unread = history.turns.place(restored).unread
            seconds.append(time.perf_counter() - begun)
    assert [message.content for message in unread] == ["and?"]
    assert min(seconds) < 2e-3


async def test_clients_have_histories_of_their_own_and_those_not_seen_for_long_are_forgotten() -> None:
    async with MultiTurnAgent(AgentConfig(history="keep"), backend=ScriptedBackend([])) as agent:
        histories = ClientHistories(agent, max_tokens=1000)
        messages = (*OPENING, replace(SAID, reasoning=None), RESULT)
        for name in ("a", "b"):
            turns = histories.of(name).turns
            turns.add(turns.next(turns.place(OPENING)), completed(range(100), SAID))
            histories.of(name).add([*OPENING, SAID], (*OPENING, SAID))
        assert histories.of("a").restored(messages)[2].reasoning == "so"
        assert histories.of("c").restored(messages)[2].reasoning is None
        for number in range(2000):
            histories.of(f"client {number}")
        assert len(histories) == 1024
        for number in range(100):
            name = f"talker {number}"
            turns = histories.of(name).turns
            turns.add(turns.next(turns.place(OPENING)), completed(range(100), SAID))
        assert sum(histories.of(f"talker {number}").size for number in range(95, 100)) <= 1000
        assert len(histories) < 100


async def test_each_of_several_answers_may_be_gone_on_from() -> None:
    number = iter(range(100))
    backend = ScriptedBackend(lambda request: f"<think>plan {next(number)}</think>ok {next(number)}")
    async with served(
        MultiTurnAgent(AgentConfig(model_name="mine", history="keep"), backend=backend)
    ) as chat:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        answers = await chat.create(model="mine", messages=asked, n=3)
        for choice in answers.choices:
            said = {"role": "assistant", "content": choice.message.content}
            await chat.create(model="mine", messages=[*asked, said, *asked])
            text = f"<think>{choice.message.reasoning}</think>{choice.message.content}"
            assert text in backend.requests[-1].text


async def test_an_answer_that_the_client_left_breaks_nothing() -> None:
    script = [f"<think>{'so ' * 50}</think>{'ok ' * 50}", "<think>hm</think>Hi.", "Bye."]
    backend = ScriptedBackend(script)
    async with served(
        MultiTurnAgent(AgentConfig(model_name="mine", history="keep"), backend=backend)
    ) as chat:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        async for chunk in await chat.create(model="mine", messages=asked, stream=True):
            if chunk.choices[0].delta.content:
                break
        await asyncio.sleep(0.1)
        part = {"role": "assistant", "content": "ok ok"}
        assert (await chat.create(model="mine", messages=[*asked, part, *asked])).choices
        said = {"role": "assistant", "content": "Hi."}
        await chat.create(model="mine", messages=[*asked, part, *asked, said, *asked])
    assert "assistant: ok ok\nuser: hi\nassistant:<think>hm</think>Hi.\nuser" in backend.requests[-1].text


async def test_of_an_answer_whose_first_call_alone_was_sent_no_more_is_shown() -> None:
    call = '<tool_call>{"name": "look_up", "arguments": {"order": "K%d"}}</tool_call>'
    backend = ScriptedBackend([f"<think>both</think>Wait. {call % 1}{call % 2}", "In Oslo."])
    config = AgentConfig(model_name="mine", history="keep")
    async with served(MultiTurnAgent(config, backend=backend)) as chat:
        asked: list[Any] = [{"role": "user", "content": "hi"}]
        options: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
        answer = (await chat.create(model="mine", messages=asked, **options)).choices[0].message
        (sent,) = answer.tool_calls
        result = {"role": "tool", "tool_call_id": sent.id, "content": "Oslo"}
        said = {"role": "assistant", "content": "Wait.", "tool_calls": [sent.model_dump()]}
        await chat.create(model="mine", messages=[*asked, said, result], **options)
    assert "both" in backend.requests[-1].text
    assert "K2" not in backend.requests[-1].text


def test_a_run_is_served_with_the_settings_of_its_agent(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    config = "agent: {model_name: embedded:desk, history: keep, system_prompt: Be kind., max_new_tokens: 9}\n"
    (tmp_path / "config.yaml").write_text(f"{config}training: {{}}\n", encoding="utf-8")
    (tmp_path / "checkpoints" / "best" / "model").mkdir(parents=True)
    parser = command_parser()

    def settings(*words: str) -> AgentConfig:
        return agent_config_of(parser.parse_args(["serve", *words]))

    for folder in (tmp_path, tmp_path / "checkpoints" / "best" / "model"):
        served_config = settings(str(folder), "--system", "Be brief.", "--set", "agent.compact_room=7")
        assert served_config == AgentConfig(
            model_name=str(folder),
            history="keep",
            system_prompt="Be brief.",
            max_new_tokens=9,
            compact_room=7,
        )
    assert settings("embedded:desk") == AgentConfig(model_name="embedded:desk")
    with pytest.raises(ConfigurationError, match=r"agent\.NAME=VALUE here, got 'history'"):
        settings("embedded:desk", "--set", "history=keep")


@pytest.mark.parametrize("history", ["keep", "compact"])
@pytest.mark.parametrize("template", ["plain", "qwen3"])
async def test_a_saved_chat_goes_on_after_it_was_loaded(history: str, template: str, tmp_path: Path) -> None:
    room = 4000 if history == "keep" else 1100 if template == "plain" else 1350

    async def chat_with(messages: Sequence[Message], sayings: Sequence[str]) -> tuple[Any, list[str]]:
        agent, backend = agent_with(room, tokenizer_of(template), history=history, compact_room=350)
        async with agent, ChatSession(agent, tools=[look_up], messages=messages) as chat:
            answers = [await chat.send(saying) for saying in sayings]
        if history == "keep":
            assert answers == [f"ok {SAYINGS.index(saying)}" for saying in sayings]
        return chat.messages, [request.text for request in backend.requests]

    messages, _ = await chat_with((), SAYINGS[:2])
    save_conversation(tmp_path / "chats.jsonl", messages)
    (loaded,) = load_conversations(tmp_path / "chats.jsonl")
    assert tuple(loaded) == messages
    _, (first, *later) = await chat_with(loaded, SAYINGS[2:])
    shows_thoughts = template == "plain"
    assert ("plan 1" in first) is shows_thoughts  # the first prompt is the template's own
    assert "Wait." in first
    if history == "keep":
        assert "plan 3" in later[-1]
        assert ("plan 1" in later[-1]) is shows_thoughts
    else:
        assert any("It is long." in text for text in later)


async def test_a_message_of_openai_s_client_brings_its_thought_back() -> None:
    agent, backend = agent_with(4000, tokenizer_of("qwen3"))
    async with served(agent) as chat:
        messages: list[Any] = [{"role": "user", "content": SAYINGS[0]}]
        message = (await chat.create(model="mine", messages=messages, tools=TOOLS)).choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Oslo"}
        await chat.create(model="mine", messages=[*messages, message, result], tools=TOOLS)
    assert "<think>\nlook 0\n</think>\n\nWait." in backend.requests[-1].text
