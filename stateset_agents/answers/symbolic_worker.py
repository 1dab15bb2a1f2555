"""The process in which math-verify compares two expressions: `python -m` this module; `symbolic.py` starts
it.

A line of JSON in, {"given": LaTeX, "expected": LaTeX}, a line out, {"equal": true}. Each comparison may take
`CPU_SECONDS` of processor time. On Linux `symbolic.py` reads this process's exact clock and ends it;
elsewhere the kernel does, by a limit. A signal handler of Python's would wait for the end of one long
multiplication.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import resource
import sys
from typing import Any

CPU_SECONDS = 2
_MEMORY = 2 * 1024**3
"""Bytes of address space."""


def main() -> None:
    """Answer until the other side closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # systems without this limit still have the other
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    math_verify = _library()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        if sys.platform != "linux":  # where the limit counts ticks, and beside busy neighbours too many
            _allow(CPU_SECONDS)
        request = json.loads(line)
        print(json.dumps({"equal": _equal(math_verify, **request)}), file=answers, flush=True)


def _allow(seconds: int) -> None:
    """Let this process take so many more seconds of processor time."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(usage.ru_utime + usage.ru_stime) + seconds, hard))


def _library() -> Any:
    logging.disable(logging.CRITICAL)
    return importlib.import_module("math_verify")


def _equal(math_verify: Any, given: str, expected: str) -> bool:
    """Both are parsed as one LaTeX expression and compared as such, never as texts."""
    try:
        target = [math_verify.LatexExtractionConfig()]
        trees = []
        for text in (expected, given):
            items = math_verify.parse(f"${text}$", target, fallback_mode="no_fallback", parsing_timeout=None)
            trees.append([item for item in items if not isinstance(item, str)][:1])
        if not all(trees):
            return False
        precise: dict[str, Any] = {"float_rounding": 15, "numeric_precision": 30, "timeout_seconds": None}
        return bool(math_verify.verify(*trees, **precise))
    except (MemoryError, RecursionError):  # of the answer's making
        return False


if __name__ == "__main__":
    main()
