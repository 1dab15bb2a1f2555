"""Run a page of the docs as its reader would: `python page_snippets.py PAGE`, in an empty folder.

The page's fences are taken in order. Python runs in one namespace and one process, with top-level await as
in a notebook; a fence with a title (```python title="desk.py") is a file that the reader writes;
commands (```console) run in a shell. What is only shown says so: ```console not-run.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import linecache
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Fence", "difference", "fences", "run_page"]

NEAR = 0.25

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```", re.S | re.M
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """One fenced piece of a page."""

    language: str
    text: str
    line: int
    """Of its first line of text, counted from 1."""
    title: str | None
    """The file that it is."""
    words: frozenset[str]
    """The other words after the language."""

    @property
    def runs(self) -> bool:
        return "not-run" not in self.words

    @property
    def is_program(self) -> bool:
        return self.runs and self.language in ("python", "console") and self.title is None


def fences(page: Path) -> Iterator[Fence]:
    """The fences of a page, in order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', found["info"])
        yield Fence(
            language=found["language"],
            text=textwrap.dedent(found["text"]),
            line=text.count("\n", 0, found.start("text")) + 1,
            title=title[1] if title else None,
            words=frozenset(found["info"].split()),
        )


def run_page(page: Path) -> None:
    """Write the page's files, run its code and commands, all in the current folder."""
    sys.path.insert(0, "")  # what the page wrote can be imported
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    with asyncio.Runner() as runner:
        for fence in fences(page):
            started = time.monotonic()
            if fence.title is not None:
                path = Path(fence.title)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(fence.text, encoding="utf-8")
            elif fence.is_program and fence.language == "python":
                printed = _run_python(fence, page, namespace, runner)
                print(printed, flush=True)
            elif fence.is_program:
                print(fence.text, flush=True)
                command = ["bash", "-euo", "pipefail", "-c", fence.text]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                printed = done.stdout
                print(printed, flush=True)
                done.check_returncode()
            elif "output" in fence.words:
                said = difference(fence.text, printed, near="near" in fence.words)
                if said is not None:
                    raise SystemExit(f"{page.name}, line {fence.line}: {said}")
            else:
                continue
            print(f"[{page.name}:{fence.line} {time.monotonic() - started:.1f} s]", flush=True)


def _run_python(fence: Fence, page: Path, namespace: dict[str, Any], runner: asyncio.Runner) -> str:
    """What it prints."""
    name = f"{page.name}, line {fence.line}"
    linecache.cache[name] = (len(fence.text), None, fence.text.splitlines(keepends=True), name)
    code = compile(fence.text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)

    async def piece() -> None:
        await eval(code, namespace)

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        if code.co_flags & inspect.CO_COROUTINE:
            runner.run(piece())
        else:
            exec(code, namespace)
    return printed.getvalue()


_NUMBER = r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?%?"


def difference(shown: str, printed: str, *, near: bool = False) -> str | None:
    """What a page shows beside what was printed: None where that is the same (see above)."""
    shown, printed = _plain(shown, near), _plain(printed, near)
    found = re.fullmatch(_pattern(shown, near), printed)
    wrong = "the page shows and the program prints another thing"
    if found is not None:
        numbers = [one for one in re.findall(_NUMBER, shown) if _is_inexact(one)] if near else []
        off = [f"{a} and not {b}" for a, b in zip(found.groups(), numbers, strict=True) if _is_off(a, b)]
        if not off:
            return None
        wrong = f"the program prints {', '.join(off)}"
    return f"{wrong}\n--- shown\n{shown}--- printed\n{printed}"


def _plain(text: str, near: bool) -> str:
    lines = [" ".join(line.split()) if near else line.rstrip() for line in text.strip("\n").split("\n")]
    return "\n".join(lines) + "\n"


def _pattern(shown: str, near: bool) -> str:
    """A regular expression with a group for each number that may be off."""
    parts = []
    for piece in re.split(rf"((?m:^\.\.\.\n)|\.\.\.|{_NUMBER})", shown):
        if piece == "...\n":
            parts.append(r"(?:.*\n)*?")
        elif piece == "...":
            parts.append(".*")
        elif near and re.fullmatch(_NUMBER, piece) and _is_inexact(piece):
            parts.append(f"({_NUMBER})")
        else:
            parts.append(re.escape(piece))
    return "".join(parts)


def _is_inexact(number: str) -> bool:
    return "." in number or "%" in number


def _is_off(printed: str, shown: str) -> bool:
    a, b = (float(one.replace(",", "").rstrip("%")) for one in (printed, shown))
    return abs(a - b) > max(NEAR * (100 if "%" in shown else 1), NEAR * abs(b))


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).resolve())
