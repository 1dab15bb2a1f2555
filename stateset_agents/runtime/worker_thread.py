"""The thread in which the trainer runs blocking work (loading, updates, files), one call after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from stateset_agents.types.errors import ConfigurationError

_T = TypeVar("_T")


class Worker:
    """Runs blocking work while the event loop goes on. It cannot be started again once stopped."""

    def __init__(self) -> None:
        self._is_stopped = False
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="update",
            initializer=torch.set_num_threads,  # torch keeps one number per thread
            initargs=(torch.get_num_threads(),),
        )

    def refuse_stopped(self) -> None:
        """Raises ConfigurationError after `stop`."""
        if self._is_stopped:
            raise ConfigurationError(
                "the trainer was stopped: make a new one, with run=trainer.run and load_checkpoint() to go on"
            )

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """The result of `work(*arguments)`."""
        self.refuse_stopped()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def stop(self) -> None:
        """Wait for the work under way and end the thread; stopping twice does nothing."""
        self._is_stopped = True
        await asyncio.to_thread(self._thread.shutdown)
