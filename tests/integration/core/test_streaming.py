"""Answers stream piece by piece, can be left at any time, and end at stop strings, in rollouts too."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from tiny_training import SCENARIOS, even_share, make_agent, make_environment

from stateset_agents import AgentConfig, MultiTurnAgent
from stateset_agents.backends.local import model_selection
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.sources.scenario_files import load_scenarios
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import Completion


def live(agent: MultiTurnAgent) -> int:
    return agent.backend.num_conversations  # type: ignore[attr-defined]  # a HuggingFaceBackend


def sampled(agent: MultiTurnAgent) -> int:
    return agent.backend.stats.sampled_tokens  # type: ignore[attr-defined,no-any-return]  # a HuggingFaceBackend


async def until_idle(agent: MultiTurnAgent) -> None:
    """The worker frees a slot between two steps; a job that it runs after that says it has."""
    for _ in range(100):
        await agent.backend.score([1, 2])
        if live(agent) == 0:
            return
    raise AssertionError(f"{live(agent)} conversations still hold a slot")


@pytest.mark.long
async def test_the_pieces_laid_end_to_end_are_the_response() -> None:
    async with make_agent(max_new_tokens=150) as one, make_agent(max_new_tokens=150) as other:
        number = 0
        for text in ("hi", "where is order K27?", "é", "ok"):
            pieces = [piece async for piece in one.stream_response(text, {"order": "K27"})]
            assert "".join(pieces) == await other.generate_response(text, {"order": "K27"})
            number += len(pieces)
        assert number > 20
        await until_idle(one)


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Generation waits after its 20th step until this is set, however fast or slow the machine is."""
    go, step = threading.Event(), Batcher.step

    def patiently(batcher: Batcher, turns: Any) -> Any:
        if batcher.stats.sampled_tokens >= 20:
            assert go.wait(60)
        return step(batcher, turns)

    monkeypatch.setattr(Batcher, "step", patiently)
    monkeypatch.setattr(model_selection, "check_cache", lambda *_: None)  # it samples more than 20 tokens
    yield go
    go.set()


async def test_pieces_come_while_the_model_still_speaks(paused: threading.Event) -> None:
    async with make_agent(max_new_tokens=200) as agent:
        stream = agent.stream_response("hi")
        assert await anext(stream)
        assert sampled(agent) <= 20
        paused.set()
        assert "".join([piece async for piece in stream])
        assert sampled(agent) > 20


async def test_leaving_the_loop_ends_the_generation_and_frees_its_slot(paused: threading.Event) -> None:
    async with make_agent(max_new_tokens=200) as agent:
        async for _ in agent.stream_response("hi"):
            assert live(agent) == 1
            break
        await asyncio.sleep(0)  # Python has a task close the stream a moment after the break
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        paused.set()
        await until_idle(agent)
        assert sampled(agent) <= 21  # the step that was under way
        await agent.generate_response("again")
        await until_idle(agent)


async def test_a_cancelled_reader_frees_its_slot(paused: threading.Event) -> None:
    async with make_agent(max_new_tokens=200) as agent:
        started = asyncio.Event()

        async def read() -> None:
            async with aclosing(agent.stream_response("hi")) as pieces:
                async for _ in pieces:
                    started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        paused.set()
        await until_idle(agent)
        assert sampled(agent) <= 21


@pytest.mark.long
async def test_streams_run_side_by_side() -> None:
    async with make_agent(max_new_tokens=40) as agent, make_agent(max_new_tokens=40) as other:

        async def whole(text: str) -> str:
            return "".join([piece async for piece in agent.stream_response(text)])

        together = await asyncio.gather(*(whole(text) for text in ("a", "b", "c")))
        assert sorted(together) == sorted([await other.generate_response(text) for text in ("a", "b", "c")])


async def test_errors_reach_the_reader() -> None:
    agent = MultiTurnAgent(AgentConfig(), backend=ScriptedBackend([BackendError("the model is away")]))
    async with agent:
        with pytest.raises(ConfigurationError, match="messages is empty"):
            _ = [piece async for piece in agent.stream_response([])]
        with pytest.raises(BackendError, match="the model is away"):
            _ = [piece async for piece in agent.stream_response("hi")]


async def test_a_rollout_decodes_no_text_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(*_: Any) -> bool:
        raise AssertionError("decoded for nobody")

    monkeypatch.setattr("stateset_agents.backends.tokenizers.TurnText.add", add)
    async with make_agent() as agent:
        assert await replies(agent)


async def replies(agent: MultiTurnAgent) -> list[Completion]:
    """Every turn of a deterministic rollout."""
    engine = ComputationalEngine(agent, make_environment(), even_share, num_generations=4)
    groups = await engine.rollout(load_scenarios(SCENARIOS[:4]), seed=0, step=0)
    return [turn.completion for group in groups for t in group.trajectories for turn in t.turns]


@pytest.mark.long
async def test_a_stop_string_ends_rollouts_the_same_way_every_time() -> None:
    async with make_agent(max_new_tokens=40) as agent:
        free = await replies(agent)
    letters = "".join(c.message.content for c in free)
    stop = (max(filter(str.isascii, set(letters)), key=letters.count),)
    async with (
        make_agent(max_new_tokens=40, stop=stop) as one,
        make_agent(max_new_tokens=40, stop=stop) as two,
    ):
        cut, again = await replies(one), await replies(two)
        decode = one.backend.tokenizer.decode
    assert cut == again
    stopped = [c for c in cut if stop[0] in decode(c.token_ids)]
    assert stopped
    assert cut[0].token_ids == free[0].token_ids[: len(cut[0].token_ids)]  # the same draws up to there
    for completion in stopped:
        assert completion.finish_reason == "stop"
        assert stop[0] not in completion.message.content
        assert stop[0] not in decode(completion.token_ids[:-1])  # it ended as soon as it could
        assert len(completion.logprobs) == len(completion.token_ids)


@pytest.mark.parametrize("history", ["keep", "template"])
async def test_a_turn_that_a_stop_string_ended_gets_an_untrained_end_token(history: str) -> None:
    """Or opens a row, where the template's own rendering is read: it does not write the stop string."""
    config = AgentConfig(stop=("STOP",), history=history)
    agent = MultiTurnAgent(config, backend=ScriptedBackend(lambda _: "ok STOP no"))
    async with agent:
        engine = ComputationalEngine(agent, make_environment(), even_share, num_generations=1)
        [group] = await engine.rollout(load_scenarios(SCENARIOS[:1]), seed=0, step=0)
        first, second = group.trajectories[0].turns
        assert first.completion.token_ids == tuple(b"ok STOP")
        assert first.completion.message.content == "ok"
        if history == "keep":
            assert second.prompt_ids[0] == agent.backend.tokenizer.eos_ids[0]
        else:
            assert group.trajectories[0].follows(1) is None
            assert bytes(id for id in second.prompt_ids if id < 256).count(b"STOP") == 0
        assert await agent.generate_response("hi") == "ok "


@pytest.mark.parametrize(("backend", "said"), [("scripted", "a\nuse"), ("real", None)])
async def test_streams_and_responses_stop_alike(backend: str, said: str | None) -> None:
    def make() -> MultiTurnAgent:
        if backend == "real":
            return make_agent(max_new_tokens=100, stop=("e", "zz"), temperature=2.0)
        config = AgentConfig(stop=("\nuser:",))
        return MultiTurnAgent(config, backend=ScriptedBackend(["a\nuse\nuser: b"]))

    async with make() as one, make() as other:
        pieces = [piece async for piece in one.stream_response("hi")]
        whole = await other.generate_response("hi")
    assert "".join(pieces) == whole
    assert said in (None, whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": ("",)}, "stop: a stop string must hold at least one character"),
        ({"stop": 3}, "stop: input should be a valid tuple, got 3"),
        ({"persona": "You are Mia"}, 'persona goes on from "You are", which is added: leave it out'),
        ({"context_window": "slide"}, "context_window: input should be 'refuse' or 'sliding', got 'slide'"),
    ],
)
def test_settings_that_cannot_work_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AgentConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
