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
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

# --- log lines of transformers while it loads or saves a model

_logs_lock = threading.Lock()
_num_open: list[object] = []
"""An entry for each context that is open, in all threads."""
_restore = contextlib.ExitStack()
"""Restores the log levels. They are settings of the whole process, so the last context that ends does it."""


@contextlib.contextmanager
def suppress_library_logs() -> Iterator[None]:
    """Inside, the hub client logs no retries and transformers no reports; our own messages say what matters.

    Progress bars are off, too, unless stderr is a terminal.
    """
    with _logs_lock:
        if not _num_open:
            _suppress()
        _num_open.append(None)
    try:
        yield
    finally:
        with _logs_lock:
            _num_open.pop()
            if not _num_open:
                _restore.close()


def _suppress() -> None:
    from transformers.utils import logging as transformers_logging

    library: Any = transformers_logging
    for logger in (logging.getLogger("huggingface_hub"), logging.getLogger("transformers")):
        _restore.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
    if library.is_progress_bar_enabled() and not sys.stderr.isatty():
        _restore.callback(library.enable_progress_bar)
        library.disable_progress_bar()


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
