"""Log lines for people. Every module asks `get_logger`; the command line calls `configure_logging` once.

Events go through Python's own logging under the name `stateset_agents`, so a program that uses the
library sees warnings only, unless it sets a level or calls `configure_logging` itself.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger
    from structlog.typing import EventDict

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""A terminal obeys control characters, and the others end lines or turn the order of what is read around. The
marks of right-to-left scripts (U+200E, U+200F, U+061C) turn nothing that a letter of theirs does not."""


def shown(text: str) -> str:
    r"""Control and direction characters as escapes; tabs and ends of lines stay.

    >>> shown("gone\x1b[2J")
    'gone\\x1b[2J'
    """
    return _COMMANDS.sub(lambda match: ascii(match[0])[1:-1], text)


def shown_line(text: str) -> str:
    """The same on one line: white space of any kind and length is a space."""
    return shown(" ".join(text.split()))


_ROOT = "stateset_agents"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the current stderr, so that it does not break a live display that captures it."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        """Ignored: the base class sets it once, and we use stderr at the time of writing."""


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """The traceback, too, which another handler may have formatted before."""
        return shown(super().format(record))


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Lines of text: rows of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        indent + "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


class _LazyLogger:
    """Makes structlog's logger at its first event, for structlog brings all of rich with it."""

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _bound(self) -> BoundLogger:
        import structlog

        processors: list[Any] = [
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            _human_line,
        ]
        wrapper = structlog.stdlib.BoundLogger
        logger = logging.getLogger(self._name)
        return cast(
            "BoundLogger", structlog.wrap_logger(logger, wrapper_class=wrapper, processors=processors)
        )

    def __getattr__(self, method: str) -> Any:
        return getattr(self._bound, method)


def get_logger(name: str) -> BoundLogger:
    """A logger that takes an event and fields: `log.info("checkpoint saved", step=20)`.

    It leaves structlog's global configuration to the program that uses the library.
    """
    return cast("BoundLogger", _LazyLogger(name))


def configure_logging(level: str = "INFO") -> None:
    """Print events from `level` on as human lines on stderr; a second call replaces the first.

    Raises ValueError on a level that logging does not know.
    """
    logger = logging.getLogger(_ROOT)
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Stderr)]:
        logger.removeHandler(handler)
    handler = _Stderr()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level.upper())


def _human_line(_: Any, __: str, event: EventDict) -> str:
    """`checkpoint saved  step=20 path=runs/0001-demo`; a traceback goes below. No value begins a line of its
    own, or reaches the terminal as a command."""
    trace = event.pop("exception", None)
    line = str(event.pop("event", ""))
    if event:
        line += "  " + " ".join(f"{key}={value}" for key, value in event.items())
    line = shown(line.replace("\r\n", "\n").replace("\n", "\\n"))
    return f"{line}\n{shown(str(trace))}" if trace else line
