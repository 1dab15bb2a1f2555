"""An estimator or a loss is named in its registry alone; settings, their errors and the docs follow it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import stateset_agents
from scripts.configuration_reference import reference
from stateset_agents.algorithms.advantages import BASELINES, Baseline, group_advantages
from stateset_agents.algorithms.policy_losses import LOSSES, PolicyLoss, log_likelihood
from stateset_agents.runtime.named_code import imported
from stateset_agents.training.components import ENVIRONMENTS
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ESTIMATORS, Advantages, Estimator
from stateset_agents.types.errors import ConfigurationError

PACKAGE = Path(stateset_agents.__file__).parent
TRL = {"training/trl/settings.py", "training/trl/update.py"}
"""They have TRL's names, some of which are ours."""
CHOSEN = {
    "grpo": TRL
    | {"training/settings/update.py"}  # the default of loss_type
    | {"reporting/learn_pages.py"},  # a page's name
    "dr_grpo": TRL | {"training/estimators.py"},  # the default under unbiased estimators
    "dapo": {"training/trl/settings.py"},
    "cispo": {"training/trl/settings.py"},
    "ppo": {"numeric/settings.py"},  # the default of numeric trainings
}
"""Name -> the modules besides its registry that have it: they choose it, or translate."""
OTHER_MEANINGS = {"group", "branch"}
"""Also a group's number in an event, a scope of rewards, a stream of seeds; looked for in training/ alone."""


def texts_of(path: Path) -> list[str]:
    """The strings of a module, without docstrings and `__all__`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            left_out.add(node.value)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            left_out.update(ast.walk(node.value))
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in left_out]
    return [node.value for node in strings if isinstance(node.value, str)]


@cache
def texts() -> dict[str, list[str]]:
    """Module -> its strings; read when a test asks, not in every process that collects."""
    return {path.relative_to(PACKAGE).as_posix(): texts_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


def modules_with(name: str) -> set[str]:
    """Modules that have the name in a string, as a word."""
    if name in OTHER_MEANINGS:
        return {
            module
            for module, found in texts().items()
            if name in found and module.startswith("training/") and not module.startswith("training/loop/")
        }
    word = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
    return {module for module, found in texts().items() if any(map(word.search, found))}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_is_named_in_one_module(name: str) -> None:
    assert modules_with(name) == {"training/estimators.py"}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_named_in_one_module_and_where_it_is_chosen(name: str) -> None:
    assert modules_with(name) == {"algorithms/policy_losses.py"} | CHOSEN.get(name, set())


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_named_in_one_module_and_where_it_is_chosen(name: str) -> None:
    chosen = {
        "group_mean": {"algorithms/advantages.py", "core/value_function.py", "evaluation/rescoring.py"}
        | {"training/settings/update.py", "reporting/learn_pages.py"},  # defaults
        "leave_one_out": set(),
    }
    twins = {"algorithms/group_arrays.py"} if name in chosen else set()
    assert modules_with(name) == {"algorithms/advantages.py"} | twins | chosen.get(name, set())


def test_a_baseline_that_is_added_says_what_rewards_are_compared_with(monkeypatch) -> None:
    best_of_the_batch = Baseline(lambda rewards: [max(rewards)] * len(rewards), over="batch")
    monkeypatch.setitem(BASELINES, "best", best_of_the_batch)
    assert TrainingConfig(baseline_type="best").baseline_type == "best"
    rewards = [[1.0, 0.0], [None, 3.0]]
    assert group_advantages(rewards, baseline="best", scaling="none") == [[-2.0, -3.0], [None, 0.0]]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_named_environment_is_there(name: str) -> None:
    assert {"scenarios", "start"} <= set(dir(imported("environment", ENVIRONMENTS[name])))


def no_credit(step: object) -> Advantages:
    raise AssertionError("nothing is credited here")


def test_what_is_added_to_a_registry_is_a_value_of_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    estimator = Estimator(credit=no_credit, per="turn", normalizations=("none",), group_default=3)
    loss = PolicyLoss(token_loss=log_likelihood, averaging="token", clips="none")
    monkeypatch.setitem(ESTIMATORS, "median_turn", estimator)
    monkeypatch.setitem(LOSSES, "raft", loss)
    config = TrainingConfig(advantage_estimator="median_turn", loss_type="raft")
    assert (config.advantage_normalization, config.min_group_size) == ("none", 3)
    assert TrainingConfig(**config.model_dump(mode="json")) == config
    for names in (ESTIMATORS, LOSSES):
        assert f"One of {', '.join(f'`{name}`' for name in names)}." in reference()
    assert TrainingConfig.model_json_schema()["properties"]["loss_type"]["enum"][-1] == "raft"
    with pytest.raises(ConfigurationError, match=r"or 'raft', got 'rafft' \(did you mean 'raft'\?\)$"):
        TrainingConfig(loss_type="rafft")
    with pytest.raises(ConfigurationError, match=r"or 'median_turn', got 'turn_medain' \(did you mean"):
        TrainingConfig(advantage_estimator="turn_medain")
    with pytest.raises(ConfigurationError, match="median_turn or one with a critic"):
        TrainingConfig(gamma=0.9)
    with pytest.raises(ConfigurationError, match="raft has no dual clip: leave dual_clip unset"):
        TrainingConfig(loss_type="raft", dual_clip=2.0)
