"""Scores from the same starts, their paired differences, and the table."""

from __future__ import annotations

import numpy as np
import pytest
from control_toys import Signals

from scripts.paired_scores import Score, compare, difference
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.types.errors import ConfigurationError


def score(rewards, seeds=None, **components):
    return Score(
        seeds=tuple(seeds or range(len(rewards))),
        rewards=np.array(rewards, dtype=float),
        components={name: np.array(part, dtype=float) for name, part in components.items()},
    )


def test_a_score_is_the_mean_of_a_step():
    environment = Signals(stop=2)
    found = Score.of(evaluate_rule(lambda env: lambda: env.signals[env.time], environment, [0, 1]))
    assert found.rewards.tolist() == [0.75, 0.75]
    assert found.components["cost"].tolist() == [-0.25, -0.25]
    assert (found.mean, found.part("named")) == (0.75, 1.0)
    other = Score.of(evaluate(MlpPolicy(environment.spec), environment, [0, 1]))
    assert other.seeds == found.seeds


def test_the_difference_is_paired_and_leaves_out_what_failed():
    noise = np.random.default_rng(0).normal(0, 10, 400)
    better = score(noise + 1 + np.random.default_rng(1).normal(0, 0.1, 400))
    found = difference(better, score(noise))
    assert found.mean == pytest.approx(1, abs=0.02)
    assert found.interval[0] == pytest.approx(0.99, abs=0.02)
    assert found.verdict == "better"
    assert difference(score(noise), better).verdict == "worse"
    assert difference(score([1, -1, 2, -1]), score([0, 0, 0, 0])).verdict == "unclear"
    assert difference(score([1, np.nan, 3]), score([0, 5, 2])).mean == 1.0
    with pytest.raises(ConfigurationError, match="the two scores have other seeds"):
        difference(score([1.0]), score([1.0], seeds=[7]))
    with pytest.raises(ConfigurationError, match="every episode failed in one of the two"):
        difference(score([1.0]), score([np.nan]))


def test_the_table_has_differences_and_the_share_of_the_gap():
    scores = {
        "HPA": score([-2.0, -1.0, -3.0], late=[4, 5, 6]),
        "policy": score([-1.5, -0.5, -2.0], late=[3, 3, 3]),
        "plan": score([-1.0, 0.0, -1.0], late=[1, 1, 1]),
    }
    found = compare(scores, "HPA", bound="plan")
    assert [row["name"] for row in found.rows()] == ["plan", "policy", "HPA"]
    assert found.gap_closed("policy") == pytest.approx(0.5)
    assert found.gap_closed("policy", bound="HPA") is None
    table = found.table().splitlines()
    assert table[0] == "| policy | reward | late | against HPA, paired 95 % | of the gap to plan |"
    assert table[3].startswith("| policy | -1.333 | 3.000 | +0.667 [")
    assert table[3].endswith("| 50% |")
    assert table[4] == "| HPA | -2.000 | 5.000 | - | - |"
    assert "late" not in compare({"HPA": score([1.0])}, "HPA").table()
    assert compare(scores, "HPA").rows()[1]["gap_closed"] is None


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(ConfigurationError, match="bound must be one of HPA, got 'mpc'"):
        compare({"HPA": score([1.0])}, "HPA", bound="mpc")
    with pytest.raises(ConfigurationError, match="a was played from other seeds than b"):
        compare({"a": score([1.0], seeds=[3]), "b": score([1.0])}, "b")
