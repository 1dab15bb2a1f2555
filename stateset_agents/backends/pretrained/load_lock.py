"""A lock so that this process loads or builds only one transformers model at a time.

While transformers loads a model it replaces process-wide objects and restores them afterwards: the method
`PreTrainedModel.tie_weights` (`initialization.no_tie_weights`), `torch.linspace`, torch's default dtype. If
two threads load at the same time, the second saves the replacement of the first and restores that at last.
From then on no model of the process is tied, and heads that share the embedding's weights stay random. A
model that is built from its config meanwhile is not tied either.

The lock cannot stop other code that calls transformers in another thread: such code should enter `loading`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from stateset_agents.backends.pretrained.library_logs import suppress_library_logs

T = TypeVar("T")

_lock = threading.RLock()
"""Reentrant: a load may contain other loads."""
_thread = ThreadPoolExecutor(1, thread_name_prefix="model-load")
"""Loads wait in its queue, not in asyncio's few threads, which DNS look-ups need, too."""


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Inside, no other code of this package loads or builds a model, and transformers logs nothing.

    Entering blocks until the load under way has ended: do it in a thread, never on an event loop.
    """
    with _lock, suppress_library_logs():
        yield


async def load_in_thread(load: Callable[[], T]) -> T:
    """The result of `load`, which runs in the loading thread, in the order of the calls.

    `load` must enter `loading` itself. If the caller is cancelled while `load` waits, it never runs; if it
    already runs, it ends, its result is dropped, and the next load begins after it.
    """
    return await asyncio.get_running_loop().run_in_executor(_thread, load)
