"""A sandbox's job: a program and its inputs, never what should come out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that, is_whole

_MOST_DEPTH = 60
_LEAST_MIB = 64
"""Address space that the interpreter itself takes, with room to shut the door."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program and the inputs that it is run on, in one process.

        Job(program="def add(a, b): return a + b", entry_point="add", arguments=((1, 2), (3, 4)))
        Job(program="print(sum(map(int, input().split())))", stdin=("1 2", "3 4"))

    With `entry_point` the program is executed once and that function called with each tuple of `arguments`;
    without, the program runs anew for each text of `stdin`. Raises ConfigurationError for an argument that
    is no value of built-in types, and for both kinds of input, or none.
    """

    program: str
    entry_point: str | None = None
    arguments: tuple[tuple[object, ...], ...] = ()
    stdin: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.entry_point is None and (self.arguments or not self.stdin):
            raise ConfigurationError(
                "a job without entry_point is a program that reads stdin: give stdin, a text for each case"
            )
        if self.entry_point is not None and (self.stdin or not self.arguments):
            raise ConfigurationError(
                f"entry_point {self.entry_point!r:.60} is a function: give arguments, a tuple for each case"
            )
        for case in self.arguments:
            expect_built_in("an argument", case)

    @property
    def num_cases(self) -> int:
        return len(self.arguments) or len(self.stdin)

    def request(self) -> dict[str, Any]:
        """The part of the job that the child reads."""
        return {
            "program": self.program,
            "entry_point": self.entry_point,
            "arguments": list(self.arguments),
            "stdin": [text.encode("utf-8", errors="surrogatepass") for text in self.stdin],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one submission; raises ConfigurationError for a limit that is no positive number."""

    cpu_seconds: int = 4
    """Processor time of all cases together, the interpreter's start included. The program is ended when its
    exact clock has come so far."""
    wall_seconds: float = 60.0
    """Wall-clock limit. A program behind seccomp cannot sleep: exceeding it is the machine's fault."""
    memory_mib: int = 512
    """Most MiB of address space."""
    output_bytes: int = 2**20
    """Most bytes of the program's report."""

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "memory_mib", "output_bytes"):
            value = getattr(self, name)
            expect_that(is_whole(value, 1), name, "be a whole number of at least 1", value)
        expect_that(self.memory_mib >= _LEAST_MIB, "memory_mib", f"be at least {_LEAST_MIB}", self.memory_mib)
        wall: object = self.wall_seconds
        if isinstance(wall, bool) or not isinstance(wall, int | float) or not 0 < wall < math.inf:
            raise ConfigurationError(f"wall_seconds must be a positive number of seconds, got {wall!r}")

    def of_process(self) -> dict[str, int]:
        """The limits for setrlimit: RLIMIT_* -> most, soft and hard.

        A timer ends the program at `cpu_seconds`. RLIMIT_CPU is for what is without one (another program that
        `unsafe` lets it start): it counts ticks, more than were used where a neighbour yields, but never more
        than have passed, so that it lies beyond the wall limit.
        """
        return {
            "CPU": max(self.cpu_seconds, math.ceil(self.wall_seconds)) + 1,
            "AS": self.memory_mib * 2**20,
            "FSIZE": 0,
            "NOFILE": 16,
            "CORE": 0,
        }


def expect_built_in(what: str, value: object, depth: int = 0) -> None:
    """Raises ConfigurationError unless the value is made of None, bool, int, float, complex, str, bytes,
    list, tuple, dict, set and frozenset, at most 60 deep."""
    if depth > _MOST_DEPTH:
        raise ConfigurationError(f"{what} must be nested at most {_MOST_DEPTH} deep, got {value!r:.60}")
    kind = type(value)
    if value is None or kind in (bool, int, float, complex, str, bytes):
        return
    if isinstance(value, dict) and kind is dict:
        for key, item in value.items():
            expect_built_in(what, key, depth + 1)
            expect_built_in(what, item, depth + 1)
    elif isinstance(value, list | tuple | set | frozenset) and kind in (list, tuple, set, frozenset):
        for item in value:
            expect_built_in(what, item, depth + 1)
    else:
        raise ConfigurationError(
            f"{what} must be made of numbers, texts, lists and their like, got {kind.__name__}: {value!r:.60}"
        )
