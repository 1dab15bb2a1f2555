"""Read the bodies of requests within limits, and send answers as server-sent events; for our HTTP servers.

A server sets `auto_decompress=False` in its runner: aiohttp would decompress each piece as it comes, and a
piece of 64 KB may become 64 MB. Here no byte beyond the limit is decompressed or kept.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from typing import TYPE_CHECKING, Any

from stateset_agents.backends.dialects.errors import id_headers
from stateset_agents.backends.dialects.request import ApiError, Events, invalid
from stateset_agents.types.messages import MAX_NESTING, MAX_VALUES, finite_json, is_nested_deeper, num_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiohttp import web


_BYTES_PER_TOKEN = 64
_MIN_BODY, _MAX_BODY = 256 * 2**10, 4 * 2**20
_SMALL_CHUNKS = 64
"""A body of more chunks has at least so many bytes in each, on average: parsing small ones takes long."""
_PIECE = 64 * 2**10
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def default_max_body(context_length: int) -> int:
    """Most bytes of a conversation that fits the context: 256 KiB to 4 MiB.

    A token has about five characters, and a character of JSON up to twelve bytes (an escaped emoji).
    """
    return min(_MAX_BODY, max(_MIN_BODY, _BYTES_PER_TOKEN * context_length))


async def read_json(http: web.Request, max_bytes: int, take: Callable[[int], None] | None = None) -> Any:
    """The JSON body of a request. Raises ApiError if it is no JSON, or larger than `max_bytes`."""
    return parsed(await read_body(http, max_bytes, take))


async def read_body(http: web.Request, max_bytes: int, take: Callable[[int], None] | None = None) -> bytes:
    """The decompressed body of a request. Raises ApiError, status 413, once it is larger than `max_bytes`.

    `take` is called with the size of each part before it is kept, and may raise to refuse it.
    """
    coding = http.headers.get("Content-Encoding", "identity").strip().lower()
    if coding != "identity" and coding not in _WBITS:
        raise ApiError(
            f"Content-Encoding {coding!r} is not read here: send gzip, deflate or nothing",
            code="unsupported_encoding",
            status=415,
        )
    if http.content_length is not None and http.content_length > max_bytes:
        raise _too_large(max_bytes)
    decompress = _Decompressor(coding) if coding in _WBITS else None
    body = bytearray()
    num_chunks = 0
    while not http.content.at_eof():  # iter_chunks gives chunks of nothing for ever where there is no body
        piece, ends_chunk = await http.content.readchunk()
        num_chunks += ends_chunk
        if num_chunks > _SMALL_CHUNKS and len(body) < _SMALL_CHUNKS * num_chunks:
            raise invalid(f"the body comes in more than {_SMALL_CHUNKS} chunks of a few bytes: send it whole")
        for part in (piece,) if decompress is None else decompress(piece):
            if len(body) + len(part) > max_bytes:
                raise _too_large(max_bytes)
            if take is not None:
                take(len(part))
            body += part
            await asyncio.sleep(0)  # a piece may decompress to a thousand times its size
    if decompress is not None:
        decompress.end()
    return bytes(body)


class _Decompressor:
    """gzip (also of several members) and deflate, a piece at a time."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._stream: Any = None
        """A zlib decompressor; None before a member begins."""

    def __call__(self, packed: bytes) -> Iterator[bytes]:
        """The decompressed piece, in parts of at most 64 KiB."""
        is_full = False  # a full part may leave some behind where all of the piece was read
        while packed or is_full:
            if self._stream is None:
                self._stream = zlib.decompressobj(self._wbits(packed))
            try:
                part = self._stream.decompress(packed, _PIECE)
            except zlib.error as error:
                raise _broken(self._coding, str(error)) from error
            yield part
            packed, is_full = self._stream.unconsumed_tail, len(part) == _PIECE
            if self._stream.eof:
                packed, is_full, self._stream = self._stream.unused_data, False, None
                if packed and self._coding == "deflate":
                    raise _broken(self._coding, "something follows its end")

    def end(self) -> None:
        """Raises ApiError if the last member is incomplete."""
        if self._stream is not None:
            raise _broken(self._coding, "it ends too early")

    def _wbits(self, packed: bytes) -> int:
        """zlib's window bits. Deflate should begin with a zlib header, but some clients send none."""
        is_raw = self._coding == "deflate" and packed[0] & 0x0F != 8
        return -15 if is_raw else _WBITS[self._coding]


def parsed(body: bytes) -> Any:
    """The JSON value of a body. Raises ApiError beyond limits that keep parsing fast."""
    if num_values(body) > MAX_VALUES:
        raise invalid(f"the body holds more than {MAX_VALUES:,} JSON values: send fewer messages or tools")
    try:
        text = body.decode("utf-8-sig")  # json.loads would also take UTF-16, whose values were not counted
        value = finite_json(text)
    except RecursionError:
        raise invalid(_TOO_DEEP) from None
    except ValueError as error:
        raise invalid(f"the body is not JSON ({error})") from error
    if is_nested_deeper(value, MAX_NESTING):
        raise invalid(_TOO_DEEP)
    return value


_TOO_DEEP = f"the body has more than {MAX_NESTING} levels of lists and objects: nest them less deeply"


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        f"the body is larger than {max_bytes} bytes, unpacked: shorten the messages",
        code="request_too_large",
        status=413,
    )


def _broken(coding: str, reason: str) -> ApiError:
    return invalid(f"the body is not {coding} ({reason})")


# --- answers as server-sent events


class EventStream:
    """The events of one response. Its status is sent with the first event; earlier errors have their own."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        self.headers: dict[str, str] = {}
        """Headers of the response besides those of every stream; set them before the first event."""
        self._response: web.StreamResponse | None = None
        self._beginning = asyncio.Lock()

    @property
    def has_begun(self) -> bool:
        return self._response is not None

    async def send(self, events: Events) -> None:
        """Send events; several answers of one request may send at the same time. One with a type has its
        name, too."""
        response = await self._begun()
        for data in events:
            name = f"event: {data['type']}\n" if "type" in data else ""
            await response.write(f"{name}data: {json.dumps(data)}\n\n".encode())

    async def end(self, events: Events, closing: bytes = b"") -> web.StreamResponse:
        """Send the last events, and what stands behind them."""
        await self.send(events)
        response = await self._begun()
        await response.write(closing)
        await response.write_eof()
        return response

    async def _begun(self) -> web.StreamResponse:
        from aiohttp import web

        async with self._beginning:
            if self._response is None:
                headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
                response = web.StreamResponse(headers={**self.headers, **headers, **id_headers()})
                await response.prepare(self._http)
                self._response = response
        return self._response
