"""The end of a training: everything is attempted, and what breaks first is how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stateset_agents.runs.lifecycle import Lifecycle, State

__all__ = ["end_training", "one_line"]


def one_line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


async def end_training(
    state: State,
    why: str,
    *,
    lifecycle: Lifecycle,
    steps: tuple[Callable[[State, str], Awaitable[None]], ...],
    write: Callable[[], Awaitable[None]],
    cancelled: Callable[[], str],
) -> None:
    """Attempt each of `steps(state, why)`, whatever becomes of the others; after each, where it is news,
    `lifecycle` hears how the training ended and `write` writes it down.

    What breaks first on the way is raised, and is how the training ended; a cancellation does not undo a
    failure. `cancelled`: how the training ended where that was by a cancellation.
    """
    failures: list[BaseException] = []

    async def attempt(work: Awaitable[None]) -> None:
        nonlocal state, why
        try:
            await work
        except asyncio.CancelledError as error:
            failures.append(error)
            if state != "failed":
                state, why = "stopped", cancelled()
        except Exception as error:
            if not failures:
                state, why = "failed", one_line(error)
            failures.append(error)

    for step in steps:
        await attempt(step(state, why))
        if (state, why) != (lifecycle.state, lifecycle.why):
            lifecycle.end(state, why)
            await attempt(write())
    if failures:
        raise failures[0]
