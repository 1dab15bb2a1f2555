"""A call that reports to a callback, as an async generator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

P = TypeVar("P")
T = TypeVar("T")


def streamed(work: Callable[[Callable[[str], None]], Awaitable[T]]) -> AsyncGenerator[str | T]:
    """`reported` of pieces of text."""
    return reported(work)


async def reported(work: Callable[[Callable[[P], None]], Awaitable[T]]) -> AsyncGenerator[P | T]:
    """The pieces that `work` passes to its callback, and at the end its result.

    Leaving the loop early cancels the work and waits for its end.
    """
    pieces: asyncio.Queue[P | None] = asyncio.Queue()

    async def run() -> T:
        return await work(pieces.put_nowait)

    task = asyncio.create_task(run())
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        yield task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])
