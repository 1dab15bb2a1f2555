"""The event loop's worst wait while a step goes on."""

from __future__ import annotations

import asyncio
import time

import pytest

from stateset_agents.training.loop_lag import measure_loop_lag


async def test_the_longest_wait_is_kept():
    async with measure_loop_lag(interval=0.001) as lag:
        await asyncio.sleep(0.005)
        time.sleep(0.05)  # noqa: ASYNC251  # holds the loop up on purpose
        await asyncio.sleep(0.005)
    assert lag.worst >= 0.045


@pytest.mark.parametrize("hops", range(5))
async def test_a_cancellation_while_it_closes_is_not_swallowed(hops):
    async def measured():
        async with measure_loop_lag():
            await asyncio.sleep(0.001)
            cancel_after(hops, asyncio.current_task())
        await asyncio.sleep(10)

    def cancel_after(ticks, task):
        later = asyncio.get_running_loop().call_soon
        later(cancel_after, ticks - 1, task) if ticks else later(task.cancel)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.create_task(measured()), 5)
