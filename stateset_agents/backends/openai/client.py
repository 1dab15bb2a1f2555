"""A client of OpenAI-compatible chat endpoints, for judges, simulated users, agents that are measured over
one, and your own code.

It does not sample a policy: its answers have no token ids and no log-probs.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, Field, model_validator

from stateset_agents.backends.openai.responses import (
    ChatAnswer,
    Failure,
    StreamedAnswer,
    http_failure,
    read_answer,
)
from stateset_agents.runtime.circuit_breakers import Breaker, admitted, breaker_listener, wait_before
from stateset_agents.runtime.tasks import reported
from stateset_agents.types.errors import BackendError, BudgetExceeded, ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import Settings

if TYPE_CHECKING:
    import aiohttp


_MAX_ANSWER = 16 * 2**20
"""Bytes of one answer. A stream of words that has no end would fill the memory."""
_TOO_MUCH = Failure(f"its answer is longer than {_MAX_ANSWER:,} bytes", transient=False)
_Read = Callable[[str, Mapping[str, Any]], ChatAnswer | Failure]
"""(the body of a response, the request's) -> what it says."""


class NoAnswer(BackendError):
    """An endpoint did not answer a request, further tries included."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure
        """The failure of the last try."""


@dataclass(slots=True)
class _Shared:
    """Shared by the calls of one event loop."""

    slots: asyncio.Semaphore
    session: aiohttp.ClientSession | None = None
    num_users: int = 0


class ChatSettings(Settings):
    """Settings of a `ChatClient`."""

    model_config = ConfigDict(allow_inf_nan=False, strict=True)

    url: str
    """Of the API, the part before `/chat/completions`: http(s)://..."""
    model: str
    """As the endpoint calls it."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that holds the key; sent without one where it is not set."""
    temperature: float | None = Field(default=0.0, ge=0.0)
    """0 is greedy; None leaves it out, for models that take none."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Most tokens of one answer."""
    token_limit: Literal["auto", "max_tokens", "max_completion_tokens"] = "auto"
    """Under which name max_new_tokens is sent: OpenAI's newest models refuse the old name, many servers do
    not know the new one. auto sends the old one until it is refused."""
    timeout: float = Field(default=60.0, gt=0.0)
    """Seconds for one attempt; in a stream, without a piece of it."""
    stream: bool = False
    """Have every answer come in pieces: a long one may take longer than `timeout`, and an endpoint that has
    gone silent is found out as soon."""
    max_attempts: int = Field(default=5, ge=1)
    """For one answer, the first included."""
    backoff: float = Field(default=1.0, gt=0.0)
    """Seconds of the first wait."""
    max_wait: float = Field(default=60.0, gt=0.0)
    """Most seconds of a wait, for an endpoint that is down too; a server that asks for more is given up."""
    breaker_failures: int = Field(default=10, ge=0)
    """Failed attempts in a row of all calls after which they wait, and one asks whether the endpoint is back.
    0: never."""
    breaker_pause: float = Field(default=5.0, gt=0.0)
    """Seconds until it first asks."""
    max_concurrent: int = Field(default=16, ge=1)
    """Requests under way at once."""
    max_calls: int | None = Field(default=None, ge=0)
    """Most requests over the client's life; None for no limit."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Most tokens, read and written, over the client's life."""
    seed: int = 0
    """Of the waits' randomness."""

    @model_validator(mode="after")
    def _validate_url_and_model(self) -> Self:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"the url must be http:// or https://, got {self.url!r:.80}: write http://localhost:8000/v1"
            )
        if not self.model.strip():
            raise ValueError(f"the endpoint's model must be named, got {self.model!r:.60}")
        return self


class ChatClient:
    """Asks an endpoint such as `http://localhost:8000/v1`, with retries, within a budget.

        client = ChatClient("http://localhost:8000/v1", "my-model", max_calls=1000)
        print(await client("What is 6 times 7?"))

    A refused connection, a timeout, a 429, a 5xx and an incomplete body are retried, up to `max_attempts` in
    all, with exponential backoff and jitter. All calls of the client honour a `Retry-After` of the server.
    After `breaker_failures` such attempts in a row all calls wait, and one at a time tries whether the
    endpoint is back. Errors that no retry can cure (401, 404, a certificate, an answer of another format)
    raise BackendError at once.

    `max_calls` and `max_tokens` limit all calls together, retries included. Beyond them every call raises
    BudgetExceeded; calls that are under way may exceed `max_tokens` by their tokens.
    """

    def __init__(self, url: str, model: str, **settings: Any) -> None:
        """`settings`: the fields of `ChatSettings`."""
        self.settings = ChatSettings(url=url, model=model, **settings)
        importlib.import_module("aiohttp")  # here, since the import would block an event loop for too long
        self.url = self.settings.url.rstrip("/")
        self.model = self.settings.model
        self.num_calls = 0
        """Requests sent so far."""
        self.num_tokens = 0
        """Tokens read and written so far."""
        self._waits = count()
        self._token_limit = self.settings.token_limit
        self._knows_seed = True
        self._breaker = Breaker(
            f"endpoint {model}", failures=self.settings.breaker_failures, pause=self.settings.breaker_pause
        )
        self._not_before: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    @property
    def identity(self) -> str:
        """The settings that answers depend on besides the prompt; part of the key of a cache of answers."""
        settings = self.settings
        sampling = {"temperature": settings.temperature, "tokens": settings.max_new_tokens}
        return json.dumps({"url": self.url, "model": settings.model, **sampling}, sort_keys=True)

    async def __call__(self, prompt: str) -> str:
        """The text of the answer to one user message."""
        return (await self.complete([Message(role="user", content=prompt)])).text

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        on_text: Callable[[str], None] | None = None,
    ) -> ChatAnswer:
        """The answer to a conversation; `on_text` gets it piece by piece as it comes.

        `tools` are schemas in OpenAI's shape; the answer's `tool_calls` are for the caller to make. Such an
        answer comes whole, whatever `stream` says, and not with `on_text`.

        Raises BackendError if all attempts fail, BudgetExceeded if the budget is spent. An answer that breaks
        off after `on_text` was called is not retried: it would start again from the beginning.
        """
        if tools and on_text is not None:
            raise ConfigurationError("an answer with tools comes whole: give tools or on_text, not both")
        stream = on_text is not None or self.settings.stream
        body = self._request(messages, tools, stream=stream and not tools)
        return await self._answer(body, read_answer, on_text)

    async def turn(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Mapping[str, Any] | None = None,
    ) -> ChatAnswer:
        """An agent's next turn: it comes whole, thoughts and calls and all, and may be empty.

        Messages that are mappings are sent as they stand. `sampling`: fields of the request such as `seed`
        and `stop`, and `max_new_tokens`, which take the place of the client's own settings.

        Raises as `complete` does.
        """
        body = self._request(messages, tools, stream=False) | dict(sampling or {})
        return await self._answer(body, partial(read_answer, may_be_empty=True), None)

    async def _answer(
        self, body: Mapping[str, Any], read: _Read, on_text: Callable[[str], None] | None
    ) -> ChatAnswer:
        settings, stream = self.settings, derive(self.settings.seed, "chat client", next(self._waits))
        pieces: list[str] = []

        def on_piece(piece: str) -> None:
            if on_text is not None:
                pieces.append(piece)
                on_text(piece)

        async with self._session() as session:
            for attempt in range(1, settings.max_attempts + 1):
                await self._wait_until_allowed()
                result = await self._ask(session, body, read, on_piece)
                if isinstance(result, ChatAnswer):
                    self.num_tokens += result.prompt_tokens + result.completion_tokens
                    return result
                if pieces:
                    length = sum(map(len, pieces))
                    raise NoAnswer(f"{self.url} broke off after {length} characters: {result.why}", result)
                seconds = result.retry_after or 0.0
                if not result.transient or attempt == settings.max_attempts or seconds > settings.max_wait:
                    times = f" ({attempt} attempts)" if attempt > 1 else ""
                    longer = f"; it asks to wait {seconds:g} s" if seconds > settings.max_wait else ""
                    raise NoAnswer(f"{self.url} gave no answer{times}: {result.why}{longer}", result)
                if (listener := breaker_listener.get()) is not None:
                    listener.num_retries[self._breaker.name] += 1
                loop = asyncio.get_running_loop()  # none of its calls starts before
                self._not_before[loop] = max(self._not_before.get(loop, 0.0), loop.time() + seconds)
                wait = wait_before(attempt, first=settings.backoff, stream=stream, most=settings.max_wait)
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def stream(self, messages: Sequence[Message]) -> AsyncGenerator[str | ChatAnswer]:
        """The answer piece by piece, and at the end the `ChatAnswer`, which says whether it was cut.

            async for piece in client.stream([Message(role="user", content="Tell me a story.")]):
                if isinstance(piece, str):
                    print(piece, end="", flush=True)

        Raises as `complete` does. Leaving the loop, within `contextlib.aclosing`, ends the request.
        """

        async def work(on_text: Callable[[str], None]) -> ChatAnswer:
            return await self.complete(messages, on_text=on_text)

        async with aclosing(reported(work)) as pieces:
            async for piece in pieces:
                yield piece

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        request: Mapping[str, Any],
        read: _Read,
        on_piece: Callable[[str], None],
    ) -> ChatAnswer | Failure:
        """The result of an attempt behind the breaker, repeated where the endpoint refuses a field's name."""
        passing = admitted(self._breaker, patience=self.settings.max_wait, down=BackendError)
        async with passing as call:
            self._spend_call()
            body = self._as_known(request)
            result = await self._attempt(session, body, read, on_piece)
            while isinstance(result, Failure) and self._learns_from(result, body):
                self._spend_call()
                body = self._as_known(request)
                result = await self._attempt(session, body, read, on_piece)
            if isinstance(result, Failure) and result.transient:
                call.cause = result.why
            return result

    def _request(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        stream: bool,
    ) -> dict[str, Any]:
        """The request's body, but for the names that depend on the endpoint (`_as_known`)."""
        settings = self.settings
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [
                message.to_openai() if isinstance(message, Message) else dict(message) for message in messages
            ],
        }
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        if tools:
            body["tools"] = [dict(tool) for tool in tools]
        elif stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body | {"max_new_tokens": settings.max_new_tokens}

    def _as_known(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The body with the endpoint's own name of max_new_tokens, and a seed where it knows one."""
        name = "max_tokens" if self._token_limit == "auto" else self._token_limit
        names = {"max_new_tokens": name}
        return {
            names.get(key, key): value for key, value in request.items() if key != "seed" or self._knows_seed
        }

    def _learns_from(self, failure: Failure, body: Mapping[str, Any]) -> bool:
        """Would the endpoint take the request under other names?"""
        if failure.wants_newer_name and self._token_limit == "auto":
            self._token_limit = "max_completion_tokens"
            return True
        if failure.refuses_seed and "seed" in body:
            self._knows_seed = False
            return True
        return False

    def _spend_call(self) -> None:
        for unit, amount, budget in (
            ("calls", self.num_calls, self.settings.max_calls),
            ("tokens", self.num_tokens, self.settings.max_tokens),
        ):
            if budget is not None and amount >= budget:
                raise BudgetExceeded(
                    f"the budget of {budget} {unit} for {self.model} at {self.url} is used up: raise "
                    f"max_{unit}, or ask it about fewer conversations"
                )
        self.num_calls += 1

    async def _wait_until_allowed(self) -> None:
        loop = asyncio.get_running_loop()
        while (left := self._not_before.get(loop, 0.0) - loop.time()) > 0:  # noqa: ASYNC110  # the time may have moved
            await asyncio.sleep(left)

    async def _attempt(
        self,
        session: aiohttp.ClientSession,
        body: Mapping[str, Any],
        read: _Read,
        on_piece: Callable[[str], None],
    ) -> ChatAnswer | Failure:
        import aiohttp

        key, timeout = self._key(), self.settings.timeout
        total = None if body.get("stream") else timeout
        answer = StreamedAnswer(body, on_piece)
        try:
            async with session.post(
                f"{self.url}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=aiohttp.ClientTimeout(total=total, sock_connect=timeout, sock_read=timeout),
                allow_redirects=False,  # what was said is for this endpoint
            ) as response:
                if response.status == 200 and response.content_type == "text/event-stream":
                    return await self._read_stream(response, answer)
                raw = bytearray()
                async for chunk in response.content.iter_any():
                    raw += chunk
                    if len(raw) > _MAX_ANSWER:
                        return _TOO_MUCH
                text = raw.decode(errors="replace")
        except TimeoutError:
            return Failure(
                f"no {'more' * bool(answer.text) or 'answer'} within {timeout:g} s", transient=True
            )
        except aiohttp.ClientError as error:
            is_final = isinstance(error, aiohttp.InvalidURL | aiohttp.ClientSSLError)
            return Failure(f"{type(error).__name__}: {error}", transient=not is_final)
        safe_text = text.replace(key, "(the key)") if key else text  # some repeat it in an error
        if response.status != 200:
            return http_failure(response.status, safe_text, response.headers)
        result = read(text, body)
        if isinstance(result, Failure):
            return read(safe_text, body)
        if result.text and body.get("stream"):  # it did not stream
            on_piece(result.text)
        return result

    def _key(self) -> str:
        """The key, "" without one. Raises ConfigurationError for one that no header can hold."""
        variable = self.settings.api_key_env or ""
        key = os.environ.get(variable, "").strip()
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigurationError(f"{variable} holds no key: a key is one word of ASCII characters")
        return key

    async def _read_stream(
        self, response: aiohttp.ClientResponse, answer: StreamedAnswer
    ) -> ChatAnswer | Failure:
        """Raises TimeoutError if no event of the answer came for `timeout` seconds."""
        is_complete = False
        size = 0
        try:
            while not answer.is_over and answer.failure is None:
                async with asyncio.timeout(self.settings.timeout):
                    while raw := await response.content.readany():
                        size += len(raw)
                        if size > _MAX_ANSWER:
                            return _TOO_MUCH
                        if answer.feed(raw):
                            break
                if not raw:
                    break
            result = answer.end()
            is_complete = isinstance(result, ChatAnswer)
            return result
        finally:
            if not is_complete:
                self.num_tokens += answer.tokens_so_far

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A slot of `max_concurrent`, and a session whose connections stay open while any call uses them."""
        import aiohttp

        loop = asyncio.get_running_loop()
        shared = self._by_loop.get(loop)
        if shared is None:
            shared = self._by_loop[loop] = _Shared(asyncio.Semaphore(self.settings.max_concurrent))
        shared.num_users += 1
        try:
            async with shared.slots:
                if shared.session is None:
                    shared.session = aiohttp.ClientSession()
                yield shared.session
        finally:
            shared.num_users -= 1
            if shared.num_users == 0 and shared.session is not None:
                session, shared.session = shared.session, None
                await session.close()
