"""Problems from a file, or rows at hand, each with its text and what is right.

[{"problem": "What is 6 times 7?", "answer": 42}, {"problem": "Write add(a, b).", "tests": [...]}]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.answers.agreement import Form, check_truth, math_agreement
from stateset_agents.core.sources.datasets import with_drawn_split
from stateset_agents.core.sources.files import read_rows
from stateset_agents.environments.problems.environment import ProblemEnvironment, Trace, split_of
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split

_TEXTS = ("problem", "question", "prompt")
_TRUTHS = ("answer", "tests")


class ProblemFiles(ProblemEnvironment):
    """Problems that somebody wrote down.

        ProblemFiles("math_problems.json")

    A problem is a mapping with its text (`problem`, `question` or `prompt`) and either `answer`, as
    `math_agreement` takes it, or `tests` for a program. `family`, `difficulty`, `split`, `id` and `solution`,
    the way to the answer, may stand beside; anything else goes into the context. A problem without a split
    gets one by its text: one in ten is for validation, one for the test. Whether a program is right only the
    reward can tell: the environment gives no verdict on `tests`.
    """

    def __init__(
        self, path: str | Path | Sequence[Mapping[str, Any]], *, form: Form = "value", **settings: Any
    ) -> None:
        """`path` of the file, or its rows; `form` is that of `math_agreement`, `settings` are those of
        `ProblemEnvironment`. Raises ConfigurationError for a file that cannot be read, and for a problem
        whose own answer would be wrong."""
        super().__init__(**settings)
        self._form: Form = form
        self._problems = read_problems(path, form=form)

    def make(self, split: Split) -> Sequence[Scenario]:
        return [problem for problem in self._problems if problem.split == split]

    def hold_out(self, split: Split) -> None:
        """Take some problems of train, one at least, into a split that has none."""
        train = self.make("train")
        if len(train) > 1 and not self.make(split):
            problems = with_drawn_split(train, split)
            self._problems = [problem for problem in self._problems if problem.split != "train"] + problems
            self._made.clear()

    def judge(self, scenario: Scenario, answer: str) -> float | None:
        if "answer" not in scenario.context:
            return None
        return float(math_agreement(answer, scenario.context["answer"], form=self._form))

    def solve(self, scenario: Scenario) -> Trace:
        solution, answer = scenario.context.get("solution"), scenario.context.get("answer")
        if answer is None and solution is None:
            raise ConfigurationError(f"problem {scenario.id!r} has tests and no solution: nobody can show it")
        if answer is None:
            return Trace(steps=(), answer=str(solution))
        return Trace(steps=tuple(str(solution or "").splitlines()), answer=_as_text(answer))


def read_problems(path: str | Path | Sequence[Mapping[str, Any]], *, form: Form = "value") -> list[Scenario]:
    """The problems of a file, or of rows, as scenarios, in their order. Raises ConfigurationError with the
    problem's number."""
    rows: Any = path
    of = ""
    if isinstance(path, str | Path):
        rows, of = [row for _, row in read_rows(path, of="problems")], f" of {path}"
    if not rows:
        raise ConfigurationError(f"{str(path)!r} has no problem: write a list of them")
    problems: list[Scenario] = []
    numbers: dict[str, int] = {}
    for number, entry in enumerate(rows, start=1):
        problem = _problem(entry, f"problem {number}{of}", form)
        if problem.opening in numbers:
            raise ConfigurationError(
                f"problem {number}{of} is problem {numbers[problem.opening]} again: take one out"
            )
        numbers[problem.opening] = number
        problems.append(problem)
    return problems


def _problem(entry: Any, where: str, form: Form) -> Scenario:
    if not isinstance(entry, Mapping):
        raise ConfigurationError(f"{where} must be a mapping, got {entry!r:.60}")
    texts = [key for key in _TEXTS if key in entry]
    truths = [key for key in _TRUTHS if entry.get(key) is not None]
    if len(texts) != 1 or not isinstance(entry[texts[0]], str) or not entry[texts[0]].strip():
        raise ConfigurationError(f"{where} needs a text, as one of {', '.join(_TEXTS)}")
    if len(truths) != 1:
        raise ConfigurationError(f"{where} needs either an answer or tests")
    text = entry[texts[0]]
    if truths == ["answer"]:
        check_truth(entry["answer"], form=form, where=where)
    beside = ("id", "family", "split", "opening", *texts)
    context = {key: value for key, value in entry.items() if key not in beside}
    return Scenario(
        id=str(entry.get("id") or f"problem {text}"),
        family=str(entry.get("family") or "default"),
        opening=text,
        context=context,
        split=entry.get("split") or split_of(text),
    )


def _as_text(answer: Any) -> str:
    """A truth as somebody would answer it: of a list its values, of each the first wording."""
    if isinstance(answer, list):
        return ", ".join(str(item[0] if isinstance(item, list) and item else item) for item in answer)
    return str(answer)
