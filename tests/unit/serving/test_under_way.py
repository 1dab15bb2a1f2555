"""Requests under way: a drain refuses, waits, breaks off what takes too long, and can be hurried."""

from __future__ import annotations

import asyncio
import time

import pytest

from stateset_agents.backends.openai.protocol import ApiError
from stateset_agents.serving.under_way import UnderWay


async def taking(under_way, seconds):
    async with under_way.request():
        await asyncio.sleep(seconds)
        return "whole"


async def begun(under_way, seconds):
    task = asyncio.create_task(taking(under_way, seconds))
    await asyncio.sleep(0)
    return task


async def test_a_drain_waits_for_what_is_under_way_and_takes_nothing_new():
    under_way = UnderWay()
    request = await begun(under_way, 0.1)
    drain = asyncio.create_task(under_way.drain(10))
    await asyncio.sleep(0)
    with pytest.raises(ApiError, match="ask again at another one") as caught:
        await taking(under_way, 0)
    assert caught.value.status == 503
    assert await drain == 0
    assert await request == "whole"


async def test_what_takes_longer_is_broken_off_and_counted():
    under_way = UnderWay()
    quick, slow = await begun(under_way, 0.01), await begun(under_way, 60)
    assert await under_way.drain(0.2) == 1
    assert await quick == "whole"
    with pytest.raises(ApiError, match="shut down before the answer was whole"):
        await slow


async def test_a_drain_that_is_hurried_waits_no_longer():
    under_way = UnderWay()
    slow = await begun(under_way, 60)
    drain = asyncio.create_task(under_way.drain(60))
    await asyncio.sleep(0)
    since = time.monotonic()
    under_way.hurry()
    assert await drain == 1
    assert time.monotonic() - since < 5
    with pytest.raises(ApiError):
        await slow
    under_way.hurry()


async def test_nothing_under_way_is_drained_at_once():
    assert await UnderWay().drain(0) == 0


async def test_a_client_s_cancellation_and_a_timeout_of_its_own_are_no_drain():
    under_way = UnderWay()
    request = await begun(under_way, 60)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    with pytest.raises(TimeoutError):
        async with under_way.request(), asyncio.timeout(0.01):
            await asyncio.sleep(60)
    assert await under_way.drain(0) == 0
