"""`stateset-agents serve` as a process of its own on loopback: how it ends while it answers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import statistics
import time

import aiohttp
import openai
import pytest
from warm_python import warm_python

HI = [{"role": "user", "content": "hello, what is the news on order K16?"}]
LONG = {"model": "embedded:desk", "messages": HI, "max_tokens": 900, "temperature": 30}


@contextlib.asynccontextmanager
async def serve(*flags):
    """The process, its base URL, and a client."""
    words = [
        *warm_python(),
        "-m",
        "stateset_agents.cli.main",
        "serve",
        "embedded:desk",
        "--port",
        "0",
        *flags,
    ]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*words, stdout=pipe, stderr=pipe)
    try:
        url = (await process.stdout.readline()).decode().split()[-1]
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield process, url, client.chat.completions
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def complete_answer(chat):
    answer = await chat.create(**LONG)
    return answer.choices[0].finish_reason


async def streamed(chat, begun):
    reason = None
    async for chunk in await chat.create(**LONG, stream=True):
        begun.set()
        reason = chunk.choices[0].finish_reason or reason
    return reason


@contextlib.asynccontextmanager
async def eight_active_answers(chat):
    """Eight answers that are being sampled, every second one streamed."""
    begun = [asyncio.Event() for _ in range(4)]
    work = [asyncio.ensure_future(complete_answer(chat)) for _ in range(4)]
    work += [asyncio.ensure_future(streamed(chat, event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    yield work
    await asyncio.gather(*work, return_exceptions=True)


async def test_a_server_that_is_told_to_end_loses_no_answer():
    async with serve() as (process, url, chat), aiohttp.ClientSession() as http:
        root = url.removesuffix("v1")
        async with http.get(f"{root}ready") as answer:
            assert answer.status == 200
        async with eight_active_answers(chat) as work:
            assert not all(item.done() for item in work)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            async with http.get(f"{root}ready") as answer:
                assert answer.status == 503
            async with http.get(f"{root}health") as answer:
                assert answer.status == 200
            with pytest.raises(openai.InternalServerError) as caught:
                await chat.create(**LONG)
            assert (caught.value.status_code, caught.value.code) == (503, "shutting_down")
            assert caught.value.response.headers["Retry-After"]
            assert sum(item.done() for item in work) < 8
            reasons = await asyncio.gather(*work)
        assert set(reasons) <= {"stop", "length"}
        assert len(reasons) == 8
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        assert await process.stderr.read() == b""


@pytest.mark.long
async def test_what_takes_longer_than_the_drain_is_told_and_the_exit_code_says_so():
    async with serve("--drain", "0.3") as (process, _, chat):
        async with eight_active_answers(chat) as work:
            since = time.monotonic()
            process.send_signal(signal.SIGTERM)
            results = await asyncio.gather(*work, return_exceptions=True)
        errors = [item for item in results if isinstance(item, openai.APIError)]
        assert errors, "answers of 900 tokens were whole within .3 s: make them longer"
        assert len(errors) + results.count("stop") + results.count("length") == 8
        assert {error.code for error in errors} == {"shutting_down"}
        assert all("shut down before the answer was whole: ask again" in error.message for error in errors)
        async with asyncio.timeout(30):
            assert await process.wait() == 1
        assert time.monotonic() - since < 15
        text = (await process.stderr.read()).decode()
        assert text.startswith(
            f"stateset-agents: {len(errors)} requests were broken off: give them longer than"
        )


@pytest.mark.long
async def test_one_client_s_three_hundred_long_answers_leave_another_s_short_one_quick(tmp_path):
    """Within three times of what it takes alone, by the median of twenty."""
    (tmp_path / "keys").write_text("alice\nbob\n")
    short = {**LONG, "max_tokens": 16}

    async def median(chat):
        took = []
        for _ in range(20):
            since = time.monotonic()
            await chat.create(**short)
            took.append(time.monotonic() - since)
        return statistics.median(took)

    async with serve("--api-key-file", str(tmp_path / "keys")) as (_, url, _):
        async with (
            openai.AsyncOpenAI(base_url=url, api_key="alice", max_retries=0, timeout=600) as alice,
            openai.AsyncOpenAI(base_url=url, api_key="bob", max_retries=0, timeout=600) as bob,
        ):
            await bob.chat.completions.create(**short)
            alone = await median(bob.chat.completions)
            flood = [asyncio.ensure_future(alice.chat.completions.create(**LONG)) for _ in range(300)]
            await asyncio.sleep(3)
            beside = await median(bob.chat.completions)
            left = sum(not item.done() for item in flood)
            for item in flood:
                item.cancel()
            await asyncio.wait(flood)
        print(f"a short answer alone {alone * 1e3:.0f} ms, beside {left} long ones {beside * 1e3:.0f} ms")
        assert left > 200
        assert beside < 3 * alone
