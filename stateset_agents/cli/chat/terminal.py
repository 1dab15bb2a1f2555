"""Lines in and out of the chat command: a person at a terminal, or a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys

__all__ = ["Terminal"]

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a model may write and a terminal would obey."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_MOST_SHOWN = 2000
"""Characters of one tool's answer."""


class Terminal:
    """Prompts, colours and remarks are for people; a pipe gets the agent's words and its tools."""

    def __init__(self) -> None:
        self.has_person = sys.stdin.isatty()
        self._has_colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._in_line = False
        for stream in (sys.stdin, sys.stdout):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        if self.has_person:
            with contextlib.suppress(ImportError):  # line editing, where Python was built with it
                import readline  # noqa: F401 - importing it is its effect

    def read(self) -> str | None:
        """The next line; None at the end. Ctrl-C throws away what was typed."""
        is_interrupted = False
        while True:
            try:
                if is_interrupted:
                    print("\n(Ctrl-D leaves)")
                if self.has_person:
                    return input("you> ")
                line = sys.stdin.readline()
                return line.rstrip("\r\n") if line else None
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                if not self.has_person:
                    raise
                is_interrupted = True

    def say(self, piece: str) -> None:
        """A piece of the agent's words."""
        if not self._in_line and self.has_person:
            print("agent> ", end="")
        self._in_line = True
        print(_CONTROL.sub("\ufffd", piece), end="", flush=True)

    def note(self, text: str) -> None:
        """An aside on lines of its own: a tool call, its result."""
        self.end_line()
        if len(text) > _MOST_SHOWN:
            text = f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"
        for line in _CONTROL.sub("\ufffd", text).split("\n"):
            print(f"{_DIM}  {line}{_PLAIN}" if self._has_colours else f"  {line}", flush=True)

    def remark(self, text: str) -> None:
        """A note for people only."""
        if self.has_person:
            self.note(text)

    def aside(self, text: str) -> None:
        """One line on stderr, where a pipe's reader does not take it for the agent's words."""
        self.end_line()
        print(_CONTROL.sub("\ufffd", " ".join(text.split())), file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """One line on stderr."""
        self.aside(f"stateset-agents: {text}")

    def end_line(self) -> None:
        """Finish a line of words."""
        if self._in_line:
            print(flush=True)
            self._in_line = False
