"""Any OpenAI-compatible chat endpoint as a function from a prompt to text: for judges, and for your own use.

It samples no policy: nothing it says has token ids or log-probs.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from stateset_agents.errors import BackendError, BudgetExceeded, ConfigurationError
from stateset_agents.messages import Message
from stateset_agents.streams import derive

if TYPE_CHECKING:
    import aiohttp

__all__ = ["ChatAnswer", "ChatClient"]

_TRANSIENT = frozenset({408, 409, 425, 429})
"""Besides every 5xx: statuses after which the same request may succeed."""
_CHARACTERS_A_TOKEN = 4
"""Of an endpoint that does not say what it used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """What the endpoint said."""

    text: str
    finish_reason: str
    """"length" where its words were cut."""
    prompt_tokens: int
    """As it counted them; estimated by the characters where it did not."""
    completion_tokens: int


@dataclass(slots=True)
class _Shared:
    """What the calls of one event loop share."""

    free: asyncio.Semaphore
    session: aiohttp.ClientSession | None = None
    num_users: int = 0


class ChatClient:
    """Asks an endpoint such as `http://localhost:8000/v1`, with retries, within a budget.

        client = ChatClient("http://localhost:8000/v1", "my-model", max_calls=1000)
        print(await client("What is 6 times 7?"))

    A refused connection, a time-out, a 429, a 5xx and a torn body are tried again, `max_attempts` times in
    all, after a wait that doubles each time and is drawn at random between half and all of itself; what the
    server asks for in `Retry-After` is honoured, by all calls of this client. What will not mend itself (401,
    404, a certificate, an answer of another shape) is a BackendError at once.

    `max_calls` and `max_tokens` bound what all calls together may cost, retries included; beyond them every
    call raises BudgetExceeded, and calls that are under way may go over `max_tokens` by their own.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = "OPENAI_API_KEY",
        temperature: float = 0.0,
        max_new_tokens: int = 512,
        timeout: float = 60.0,
        max_attempts: int = 5,
        backoff: float = 1.0,
        max_wait: float = 60.0,
        max_concurrent: int = 16,
        max_calls: int | None = None,
        max_tokens: int | None = None,
        seed: int = 0,
    ) -> None:
        """
        Args:
            url: Of the API, the part before `/chat/completions`.
            model: As the endpoint calls it.
            api_key_env: The environment variable that holds the key; sent without one where it is not set.
            temperature: 0 is greedy.
            max_new_tokens: Most tokens of one answer.
            timeout: Seconds for one attempt.
            max_attempts: For one answer, the first included.
            backoff: Seconds of the first wait.
            max_wait: Most seconds of a wait; a server that asks for more is given up.
            max_concurrent: Requests under way at once.
            max_calls: Most requests over the client's life.
            max_tokens: Most tokens, read and written, over the client's life.
            seed: Of the waits' randomness.
        """
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"the endpoint's url must start with http:// or https://, got {url!r:.80}: write "
                "http://localhost:8000/v1"
            )
        if not isinstance(model, str) or not model.strip():
            raise ConfigurationError(f"the endpoint's model must be named, got {model!r:.60}")
        for name, number, least in (
            ("max_new_tokens", max_new_tokens, 1),
            ("max_attempts", max_attempts, 1),
            ("max_concurrent", max_concurrent, 1),
            ("max_calls", max_calls, 0),
            ("max_tokens", max_tokens, 0),
        ):
            if number is not None and (
                isinstance(number, bool) or not isinstance(number, int) or number < least
            ):
                raise ConfigurationError(f"{name} must be a whole number of at least {least}, got {number!r}")
        if (
            isinstance(temperature, bool)
            or not isinstance(temperature, int | float)
            or not 0 <= temperature < math.inf
        ):
            raise ConfigurationError(f"temperature must be at least 0 (greedy), got {temperature!r}")
        for name, seconds in (("timeout", timeout), ("backoff", backoff), ("max_wait", max_wait)):
            if (
                isinstance(seconds, bool)
                or not isinstance(seconds, int | float)
                or not 0 < seconds < math.inf
            ):
                raise ConfigurationError(f"{name} must be seconds above 0, got {seconds!r}")
        importlib.import_module("aiohttp")  # here, for it takes long enough to be felt in an event loop
        self.url = url.rstrip("/")
        self.model = model
        self.temperature = temperature
        self.max_new_tokens = max_new_tokens
        self.max_calls = max_calls
        self.max_tokens = max_tokens
        self.num_calls = 0
        """Requests sent so far."""
        self.num_tokens = 0
        """Tokens read and written so far."""
        self._api_key_env = api_key_env
        self._timeout = timeout
        self._max_attempts = max_attempts
        self._backoff = backoff
        self._max_wait = max_wait
        self._max_concurrent = max_concurrent
        self._draw = random.Random(derive(seed, "chat client"))
        self._not_before: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    @property
    def identity(self) -> str:
        """What its answers depend on besides the prompt; caches keep answers of different ones apart."""
        settings = {"model": self.model, "temperature": self.temperature, "tokens": self.max_new_tokens}
        return json.dumps({"url": self.url, **settings}, sort_keys=True)

    async def __call__(self, prompt: str) -> str:
        """The answer to one user message, as text."""
        return (await self.complete([Message(role="user", content=prompt)])).text

    async def complete(self, messages: Sequence[Message]) -> ChatAnswer:
        """The answer to a conversation.

        Raises BackendError where there is none after all attempts, BudgetExceeded where no more may be asked.
        """
        body = {
            "model": self.model,
            "messages": [message.to_openai() for message in messages],
            "temperature": self.temperature,
            "max_tokens": self.max_new_tokens,
        }
        async with self._session() as session:
            for attempt in range(1, self._max_attempts + 1):
                await self._pause()
                self._spend_call()
                result = await self._attempt(session, body)
                if isinstance(result, ChatAnswer):
                    self.num_tokens += result.prompt_tokens + result.completion_tokens
                    return result
                asked = result.retry_after or 0.0
                if not result.transient or attempt == self._max_attempts or asked > self._max_wait:
                    times = f" ({attempt} attempts)" if attempt > 1 else ""
                    longer = f"; it asks to wait {asked:g} s" if asked > self._max_wait else ""
                    raise BackendError(f"{self.url} gave no answer{times}: {result.why}{longer}")
                self._hold(asked)
                longest = min(self._max_wait, self._backoff * 2 ** (attempt - 1))
                await asyncio.sleep(longest * (0.5 + 0.5 * self._draw.random()))
        raise AssertionError("the last attempt returns or raises")

    def _spend_call(self) -> None:
        for what, used, most in (
            ("calls", self.num_calls, self.max_calls),
            ("tokens", self.num_tokens, self.max_tokens),
        ):
            if most is not None and used >= most:
                raise BudgetExceeded(
                    f"the budget of {most} {what} for {self.model} at {self.url} is used up: raise "
                    f"max_{what}, or ask it about fewer conversations"
                )
        self.num_calls += 1

    def _hold(self, seconds: float) -> None:
        """No call of this loop before so many seconds have passed."""
        loop = asyncio.get_running_loop()
        self._not_before[loop] = max(self._not_before.get(loop, 0.0), loop.time() + seconds)

    async def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        while (left := self._not_before.get(loop, 0.0) - loop.time()) > 0:  # noqa: ASYNC110  # it may have moved
            await asyncio.sleep(left)

    async def _attempt(
        self, session: aiohttp.ClientSession, body: Mapping[str, Any]
    ) -> ChatAnswer | _Failure:
        import aiohttp

        key = os.environ.get(self._api_key_env or "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with session.post(
                f"{self.url}/chat/completions",
                json=body,
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout),
            ) as response:
                raw = await response.read()
        except TimeoutError:
            return _Failure(f"no answer within {self._timeout:g} s", transient=True)
        except aiohttp.ClientError as error:
            lasts = isinstance(error, aiohttp.InvalidURL | aiohttp.ClientSSLError)
            return _Failure(f"{type(error).__name__}: {error}", transient=not lasts)
        text = raw.decode(errors="replace")
        if response.status != 200:
            transient = response.status >= 500 or response.status in _TRANSIENT
            wait = _retry_after(response.headers.get("Retry-After")) if transient else None
            why = f"status {response.status}: {' '.join(text.split())!r:.200}"
            return _Failure(why, transient=transient, retry_after=wait)
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            return _Failure(f"its answer is not JSON: {text!r:.80}", transient=True)
        return _answer(data, body)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A place among the requests under way, and connections that live as long as anybody uses them."""
        import aiohttp

        loop = asyncio.get_running_loop()
        shared = self._by_loop.get(loop)
        if shared is None:
            shared = self._by_loop[loop] = _Shared(asyncio.Semaphore(self._max_concurrent))
        shared.num_users += 1
        try:
            async with shared.free:
                if shared.session is None:
                    shared.session = aiohttp.ClientSession()
                yield shared.session
        finally:
            shared.num_users -= 1
            if shared.num_users == 0 and shared.session is not None:
                session, shared.session = shared.session, None
                await session.close()


@dataclass(frozen=True, slots=True)
class _Failure:
    why: str
    transient: bool
    retry_after: float | None = None
    """Seconds that the server asks for."""


def _answer(data: Any, body: Mapping[str, Any]) -> ChatAnswer | _Failure:
    try:
        choice = data["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        return _Failure(f"its answer holds no text: {json.dumps(data)[:160]}", transient=False)
    usage = data.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    read = sum(len(message["content"]) for message in body["messages"])
    return ChatAnswer(
        text=text,
        finish_reason=str(choice.get("finish_reason") or "stop"),
        prompt_tokens=_count(usage.get("prompt_tokens"), read),
        completion_tokens=_count(usage.get("completion_tokens"), len(text)),
    )


def _count(told: Any, characters: int) -> int:
    if isinstance(told, int) and not isinstance(told, bool) and told >= 0:
        return told
    return math.ceil(characters / _CHARACTERS_A_TOKEN)


def _retry_after(value: str | None) -> float | None:
    """Seconds of the header, a number or a date (RFC 9110, 10.2.3); None where it cannot be read."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            until = parsedate_to_datetime(value)
        except ValueError:
            return None
        until = until if until.tzinfo else until.replace(tzinfo=UTC)
        seconds = (until - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else None
