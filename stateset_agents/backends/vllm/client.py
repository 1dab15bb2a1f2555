"""HTTP requests to a vLLM server, with retries of transient failures; for backend.py."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stateset_agents.runtime.circuit_breakers import Breaker, admitted
from stateset_agents.runtime.retries import retry, wait_before
from stateset_agents.types.errors import BackendError
from stateset_agents.types.logs import get_logger

if TYPE_CHECKING:
    import aiohttp


_log = get_logger(__name__)
_TRANSIENT = frozenset({408, 425, 429})
"""Besides every 5xx."""
_PATIENCE = 300.0
"""Seconds that requests wait for a server that is down."""


class VLLMClient:
    """Requests to one server; its API key is read from the variable VLLM_API_KEY."""

    def __init__(self, url: str, *, timeout: float = 600.0, attempts: int = 5, backoff: float = 0.5) -> None:
        """`timeout`: seconds of one attempt; `backoff`: of the first wait (exponential, with jitter)."""
        self.url = url
        self.num_retries = 0
        self.timeout = timeout
        """Seconds of one attempt."""
        self._attempts = attempts
        self._backoff = backoff
        self._session: aiohttp.ClientSession | None = None
        self._breaker = Breaker("vllm", failures=10, pause=5.0)

    async def open(self) -> None:
        """Get ready for requests; a second call does nothing."""
        import aiohttp

        if self._session is None:
            key = os.environ.get("VLLM_API_KEY")
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(total=self.timeout, sock_connect=10.0),
                connector=aiohttp.TCPConnector(limit=0),
            )

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, once: bool = False
    ) -> Any:
        """The JSON of the server's answer, None for an empty one; `once`: without retries.

        After ten failed attempts in a row all requests wait, and one at a time tries if the server is up.

        Raises `Unreachable` if the server did not answer as a healthy one does, BackendError if it refused
        the request.
        """

        async def wait(failures: int, error: Exception) -> None:
            self.num_retries += 1
            _log.warning("asking the vLLM server again", error=str(error), attempt=failures)
            await asyncio.sleep(wait_before(failures, first=self._backoff, stream=self.num_retries))

        def is_final(error: Exception) -> bool:
            return not isinstance(error, Unreachable) or self._breaker.seconds_down > _PATIENCE

        return await retry(
            lambda _: self._behind_breaker(method, path, body, waits=not once),
            times=0 if once else self._attempts - 1,
            is_final=is_final,
            wait=wait,
        )

    async def _behind_breaker(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, waits: bool
    ) -> Any:
        if not waits:
            return await self._attempt(method, path, body)
        async with admitted(self._breaker, patience=_PATIENCE, down=Unreachable) as call:
            try:
                return await self._attempt(method, path, body)
            except Unreachable as error:
                call.failed(str(error))
                raise

    async def _attempt(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        import aiohttp

        if self._session is None:
            raise BackendError("the vLLM backend was not started: await backend.start() first")
        try:
            async with self._session.request(method, self.url + path, json=body) as response:
                text = await response.text()
        except TimeoutError as error:
            raise Unreachable(f"{self._at(path)} gave no answer within {self.timeout:g} s") from error
        except (aiohttp.ClientError, UnicodeDecodeError) as error:
            raise Unreachable(f"{self._at(path)}: {type(error).__name__}: {error}") from error
        if response.status != 200:
            reason = f"{self._at(path)} answered with status {response.status}: {_message(text)}"
            if response.status >= 500 or response.status in _TRANSIENT:
                raise Unreachable(reason)
            raise BackendError(reason)
        if not text:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"{self._at(path)} answered with broken JSON: {text[-60:]!r}") from error

    def _at(self, path: str) -> str:
        return f"the vLLM server at {self.url} ({path.partition('?')[0]})"


class Unreachable(BackendError):
    """The server did not answer, or not as a healthy one; a retry may succeed."""


def _message(text: str) -> str:
    """The server's error message."""
    try:
        data = json.loads(text)
        return str(data["error"]["message"] if "error" in data else data["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{' '.join(text.split())!r:.200}"


def sampled(choice: Mapping[str, Any], limit: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Ids and log-probs of a choice. Raises BackendError if they cannot be those of one turn."""
    try:
        ids = tuple(map(int, choice["token_ids"]))
        logprobs = tuple(map(float, choice["logprobs"]["token_logprobs"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BackendError("the vLLM server answered without token ids or their log-probs") from error
    if not 0 < len(ids) == len(logprobs) <= limit:
        raise BackendError(
            f"the vLLM server answered with {len(ids)} tokens and {len(logprobs)} log-probs where at most "
            f"{limit} were asked for"
        )
    if not all(-math.inf < value < 1e-3 for value in logprobs):  # rounding may go a little above 0
        raise BackendError("the vLLM server answered with log-probs that are not finite or above 0")
    return ids, logprobs
