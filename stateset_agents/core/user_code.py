"""The boundary to user code: how it is called, how long it may take, and how its failures are told.

Environments, tools, rewards and the engine call users, tools, goals and rewards through this.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

from stateset_agents.core.waiting import in_thread
from stateset_agents.errors import StatesetError
from stateset_agents.tracking.logging import get_logger

__all__ = ["SaidOnce", "call_user_code", "time_limit", "told"]

_log = get_logger(__name__)


async def call_user_code(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function of the user's returns: an async one is awaited, a sync one runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await in_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


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
