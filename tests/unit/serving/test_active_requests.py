"""Active requests: a drain refuses new ones, waits, and cancels those that take too long."""

from __future__ import annotations

import asyncio
import time

import pytest

from stateset_agents.backends.dialects.request import ApiError
from stateset_agents.serving.limits import ActiveRequests


async def answer(requests, seconds):
    async with requests.request():
        await asyncio.sleep(seconds)
        return "whole"


async def start(requests, seconds):
    task = asyncio.create_task(answer(requests, seconds))
    await asyncio.sleep(0)
    return task


async def test_a_drain_waits_for_active_requests_and_accepts_no_new_one():
    requests = ActiveRequests()
    request = await start(requests, 0.1)
    drain = asyncio.create_task(requests.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="ask again at another one") as caught:
        await answer(requests, 0)
    assert caught.value.status == 503
    assert await drain == 0
    assert await request == "whole"


async def test_requests_that_take_longer_are_cancelled_and_counted():
    requests = ActiveRequests()
    quick, slow = await start(requests, 0.01), await start(requests, 60)
    assert await requests.drain(0.2) == 1
    assert await quick == "whole"
    with pytest.raises(ApiError, match="shut down before the answer was whole"):
        await slow


async def test_stop_waiting_ends_a_drain_at_once():
    requests = ActiveRequests()
    slow = await start(requests, 60)
    drain = asyncio.create_task(requests.drain(60))
    await asyncio.sleep(0)
    since = time.monotonic()
    requests.stop_waiting()
    assert await drain == 1
    assert time.monotonic() - since < 5
    with pytest.raises(ApiError):
        await slow
    requests.stop_waiting()


async def test_a_drain_without_requests_ends_at_once():
    assert await ActiveRequests().drain(0) == 0


async def test_a_cancellation_and_a_timeout_of_the_client_are_no_drain():
    requests = ActiveRequests()
    request = await start(requests, 60)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    with pytest.raises(TimeoutError):
        async with requests.request(), asyncio.timeout(0.01):
            await asyncio.sleep(60)
    assert await requests.drain(0) == 0
