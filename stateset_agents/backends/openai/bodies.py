"""Bodies of requests, read and unpacked within bounds; openai/protocol.py asks.

A server sets `auto_decompress=False` in its runner: aiohttp would unpack a piece as it comes, and one piece
of 64 KB may hold 64 MB. Here not a byte beyond the bound is unpacked or kept.
"""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from typing import TYPE_CHECKING, Any

from stateset_agents.backends.openai.protocol import ApiError
from stateset_agents.types.messages import MAX_NESTING, MAX_VALUES, is_nested_deeper, num_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiohttp import web

__all__ = ["default_max_body", "parsed", "read_body", "read_json"]

_BYTES_PER_TOKEN = 64
_LEAST, _MOST = 256 * 2**10, 4 * 2**20
_PIECE = 64 * 2**10
_WBITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def default_max_body(context_length: int) -> int:
    """Bytes that a conversation which fits the context has at the most: 256 KiB to 4 MiB.

    A token stands for five characters or so, and a character of JSON has up to twelve bytes (an emoji,
    escaped).
    """
    return min(_MOST, max(_LEAST, _BYTES_PER_TOKEN * context_length))


async def read_json(http: web.Request, most: int, take: Callable[[int], None] | None = None) -> Any:
    """What the body of a request says. Raises ApiError where it is no JSON, or larger than `most` bytes."""
    return parsed(await read_body(http, most, take))


async def read_body(http: web.Request, most: int, take: Callable[[int], None] | None = None) -> bytes:
    """The body of a request, unpacked. Raises ApiError, status 413, as soon as it is larger than `most`.

    `take` hears the size of each part before it is kept, and may refuse it.
    """
    coding = http.headers.get("Content-Encoding", "identity").strip().lower()
    if coding != "identity" and coding not in _WBITS:
        raise ApiError(
            f"Content-Encoding {coding!r} is not read here: send gzip, deflate or nothing",
            code="unsupported_encoding",
            status=415,
        )
    if http.content_length is not None and http.content_length > most:
        raise _too_large(most)
    unpack = _Unpacker(coding, most) if coding in _WBITS else None
    body = bytearray()
    async for piece in http.content.iter_chunked(_PIECE):
        for part in (piece,) if unpack is None else unpack(piece):
            if len(body) + len(part) > most:
                raise _too_large(most)
            if take is not None:
                take(len(part))
            body += part
            await asyncio.sleep(0)  # a piece may hold a thousand times its size
    if unpack is not None:
        unpack.end()
    return bytes(body)


class _Unpacker:
    """gzip (several members behind one another, too) and deflate, a piece at a time."""

    def __init__(self, coding: str, most: int) -> None:
        self._coding = coding
        self._most = most
        self._stream: Any = None
        """A decompressor of zlib's; None before a member begins."""

    def __call__(self, packed: bytes) -> Iterator[bytes]:
        """What is in a piece, in parts of 64 KiB at the most."""
        while packed:
            if self._stream is None:
                self._stream = zlib.decompressobj(self._wbits(packed))
            try:
                yield self._stream.decompress(packed, _PIECE)
            except zlib.error as error:
                raise _broken(self._coding, str(error)) from error
            packed = self._stream.unconsumed_tail
            if self._stream.eof:
                packed, self._stream = self._stream.unused_data, None
                if packed and self._coding == "deflate":
                    raise _broken(self._coding, "something follows its end")

    def end(self) -> None:
        """Raises ApiError where the last member is not whole."""
        if self._stream is not None:
            raise _broken(self._coding, "it ends too early")

    def _wbits(self, packed: bytes) -> int:
        """Deflate is meant to have zlib's two bytes in front, and some send it without."""
        bare = self._coding == "deflate" and packed[0] & 0x0F != 8
        return -15 if bare else _WBITS[self._coding]


def parsed(body: bytes) -> Any:
    """The JSON value of a body, within bounds that keep reading it quick. Raises ApiError beyond them."""
    if num_values(body) > MAX_VALUES:
        raise _invalid(f"the body holds more than {MAX_VALUES:,} JSON values: send fewer messages or tools")
    try:
        text = body.decode("utf-8-sig")  # json.loads would also take UTF-16, whose values nobody counted
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise _invalid(_TOO_DEEP) from None
    except ValueError as error:
        raise _invalid(f"the body is not JSON ({error})") from error
    if is_nested_deeper(value, MAX_NESTING):
        raise _invalid(_TOO_DEEP)
    return value


_TOO_DEEP = f"the body has more than {MAX_NESTING} levels of lists and objects: nest them less deeply"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:20]!r} is too large")
    return value


def _whole(digits: str) -> int:
    if len(digits) > 308:  # no float is as large
        raise ValueError(f"the number {digits[:20]}... is too large")
    return int(digits)


def _too_large(most: int) -> ApiError:
    return ApiError(
        f"the body is larger than {most} bytes, unpacked: shorten the messages",
        code="request_too_large",
        status=413,
    )


def _broken(coding: str, reason: str) -> ApiError:
    return _invalid(f"the body is not {coding} ({reason})")


def _invalid(message: str) -> ApiError:
    return ApiError(message, code="invalid_request")
