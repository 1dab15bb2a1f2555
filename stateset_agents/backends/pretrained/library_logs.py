"""Suppress transformers' log lines while it loads or saves a model; for load_lock.py, local/backend.py."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

_lock = threading.Lock()
_open: list[object] = []
"""An entry for each context that is open, in all threads."""
_restore = contextlib.ExitStack()
"""Restores the log levels. They are settings of the whole process, so the last context that ends does it."""


@contextlib.contextmanager
def suppress_library_logs() -> Iterator[None]:
    """Inside, the hub client logs no retries and transformers no reports; our own messages say what matters.

    Progress bars are off, too, unless stderr is a terminal.
    """
    with _lock:
        if not _open:
            _suppress()
        _open.append(None)
    try:
        yield
    finally:
        with _lock:
            _open.pop()
            if not _open:
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
