"""The scripted backend answers like a real one, from a script."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from stateset_agents.backends.base import Session
from stateset_agents.backends.scripted import ScriptedBackend, ScriptedRequest
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import SamplingParams

PARAMS = SamplingParams(max_new_tokens=50)
A, B = Session(0, 0), Session(0, 1)


async def say(backend: ScriptedBackend, text: str, session: Session | None = A) -> str:
    prompt = backend.tokenizer.encode(text)
    return (await backend.generate(prompt, PARAMS, session=session)).message.content


async def test_each_session_walks_through_the_list_on_its_own() -> None:
    backend = ScriptedBackend(["one", "two"])
    assert [await say(backend, "x", A), await say(backend, "x", B), await say(backend, "x", A)] == [
        "one",
        "one",
        "two",
    ]
    with pytest.raises(BackendError, match="2 replies and turn 3"):
        await say(backend, "x", A)
    await backend.release(A)
    assert await say(backend, "x", A) == "one"


async def test_sessions_can_have_scripts_of_their_own() -> None:
    backend = ScriptedBackend({A: ["a"], B: ["b"]})
    assert [await say(backend, "x", B), await say(backend, "x", A)] == ["b", "a"]
    with pytest.raises(BackendError, match="no entry"):
        await say(backend, "x", Session(9, 9))


async def test_a_function_sees_the_prompt_and_the_turn() -> None:
    async def reply(request: ScriptedRequest) -> str:
        return f"{request.turn}:{request.text.upper()}"

    backend = ScriptedBackend(reply)
    assert [await say(backend, "hi"), await say(backend, "you")] == ["0:HI", "1:YOU"]
    assert [request.text for request in backend.requests] == ["hi", "you"]


async def test_a_completion_ends_with_eos_or_is_cut() -> None:
    backend = ScriptedBackend(["hello", "hello"])
    complete = await backend.generate([65], PARAMS, session=A)
    assert complete.token_ids == (*b"hello", 256)
    assert (complete.finish_reason, complete.prompt_ids, complete.logprobs) == ("stop", (65,), (0.0,) * 6)
    cut = await backend.generate([65], SamplingParams(max_new_tokens=3), session=A)
    assert (cut.message.content, cut.finish_reason) == ("hel", "length")


async def test_exceptions_in_the_script_are_raised() -> None:
    backend = ScriptedBackend([BackendError("down"), "up"])
    with pytest.raises(BackendError, match="down"):
        await say(backend, "x")
    assert await say(backend, "x") == "up"


async def test_the_context_is_as_long_as_it_says() -> None:
    backend = ScriptedBackend(["hello"], context_length=4)
    completion = await backend.generate([1, 2], PARAMS)
    assert (completion.token_ids, completion.finish_reason) == (tuple(b"he"), "length")
    with pytest.raises(BackendError, match="4 tokens and the context holds 4"):
        await backend.generate([1, 2, 3, 4], PARAMS)


async def test_delays_overlap() -> None:
    backend = ScriptedBackend(["x"], delay=lambda request: 0.02 * request.prompt_ids[0])
    order: list[int] = []

    async def converse(member: int) -> None:
        await backend.generate([member], PARAMS, session=Session(0, member))
        order.append(member)

    await asyncio.gather(converse(3), converse(1), converse(2))
    assert order == [1, 2, 3]


async def test_a_fork_goes_on_from_the_same_turn() -> None:
    backend = ScriptedBackend(["one", "two"])
    await say(backend, "x", A)
    await backend.fork(A, B)
    assert await say(backend, "x", B) == "two"


def test_a_bare_text_is_no_script() -> None:
    with pytest.raises(ConfigurationError, match="list of replies"):
        ScriptedBackend("hello")


def test_it_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, stateset_agents.backends.scripted\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
