"""A call that reports by a callback, as something to iterate over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

__all__ = ["streamed"]

T = TypeVar("T")


async def streamed(work: Callable[[Callable[[str], None]], Awaitable[T]]) -> AsyncGenerator[str | T]:
    """What `work` tells its callback, piece by piece, and at the end what it returns.

    Whoever leaves the loop early cancels the work and waits for it.
    """
    pieces: asyncio.Queue[str | None] = asyncio.Queue()

    async def whole() -> T:
        return await work(pieces.put_nowait)

    task = asyncio.create_task(whole())
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        yield task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])
