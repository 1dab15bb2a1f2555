"""Input and output of the chat command, with a person at a terminal or with a pipe."""

from __future__ import annotations

import contextlib
import io
import os
import sys

from stateset_agents.types.shown_text import shown, shown_line

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_MAX_SHOWN = 2000
"""Characters of one tool's answer."""


class Terminal:
    """People also get prompts, colours and remarks; a pipe gets only the agent's text and its tools."""

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
        """The next line; None at the end. Ctrl-C discards what was typed."""
        was_interrupted = False
        while True:
            try:
                if was_interrupted:
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
                was_interrupted = True

    def write(self, piece: str) -> None:
        """Print a piece of the agent's text."""
        if not self._in_line and self.has_person:
            print("agent> ", end="")
        self._in_line = True
        print(shown(piece), end="", flush=True)

    def note(self, text: str) -> None:
        """Print a tool call or its result on lines of its own."""
        self.end_line()
        if len(text) > _MAX_SHOWN:
            text = f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"
        for line in shown(text).split("\n"):
            print(f"{_DIM}  {line}{_PLAIN}" if self._has_colours else f"  {line}", flush=True)

    def remark(self, text: str) -> None:
        """Print a note for people only."""
        if self.has_person:
            self.note(text)

    def to_stderr(self, text: str) -> None:
        """Print one line on stderr, so that a pipe's reader does not take it for the agent's text."""
        self.end_line()
        print(shown_line(text), file=sys.stderr, flush=True)

    def error(self, text: str) -> None:
        """Print an error as one line on stderr."""
        self.to_stderr(f"stateset-agents: {text}")

    def end_line(self) -> None:
        """End the line of the agent's text."""
        if self._in_line:
            print(flush=True)
            self._in_line = False
