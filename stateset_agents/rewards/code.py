"""`CodeReward`: does the program in the last reply compute what its scenario's tests expect?

The program runs in a sandbox, which hears its inputs alone; the values are compared here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.core.scoring.base import RewardFunction, RewardResult
from stateset_agents.sandbox import Claims, Job, Limits, Sandbox
from stateset_agents.sandbox.job import expect_built_in
from stateset_agents.types.comparison import nfc
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.trajectory import Trajectory

_log = get_logger(__name__)
_MOST_CHARACTERS = 100_000
"""Characters of a reply; a longer one is no program."""
_PYTHON = ("", "py", "python", "python3")
"""Languages that a program's fence may name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenCases:
    """A scenario's hidden cases: inputs, and what is expected of each."""

    entry_point: str | None
    inputs: tuple[Any, ...]
    """Tuples of arguments, or texts for stdin."""
    expected: tuple[Any, ...]

    def job(self, program: str) -> Job:
        """Return what the sandbox runs; it holds no expected value."""
        if self.entry_point is None:
            return Job(program=program, stdin=self.inputs)
        return Job(program=program, entry_point=self.entry_point, arguments=self.inputs)


class CodeReward(RewardFunction):
    """The share of a scenario's hidden tests that the program in the last reply passes.

        {"opening": "Write a Python function add(a, b).",
         "context": {"tests": {"entry_point": "add", "cases": [{"arguments": [1, 2], "expected": 3}]}}}

    The program is the last fenced block of Python, or the whole reply where it has no fence. Without
    `entry_point` it is one that reads stdin, and a case is `{"stdin": "1 2", "expected": "3"}`; white space
    at the ends of lines and of the text does not count. Cases with `"visible": true` may stand in the prompt
    and score nothing.

    Values are compared by exact type: True is not 1, 1 is not 1.0, a tuple is not a list, and NaN equals
    nothing. A program that loops, ends early or says two things of one case has failed; where the sandbox or
    the machine fails, the conversation is unscored, and asked about again.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        *,
        all_or_nothing: bool = False,
        tolerance: float = 0.0,
        name: str = "code",
    ) -> None:
        """`all_or_nothing`: 1 if every case passes, else 0; `tolerance`: of floats, relative or absolute."""
        if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
            raise ConfigurationError(f"tolerance must be a number from 0 to below 1, got {tolerance!r}")
        self.name = name
        self._sandbox = Sandbox() if sandbox is None else sandbox
        self.local = self._sandbox.local
        self._all_or_nothing = all_or_nothing
        self._tolerance = float(tolerance)

    async def score(self, trajectory: Trajectory) -> RewardResult:
        data = trajectory.scenario.context.get("tests")
        if data is None:
            message = "reward does not apply: the scenario has no tests"
            self.warn_once(_log, message, mend='give context["tests"]')
            return RewardResult(score=None)
        tests = read_tests(data)
        program = last_program(trajectory.replies[-1].content) if trajectory.replies else None
        if program is None:
            return RewardResult(score=0.0, breakdown={"passed": 0.0, "ran": 0.0})
        claims = await self._sandbox.run(tests.job(program))
        passed = sum(self._passes(claims, case, tests) for case in range(len(tests.expected)))
        share = passed / len(tests.expected)
        score = float(share == 1) if self._all_or_nothing else share
        return RewardResult(
            score=score, breakdown={"passed": share, "ran": float(claims.ending == "finished")}
        )

    def _passes(self, claims: Claims, case: int, tests: HiddenCases) -> bool:
        if tests.entry_point is not None:
            return claims.agree(case, tests.expected[case], tolerance=self._tolerance)
        printed = claims.claimed.get(case)
        return isinstance(printed, str) and _lines(printed) == _lines(tests.expected[case])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in nfc(text).strip().splitlines()]


def last_program(reply: str) -> str | None:
    """The last fenced block of Python; the whole reply where it has no fence; None where there is neither.

    >>> last_program("Like this:\\n```python\\nx = 1\\n```\\nThat is all.")
    'x = 1'

    A block that is not closed was cut, and is none.
    """
    if len(reply) > _MOST_CHARACTERS or not reply.strip():
        return None
    program: str | None = None
    block: list[str] | None = None
    language, fence = "", ""
    has_fence = False
    for line in reply.splitlines():
        start = line.strip()
        if block is None and start.startswith("```"):
            has_fence, block = True, []
            fence = "`" * (len(start) - len(start.lstrip("`")))
            language = start.lstrip("`").strip().lower()
        elif block is not None and start == fence:
            program = "\n".join(block) if language in _PYTHON else program
            block = None
        elif block is not None:
            block.append(line)
    return program if has_fence else reply


def read_tests(given: object) -> HiddenCases:
    """The hidden cases of `context["tests"]`. Raises ConfigurationError where there is none, or one cannot be
    compared."""
    if not isinstance(given, Mapping):
        raise _unfit(f"must be a mapping with cases, got {type(given).__name__}: {given!r:.60}")
    unknown = set(given) - {"entry_point", "cases"}
    if unknown:
        raise _unfit(f"has no key {sorted(unknown)[0]!r}: give entry_point and cases")
    entry_point, cases = given.get("entry_point"), given.get("cases")
    if entry_point is not None and not (isinstance(entry_point, str) and entry_point.isidentifier()):
        raise _unfit(f"needs a function's name as entry_point, got {entry_point!r:.60}")
    if not isinstance(cases, Sequence) or isinstance(cases, str):
        raise _unfit(f"needs a list of cases, got {cases!r:.60}")
    hidden = [case for case in cases if not (isinstance(case, Mapping) and case.get("visible", False))]
    if not hidden:
        raise _unfit("has no hidden case: a program that lists the visible ones would pass")
    read = [_read_case(case, of_function=entry_point is not None) for case in hidden]
    return HiddenCases(
        entry_point=entry_point,
        inputs=tuple(case_input for case_input, _ in read),
        expected=tuple(expected for _, expected in read),
    )


def _read_case(case: object, *, of_function: bool) -> tuple[Any, Any]:
    key = "arguments" if of_function else "stdin"
    if not isinstance(case, Mapping) or set(case) - {"visible"} != {key, "expected"}:
        raise _unfit(f"needs cases with {key} and expected, got {case!r:.80}")
    case_input, expected = case[key], case["expected"]
    if not of_function:
        if not isinstance(case_input, str) or not isinstance(expected, str):
            raise _unfit(f"compares texts where it has no entry_point, got {case!r:.80}")
        return case_input, expected
    if not isinstance(case_input, list | tuple):
        raise _unfit(f"needs a list of arguments for each case, got {case_input!r:.60}")
    expect_built_in('what context["tests"] expects', expected)
    return tuple(case_input), expected


def _unfit(what: str) -> ConfigurationError:
    return ConfigurationError(f'context["tests"] {what}')


def create_code_reward(
    *,
    sandbox: str = "auto",
    all_or_nothing: bool = False,
    tolerance: float = 0.0,
    cpu_seconds: int = 4,
    wall_seconds: float = 60.0,
    memory_mib: int = 512,
    max_concurrent: int | None = None,
    name: str = "code",
) -> CodeReward:
    """A `CodeReward` for a YAML file: `reward: {name: code, sandbox: auto, cpu_seconds: 4}`."""
    limits = Limits(cpu_seconds=cpu_seconds, wall_seconds=wall_seconds, memory_mib=memory_mib)
    walls = Sandbox(sandbox, limits=limits, max_concurrent=max_concurrent)
    return CodeReward(walls, all_or_nothing=all_or_nothing, tolerance=tolerance, name=name)
