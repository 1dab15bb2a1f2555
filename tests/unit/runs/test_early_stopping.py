"""Which evaluation is the best, when waiting ends, and when something is due."""

from __future__ import annotations

import pytest

from stateset_agents.runs.early_stopping import Best, crossed
from stateset_agents.training.config import TrainingConfig
from stateset_agents.types.errors import ConfigurationError


def after(*values, threshold=0.0):
    best = Best(metric="eval/success")
    for number, value in enumerate(values, start=1):
        best = best.after(10 * number, value, threshold=threshold)
    return best.step, best.value, best.waits


def test_the_highest_value_is_the_best_and_the_earlier_of_two_equals():
    assert after(0.2, 0.5, 0.4) == (20, 0.5, 1)
    assert after(0.5, 0.5, 0.5) == (10, 0.5, 2)
    assert after(0.2, 0.1, 0.3) == (30, 0.3, 0)


def test_a_gain_within_the_threshold_is_the_best_and_still_a_wait():
    assert after(0.50, 0.52, 0.54, threshold=0.05) == (30, 0.54, 2)
    assert after(0.50, 0.56, threshold=0.05) == (20, 0.56, 0)


def test_an_evaluation_without_a_value_improves_nothing():
    assert after(0.5, None) == (10, 0.5, 1)
    assert after(None) == (None, None, 1)


def test_patience_is_counted_in_evaluations_and_0_never_ends():
    best = Best(metric="eval/reward", step=1, value=0.5, waits=3)
    assert [best.exhausts(patience) for patience in (0, 2, 3, 4)] == [False, True, True, False]
    assert best.why_stopped() == (
        "stopped early: eval/reward did not improve on 0.5 of step 1 in the last 3 evaluations"
    )


def test_the_metric_is_chosen_once_by_what_the_first_evaluation_has():
    judged = {"eval/success": 0.5, "eval/reward": 1.0}
    assert Best().chosen("auto", judged).metric == "eval/success"
    assert Best().chosen("auto", {"eval/reward": 1.0}).metric == "eval/reward"
    assert Best().chosen("eval/reward", judged).metric == "eval/reward"
    assert Best(metric="eval/reward").chosen("auto", judged).metric == "eval/reward"
    with pytest.raises(ConfigurationError, match="gives no verdict: set it to eval/reward"):
        Best().chosen("eval/success", {"eval/reward": 1.0})


@pytest.mark.parametrize(
    ("before", "now", "due"), [(0, 0, False), (0, 49, False), (49, 50, True), (40, 63, True), (50, 99, False)]
)
def test_something_is_due_when_a_multiple_is_crossed_and_never_at_0(before, now, due):
    assert crossed(50, before, now) is due
    assert crossed(0, before, now) is False


@pytest.mark.parametrize("setting", [{"early_stopping_patience": 2}, {"load_best_at_end": True}])
def test_without_evaluations_there_is_nothing_to_stop_by(setting):
    with pytest.raises(ConfigurationError, match=f"{next(iter(setting))} needs evaluations: set eval_steps"):
        TrainingConfig(**setting)
    assert TrainingConfig(**setting, eval_steps=5)
