"""Ten small programming problems: hidden tests, a solution, and mutants, wrong programs that tests must tell.

`CodingProblems` is their environment. The hidden cases are few and chosen, so that each mutant fails one; a
program that lists the visible cases fails all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.environments.problems.environment import ProblemEnvironment
from stateset_agents.environments.problems.traces import Trace
from stateset_agents.types.scenario import Scenario, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One input and what is expected of it."""

    given: tuple[Any, ...] | str
    """Arguments, or the text of stdin."""
    expected: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A task, how it is graded, and what is known of its grading."""

    name: str
    task: str
    entry_point: str | None
    """The function's name; None: the program reads stdin."""
    visible: tuple[Case, ...]
    """Shown in the prompt; they score nothing."""
    hidden: tuple[Case, ...]
    solution: str
    mutants: tuple[str, ...] = field(repr=False)
    """Each is wrong, and fails a hidden case."""

    def prompt(self) -> str:
        """What the agent is asked."""
        what = (
            f"Write a Python function `{self.entry_point}`. {self.task}"
            if self.entry_point
            else f"Write a Python program that reads from standard input and prints. {self.task}"
        )
        examples = "\n".join(self._example(case) for case in self.visible)
        return f"{what}\n\nExamples:\n{examples}\n\nAnswer with one block of Python."

    def _example(self, case: Case) -> str:
        if self.entry_point is None:
            return f"{case.given!r} -> {case.expected!r}"
        return f"{self.entry_point}({', '.join(map(repr, case.given))}) == {case.expected!r}"

    def tests(self) -> dict[str, Any]:
        """For a scenario's `context["tests"]`."""
        key = "stdin" if self.entry_point is None else "arguments"
        cases = [
            {key: case.given, "expected": case.expected, "visible": case in self.visible}
            for case in (*self.visible, *self.hidden)
        ]
        return (
            {"cases": cases}
            if self.entry_point is None
            else {"entry_point": self.entry_point, "cases": cases}
        )


def _cases(*pairs: tuple[tuple[Any, ...] | str, Any]) -> tuple[Case, ...]:
    return tuple(Case(given=given, expected=expected) for given, expected in pairs)


PROBLEMS: Sequence[Problem] = (
    Problem(
        name="second largest",
        task="It takes a list of integers and returns the second largest of its different values, or "
        "None where there are fewer than two.",
        entry_point="second_largest",
        visible=_cases((([3, 1, 2],), 2), (([5],), None)),
        hidden=_cases(
            (([7, 7, 4],), 4),
            (([2, 2],), None),
            (([],), None),
            (([-3, -1, -2],), -2),
            (([-5, 1],), -5),
            (([0, 9, 9, 8, 1],), 8),
        ),
        solution="""
def second_largest(xs):
    xs = sorted(set(xs))
    return xs[-2] if len(xs) > 1 else None
""",
        mutants=(
            "def second_largest(xs):\n    xs = sorted(xs)\n    return xs[-2] if len(xs) > 1 else None",
            "def second_largest(xs):\n    return sorted(set(xs))[-2]",
            """
def second_largest(xs):
    xs = sorted(set(xs), key=abs)
    return xs[-2] if len(xs) > 1 else None
""",
            "def second_largest(xs):\n    xs = sorted(set(xs))\n    return xs[-2] if len(xs) > 1 else -1",
        ),
    ),
    Problem(
        name="balanced brackets",
        task="It takes a text and says, as a bool, whether its brackets ()[]{} are balanced and "
        "rightly nested. Other characters do not count.",
        entry_point="is_balanced",
        visible=_cases((("(a[b])",), True), (("(]",), False)),
        hidden=_cases(
            (("([)]",), False),
            (("",), True),
            (("((",), False),
            (("}{",), False),
            (("{x:[(1)]}",), True),
            (("())",), False),
        ),
        solution="""
def is_balanced(text):
    open_ones, pairs = [], {")": "(", "]": "[", "}": "{"}
    for mark in text:
        if mark in "([{":
            open_ones.append(mark)
        elif mark in pairs and (not open_ones or open_ones.pop() != pairs[mark]):
            return False
    return not open_ones
""",
        mutants=(
            """
def is_balanced(text):
    return all(text.count(a) == text.count(b) for a, b in ('()', '[]', '{}'))
""",
            """
def is_balanced(text):
    open_ones, pairs = [], {")": "(", "]": "[", "}": "{"}
    for mark in text:
        if mark in "([{":
            open_ones.append(mark)
        elif mark in pairs and (not open_ones or open_ones.pop() != pairs[mark]):
            return False
    return True
""",
            """
def is_balanced(text):
    depth = 0
    for mark in text:
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return False
    return depth == 0
""",
            "def is_balanced(text):\n    return 1 if text == '' else False",
        ),
    ),
    Problem(
        name="run lengths",
        task="It takes a text and returns a list of [character, count] for each run of equal "
        "characters, in order.",
        entry_point="runs",
        visible=_cases((("aab",), [["a", 2], ["b", 1]])),
        hidden=_cases(
            (("",), []),
            (("abba",), [["a", 1], ["b", 2], ["a", 1]]),
            (("zzzz",), [["z", 4]]),
            (("aA",), [["a", 1], ["A", 1]]),
        ),
        solution="""
from itertools import groupby

def runs(text):
    return [[c, len(list(g))] for c, g in groupby(text)]
""",
        mutants=(
            """
from collections import Counter

def runs(text):
    return [[c, n] for c, n in Counter(text).items()]
""",
            """
from itertools import groupby

def runs(text):
    return [(c, len(list(g))) for c, g in groupby(text)]
""",
            """
from itertools import groupby

def runs(text):
    return [[c, len(list(g))] for c, g in groupby(text.lower())]
""",
            """
from itertools import groupby

def runs(text):
    return [[c, len(list(g))] for c, g in groupby(text)][:2]
""",
        ),
    ),
    Problem(
        name="merge intervals",
        task="It takes a list of [start, end] with start <= end, in any order, and returns them merged "
        "where they overlap or touch, in rising order.",
        entry_point="merge",
        visible=_cases((([[1, 3], [2, 5]],), [[1, 5]])),
        hidden=_cases(
            (([[5, 6], [1, 2]],), [[1, 2], [5, 6]]),
            (([[1, 2], [2, 3]],), [[1, 3]]),
            (([[1, 10], [2, 3], [4, 5]],), [[1, 10]]),
            (([],), []),
            (([[1, 4], [0, 2], [6, 6]],), [[0, 4], [6, 6]]),
        ),
        solution="""
def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged
""",
        mutants=(
            """
def merge(intervals):
    merged = []
    for start, end in intervals:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged
""",
            """
def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([start, end])
    return merged
""",
            """
def merge(intervals):
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = end
        else:
            merged.append([start, end])
    return merged
""",
        ),
    ),
    Problem(
        name="roman numerals",
        task="It takes an integer from 1 to 3999 and returns it as a Roman numeral in capitals.",
        entry_point="roman",
        visible=_cases(((6,), "VI"), ((14,), "XIV")),
        hidden=_cases(
            ((1,), "I"), ((49,), "XLIX"), ((944,), "CMXLIV"), ((3999,), "MMMCMXCIX"), ((2008,), "MMVIII")
        ),
        solution="""
VALUES = dict(M=1000, CM=900, D=500, CD=400, C=100, XC=90, L=50, XL=40, X=10, IX=9, V=5, IV=4, I=1)

def roman(n):
    text = ""
    for letters, value in VALUES.items():
        text += letters * (n // value)
        n %= value
    return text
""",
        mutants=(
            """
VALUES = dict(M=1000, D=500, C=100, L=50, X=10, IX=9, V=5, IV=4, I=1)

def roman(n):
    text = ""
    for letters, value in VALUES.items():
        text += letters * (n // value)
        n %= value
    return text
""",
            "def roman(n):\n    return {6: 'VI', 14: 'XIV'}.get(n, 'I' * n)",
            """
VALUES = dict(IL=49, CM=900, M=1000, D=500, CD=400, C=100, XC=90, L=50, XL=40, X=10, IX=9, V=5, IV=4, I=1)

def roman(n):
    text = ""
    for letters, value in sorted(VALUES.items(), key=lambda pair: -pair[1]):
        text += letters * (n // value)
        n %= value
    return text
""",
        ),
    ),
    Problem(
        name="two that sum",
        task="It takes a list of integers and a target, and returns the indices [i, j], i < j, of two "
        "values that sum to the target: those with the smallest j; None where there are none.",
        entry_point="two_sum",
        visible=_cases((([2, 7, 11], 9), [0, 1])),
        hidden=_cases(
            (([3, 3], 6), [0, 1]),
            (([3, 1], 6), None),
            (([1, 2, 3, 4], 5), [1, 2]),
            (([], 0), None),
            (([-1, 0, 1, 0], 0), [0, 2]),
        ),
        solution="""
def two_sum(values, target):
    seen = {}
    for j, value in enumerate(values):
        if target - value in seen:
            return [seen[target - value], j]
        seen.setdefault(value, j)
    return None
""",
        mutants=(
            """
def two_sum(values, target):
    for i in range(len(values)):
        for j in range(len(values)):
            if values[i] + values[j] == target:
                return [i, j]
    return None
""",
            """
def two_sum(values, target):
    for i in range(len(values)):
        for j in range(i + 1, len(values)):
            if values[i] + values[j] == target:
                return [i, j]
    return None
""",
            """
def two_sum(values, target):
    places = {value: i for i, value in enumerate(values)}
    for i, value in enumerate(values):
        j = places.get(target - value)
        if j is not None and j > i:
            return [i, j]
    return []
""",
        ),
    ),
    Problem(
        name="mean of the middle",
        task="It takes a list of numbers and returns, as a float, their median: the mean of the two "
        "middle ones where their number is even. The list is never empty.",
        entry_point="median",
        visible=_cases((([3, 1, 2],), 2.0)),
        hidden=_cases((([4, 1, 3, 2],), 2.5), (([5],), 5.0), (([10, 9, 1, 2, 3],), 3.0), (([-1, 1],), 0.0)),
        solution="""
def median(values):
    values = sorted(values)
    n = len(values)
    return (values[(n - 1) // 2] + values[n // 2]) / 2
""",
        mutants=(
            "def median(values):\n    return float(sorted(values)[len(values) // 2])",
            """
def median(values):
    n = len(values)
    return (values[(n - 1) // 2] + values[n // 2]) / 2
""",
            "def median(values):\n    return sum(values) / len(values)",
            """
def median(values):
    values = sorted(values)
    n = len(values)
    return (values[(n - 1) // 2] + values[n // 2]) // 2
""",
        ),
    ),
    Problem(
        name="shortest path",
        task="It takes a grid, a list of texts of '.' and '#', and returns the least number of steps "
        "(up, down, left, right, on '.') from the top left to the bottom right, or -1 where there "
        "is no way. Both corners are '.'.",
        entry_point="steps",
        visible=_cases(((["..", ".."],), 2)),
        hidden=_cases(
            (([".#", "#."],), -1),
            ((["."],), 0),
            (([".#...", ".#.#.", "...#."],), 10),
            ((["....", ".##.", "...."],), 5),
            (([".#", ".."],), 2),
        ),
        solution="""
from collections import deque

def steps(grid):
    goal = (len(grid) - 1, len(grid[0]) - 1)
    seen, waiting = {(0, 0)}, deque([(0, 0, 0)])
    while waiting:
        row, column, taken = waiting.popleft()
        if (row, column) == goal:
            return taken
        for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if 0 <= r <= goal[0] and 0 <= c <= goal[1] and grid[r][c] == "." and (r, c) not in seen:
                seen.add((r, c))
                waiting.append((r, c, taken + 1))
    return -1
""",
        mutants=(
            "def steps(grid):\n    return len(grid) + len(grid[0]) - 2",
            """
from collections import deque

def steps(grid):
    goal = (len(grid) - 1, len(grid[0]) - 1)
    seen, waiting = {(0, 0)}, deque([(0, 0, 0)])
    while waiting:
        row, column, taken = waiting.popleft()
        if (row, column) == goal:
            return taken
        for r, c in ((row + 1, column), (row, column + 1)):
            if r <= goal[0] and c <= goal[1] and grid[r][c] == "." and (r, c) not in seen:
                seen.add((r, c))
                waiting.append((r, c, taken + 1))
    return -1
""",
            """
from collections import deque

def steps(grid):
    goal = (len(grid) - 1, len(grid[0]) - 1)
    seen, waiting = {(0, 0)}, deque([(0, 0, 1)])
    while waiting:
        row, column, taken = waiting.popleft()
        if (row, column) == goal:
            return taken
        for r, c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            if 0 <= r <= goal[0] and 0 <= c <= goal[1] and grid[r][c] == "." and (r, c) not in seen:
                seen.add((r, c))
                waiting.append((r, c, taken + 1))
    return -1
""",
        ),
    ),
    Problem(
        name="words by count",
        task="It reads a text and prints each different word, in small letters, with how often it "
        "stands there: the most frequent first, equal ones in the alphabet's order, one 'word "
        "count' on a line. Words are what white space divides.",
        entry_point=None,
        visible=_cases(("b a b\n", "b 2\na 1\n")),
        hidden=_cases(
            ("The the THE cat\n", "the 3\ncat 1\n"),
            ("d c\nb a\n", "a 1\nb 1\nc 1\nd 1\n"),
            ("one   two\tone\n\n", "one 2\ntwo 1\n"),
            ("", ""),
        ),
        solution="""
import sys
from collections import Counter

counts = Counter(sys.stdin.read().lower().split())
for word, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
    print(word, count)
""",
        mutants=(
            """
import sys
from collections import Counter

for word, count in Counter(sys.stdin.read().lower().split()).most_common():
    print(word, count)
""",
            """
import sys
from collections import Counter

counts = Counter(sys.stdin.read().split())
for word, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
    print(word, count)
""",
            """
from collections import Counter

counts = Counter(input().lower().split(" "))
for word, count in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0])):
    print(word, count)
""",
        ),
    ),
    Problem(
        name="change",
        task="It reads two lines, an amount and the coins there are (integers, as many as needed of "
        "each), and prints the least number of coins that make the amount, or -1 where none do.",
        entry_point=None,
        visible=_cases(("11\n1 2 5\n", "3\n"), ("3\n2\n", "-1\n")),
        hidden=_cases(
            ("6\n1 3 4\n", "2\n"),
            ("0\n5\n", "0\n"),
            ("7\n3 5\n", "-1\n"),
            ("27\n4 9 10\n", "3\n"),
            ("100\n1 50\n", "2\n"),
        ),
        solution="""
amount = int(input())
coins = list(map(int, input().split()))
least = [0] + [None] * amount
for total in range(1, amount + 1):
    ways = [least[total - coin] for coin in coins if coin <= total and least[total - coin] is not None]
    least[total] = min(ways) + 1 if ways else None
print(-1 if least[amount] is None else least[amount])
""",
        mutants=(
            """
amount = int(input())
count = 0
for coin in sorted(map(int, input().split()), reverse=True):
    count += amount // coin
    amount %= coin
print(-1 if amount else count)
""",
            """
amount = int(input())
coins = list(map(int, input().split()))
least = [0] + [10**9] * amount
for total in range(1, amount + 1):
    least[total] = min([least[total - coin] + 1 for coin in coins if coin <= total] or [10**9])
print(least[amount])
""",
            """
amount = int(input())
coins = list(map(int, input().split()))
least = [0] + [None] * amount
for total in range(1, amount + 1):
    ways = [least[total - coin] for coin in coins if coin <= total and least[total - coin] is not None]
    least[total] = min(ways) + 1 if ways else None
print(least[amount] or -1)
""",
        ),
    ),
)


class CodingProblems(ProblemEnvironment):
    """The ten problems: six to train on, two for validation, two for the test.

    Whether a program is right the reward tells, by the hidden tests (`reward: code`, or `reasoning`, which
    also pays for the format); the environment gives no verdict.
    """

    def make(self, split: Split) -> Sequence[Scenario]:
        return [
            Scenario(
                id=f"coding/{problem.name.replace(' ', '-')}",
                family="coding",
                opening=problem.prompt(),
                context={"tests": problem.tests()},
                split=split,
            )
            for problem in PROBLEMS[_PLACES[split]]
        ]

    def judge(self, scenario: Scenario, answer: str) -> float | None:
        return None

    def solve(self, scenario: Scenario) -> Trace:
        [problem] = [problem for problem in PROBLEMS if problem.prompt() == scenario.opening]
        thought = "A function" if problem.entry_point else "A program"
        steps = (f"{thought} is asked for.", problem.task)
        return Trace(steps=steps, answer=f"\n```python\n{problem.solution.strip()}\n```\n")


_PLACES: Mapping[Split, slice] = {"train": slice(6), "validation": slice(6, 8), "test": slice(8, None)}
