"""Listens for all HTTP servers of this package, so that no client can keep the others waiting.

- A connection is read by 512 bytes a turn of the event loop until a request with a `Content-Length` is let
  in: parsing chunks of one byte each takes a thousand times as long as their bytes.
- After a refusal nothing more of the body is parsed, and the connection is closed.
- A request has to arrive, and an answer to be read, within `read_timeout`: where a body takes longer, its
  handler is cancelled and the answer is 408.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from aiohttp import web


_FEW_BYTES, _MANY_BYTES = 512, 2**18
"""Bytes read at once from a connection: before a request is let in, and of a body of a known length."""


async def listen(
    app: web.Application,
    host: str,
    port: int,
    *,
    read_timeout: float,
    shutdown_timeout: float = 1.0,
    log: logging.Logger | None = None,
) -> web.AppRunner:
    """Serve `app` until the runner's `cleanup`; port 0 takes a free one.

    Add the app's own middlewares before. Raises ConfigurationError for an address that cannot be used.
    """
    from aiohttp import web

    app.middlewares.insert(0, web.middleware(_closing_after_refusals))
    app.middlewares.append(_reading_for(read_timeout))
    app.on_response_prepare.append(_stalled_reader_closer(read_timeout))
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=shutdown_timeout,
        handler_cancellation=True,
        keepalive_timeout=read_timeout,  # also for a request whose headers never end
        lingering_time=1.0,  # a refused client may go on sending for so long, and reads its answer
        auto_decompress=False,
        read_bufsize=2**16,
        logger=log or logging.getLogger("aiohttp.server"),
    )
    await runner.setup()
    _read_few_bytes_at_first(runner.server)
    try:
        await web.TCPSite(runner, host, port, backlog=1024).start()
    except (OSError, OverflowError) as error:
        await runner.cleanup()
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {reason}; choose another with --port, or 0 for a free one"
        ) from error
    except BaseException:
        await runner.cleanup()
        raise
    return runner


def _read_few_bytes_at_first(server: Any) -> None:
    connection_made = server.connection_made

    def limited(handler: Any, transport: Any) -> None:
        _set_bytes_at_once(transport, _FEW_BYTES)
        connection_made(handler, transport)

    server.connection_made = limited


def _set_bytes_at_once(transport: Any, size: int) -> None:
    if hasattr(transport, "max_size"):  # asyncio's own transports for sockets, not those of other event loops
        transport.max_size = size


_Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


async def _closing_after_refusals(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """The outermost middleware: what is left of a refused body is thrown away unparsed."""
    from aiohttp import web

    try:
        response = await handler(request)
    except web.HTTPException as error:
        _close_unless_read(request, error)
        raise
    if response.status >= 400:
        _close_unless_read(request, response)
    return response


def _close_unless_read(request: web.Request, response: web.StreamResponse) -> None:
    if not request.content.is_eof():
        response.force_close()
        request.protocol.close()


def _reading_for(seconds: float) -> Callable[..., Awaitable[web.StreamResponse]]:
    """The innermost middleware, for requests that the others let in: their bodies are read by many bytes, and
    have to come within `seconds`."""
    from aiohttp import web

    @web.middleware
    async def reading(request: web.Request, handler: _Handler) -> web.StreamResponse:
        if request.content.is_eof():
            return await handler(request)
        limit = asyncio.timeout(seconds)

        def has_come() -> None:
            with suppress(RuntimeError):  # the handler did not wait for it
                limit.reschedule(None)

        if request.content_length is not None:
            _set_bytes_at_once(request.transport, _MANY_BYTES)
        try:
            async with limit:
                request.content.on_eof(has_come)
                return await handler(request)
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"the body did not come within {seconds:g} seconds"
            raise web.HTTPRequestTimeout(text=text) from error
        finally:
            _set_bytes_at_once(request.transport, _FEW_BYTES)

    return reading


def _stalled_reader_closer(
    seconds: float,
) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A hook that closes the connection of a client that reads nothing of its answer for so many seconds.

    Only Linux can close it (TCP_USER_TIMEOUT, https://man7.org/linux/man-pages/man7/tcp.7.html).
    """
    milliseconds = max(min(round(1000 * seconds), 2**31 - 1), 1)

    async def prepare(request: web.Request, _: web.StreamResponse) -> None:
        connection = request.transport and request.transport.get_extra_info("socket")
        if connection and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    return prepare
