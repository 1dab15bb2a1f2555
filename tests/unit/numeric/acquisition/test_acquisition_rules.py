"""Rules that choose experiments, those that imagine outcomes, and campaigns."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from scripts.rivals.lookahead import rollout_lookahead, rollout_regrets
from stateset_agents.numeric.acquisition.campaign import play
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.lookahead import knowledge_values
from stateset_agents.numeric.acquisition.rules import RULES, Situation, expected_improvement

FAMILY = LinearFamily(num_variables=4)


def situation(family: LinearFamily = FAMILY, number: int = 3, **changes: object) -> Situation:
    tasks = family.draw(range(number))
    made = Situation(
        belief=tasks.belief,
        costs=tasks.menu.costs,
        left=tasks.budget,
        counts=np.zeros(tasks.menu.costs.shape, dtype=np.int64),
        random=np.random.default_rng(0),
    )
    return replace(made, **changes)  # type: ignore[arg-type]  # any field


def test_expected_improvement_by_hand() -> None:
    found = expected_improvement(np.array([[1.0, 0.0, 0.0]]), np.array([[2.0, 0.0, 1.0]]))
    # of the best: sd / sqrt(2 pi); known to be worse: 0; one deviation below: phi(1) - (1 - Phi(1))
    phi, tail = math.exp(-0.5) / math.sqrt(2 * math.pi), 0.5 * math.erfc(1 / math.sqrt(2))
    assert found[0] == pytest.approx([2 / math.sqrt(2 * math.pi), 0.0, phi - tail])


@pytest.mark.parametrize("name", RULES)
def test_every_rule_chooses_what_can_be_paid(name: str) -> None:
    now = situation(number=20)
    left = now.costs.min(axis=1)  # pays the cheapest alone
    chosen = RULES[name](replace(now, left=left))
    assert (now.costs[np.arange(20), chosen] <= left).all()


def test_rules_differ_as_they_say() -> None:
    now = situation(number=50)
    mean, deviation = now.belief.effect_moments()
    assert np.array_equal(RULES["sd"](now), deviation.argmax(axis=1))
    assert np.array_equal(RULES["sd per cost"](now), (deviation / now.costs).argmax(axis=1))
    assert np.array_equal(RULES["EI"](now), expected_improvement(mean, deviation).argmax(axis=1))
    assert (RULES["EI per cost"](now) != RULES["EI"](now)).any()
    counts = np.ones(now.costs.shape, dtype=np.int64)
    counts[:, 2] = 0
    assert (RULES["round robin"](replace(now, counts=counts)) == 2).all()


def test_thompson_chooses_as_often_as_an_intervention_is_best() -> None:
    one = situation(number=1)
    many = replace(one.take(np.zeros(4000, dtype=np.int64)), random=np.random.default_rng(0))
    shares = np.bincount(RULES["Thompson"](many), minlength=6) / 4000
    random = np.random.default_rng(1)
    drawn = one.belief.sampled_effects(random.standard_normal((1, 20_000, 4, 5)), random.random((1, 20_000)))
    best = np.bincount(drawn[0].argmax(axis=1), minlength=6) / 20_000
    assert shares == pytest.approx(best, abs=0.03)


def test_the_knowledge_gradient_of_one_arm_is_its_closed_form() -> None:
    """X -> Y with a known intercept: do(X = v) tells w, and the best of w v and -w v is |w| v."""
    family = LinearFamily(num_variables=2, density=1.0, intercept_scale=1e-6)
    now = situation(family, 1)
    values = knowledge_values(now, 4000)
    # the mean of w after one experiment has variance 1 / (1 + s^2 / v^2), v = 1; E|mean| v of a normal
    expected = math.sqrt(2 / math.pi) * math.sqrt(1 / (1 + 0.5**2))
    assert values[0] == pytest.approx([expected, expected], rel=0.04)


def test_rollouts_of_a_budget_for_one_experiment_are_the_knowledge_gradient() -> None:
    """What is known better afterwards is less regret: their sum is the regret of today's recommendation."""
    now = situation(LinearFamily(num_variables=4, costs=(1.0, 1.0), budget=1.0), 5)
    regrets = rollout_regrets(now, RULES["sd"], samples=600).mean(axis=2)
    values = knowledge_values(now, 600)
    saved = regrets.mean(axis=1, keepdims=True) - regrets
    gained = values - values.mean(axis=1, keepdims=True)
    assert np.corrcoef(saved.ravel(), gained.ravel())[0, 1] > 0.9


def test_caution_keeps_the_base_rule() -> None:
    now = situation(number=8)
    base = RULES["EI per cost"]
    assert np.array_equal(rollout_lookahead(base, samples=4, caution=1e9)(now), base(now))
    assert (rollout_lookahead(base, samples=4, caution=0.0)(now) != base(now)).any()


def test_campaigns_spend_the_budget_and_are_paired() -> None:
    tasks = FAMILY.draw(range(40))
    outcome = play(RULES["sd per cost"], tasks)
    rows, spent = np.arange(40), np.zeros(40)
    for actions in outcome.actions:
        spent += np.where(actions >= 0, tasks.menu.costs[rows, actions], 0.0)
    assert (spent <= FAMILY.budget + 1e-9).all()
    assert (FAMILY.budget - spent < tasks.menu.costs.min(axis=1)).all()
    assert (outcome.regret >= 0).all()
    again = play(RULES["sd per cost"], tasks, seed=5)
    assert np.array_equal(outcome.regret, again.regret)
    assert not np.array_equal(
        play(RULES["random"], tasks).actions, play(RULES["random"], tasks, seed=5).actions
    )


def test_better_rules_end_with_less_regret() -> None:
    tasks = FAMILY.draw(range(500))
    outcomes = {name: play(RULES[name], tasks) for name in ("random", "Thompson", "EI per cost")}
    means = [outcome.expected_regret.mean() for outcome in outcomes.values()]
    assert means[0] > 1.1 * means[1] > 1.1 * means[2]
    # the expected regret is the regret's mean
    difference = np.concatenate([outcome.regret - outcome.expected_regret for outcome in outcomes.values()])
    assert abs(difference.mean()) < 4 * difference.std() / np.sqrt(500)
    spread = np.array(
        [[outcome.expected_regret.std(), outcome.regret.std()] for outcome in outcomes.values()]
    )
    assert (spread[:, 0] < 0.7 * spread[:, 1]).all()
