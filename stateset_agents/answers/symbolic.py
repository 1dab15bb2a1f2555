"""Equality of expressions by math-verify (https://github.com/huggingface/Math-Verify), in a process with
limits.

math-verify's own time limit is wall time and a signal: in a thread it raises, and on a busy machine right
answers become zeros. Here it is processor time, by the process's exact clock. What takes too much of that is
wrong; what got too little of it is unscored, and asked again.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from stateset_agents.answers.exact import MAX_PRODUCTS, rational
from stateset_agents.answers.symbolic_worker import CPU_SECONDS
from stateset_agents.answers.tokens import FUNCTIONS, NOTATION
from stateset_agents.answers.tree import Ambiguous, Apply, Node, Number, Symbol
from stateset_agents.types.errors import RewardTimeout
from stateset_agents.types.logs import get_logger

# An expression tree as LaTeX again, for math-verify: the tree's few kinds of nodes, never an agent's text.

_MAX_POWER = 100
_MAX_FACTORIAL = 50
_FORMS: Mapping[str, str] = NOTATION["forms"]
"""Operation -> the LaTeX around its arguments."""


def latex_of(node: Node) -> str | None:
    """The expression; None where it holds what is no single value, or what may be too large to compute.

    A power of numbers has an exponent up to 100 that is a number by itself, a factorial an argument up to 50;
    multiplied out, nothing has more than 10,000 terms.
    """
    if isinstance(node, Number):
        above, below = node.value.numerator, node.value.denominator
        return str(above) if below == 1 else rf"\frac{{{above}}}{{{below}}}"
    if isinstance(node, Symbol):
        letter, _, index = node.name.partition("_")
        name = letter if len(letter) == 1 else {"oo": r"\infty"}.get(letter, f"\\{letter}")
        return f"{name}_{{{index}}}" if index else name
    if isinstance(node, Ambiguous):
        return latex_of(node.product)
    if not isinstance(node, Apply) or not _is_small(node):
        return None
    parts = [latex_of(part) for part in node.args]
    texts = [part for part in parts if part is not None]
    if len(texts) < len(parts):
        return None
    return _operation(node.name, texts)


def _operation(name: str, parts: list[str]) -> str | None:
    bracketed = [f"({part})" for part in parts]
    if name in ("+", "mixed"):
        return "+".join(bracketed)
    if name in ("*", "scaled"):
        return r" \cdot ".join(bracketed)
    if name == "log" and len(parts) == 2:
        return rf"\log_{{{parts[1]}}}({parts[0]})"
    if name in _FORMS:
        return _FORMS[name].format(*parts)
    return f"\\{name}({parts[0]})" if name in FUNCTIONS and len(parts) == 1 else None


def _is_small(node: Apply) -> bool:
    if _num_terms(node) > MAX_PRODUCTS:
        return False
    if node.name == "^":
        exponent = rational(node.args[1])
        return not _holds_number(node.args[1]) if exponent is None else abs(exponent) <= _MAX_POWER
    if node.name == "!":
        value = rational(node.args[0])
        return value is not None and 0 <= value <= _MAX_FACTORIAL
    return True


def _num_terms(node: Node) -> int:
    """Return how many terms it has at most, multiplied out; beyond the bound one more than that."""
    if isinstance(node, Ambiguous):
        return _num_terms(node.product)
    if not isinstance(node, Apply):
        return 1
    counts = [_num_terms(part) for part in node.args]
    match node.name:
        case "+" | "mixed":
            number = sum(counts)
        case "*" | "/" | "scaled" | "neg" | "pos":
            number = math.prod(counts)
        case "^":
            exponent = rational(node.args[1])
            power = 1 if exponent is None else int(abs(exponent))
            number = math.comb(counts[0] + power - 1, power) if power <= _MAX_POWER else 1
        case _:
            number = 1
    return min(number, MAX_PRODUCTS + 1)


def _holds_number(node: Node) -> bool:
    """True where a large number is in it, so that a power of it could be large. 2x + 1 is none, 999 x is."""
    if isinstance(node, Number):
        return abs(node.value) > _MAX_POWER
    if isinstance(node, Apply):
        return node.name in ("^", "!") or any(_holds_number(part) for part in node.args)
    return False


_log = get_logger(__name__)
WALL_SECONDS = 60.0
"""Seconds for a comparison of at most 2 s of processor time; a machine that gives it less in a minute is
overloaded."""
START_SECONDS = 300.0
"""Seconds for the imports, which take about one on an idle machine."""


class SymbolicWorker:
    """The process, begun at its first use and again where one has ended. Threads wait for one another."""

    def __init__(self, wall_seconds: float = WALL_SECONDS) -> None:
        self._lock = threading.Lock()
        self._wall_seconds = wall_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    @property
    def pid(self) -> int | None:
        """Id of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def are_equal(self, given: str, expected: str) -> bool:
        """Two LaTeX expressions that `latex_of` wrote. Raises RewardTimeout where the machine
        gave the comparison less processor time than it may take, and ChildProcessError where something else
        ended the process: a reward asks again then."""
        with self._lock:
            process = self._running()
            assert process.stdin is not None  # it is a pipe
            limit = _processor_seconds(process) + CPU_SECONDS
            try:
                process.stdin.write(json.dumps({"given": given, "expected": expected}).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                self.close()
                raise ChildProcessError("math-verify's process had ended") from None
            answer = _line(process, self._wall_seconds, limit)
            if answer is not None:
                return bool(answer["equal"])
            if process.poll() is None:
                is_used_up = _processor_seconds(process) >= limit
                self.close()
                if is_used_up:
                    return False
                raise RewardTimeout(
                    f"math-verify got less than {CPU_SECONDS} s of processor time in "
                    f"{self._wall_seconds:g} s: the machine is overloaded"
                )
            self.close()
            if process.returncode in (
                -signal.SIGXCPU,
                -signal.SIGSEGV,
            ):  # too long, or too deep for C's stack
                return False
            raise ChildProcessError(
                f"math-verify's process was ended from outside: status {process.returncode}"
            )

    def _running(self) -> subprocess.Popen[bytes]:
        if self._owner != os.getpid():  # after a fork the pipes are the parent's
            self._process, self._owner = None, os.getpid()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "stateset_agents.answers.symbolic_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # an interrupt at the keyboard is the caller's alone
        )
        if _line(self._process, START_SECONDS) is None:
            status = self._process.poll()
            self.close()
            raise ChildProcessError(f"math-verify's process did not begin (status {status})")
        return self._process

    def close(self) -> None:
        """End the process and wait until it is gone; the next use begins another."""
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # of what was not yet written
                    pipe.close()
        process.wait()


def _processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the seconds it has used, by Linux's exact clock of a process (CPUCLOCK_SCHED); 0 without one."""
    return time.clock_gettime(~process.pid << 3 | 2) if sys.platform == "linux" else 0.0


def _line(
    process: subprocess.Popen[bytes], seconds: float, processor_limit: float = math.inf
) -> dict[str, Any] | None:
    """The next line of JSON; None where the process ended, or its time of either kind is over. An end is
    waited for."""
    assert process.stdout is not None  # it is a pipe
    pipe = process.stdout.fileno()
    until = time.monotonic() + seconds
    text = b""
    while not text.endswith(b"\n"):
        left = min(until - time.monotonic(), processor_limit - _processor_seconds(process))
        if not select.select([pipe], [], [], max(0.0, left))[0]:
            if left <= 0:
                return None
            continue
        piece = os.read(pipe, 65_536)
        if not piece:
            process.wait()
            return None
        text += piece
    answer: dict[str, Any] = json.loads(text)
    return answer


_worker = SymbolicWorker()
atexit.register(_worker.close)
_warned = threading.Event()


@lru_cache(maxsize=1)
def has_math_verify() -> bool:
    """True where the library is installed."""
    return importlib.util.find_spec("math_verify") is not None


def symbolically_equal(given: Node, expected: Node) -> bool | None:
    """True where math-verify finds two expressions equal; None where it is not installed, or where one of
    them is nothing that it is asked about: several values, a tower of powers.

    Raises RewardTimeout where it got too little of the machine's time, and ChildProcessError.
    """
    if not has_math_verify():
        if not _warned.is_set():
            _warned.set()
            _log.warning(
                "an answer counts as wrong that only math-verify could compare",
                mend='pip install "math-verify>=0.9,<0.10"',
            )
        return None
    texts = latex_of(given), latex_of(expected)
    if texts[0] is None or texts[1] is None:
        return None
    return _compared(texts[0], texts[1])


@lru_cache(maxsize=4096)
def _compared(answer: str, expected: str) -> bool:
    return _worker.are_equal(answer, expected)
