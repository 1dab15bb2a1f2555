"""Calls of an async API that nobody awaits: refused in one line, or, in a plain script, run to their end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NoReturn, ParamSpec, TypeVar

from stateset_agents.types.errors import ConfigurationError

T = TypeVar("T")
P = ParamSpec("P")


class PendingCall(Coroutine[Any, Any, T]):
    """A coroutine that says "await it" to code that reads its result before it is awaited."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str) -> None:
        self._coroutine = coroutine
        self._name = name

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __getitem__(self, key: object) -> Any:
        self._refuse(f"[{key!r}]")

    def __iter__(self) -> Any:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()

    def _refuse(self, use: str = "") -> NoReturn:
        self.close()
        call = f"await {self._name}(...)"
        raise ConfigurationError(
            f"{self._name} is async, and its result is there when it is awaited: write "
            f"{f'({call}){use}' if use else call}"
        )


def awaitable(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, PendingCall[T]]:
    """An async function whose call, where it is not awaited, says so in one line."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> PendingCall[T]:
        return PendingCall(function(*args, **kwargs), function.__name__)

    return call


def awaitable_or_blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, PendingCall[T]]:
    """An async function that plain scripts call, too: where no event loop runs, the call blocks and returns
    the result; in one it is awaited, as any other.

    All blocking calls of a program share one event loop, in its own thread, as engines stay on theirs.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        with contextlib.suppress(RuntimeError):  # no loop runs
            asyncio.get_running_loop()
            return PendingCall(function(*args, **kwargs), function.__name__)
        future = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), _loop_of_scripts())
        try:
            return future.result()
        finally:  # a Ctrl-C ends what is under way, too
            future.cancel()

    return call


@functools.cache
def _loop_of_scripts() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="blocking-calls", daemon=True).start()
    return loop
