"""Memory that a peak of requests took goes back to the system once nobody asks; `AgentServer` runs this."""

from __future__ import annotations

import asyncio

from stateset_agents.backends.base import Backend

__all__ = ["rest_when_idle"]

_POLL_SECONDS, _LEAST_SECONDS = 1.0, 0.05


async def rest_when_idle(backend: Backend, seconds: float) -> None:
    """Let the backend sleep whenever it has done nothing for so long; runs until it is cancelled.

    Idle is a backend whose counts stand still. A turn that comes at the same moment is served all the same.
    """
    loop = asyncio.get_running_loop()
    seen, since, rested = dict(backend.counts()), loop.time(), True
    while True:
        await asyncio.sleep(min(_POLL_SECONDS, max(seconds / 4, _LEAST_SECONDS)))
        counts = dict(backend.counts())
        if counts != seen:
            seen, since, rested = counts, loop.time(), False
        elif not rested and loop.time() - since >= seconds:
            await backend.sleep()
            rested = True
