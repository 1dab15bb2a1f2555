"""Who may talk to an HTTP server of ours: serve, the live report, rollout endpoints, an application of yours.

A web page in a browser on this machine can send requests to 127.0.0.1 as well. It cannot send
`application/json` without asking first (a preflight request, which no server here answers), and a page that
points its own name at this machine (DNS rebinding) sends that name as `Host`. So both are checked, and a key
where there is one.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from aiohttp import web

__all__ = ["API_KEY_VARIABLE", "LOOPBACK_NAMES", "HttpGuard", "is_loopback", "read_api_keys"]

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""What a browser may call this machine."""
API_KEY_VARIABLE = "STATESET_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGuard:
    """Checks a request before anything else looks at it.

        app = web.Application(middlewares=[HttpGuard().middleware()])

    Refusals are aiohttp's: 403 for a foreign `Host`, 401 for a missing or wrong key, 415 for a POST whose
    body is not `application/json` (also one without a body: a web page can send that, too).
    """

    hosts: tuple[str, ...] = LOOPBACK_NAMES
    """Names in `Host` that are served: `name` (any port) or `name:port`; case and a last dot do not count."""
    any_address: bool = False
    """Serve every address in numbers, too? A page that points its name here sends that name."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Of which a request has to send one, as `Authorization: Bearer KEY`; none asks nobody."""
    without_key: Collection[str] = ()
    """Paths that are answered without a key, such as a load balancer's."""

    def __post_init__(self) -> None:
        """Raises ConfigurationError for a key that anybody has and a host that no request names."""
        for name in ("hosts", "api_keys"):
            _expect_texts(name, getattr(self, name))
        if not all(map(str.strip, self.api_keys)):
            raise ConfigurationError(
                "an API key is empty: give one such as the output of openssl rand -hex 32"
            )
        for host in self.hosts:
            name, port = _name_and_port(host)
            colons = ":" in name and not name.startswith("[")  # an IPv6 address needs its brackets
            if not name or colons or set("/*@ ") & set(name) or (port and not port.isdecimal()):
                raise ConfigurationError(
                    f"{host!r} is no name that a request has as its Host: write agents.example, "
                    "agents.example:8080 or [fe80::1]"
                )

    @classmethod
    def listening_on(
        cls,
        address: str,
        *,
        api_keys: Collection[str] = (),
        allowed_hosts: Collection[str] = (),
        without_key: Collection[str] = (),
    ) -> HttpGuard:
        """The guard of a server that listens on `address`.

        Raises ConfigurationError where others can reach the address and no key is asked for.
        """
        _expect_texts("api_keys", api_keys)
        _expect_texts("allowed_hosts", allowed_hosts)
        local = is_loopback(address)
        if not local and not api_keys:
            raise ConfigurationError(
                f"--host {address} can be reached by others, and nobody is asked for a key: give "
                f"--api-key-file FILE, set {API_KEY_VARIABLE}, or leave it on 127.0.0.1"
            )
        return cls(
            hosts=tuple(dict.fromkeys([*LOOPBACK_NAMES, *filter(None, [_in_url(address)]), *allowed_hosts])),
            any_address=not local,
            api_keys=tuple(api_keys),
            without_key=frozenset(without_key),
        )

    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        """For `web.Application(middlewares=[...])`; what answers errors stands before it."""
        from aiohttp import web

        @web.middleware
        async def guarded(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            self.check(request)
            return await handler(request)

        return guarded

    def check(self, request: web.Request) -> None:
        """Raises aiohttp's HTTPForbidden, HTTPUnauthorized or HTTPUnsupportedMediaType."""
        from aiohttp import web

        given = request.headers.getall("Host", [])
        if len(given) != 1 or not self.allows_host(given[0]):
            shown = f"{given[0]!r:.80}" if given else "nothing"
            raise web.HTTPForbidden(
                text=f"Host {shown} is not served here; served are {', '.join(self.hosts)}"
            )
        if self.api_keys and request.path not in self.without_key and self.key_number(request) is None:
            raise web.HTTPUnauthorized(
                text="a key is needed: send Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
            )
        if (
            request.method == "POST"
            and request.match_info.http_exception is None  # else it is a 404 or 405, and nothing happens
            and request.content_type != "application/json"
        ):
            raise web.HTTPUnsupportedMediaType(
                text="a POST must say Content-Type: application/json, "
                f"got {request.headers.get('Content-Type', 'nothing')!r:.80}"
            )

    def allows_host(self, given: str) -> bool:
        """Is this `Host` header one that is served?"""
        name, port = _name_and_port(given)
        if port and not port.isdecimal():
            return False
        allowed = [_name_and_port(host) for host in self.hosts]
        if any(name == known and wanted in ("", port) for known, wanted in allowed):
            return True
        return self.any_address and _address(name) is not None

    def key_number(self, request: web.BaseRequest) -> int | None:
        """The place of the request's key among `api_keys`, compared in constant time; None: it is none."""
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        sent = given.strip().encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(sent, key.encode()) for key in self.api_keys]  # all of them, always
        return matches.index(True) if kind.casefold() == "bearer" and any(matches) else None


def is_loopback(address: str) -> bool:
    """Can nobody but this machine reach a server that listens there?"""
    found = _address(_name_and_port(_in_url(address))[0])
    return address.casefold() == "localhost" or (found is not None and found.is_loopback)


def read_api_keys(
    file: str | Path | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """The keys of a file (one a line; `#` begins a comment line), else that of `STATESET_API_KEY`, else none.

    Raises ConfigurationError for a file that cannot be read or holds no key, and for an empty variable.
    """
    keys: tuple[str, ...]
    if file is None:
        if API_KEY_VARIABLE not in environment:
            return ()
        keys = (environment[API_KEY_VARIABLE].strip(),)
        source = API_KEY_VARIABLE
    else:
        try:
            lines = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise ConfigurationError(
                f"--api-key-file {str(file)!r} cannot be read ({reason}): give a file with a key on each line"
            ) from error
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        source = f"--api-key-file {str(file)!r}"
    if not keys or not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
        raise ConfigurationError(
            f"{source} holds no key: write one without spaces, such as the output of openssl rand -hex 32"
        )
    return keys


def _expect_texts(name: str, given: Collection[str]) -> None:
    """Each character of a text would be a key or a host."""
    if isinstance(given, str):
        raise ConfigurationError(f"{name} must be a list of texts, got a text: put it in [...]")


def _name_and_port(host: str) -> tuple[str, str]:
    """`LOCALHOST.:8080` -> ("localhost", "8080"); `[::1]` keeps its brackets."""
    name, colon, port = host.strip().rpartition(":")
    if not colon or (host.startswith("[") and host.rstrip().endswith("]")):
        name, port = host.strip(), ""
    return name.casefold().removesuffix("."), port


def _in_url(address: str) -> str:
    """An address as it stands in a URL and in `Host`: IPv6 in brackets."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
