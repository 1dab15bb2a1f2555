"""The boundary to user code: how it is called, how long it may take, and how its failures are told.

Environments, tools, rewards and the engine call users, tools, goals and rewards through this.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.errors import (
    PROGRAMMING_ERRORS,
    ConfigurationError,
    EnvironmentFailure,
    StatesetError,
)
from stateset_agents.types.logs import get_logger

__all__ = ["SaidOnce", "call_user_code", "guarded", "returned", "time_limit", "told", "user_line"]

T = TypeVar("T")
_log = get_logger(__name__)


async def call_user_code(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function of the user's returns: an async one is awaited, a sync one runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


async def returned(method: Callable[..., Awaitable[T]], *args: Any, kind: type[T] | None = None) -> T:
    """What an async method of the user's returns, which must be a `kind` (unset: any conversation).

    Raises ConfigurationError, naming the method, for anything else and for a method that is not async.
    """
    name = ".".join(str(getattr(method, "__qualname__", method)).split(".")[-2:])
    work: Any = method(*args)
    if not inspect.isawaitable(work):
        raise ConfigurationError(f"{name} must be written `async def`, and is a plain function")
    value: T = await work
    if value is None or (kind is not None and not isinstance(value, kind)):
        wanted = "a conversation" if kind is None else f"an {kind.__name__}"
        missing = ": is a return missing?" if value is None else ""
        raise ConfigurationError(f"{name} must return {wanted}, got {value!r:.80}{missing}")
    return value


async def guarded(what: str, work: Awaitable[T]) -> T:
    """The boundary to an environment's code: what breaks in it fails the conversation, mistakes travel."""
    try:
        return await work
    except (*PROGRAMMING_ERRORS, StatesetError):
        raise
    except Exception as error:
        raise EnvironmentFailure(f"{what} failed: {told(error)}") from error


@asynccontextmanager
async def time_limit(seconds: float | None, late: StatesetError) -> AsyncIterator[None]:
    """Cancel the body after `seconds` (None: never) and raise `late` instead.

    A sync function that the body waits for cannot be stopped: it is left to itself in its thread.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():  # the body's own
            raise
        raise late from error


_PACKAGE = Path(__file__).parents[1]
_STDLIB = Path(asyncio.__file__).parents[1]


def told(error: BaseException) -> str:
    """`KeyError: 'degreez' (at heating.py:57)`: what broke, and the last line of the user's own code.

    The package's own errors name their cause themselves; what broke in an installed package or in the
    standard library is told by the user's line that called it.
    """
    text = f"{type(error).__name__}: {error}"
    place = user_line(error)
    return f"{text} (at {place})" if place and not isinstance(error, StatesetError) else text


def user_line(error: BaseException) -> str | None:
    """`heating.py:57`, the last line of the user's own code that an exception came through, if any."""
    lines = [frame for frame in extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else None


def _is_users(file: str) -> bool:
    path = Path(file)
    if "site-packages" in path.parts or file.startswith("<frozen"):
        return False
    return not (path.is_relative_to(_STDLIB) or path.is_relative_to(_PACKAGE))


class SaidOnce:
    """Warnings that come again and again: each cause is told at its first time, and counted from then on."""

    def __init__(self) -> None:
        self._times: Counter[tuple[str, str]] = Counter()

    def warn(self, event: str, cause: str, **fields: Any) -> None:
        """Warn of `event` with its fields, unless this cause was told of before."""
        self._times[event, cause] += 1
        if self._times[event, cause] == 1:
            _log.warning(event, **fields, error=cause)

    def sum_up(self) -> None:
        """Say how often the causes came that were not told of each time, and begin anew."""
        for (event, cause), times in self._times.items():
            if times > 1:
                _log.warning(f"{event}: {times} times in all", error=cause)
        self._times.clear()
