"""The boundary to user code: how it is called, and how its errors are formatted.

Environments, tools, rewards and the engine call the user's functions through this.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
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

T = TypeVar("T")
_log = get_logger(__name__)


def is_async(function: object) -> bool:
    """True for an async function, and for an object that is called as one."""
    call = getattr(function, "__call__", None)  # noqa: B004  # an object's own method, not whether it has one
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def call_user_code(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a user's function: an async one is awaited, a sync one runs in a thread.

    A `sys.exit()` in it, which would end the program, is a RuntimeError.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        result = await in_thread(function, *args, **kwargs)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


async def call_checked(method: Callable[..., Awaitable[T]], *args: Any, kind: type[T] | None = None) -> T:
    """The result of a user's async method, which must be a `kind` (None: any conversation).

    Raises ConfigurationError with the method's name for any other result, and if the method is not async.
    """
    name = ".".join(str(getattr(method, "__qualname__", method)).split(".")[-2:])
    work: Any = method(*args)
    if not inspect.isawaitable(work):
        raise ConfigurationError(f"{name} must be written `async def`, and is a plain function")
    value: T = await work
    if value is None or (kind is not None and not isinstance(value, kind)):
        expected = "a conversation" if kind is None else f"an {kind.__name__}"
        missing = ": is a return missing?" if value is None else ""
        raise ConfigurationError(f"{name} must return {expected}, got {value!r:.80}{missing}")
    return value


async def guarded(label: str, work: Awaitable[T]) -> T:
    """The result of an environment's code; `label` names it in errors.

    Raises EnvironmentFailure, which fails the conversation. Programming errors and our own pass through.
    """
    try:
        return await work
    except (*PROGRAMMING_ERRORS, StatesetError):
        raise
    except Exception as error:
        raise EnvironmentFailure(f"{label} failed: {format_error(error)}") from error


_PACKAGE = Path(__file__).parents[1]
_STDLIB = Path(asyncio.__file__).parents[1]


def format_error(error: BaseException) -> str:
    """`KeyError: 'degreez' (at heating.py:57)`: the error, and the last line of user code it came through.

    If the error arose in an installed package or in the standard library, that is the user's line that called
    it. Errors of this package get no line: their message names the cause.
    """
    text = f"{type(error).__name__}: {error}"
    place = user_line(error)
    return f"{text} (at {place})" if place and not isinstance(error, StatesetError) else text


def user_line(error: BaseException) -> str | None:
    """`heating.py:57`, the last line of user code that an exception came through, if any."""
    lines = [frame for frame in extract_tb(error.__traceback__) if _is_user_code(frame.filename)]
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else None


def is_module_of_user(name: str) -> bool:
    """True for a module of the user's own, such as a script, that has been imported."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return name == "__main__" or (file is not None and _is_user_code(file))


def _is_user_code(file: str) -> bool:
    path = Path(file)
    if "site-packages" in path.parts or file.startswith("<frozen"):
        return False
    return not (path.is_relative_to(_STDLIB) or path.is_relative_to(_PACKAGE))


class RateLimitedWarnings:
    """Warnings that may repeat often: the first of each cause is logged, further ones are only counted."""

    def __init__(self) -> None:
        self._times: Counter[tuple[str, str]] = Counter()

    def warn(self, event: str, cause: str, **fields: Any) -> None:
        """Log `event` with its fields if this is the first one of this cause since the last `flush`."""
        self._times[event, cause] += 1
        if self._times[event, cause] == 1:
            _log.warning(event, **fields, error=cause)

    def flush(self) -> None:
        """Log the total of each cause that came more than once, and start counting again."""
        for (event, cause), times in self._times.items():
            if times > 1:
                _log.warning(f"{event}: {times} times in all", error=cause)
        self._times.clear()
