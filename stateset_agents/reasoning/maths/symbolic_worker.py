"""The process in which math-verify compares two expressions: `python -m` this module; `symbolic.py` starts
it.

A line of JSON in, {"given": LaTeX, "expected": LaTeX}, a line out, {"equal": true}. Each comparison may take
`CPU_SECONDS` of processor time; a timer of the kernel ends the process that takes more, however busy the
machine is, and however deep in sympy it hangs (a signal handler of Python's would wait for the end of one
long multiplication).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from stateset_agents.sandbox.child import caller, make_timer, set_timer

__all__ = ["CPU_SECONDS"]

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
    allow = _allowance()
    math_verify = _library()
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        allow(CPU_SECONDS)
        asked = json.loads(line)
        print(json.dumps({"equal": _equal(math_verify, **asked)}), file=answers, flush=True)


def _allowance() -> Callable[[float], None]:
    """What lets this process take so many more seconds of processor time."""
    if sys.platform != "linux":  # whose clock is exact for this limit, too
        return _limit
    call = caller()
    timer = make_timer(call, signal.SIGXCPU)
    return lambda seconds: set_timer(call, timer, time.process_time() + seconds)


def _limit(seconds: float) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def _library() -> Any:
    logging.disable(logging.CRITICAL)
    return importlib.import_module("math_verify")


def _equal(math_verify: Any, given: str, expected: str) -> bool:
    """Both are parsed as one LaTeX expression and compared as such, never as texts."""
    try:
        target = [math_verify.LatexExtractionConfig()]
        trees = []
        for text in (expected, given):
            found = math_verify.parse(f"${text}$", target, fallback_mode="no_fallback", parsing_timeout=None)
            trees.append([item for item in found if not isinstance(item, str)][:1])
        if not all(trees):
            return False
        precise: dict[str, Any] = {"float_rounding": 15, "numeric_precision": 30, "timeout_seconds": None}
        return bool(math_verify.verify(*trees, **precise))
    except (MemoryError, RecursionError):  # of the answer's making
        return False


if __name__ == "__main__":
    main()
