"""What an agent reads of its own earlier turns: all, what its template renders, a window, a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stateset_agents import AgentConfig, Message, MultiTurnAgent
from stateset_agents.backends.base import Session
from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.core.environment import Observation
from stateset_agents.core.rollout.episode import EpisodeSeeds, run_episode
from stateset_agents.serving.chat_session import ChatSession
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Status, Trajectory

QUESTION = "Sum up."


class Talk:
    """A user who says so many things, one after the other."""

    def __init__(self, sayings: Sequence[str], *, repeats: bool = False) -> None:
        """`repeats`: it says the whole conversation again each time, as far as it knows it."""
        first, *self._left = sayings
        self.opening = (Message(role="system", content="Be brief."), Message(role="user", content=first))
        self.tools = ()
        self.heard: list[str] = []
        self._said = self.opening
        self._repeats = repeats

    async def step(self, reply: Message) -> Observation:
        self.heard.append(reply.content)
        if not self._left:
            return Observation(terminated=True)
        answer = Message(role="user", content=self._left.pop(0))
        self._said += (reply, answer)
        return Observation(messages=(answer,), conversation=self._said if self._repeats else None)

    async def outcome(self) -> Outcome:
        return Outcome(reward=1.0)

    async def close(self) -> None: ...


class Talks:
    """An environment of one such user."""

    local = True

    def __init__(self, talk: Talk) -> None:
        self.talk = talk

    def scenarios(self, split: str) -> list[Scenario]:
        return [Scenario(id="talk")]

    async def start(self, scenario: Scenario, seed: int) -> Talk:
        return self.talk


def answer(request: ScriptedRequest) -> str:
    """A summary where it is asked for, else what it was told last."""
    last = request.text.removesuffix("\nassistant:").rpartition("user: ")[2]
    return "It is long." if last == QUESTION else f"ok {last.split()[-1]}"


SAYINGS = [f"this is number {number}" for number in range(8)]


def agent_with(backend: ScriptedBackend, **settings: Any) -> MultiTurnAgent:
    return MultiTurnAgent(
        AgentConfig(max_new_tokens=20, compact_prompt=QUESTION, **settings), backend=backend
    )


async def play(
    sayings: Sequence[str] = SAYINGS, *, context: int = 260, **settings: Any
) -> tuple[Trajectory, Talk, list[str]]:
    backend = ScriptedBackend(answer, context_length=context)
    agent = agent_with(backend, **settings)
    environment = Talks(Talk(sayings))
    async with agent:
        trajectory = await run_episode(
            agent,
            environment,
            environment.scenarios("train")[0],
            seeds=EpisodeSeeds(user=0, agent=0),
            session=Session(0, 0),
        )
    return trajectory, environment.talk, [request.text for request in backend.requests]


async def play_repeated(reply: str, **settings: Any) -> tuple[Trajectory, list[str]]:
    """A conversation whose environment says it whole each time, and the prompts."""
    backend = ScriptedBackend(lambda request: reply)
    environment = Talks(Talk(SAYINGS[:3], repeats=True))
    async with agent_with(backend, **settings) as agent:
        trajectory = await run_episode(
            agent,
            environment,
            environment.scenarios("train")[0],
            seeds=EpisodeSeeds(user=0, agent=0),
            session=Session(0, 0),
        )
    return trajectory, [request.text for request in backend.requests]


@pytest.mark.parametrize("history", ["template", "keep", "slide", "compact"])
async def test_an_environment_that_repeats_the_conversation_need_not_know_its_thoughts(history: str) -> None:
    trajectory, prompts = await play_repeated("<think>hm</think>ok", history=history)
    assert len(trajectory.rows) == 1
    assert prompts[2].count("<think>hm</think>ok") == 2


async def test_an_environment_that_repeats_the_conversation_need_not_know_the_agent_s_system_prompt() -> None:
    trajectory, prompts = await play_repeated("ok", system_prompt="You are Mia.")
    assert len(trajectory.rows) == 1
    assert all(prompt.startswith("system: You are Mia.\n  Be brief.\n") for prompt in prompts)


@pytest.mark.parametrize("history", ["template", "keep"])
async def test_a_conversation_that_only_grows_is_one_row_until_the_context_is_full(history: str) -> None:
    trajectory, _, _ = await play(history=history)
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.metadata == {"context_overflow": True}
    assert len(trajectory.rows) == 1
    trajectory, talk, _ = await play(history=history, context=1000)
    assert trajectory.status is Status.TERMINATED
    assert len(trajectory.rows) == 1
    assert talk.heard == [f"ok {number}" for number in range(8)]


async def test_a_sliding_window_opens_a_row_where_it_leaves_out_the_oldest() -> None:
    trajectory, talk, prompts = await play(history="slide")
    assert trajectory.status is Status.TERMINATED
    assert talk.heard == [f"ok {number}" for number in range(8)]
    assert [row.indices for row in trajectory.rows] == [(0, 1, 2, 3, 4), (5,), (6,), (7,)]
    assert prompts[5].startswith("system: Be brief.\nuser: this is number 1\n")
    assert max(len(row.token_ids) for row in trajectory.rows) <= 260
    assert len(trajectory.messages) == 17  # nothing of it is lost


async def test_a_summary_takes_the_place_of_what_it_sums_up() -> None:
    trajectory, talk, prompts = await play(history="compact", compact_room=120, context=320)
    assert trajectory.status is Status.TERMINATED
    assert talk.heard == [f"ok {number}" for number in range(8)]  # the user hears no summary
    summaries = [index for index, turn in enumerate(trajectory.turns) if turn.is_summary]
    assert summaries == [4, 7]
    asked, after = prompts[4:6]
    assert asked.endswith("assistant:ok 3\nuser: Sum up.\nassistant:")
    assert after == (
        "system: Be brief.\nuser: this is number 0\n  \n  Summary of the conversation so far:\n"
        "  It is long.\nassistant: ok 3\nuser: this is number 4\nassistant:"
    )
    assert [row.indices for row in trajectory.rows] == [(0, 1, 2, 3, 4), (5, 6, 7), (8, 9)]
    assert [message.content for message in trajectory.replies] == talk.heard
    assert trajectory.num_agent_tokens == sum(sum(row.action_mask) for row in trajectory.rows)
    assert trajectory.turns[4].reward is None
    assert trajectory.turns[4].feedback == ()


async def test_what_does_not_fit_behind_a_summary_either_ends_the_conversation() -> None:
    trajectory, _, _ = await play([*SAYINGS[:3], "x " * 200, "more"], history="compact", compact_room=80)
    assert trajectory.metadata == {"context_overflow": True}
    assert trajectory.turns[-1].is_summary


class LookUp(Talk):
    """A user whose second question takes a tool, which finds so much."""

    def __init__(self, found: str) -> None:
        super().__init__(["this is number 0", "look it up"])
        self._found = found

    async def step(self, reply: Message) -> Observation:
        if not reply.tool_calls:
            return await super().step(reply)
        (call,) = reply.tool_calls
        return Observation(messages=(Message(role="tool", content=self._found, tool_call_id=call.id),))


def looking(request: ScriptedRequest) -> str:
    if request.text.endswith("user: look it up\nassistant:"):
        return '<tool_call>{"name": "look"}</tool_call>'
    if request.text.endswith("user: Sum up.\nassistant:"):
        return "It is long."
    return "Found." if "\ntool: " in request.text else "y" * 100


@pytest.mark.parametrize(
    ("size", "is_shown", "is_over"),
    [(300, True, False), (400, False, False), (500, False, False), (600, False, True)],
)
async def test_a_tool_s_result_that_does_not_fit_beside_the_question_is_read_after_the_summary(
    size: int, is_shown: bool, is_over: bool
) -> None:
    backend = ScriptedBackend(looking, context_length=700)
    agent = MultiTurnAgent(
        AgentConfig(max_new_tokens=110, compact_prompt=QUESTION, history="compact"), backend=backend
    )
    environment = Talks(LookUp("x" * size))
    async with agent:
        trajectory = await run_episode(
            agent,
            environment,
            environment.scenarios("train")[0],
            seeds=EpisodeSeeds(user=0, agent=0),
            session=Session(0, 0),
        )
    assert [turn.is_summary for turn in trajectory.turns[:3]] == [False, False, True]
    assert ("tool: x" in backend.requests[2].text) == is_shown
    assert trajectory.turns[2].completion.finish_reason == "stop"
    if is_over:
        assert trajectory.metadata == {"context_overflow": True}
        return
    assert trajectory.status is Status.TERMINATED
    after = backend.requests[3].text
    assert "It is long." in after
    assert "x" * size in after
    assert environment.talk.heard == ["y" * 100, "Found."]


@pytest.mark.parametrize(("context", "reply"), [(300, 40), (400, 90), (480, 120), (520, 130)])
async def test_a_summary_is_asked_for_in_time_whatever_the_replies_are(context: int, reply: int) -> None:
    """Unset, `compact_room` has place for the longest reply and for the summary that is asked for then."""

    def talkative(request: ScriptedRequest) -> str:
        return "It is long." if request.text.endswith("user: Sum up.\nassistant:") else "y" * reply

    backend = ScriptedBackend(talkative, context_length=context)
    agent = MultiTurnAgent(
        AgentConfig(max_new_tokens=reply, compact_prompt=QUESTION, history="compact"), backend=backend
    )
    environment = Talks(Talk(SAYINGS))
    async with agent:
        trajectory = await run_episode(
            agent,
            environment,
            environment.scenarios("train")[0],
            seeds=EpisodeSeeds(user=0, agent=0),
            session=Session(0, 0),
        )
    assert (trajectory.status, trajectory.metadata) == (Status.TERMINATED, {})
    assert any(turn.is_summary for turn in trajectory.turns)


def message(role: Any, content: str) -> Message:
    return Message(role=role, content=content)


LONG_TALK = [
    message("user", "x" * 80),
    message("assistant", "ok 0"),
    message("user", "y" * 80),
    message("assistant", "ok 1"),
]


@pytest.mark.parametrize(
    ("messages", "asked"),
    [
        ([*LONG_TALK, message("user", "z" * 120)], True),  # with it the conversation does not fit
        ([*LONG_TALK, message("user", "z")], True),
        (LONG_TALK, False),  # nothing answers the last reply yet
    ],
)
async def test_a_summary_is_asked_for_where_the_conversation_goes_on(
    messages: list[Message], asked: bool
) -> None:
    backend = ScriptedBackend(answer, context_length=320)
    async with agent_with(backend, history="compact", compact_room=150) as agent:
        await agent.answer(messages)
    prompts = [request.text for request in backend.requests]
    assert [prompt.endswith("user: Sum up.\nassistant:") for prompt in prompts] == [True] * asked + [False]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_context_tokens": 5000}, "max_context_tokens 5000 is more than the model's context of 1024"),
        ({"max_new_tokens": 1024}, "max_new_tokens 1024 is not less than the context of 1024 tokens"),
        ({"max_context_tokens": 64, "max_new_tokens": 64}, "not less than the context of 64 tokens"),
        ({"compact_room": 300}, "compact_room has no effect with history template"),
        (
            {"compact_prompt": "Sum up.", "history": "slide"},
            "compact_prompt has no effect with history slide",
        ),
        ({"history": "compact", "compact_room": 1020}, "compact_room 1020 is more than half of the context"),
        ({"history": "compact", "compact_room": 512}, None),
        ({"max_context_tokens": 1024, "max_new_tokens": 1023}, None),
    ],
)
async def test_settings_without_effect_in_the_context_are_one_line(
    settings: dict[str, Any], told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    agent = MultiTurnAgent(AgentConfig(**settings), backend=ScriptedBackend(["ok"], context_length=1024))
    with caplog.at_level("WARNING"):
        await agent.initialize()
    assert len(caplog.messages) == (told is not None)
    assert told is None or told in caplog.messages[0]


@pytest.mark.parametrize(
    ("settings", "fix"),
    [
        ({"compact_room": 5000}, "compact_room 5000 does not fit .* 1024 tokens: .*; leave it out"),
        ({"compact_room": 1024}, "compact_room 1024 does not fit"),
        ({"max_new_tokens": 512}, "compact_room 1024 does not fit .*; lower max_new_tokens 512"),
    ],
)
async def test_a_room_for_summaries_beyond_the_context_is_refused(settings: dict[str, Any], fix: str) -> None:
    backend = ScriptedBackend(["ok"], context_length=1024)
    with pytest.raises(ConfigurationError, match=fix):
        await MultiTurnAgent(AgentConfig(history="compact", **settings), backend=backend).initialize()


@pytest.mark.parametrize("history", ["template", "keep", "slide", "compact"])
async def test_a_chat_reads_a_conversation_as_rollouts_do(history: str) -> None:
    _, _, prompts = await play(SAYINGS[:5], history=history, compact_room=80)
    backend = ScriptedBackend(answer, context_length=260)
    agent = agent_with(backend, history=history, compact_room=80)
    async with agent, ChatSession(agent, messages=[Message(role="system", content="Be brief.")]) as chat:
        for saying in SAYINGS[:5]:
            assert await chat.send(saying) == f"ok {saying[-1]}"
        assert len(chat.messages) == 11
    assert [request.text for request in backend.requests] == prompts
