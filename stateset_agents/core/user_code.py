"""The boundary to user code: how it is called, how long it may take, and how its failures are told.

Environments, tools, rewards and the engine call users, tools, goals and rewards through this.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any, TypeVar

from stateset_agents.core.waiting import in_thread
from stateset_agents.errors import (
    PROGRAMMING_ERRORS,
    ConfigurationError,
    EnvironmentFailure,
    StatesetError,
)
from stateset_agents.settings import nearest
from stateset_agents.tracking.logging import get_logger

__all__ = ["SaidOnce", "call_user_code", "guarded", "imported", "time_limit", "told"]

T = TypeVar("T")
_log = get_logger(__name__)


async def call_user_code(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function of the user's returns: an async one is awaited, a sync one runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


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


def imported(what: str, name: str) -> Any:
    """What "package.module:name" leads to; `what` is for the ConfigurationError where that is nowhere."""
    module, _, attribute = name.partition(":")
    try:
        home = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"{what} {name!r} cannot be imported: {error}; give the command where it lies, or put that "
            "folder on PYTHONPATH"
        ) from error
    try:
        return getattr(home, attribute)
    except AttributeError as error:
        there = [one for one in vars(home) if not one.startswith("_")]
        raise ConfigurationError(
            f"{what} {name!r}: module {module!r} has no {attribute!r}{nearest(attribute, there)}"
        ) from error


_PACKAGE = Path(__file__).parents[1]
_STDLIB = Path(asyncio.__file__).parents[1]


def told(error: BaseException) -> str:
    """`KeyError: 'degreez' (at heating.py:57)`: what broke, and the last line of the user's own code.

    The package's own errors name their cause themselves; what broke in an installed package or in the
    standard library is told by the user's line that called it.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, StatesetError):
        return text
    lines = [frame for frame in extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return f"{text} (at {Path(lines[-1].filename).name}:{lines[-1].lineno})" if lines else text


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
