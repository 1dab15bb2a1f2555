"""Send an answer as server-sent events, in OpenAI's format."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stateset_agents.backends.openai.protocol import REQUEST_ID, ApiError

if TYPE_CHECKING:
    from aiohttp import web


class EventStream:
    """The events of one response. Its status is sent with the first event; earlier errors have their own."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self.headers: dict[str, str] = {}
        """Of the response, besides those of every stream; set them before the first event."""
        self._response: web.StreamResponse | None = None
        self._beginning = asyncio.Lock()

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    async def send(self, data: Mapping[str, Any]) -> None:
        """Send one event; several answers of one request may send at the same time."""
        response = await self._begun()
        await response.write(f"data: {json.dumps(data)}\n\n".encode())

    async def fail(self, error: ApiError) -> web.StreamResponse:
        """End the stream with an error, which OpenAI's clients raise."""
        await self.send(error.body)
        response = await self._begun()
        await response.write_eof()
        return response

    async def end(self) -> web.StreamResponse:
        """End a complete stream."""
        response = await self._begun()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _begun(self) -> web.StreamResponse:
        from aiohttp import web

        async with self._beginning:
            if self._response is None:
                headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
                response = web.StreamResponse(
                    headers={**self.headers, **headers, "X-Request-Id": REQUEST_ID.get()}
                )
                await response.prepare(self._http)
                self._response = response
        return self._response
