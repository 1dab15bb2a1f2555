"""Decides which requests an HTTP server of this package answers: serve, the live report, rollout endpoints.

Any web page that is open in a browser on this machine can send requests to 127.0.0.1. Such a page cannot send
`application/json` without a preflight request, which no server here answers. A page that points its own name
at this machine (DNS rebinding) sends that name as `Host`. So the content type and the host are checked, and
the API key if the server has one.
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


LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine in the `Host` header of a local browser."""
API_KEY_VARIABLE = "STATESET_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGuard:
    """Checks a request before any other code handles it.

        app = web.Application(middlewares=[HttpGuard().middleware()])

    It refuses with aiohttp's errors: 403 for a foreign `Host`, 401 for a missing or wrong key, 415 for a POST
    that is not `application/json` (also without a body: a web page can send that too).
    """

    hosts: tuple[str, ...] = LOOPBACK_NAMES
    """Values of `Host` that are served: `name` (any port) or `name:port`; case and final dot are ignored."""
    any_address: bool = False
    """Serve every numeric IP address too? That is safe: DNS rebinding needs a name."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """A request must send one of them as `Authorization: Bearer KEY`, or as `X-Api-Key: KEY`, as Anthropic's
    clients do. Empty: no key is needed."""
    without_key: Collection[str] = ()
    """Paths that need no key, such as a load balancer's health check."""

    def __post_init__(self) -> None:
        """Raises ConfigurationError for an empty key, and for a host that no request can name."""
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
                    f"{host!r} is no name that a request has as its Host: write agents.example or [fe80::1]"
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

        Raises ConfigurationError if other machines can reach the address and no key is set.
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
        """The middleware for `web.Application(middlewares=[...])`, after the middleware that formats
        errors."""
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

        hosts = request.headers.getall("Host", [])
        if len(hosts) != 1 or not self.allows_host(hosts[0]):
            host = f"{hosts[0]!r:.80}" if hosts else "nothing"
            raise web.HTTPForbidden(
                text=f"Host {host} is not served here; served are {', '.join(self.hosts)}"
            )
        if self.api_keys and request.path not in self.without_key and self.key_number(request) is None:
            raise web.HTTPUnauthorized(
                text="a key is needed: send Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
            )
        if (
            request.method == "POST"
            and request.match_info.http_exception is None  # else it is a 404 or 405: no handler runs
            and request.content_type != "application/json"
        ):
            raise web.HTTPUnsupportedMediaType(
                text=f"a POST needs application/json: {request.headers.get('Content-Type', 'nothing')!r:.80}"
            )

    def allows_host(self, header: str) -> bool:
        """True if this value of the `Host` header is served."""
        name, port = _name_and_port(header)
        if port and not port.isdecimal():
            return False
        allowed = [_name_and_port(host) for host in self.hosts]
        if any(name == host and host_port in ("", port) for host, host_port in allowed):
            return True
        return self.any_address and _address(name) is not None

    def key_number(self, request: web.BaseRequest) -> int | None:
        """The place of the request's key among `api_keys`, compared in constant time; None: it is none."""
        header = request.headers.get("X-Api-Key", "")  # Anthropic's
        authorization = request.headers.get("Authorization", f"Bearer {header}")
        kind, _, credentials = authorization.partition(" ")
        token = credentials.strip().encode("utf-8", "surrogateescape")
        matches = [hmac.compare_digest(token, key.encode()) for key in self.api_keys]  # all of them, always
        return matches.index(True) if kind.casefold() == "bearer" and any(matches) else None


def is_loopback(address: str) -> bool:
    """True if only this machine can reach a server that listens on `address`."""
    ip = _address(_name_and_port(_in_url(address))[0])
    return address.casefold() == "localhost" or (ip is not None and ip.is_loopback)


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


def _expect_texts(name: str, texts: Collection[str]) -> None:
    """Each character of a text would be a key or a host."""
    if isinstance(texts, str):
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
