"""Pages that follow what goes on, served for a test: `async with served(serve_overview, root) as client`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import aiohttp

__all__ = ["address_of", "next_event", "served"]

_PATIENCE = 20.0  # seconds; a busy machine is slow, an event that was not sent does not come later either


@contextlib.asynccontextmanager
async def address_of(
    serve: Callable[..., Coroutine[Any, Any, None]], *what: Any, **options: Any
) -> AsyncIterator[str]:
    """Where the page is served; no longer at the end."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(*what, port=0, on_ready=address.set_result, **options))
    try:
        yield await address
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def served(
    serve: Callable[..., Coroutine[Any, Any, None]], *what: Any, **options: Any
) -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose addresses begin at the page's."""
    async with (
        address_of(serve, *what, **options) as address,
        aiohttp.ClientSession(base_url=address) as client,
    ):
        yield client


async def next_event(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    """Name and data of the next server-sent event."""
    async with asyncio.timeout(_PATIENCE):
        async for line in response.content:
            if line.startswith(b"event: "):
                data = await response.content.readline()
                return line[7:].strip().decode(), json.loads(data[6:])
    raise AssertionError("the stream ended")
