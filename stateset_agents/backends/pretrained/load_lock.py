"""One load of a model at a time in this process; whatever loads or builds a transformers model does so in it.

While transformers makes a model it swaps process-wide things and puts them back afterwards: the method
`PreTrainedModel.tie_weights` (`initialization.no_tie_weights`), `torch.linspace`, torch's default dtype.
Where two threads load at once, the second remembers the first's stand-in and puts that back last: from then
on no model of the process is tied, and heads that share the embedding's weights stay random. A model that
is built from its config meanwhile is not tied either.

The lock can't keep out code that calls transformers itself in another thread: let that enter `loading`, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from stateset_agents.backends.pretrained.library_logs import quietly

__all__ = ["load_in_thread", "loading"]

T = TypeVar("T")

_lock = threading.RLock()
"""Reentrant: a load may be made of others."""
_thread = ThreadPoolExecutor(1, thread_name_prefix="model-load")
"""Loads wait in its queue, not in asyncio's threads, which are few: name look-ups need them, too."""


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """While open, nothing else of ours loads or builds a model, and transformers is quiet.

    Blocks until the load under way has ended: enter it in a thread, never on an event loop.
    """
    with _lock, quietly():
        yield


async def load_in_thread(load: Callable[[], T]) -> T:
    """What `load` returns, made in the one thread that loads, in the order of the calls.

    `load` enters `loading` itself. Cancelled while it waits for its turn, it never runs; cancelled under way,
    it ends unseen, and the next one begins after it.
    """
    return await asyncio.get_running_loop().run_in_executor(_thread, load)
