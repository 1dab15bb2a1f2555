"""Less talk from transformers while it loads or saves a model; for load_lock.py and local/backend.py."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["quietly"]

_lock = threading.Lock()
_open: list[object] = []
"""Blocks under way, in whatever threads."""
_kept = contextlib.ExitStack()
"""What puts talk back; the last of them that ends does, for it is one setting for the whole process."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the hub client's note on each retry, transformers' own reports (one line of ours says it) and,
    where nobody watches, progress bars."""
    with _lock:
        if not _open:
            _hush()
        _open.append(None)
    try:
        yield
    finally:
        with _lock:
            _open.pop()
            if not _open:
                _kept.close()


def _hush() -> None:
    from transformers.utils import logging as transformers_logging

    talk: Any = transformers_logging
    for logger in (logging.getLogger("huggingface_hub"), logging.getLogger("transformers")):
        _kept.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
    if talk.is_progress_bar_enabled() and not sys.stderr.isatty():
        _kept.callback(talk.enable_progress_bar)
        talk.disable_progress_bar()
