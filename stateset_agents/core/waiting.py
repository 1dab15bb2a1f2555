"""Waiting for several things at once without leaving any behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

__all__ = ["all_or_cancel"]

T = TypeVar("T")


async def all_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order; when one raises, cancel the rest, wait for them to end, and raise what it raised."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
