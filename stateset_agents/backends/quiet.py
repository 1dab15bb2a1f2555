"""Less talk from transformers while it loads or saves a model; loading.py and huggingface.py do so in it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

__all__ = ["quietly"]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the hub client's note on each retry, transformers' own reports (one line of ours says it) and,
    where nobody watches, progress bars."""
    from transformers.utils import logging as transformers_logging

    talk: Any = transformers_logging
    loggers = [logging.getLogger(name) for name in ("huggingface_hub", "transformers")]
    levels = [logger.level for logger in loggers]
    bars = talk.is_progress_bar_enabled() and not sys.stderr.isatty()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    if bars:
        talk.disable_progress_bar()
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            talk.enable_progress_bar()
