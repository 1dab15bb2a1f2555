"""What a command wrote and left, for tests of the command line: `from command_line import the_line`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["contents", "the_line", "without_warnings"]


def the_line(code: int, text: str) -> str:
    assert code == 1
    [line] = text.splitlines()
    program, _, message = line.partition(": ")
    assert program == "stateset-agents"
    assert "Traceback" not in message
    return message


def without_warnings(text: str) -> str:
    """Without the log lines on which conversations failed."""
    return "".join(line for line in text.splitlines(keepends=True) if " WARNING " not in line)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
