"""One episode: what the agent does is scored, what breaks outside it fails the conversation."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from builders import bare
from chat_templates import trl_tokenizer
from environments import ChattyConversation, ChattyEnvironment, scenarios

from stateset_agents.backends.base import Session
from stateset_agents.backends.scripted import Script, ScriptedBackend
from stateset_agents.backends.tokenizers import ByteTokenizer
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment, Observation
from stateset_agents.core.rollout.episode import EpisodeSeeds, run_episode
from stateset_agents.core.users.simulated_user import ScriptedUser
from stateset_agents.runtime.circuit_breakers import Breaker, admitted
from stateset_agents.serving.chat_session import ChatSession
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import Message
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Outcome, Status, Trajectory

SCENARIO = scenarios(1)[0]
SEEDS = EpisodeSeeds(user=11, agent=22)
END = 256


class Backend(ScriptedBackend):
    """Remembers which sessions it was told to forget."""

    def __init__(self, script: Script, **settings: Any) -> None:
        super().__init__(script, **settings)
        self.released: list[Session] = []

    async def release(self, session: Session) -> None:
        self.released.append(session)
        await super().release(session)


async def play(
    environment: ChattyEnvironment,
    script: Script = ("a", "b", "c"),
    *,
    seconds: float | None = None,
    delay: Any = 0.0,
    **config: Any,
) -> tuple[Trajectory, Backend]:
    backend = Backend(script, context_length=config.pop("context_length", 1000), delay=delay)
    async with MultiTurnAgent(AgentConfig(**config), backend=backend) as agent:
        session = Session(3, 1)
        trajectory = await run_episode(
            agent, environment, SCENARIO, seeds=SEEDS, session=session, seconds=seconds
        )
    assert backend.released == [session]
    assert environment.num_open == 0
    return trajectory, backend


def text(ids: list[int]) -> str:
    return bytes(id for id in ids if id < 256).decode()


async def test_a_conversation_becomes_a_trajectory() -> None:
    trajectory, backend = await play(ChattyEnvironment(), system_prompt="S")
    assert trajectory.status is Status.TERMINATED
    assert [m.content for m in trajectory.messages] == ["S", "hi", "a", "go on", "b"]
    assert (trajectory.member, trajectory.seed) == (1, 11)
    assert trajectory.environment_reward == 0.5 + 0.25 + 1.0
    assert trajectory.success is True
    assert trajectory.reward is None
    assert text(trajectory.token_ids) == "system: S\nuser: hi\nassistant:a\nuser: go on\nassistant:b"
    trained = [t for t, bit in zip(trajectory.token_ids, trajectory.action_mask, strict=True) if bit]
    assert trained == [ord("a"), END, ord("b"), END]
    assert [request.params.stream for request in backend.requests] == [derive(22, 0), derive(22, 1)]


@pytest.mark.parametrize("length", [9_000, 11_000])
async def test_long_texts_are_tokenised_beside_the_event_loop(length: int) -> None:
    """Prompt and feedback alike; short ones at once, for a thread costs more than they do."""

    async def at_length(conversation: ChattyConversation, reply: Message) -> Observation:
        heard = Message(role="user", content="x" * length)
        return Observation(messages=(heard,), terminated=conversation.turn == 2)

    beside: list[bool] = []

    class Noting(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            if len(text) > 8_000:
                beside.append(threading.current_thread() is not threading.main_thread())
            return super().encode(text)

    backend = Backend(("a", "b"), context_length=100_000, tokenizer=Noting())
    async with MultiTurnAgent(AgentConfig(system_prompt="s" * length), backend=backend) as agent:
        trajectory = await run_episode(
            agent, ChattyEnvironment(answer=at_length), SCENARIO, seeds=SEEDS, session=Session(3, 1)
        )
    assert len(trajectory.turns) == 2, trajectory.error
    assert beside == [length > 10_000] * 2


async def test_a_turn_that_is_cut_by_length_gets_an_untrained_end_token() -> None:
    trajectory, _ = await play(ChattyEnvironment(), ("long", "longer"), max_new_tokens=3)
    cut = trajectory.turns[0].completion
    assert (cut.finish_reason, cut.token_ids) == ("length", (*b"lon",))
    assert trajectory.turns[1].prompt_ids == (END, *b"\nuser: go on\nassistant:")
    assert sum(trajectory.action_mask) == 6
    assert trajectory.token_ids[-3:] == list(b"lon")  # the last turn needs no end token
    assert trajectory.token_ids.count(END) == 1


async def test_a_turn_that_ends_in_any_stop_token_needs_no_other() -> None:
    trajectory, _ = await play(ChattyEnvironment())
    assert trajectory.turns[1].prompt_ids == (*b"\nuser: go on\nassistant:",)


async def test_what_the_environment_cuts_is_truncated_and_judged() -> None:
    async def cut(conversation: ChattyConversation, reply: Message) -> Observation:
        return Observation(truncated=True)

    trajectory, _ = await play(ChattyEnvironment(answer=cut))
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.success is True
    assert not trajectory.metadata


async def test_a_full_context_truncates_the_conversation_and_it_is_judged() -> None:
    prompt = len("user: hi\nassistant:")
    context = prompt + 2 + len("\nuser: go on\nassistant:")  # no room for a second reply
    trajectory, backend = await play(ChattyEnvironment(), context_length=context)
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.metadata == {"context_overflow": True}
    assert trajectory.success is True
    assert len(trajectory.turns) == len(backend.requests) == 1

    trajectory, backend = await play(ChattyEnvironment(), context_length=context + 1)
    assert trajectory.status is Status.TERMINATED
    assert backend.requests[1].params.max_new_tokens == 1


async def test_what_the_outcome_says_besides_goes_into_the_metadata() -> None:
    class Counting(ChattyEnvironment):
        async def start(self, scenario: Any, seed: int) -> Any:
            conversation: Any = await super().start(scenario, seed)

            async def outcome() -> Outcome:
                return Outcome(metadata={"violations": {"no consent": 1}, "user_miss": 2})

            conversation.outcome = outcome
            return conversation

    trajectory, _ = await play(Counting())
    assert trajectory.metadata == {"violations": {"no consent": 1}, "user_miss": 2}


async def test_an_opening_that_fills_the_context_fails_with_its_cure() -> None:
    trajectory, backend = await play(ChattyEnvironment(), context_length=19)
    assert trajectory.status is Status.FAILED
    assert trajectory.error == (
        "EnvironmentFailure: the opening leaves no room for a reply: shorten the scenario, the system prompt "
        "or the tools (the conversation has 19 tokens and the model's context 19: shorten the messages or "
        "raise max_context_tokens)"
    )
    assert not backend.requests


async def broken_step(conversation: ChattyConversation, reply: Message) -> Observation | None:
    if conversation.turn == 2:
        raise ConnectionError("no route")
    return None


async def test_an_environment_that_breaks_fails_the_conversation_and_keeps_what_was_said() -> None:
    trajectory, _ = await play(ChattyEnvironment(turns=3, answer=broken_step))
    assert trajectory.status is Status.FAILED
    assert bare(trajectory.error) == "ConnectionError: no route"
    assert trajectory.outcome is None
    assert [m.content for m in trajectory.messages] == ["hi", "a", "go on", "b"]


async def test_a_backend_that_breaks_fails_the_conversation() -> None:
    trajectory, _ = await play(ChattyEnvironment(), ["a"])
    assert trajectory.status is Status.FAILED
    assert str(trajectory.error).startswith("BackendError: the script has 1 replies")


async def test_an_observation_that_goes_nowhere_fails_the_conversation() -> None:
    async def silent(conversation: ChattyConversation, reply: Message) -> Observation:
        return Observation()

    trajectory, _ = await play(ChattyEnvironment(answer=silent))
    assert trajectory.status is Status.FAILED
    assert "no message and did not end the conversation" in str(trajectory.error)


async def test_a_turn_s_reward_and_what_it_is_made_of_must_agree() -> None:
    async def priced(conversation: ChattyConversation, reply: Message) -> Observation:
        parts = {"polite": 0.3, "words": -0.1}
        answer = (Message(role="user", content="go on"),)
        return Observation(messages=answer, reward=0.2 if conversation.turn == 1 else 0.5, breakdown=parts)

    trajectory, _ = await play(ChattyEnvironment(answer=priced))
    assert trajectory.status is Status.FAILED
    assert "breakdown of a turn's reward sums to 0.2 and the reward is 0.5" in str(trajectory.error)
    assert trajectory.turns[0].breakdown == {"polite": 0.3, "words": -0.1}
    with pytest.raises(EnvironmentFailure, match="the reward is None: give both"):
        Observation(breakdown={"polite": 0.3})
    Observation(reward=0.3333, breakdown={"polite": 1 / 3})  # rounded


class Awkward(ChattyEnvironment):
    """Breaks where it is told to."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    async def start(self, scenario: Any, seed: int) -> Any:
        if self.where == "start":
            raise self.error
        conversation: Any = await super().start(scenario, seed)
        close = conversation.close

        async def broken(*_: object) -> Any:
            if self.where == "close":
                await close()
            raise self.error

        setattr(conversation, self.where, broken)
        return conversation


@pytest.mark.parametrize("where", ["start", "step", "outcome", "close"])
async def test_wherever_the_environment_breaks_the_conversation_fails_alone(where: str) -> None:
    trajectory, _ = await play(Awkward(where, OSError("gone")))
    assert (trajectory.status, bare(trajectory.error)) == (Status.FAILED, "OSError: gone")


@pytest.mark.parametrize("error", [TypeError("x"), AttributeError("x"), ConfigurationError("x")])
@pytest.mark.parametrize("where", ["start", "step", "outcome", "close"])
async def test_mistakes_in_code_and_settings_travel(where: str, error: Exception) -> None:
    with pytest.raises(type(error)):
        await play(Awkward(where, error))


async def test_a_cancelled_conversation_is_closed_and_released() -> None:
    async def forever(conversation: ChattyConversation, reply: Message) -> Observation:
        await asyncio.sleep(100)
        raise AssertionError

    environment, backend = ChattyEnvironment(answer=forever), Backend(["a"])
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        episode = run_episode(agent, environment, SCENARIO, seeds=SEEDS, session=Session(0, 0))
        task = asyncio.create_task(episode)
        await asyncio.sleep(0.01)
        assert environment.num_open == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert environment.num_open == 0
    assert backend.released == [Session(0, 0)]


@pytest.mark.parametrize("hangs", ["the user", "the agent"])
async def test_a_conversation_whose_time_is_up_is_cut_and_judged_by_what_was_said(hangs: str) -> None:
    async def silent_at_last(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.turn == 2 and hangs == "the user":
            await asyncio.sleep(100)

    trajectory, _ = await play(
        ChattyEnvironment(turns=9, answer=silent_at_last),
        ["a", "b", "c"],
        seconds=0.2,
        delay=lambda request: 100.0 if request.turn == 2 else 0.0,
    )
    assert (trajectory.status, trajectory.success) == (Status.TRUNCATED, True)
    assert [message.content for message in trajectory.replies] == ["a", "b"]
    assert trajectory.metadata == {"timed_out": True}
    assert trajectory.error is None


async def test_a_conversation_whose_time_is_up_before_anything_was_said_has_failed() -> None:
    trajectory, _ = await play(ChattyEnvironment(), ["a"], seconds=0.05, delay=100.0)
    assert trajectory.status is Status.FAILED
    assert trajectory.error is not None
    assert "raise episode_timeout" in trajectory.error
    assert trajectory.metadata == {"timed_out": True}


async def test_the_verdict_is_the_environment_s() -> None:
    verdict = Outcome(reward=None, success=None)
    trajectory, _ = await play(ChattyEnvironment(verdict=verdict))
    assert trajectory.outcome == verdict
    assert trajectory.success is None


async def test_a_conversation_s_time_stands_still_while_it_waits_for_an_outage_to_pass() -> None:
    breaker = Breaker("shop", failures=1, pause=1.8)
    breaker.has_worked = True

    async def asks_the_shop(conversation: ChattyConversation, reply: Message) -> None:
        if conversation.turn == 1:
            breaker.failed(breaker.admit() or 0, "away")

        async def ask() -> None:
            async with admitted(breaker, patience=30.0, down=EnvironmentFailure):
                pass

        await asyncio.gather(ask(), ask())

    trajectory, _ = await play(ChattyEnvironment(turns=3, answer=asks_the_shop), seconds=1.5)
    assert (trajectory.status, trajectory.error) == (Status.TERMINATED, None)
    assert "timed_out" not in trajectory.metadata


CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
NO_TOOLS = "error: unknown tool 'look'; there are no tools here"


@pytest.mark.parametrize("name", ["gemma", "gemma3", "cohere", "phi3", "cohere2", "llava_next"])
async def test_a_call_where_no_tools_are_is_told_to_the_agent_and_ends_nothing(name: str) -> None:
    """These templates have no place for tool results: some raised, others left the answer out."""
    environment = ConversationEnvironment(
        scenarios=[{"id": "s", "topic": "order"}], user=lambda scenario, seed: ScriptedUser(["hello", "bye"])
    )
    call = "<|tool_call>call:look{}<tool_call|>" if name == "gemma4" else CALL
    backend = Backend([call + call, "no tools?", "bye"], tokenizer=trl_tokenizer(name))
    (scenario,) = environment.scenarios("train")
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        trajectory = await run_episode(agent, environment, scenario, seeds=SEEDS, session=Session(3, 1))
        assert [message.content for message in trajectory.turns[0].feedback] == [NO_TOOLS, NO_TOOLS]
        assert trajectory.status is Status.TERMINATED
        assert trajectory.error is None
        assert f"tool: {NO_TOOLS}\n\ntool: {NO_TOOLS}" in backend.requests[1].text
        backend._script = [call, "I can't."]
        async with ChatSession(agent) as chat:
            assert await chat.send("where is it?") == "I can't."
        assert f"tool: {NO_TOOLS}" in backend.requests[-1].text


@pytest.mark.parametrize("where", ["opening", "answer"])
async def test_what_the_template_does_not_render_fails_the_conversation_alone(where: str) -> None:
    """Gemma's users and agents alternate."""
    user = Message(role="user", content="hi")

    async def answer(*_: object) -> Observation:
        return Observation(messages=(user, user))

    environment = ChattyEnvironment(answer=answer, opening=(user,) * (2 if where == "opening" else 1))
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend(["hi"], tokenizer=trl_tokenizer("gemma")))
    async with agent:
        trajectory = await run_episode(
            agent,
            environment,
            scenarios(1)[0],
            seeds=EpisodeSeeds(user=0, agent=0),
            session=Session(0, 0),
        )
    assert trajectory.status is Status.FAILED
    assert "roles must alternate" in str(trajectory.error)
    assert len(trajectory.turns) == (0 if where == "opening" else 1)
