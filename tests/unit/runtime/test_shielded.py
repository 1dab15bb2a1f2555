"""`shielded`: work that runs to its end although its caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from stateset_agents.runtime.tasks import shielded


async def test_cancelled_again_and_again_the_work_ends_first():
    done, go = [], asyncio.Event()

    async def work():
        await go.wait()
        done.append(1)

    task = asyncio.create_task(shielded(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


async def test_undisturbed_it_gives_the_result():
    assert await shielded(asyncio.sleep(0, "result")) == "result"


async def test_what_the_work_raises_goes_before_the_cancellation():
    async def work():
        await asyncio.sleep(0.001)
        raise ValueError("broken")

    task = asyncio.create_task(shielded(work()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(ValueError, match="broken"):
        await task
