"""Run a page of the docs as its reader would: `python page_snippets.py PAGE`, in an empty folder.

The page's fences are taken in order. Python runs in one namespace and one process, with top-level await as
in a notebook; a fence with a title (```python title="desk.py") is a file that the reader writes;
commands (```console) run in a shell. What is only shown says so: ```console not-run.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
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

__all__ = ["Fence", "fences", "run_page"]

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
    runs: bool

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
            runs="not-run" not in found["info"].split(),
        )


def run_page(page: Path) -> None:
    """Write the page's files, run its code and commands, all in the current folder."""
    sys.path.insert(0, "")  # what the page wrote can be imported
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for fence in fences(page):
            started = time.monotonic()
            if fence.title is not None:
                path = Path(fence.title)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(fence.text, encoding="utf-8")
            elif fence.is_program and fence.language == "python":
                _run_python(fence, page, namespace, runner)
            elif fence.is_program:
                print(fence.text, flush=True)
                subprocess.run(["bash", "-euo", "pipefail", "-c", fence.text], check=True)
            else:
                continue
            print(f"[{page.name}:{fence.line} {time.monotonic() - started:.1f} s]", flush=True)


def _run_python(fence: Fence, page: Path, namespace: dict[str, Any], runner: asyncio.Runner) -> None:
    name = f"{page.name}, line {fence.line}"
    linecache.cache[name] = (len(fence.text), None, fence.text.splitlines(keepends=True), name)
    code = compile(fence.text, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not code.co_flags & inspect.CO_COROUTINE:
        exec(code, namespace)
        return

    async def piece() -> None:
        await eval(code, namespace)

    runner.run(piece())


if __name__ == "__main__":
    run_page(Path(sys.argv[1]).resolve())
