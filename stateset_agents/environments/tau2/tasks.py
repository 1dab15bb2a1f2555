"""tau2's tasks as scenarios: the official splits, families, and what of a task cannot be scored here."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.environments.tau2.library import DomainName, library
from stateset_agents.environments.tau2.world import Domain
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split, expect_split

NO_WRITE, WITH_WRITES = "no_write", "with_writes"
"""The family of tasks in which nothing is to be changed, which doing nothing often gets right; and the part
that all others make together."""
SEVERAL = "several_writes"
_SCORED = ("DB", "ENV_ASSERTION", "ACTION", "COMMUNICATE")
"""Parts of tau2's `reward_basis` that can be scored; NL_ASSERTION needs a judge."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TaskEntry:
    """A task of tau2's, with the scenario that stands for it."""

    task: Any
    """tau2's `Task`."""
    scenario: Scenario

    @property
    def actions(self) -> Sequence[Any]:
        """The gold actions, in order."""
        criteria = self.task.evaluation_criteria
        return [] if criteria is None else criteria.actions or []


def entry(
    domain: Domain,
    task: Any,
    split: Split,
    *,
    family: str | None = None,
    num_writes: int | None = None,
    pair: str | None = None,
) -> TaskEntry:
    """The scenario of a task; `family` and `num_writes` are read off its gold actions when absent. `pair`
    names it and its twin.

    Raises ConfigurationError for a task that could not be scored in full, or not be played.
    """
    _refuse_unfit(domain, task)
    actions = [] if task.evaluation_criteria is None else task.evaluation_criteria.actions or []
    writes = [action.name for action in actions if action.name in domain.writes]
    num_writes = len(writes) if num_writes is None else num_writes
    instructions = task.user_scenario.instructions
    told = {} if isinstance(instructions, str) else {"reason_for_call": instructions.reason_for_call}
    scenario = Scenario(
        id=f"{domain.name}:{task.id}",
        family=family or _family(domain, task, writes),
        context={
            "task": task.id,
            **told,
            "num_writes": num_writes,
            **({"part": WITH_WRITES} if num_writes else {}),
            **({} if pair is None else {"pair": pair}),
        },
        split=split,
    )
    return TaskEntry(task=task, scenario=scenario)


def _family(domain: Domain, task: Any, writes: Sequence[str]) -> str:
    if not writes:
        return NO_WRITE
    if domain.name == "telecom" and task.id.startswith(
        "["
    ):  # "[mms_issue]airplane_mode_on|...", as tau2's are
        return str(task.id[1:].partition("]")[0])
    return writes[0] if len(set(writes)) == 1 else SEVERAL


def _refuse_unfit(domain: Domain, task: Any) -> None:
    criteria = task.evaluation_criteria
    if criteria is None:
        raise ConfigurationError(
            f"tau2 task {task.id!r} has no evaluation_criteria: give it some, or leave it out"
        )
    parts = [part.value for part in criteria.reward_basis]
    unscored = [part for part in parts if part not in _SCORED]
    if unscored or not parts:
        raise ConfigurationError(
            f"tau2 task {task.id!r} is paid by {', '.join(unscored) or 'nothing'}, which cannot be scored "
            f"here: leave it out, or give it a reward_basis of {', '.join(_SCORED)}"
        )
    state = task.initial_state
    if state is not None and state.message_history:
        raise ConfigurationError(
            f"tau2 task {task.id!r} begins with a message_history, which cannot be played: leave it out"
        )
    if state is not None and state.initialization_data is not None and domain.name != "telecom":
        raise ConfigurationError(
            f"tau2 task {task.id!r} has initialization_data, which only telecom's can have here: leave it out"
        )
    if domain.solo and not task.ticket:
        raise ConfigurationError(f"tau2 task {task.id!r} has no ticket: it cannot be played solo")


@functools.cache
def _official(domain: DomainName) -> Mapping[Split, Sequence[Any]]:
    module = library().domains[domain]
    folder = library().folder / "data" / "tau2" / "domains" / domain
    splits = module.get_tasks_split()
    # not `get_tasks`, which makes an object of each of telecom's 2,285
    by_id = {task["id"]: task for task in json.loads((folder / "tasks.json").read_text(encoding="utf-8"))}
    make = library().tasks.Task.model_validate
    return {
        "train": [make(by_id[id]) for id in splits["train"]],
        "test": [make(by_id[id]) for id in splits["test"]],
    }


def official_tasks(domain: Domain, num_validation: int) -> list[TaskEntry]:
    """tau2's official train and test tasks, `num_validation` of those to train on held back, evenly spaced.

    Raises ConfigurationError where so many cannot be held back.
    """
    tasks = _official(domain.name)
    num_train = len(tasks["train"])
    if not 0 <= num_validation < num_train:
        raise ConfigurationError(
            f"num_validation must be from 0 to {num_train - 1}, for {domain.name} has {num_train} tasks to "
            f"train on, got {num_validation!r}"
        )
    held_back = {index * num_train // num_validation for index in range(num_validation)}
    return [
        *(
            entry(domain, task, "validation" if index in held_back else "train")
            for index, task in enumerate(tasks["train"])
        ),
        *(entry(domain, task, "test") for task in tasks["test"]),
    ]


def tasks_of_file(domain: Domain, path: str | Path) -> list[TaskEntry]:
    """Tasks in tau2's format, a JSON list; each may have a `split` besides, `train` when absent.

    Raises ConfigurationError for a file that is none, and for tasks as `entry` does.
    """
    import pydantic

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"tasks must be official, made, or a JSON file of tau2 tasks, got {str(path)!r}: {error}"
        ) from error
    if not isinstance(data, list) or not data or not all(isinstance(task, dict) for task in data):
        raise ConfigurationError(f"{path} must hold a list of tau2 tasks, got {type(data).__name__}")
    entries = []
    for index, item in enumerate(data):
        try:
            task = library().tasks.Task.model_validate(item)
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigurationError(
                f"{path}: task {index} is none of tau2's: {place}: {first['msg']}"
            ) from error
        entries.append(
            entry(domain, task, expect_split(item.get("split", "train"), f"{path}: split of {task.id}"))
        )
    ids = [made.scenario.id for made in entries]
    twice = next((id for id in ids if ids.count(id) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"{path}: task {twice!r} stands twice: ids must be unique")
    return entries
