"""Problems of reasoning-gym (https://github.com/open-thought/reasoning-gym), made by its generators from
seeds.

Only data sets whose own verdict holds are offered (`procedural_allowed.yaml`): scripts/reasoning_gym_audit.py
tries each with its own answers, with replies that know nothing, and with text that must not be run as code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.environments.problems.arithmetic import steps_of
from stateset_agents.environments.problems.environment import ProblemEnvironment, Trace, at_least, split_of
from stateset_agents.runtime.named_code import library
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that, nearest

ALLOWED = frozenset[str](read_yaml(Path(__file__).with_name("procedural_allowed.yaml")))
_MAX_ANSWER = 2_000
"""Characters; some answers are grids."""
_DRAWS = 30
"""Draws for each problem wanted; a data set that gave too few by then is taken to have no more."""
_SEEDS = 2**31


class ReasoningGymProblems(ProblemEnvironment):
    """Problems of one or more of reasoning-gym's data sets.

        ReasoningGymProblems("chain_sum")
        ReasoningGymProblems({"chain_sum": {"max_terms": 4}, "leg_counting": {}})

    A data set is the family. Right is what the library gives its full score (`verdict_of`), and
    `context["verdict"]` tells rewards to ask for that. A problem's text decides its split.
    """

    def __init__(
        self,
        datasets: str | Sequence[str] | Mapping[str, Mapping[str, Any]] = "all",
        *,
        num_train: int = 1000,
        num_validation: int = 50,
        num_test: int = 100,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        """
        Args:
            datasets: `all` that are allowed, a name, names, or names with the arguments of each.
            num_train: Maximum problems to train on, as many of each data set; fewer where one has no
                more that differ. `num_validation` and `num_test` likewise.
            seed: Chooses the problems to train on.
            settings: Those of `ProblemEnvironment`.

        Raises ConfigurationError where the library is missing, for a data set that is not allowed, and for
        arguments that it does not take.
        """
        at_least(1, num_train=num_train, num_validation=num_validation, num_test=num_test)
        super().__init__(seed=seed, **settings)
        self._library = load_reasoning_gym()
        self._arguments = _named(datasets)
        self._numbers: dict[Split, int] = {"train": num_train, "validation": num_validation, "test": num_test}
        self._entries: dict[str, tuple[Any, Mapping[str, Any]]] = {}
        for name in self._arguments:
            self._dataset(name, 0, 1)

    def make(self, split: Split) -> Sequence[Scenario]:
        each = -(-self._numbers[split] // len(self._arguments))
        columns = [self._problems(name, split, each) for name in self._arguments]
        rows = [
            scenario for place in range(each) for column in columns for scenario in column[place : place + 1]
        ]
        return rows[: self._numbers[split]]

    def _problems(self, name: str, split: Split, number: int) -> list[Scenario]:
        seed = derive(self._seed if split == "train" else 0, "reasoning_gym", name, split) % _SEEDS
        dataset = self._dataset(name, seed, _DRAWS * number)
        scenarios: dict[str, Scenario] = {}
        for place in range(_DRAWS * number):
            entry = dataset[place]
            question = str(entry["question"])
            if question in scenarios or split_of(question) != split:
                continue
            scenario = Scenario(
                id=f"{name} {seed} {place}",
                family=name,
                opening=question,
                context={"verdict": "environment", "dataset": name},
                split=split,
            )
            scenarios[question] = scenario
            self._entries[scenario.id] = dataset, entry
            if len(scenarios) == number:
                break
        return list(scenarios.values())

    def _dataset(self, name: str, seed: int, size: int) -> Any:
        try:
            return self._library.create_dataset(name, seed=seed, size=size, **self._arguments[name])
        except (TypeError, ValueError, AssertionError) as error:  # what its configurations raise
            raise ConfigurationError(
                f"data set {name!r} does not take {dict(self._arguments[name])}: {error}"
            ) from error

    def judge(self, scenario: Scenario, answer: str) -> float:
        if scenario.id not in self._entries:
            raise ConfigurationError(
                f"{scenario.id!r} is no problem of this environment: take one of environment.scenarios(split)"
            )
        if not answer or len(answer) > _MAX_ANSWER:
            return 0.0
        dataset, entry = self._entries[scenario.id]
        try:
            return verdict_of(float(dataset.score_answer(answer=answer, entry=entry)))
        except _UNREADABLE:  # the answer's doing: own answers were tried, and an error must not be a way out
            return 0.0

    def solve(self, scenario: Scenario) -> Trace:
        """A sum term by term; of any other problem only the answer is known."""
        _, entry = self._entries[scenario.id]
        expression = str(entry["metadata"].get("expression", ""))
        steps = steps_of(expression) if _SUM.fullmatch(expression) else ()
        return Trace(steps=tuple(steps), answer=str(entry["answer"]), between=" = ")


_SUM = re.compile(r"-?[0-9]{1,9}(?: [-+] [0-9]{1,9})+")


_UNREADABLE = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RecursionError, SyntaxError, TypeError, ValueError),
)
"""Errors that an answer causes in its reader; any other, a lack of memory say, leaves the reply unscored."""


def verdict_of(score: float) -> float:
    """1 for the library's full score, else 0: it pays a part for any text that holds the right one, lists
    too."""
    return float(score >= 1)


def load_reasoning_gym() -> Any:
    """The library. Raises ConfigurationError where it is missing."""
    return library(
        "reasoning_gym",
        "environment reasoning_gym needs the reasoning-gym library ({error}), which builds a part in C: "
        'pip install "reasoning-gym>=0.1.25,<0.2"',
    )


def _named(datasets: Any) -> Mapping[str, Mapping[str, Any]]:
    """Each data set with its arguments."""
    if datasets == "all":
        datasets = sorted(ALLOWED)
    if isinstance(datasets, str):
        datasets = [datasets]
    if not isinstance(datasets, Mapping):
        datasets = {name: {} for name in datasets}
    if not datasets:
        raise ConfigurationError("datasets is empty: name one, or write all")
    for name, arguments in datasets.items():
        if name not in ALLOWED:
            raise ConfigurationError(
                f"datasets has {name!r:.60}, which is none whose verdict was found to hold"
                f"{nearest(str(name), ALLOWED)}: see procedural_allowed.yaml"
            )
        is_mapping = isinstance(arguments or {}, Mapping)
        expect_that(is_mapping, f"the arguments of data set {name!r}", "be a mapping", arguments, length=60)
    return {name: dict(arguments or {}) for name, arguments in datasets.items()}
