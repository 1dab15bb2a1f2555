"""A policy learns what a rule does, and a rule is played as a policy is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from control_toys import Signals

from stateset_agents.numeric.cloning import clone
from stateset_agents.numeric.evaluation import evaluate, evaluate_rule
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.types.errors import ConfigurationError


def name_it(environment):
    """The best policy: say the signal that is seen."""
    return lambda: environment.signals[environment.time]


def name_the_last(environment):
    """Say the signal of the step before, which no observation tells."""
    before = np.zeros(environment.signals.shape[1], dtype=np.int64)

    def choose():
        nonlocal before
        now, before = before, environment.signals[environment.time].copy()
        return now

    return choose


def test_a_rule_is_played_from_its_own_beginning_each_time():
    environment, seeds = Signals(), list(range(7))
    first = evaluate_rule(name_the_last, environment, seeds)
    assert evaluate_rule(name_the_last, environment, seeds).returns == first.returns
    best = evaluate_rule(name_it, environment, seeds)
    assert (best.seeds, best.mean) == (tuple(seeds), 6 * 0.75)
    assert best.components["named"] == 6
    assert not best.rollout.logprobs.any()
    stopping = evaluate_rule(name_it, Signals(stop=2), seeds)
    assert stopping.lengths == (6, 2, 6, 2, 6, 2, 6)


@pytest.mark.parametrize("masked", [False, True])
def test_a_policy_learns_what_a_rule_does(masked):
    environment = Signals(masked=masked)
    policy = MlpPolicy(environment.spec, hidden=(16,))
    found = clone(policy, name_it, environment, num_episodes=64, num_passes=10, minibatch_size=64, seed=3)
    assert found.agreement == 1.0
    assert found.commonest < 0.5
    assert found.cross_entropy < 0.2
    assert found.num_steps == 80 * 6
    assert evaluate(policy, environment, range(20)).mean == 6 * 0.75
    again = MlpPolicy(environment.spec, hidden=(16,))
    assert (
        clone(again, name_it, environment, num_episodes=64, num_passes=10, minibatch_size=64, seed=3) == found
    )
    assert all(map(torch.equal, policy.parameters(), again.parameters()))


def test_what_a_rule_remembers_cannot_be_cloned_and_the_agreement_says_so():
    environment = Signals()
    found = clone(MlpPolicy(environment.spec, hidden=(16,)), name_the_last, environment, num_episodes=256)
    assert found.agreement < 0.55
    assert found.agreement == pytest.approx(found.commonest, abs=0.12)


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda: 1, r"a rule must give integers \(2,\), got int64 \(\)"),
        (lambda: np.zeros(3), r"a rule must give integers \(2,\), got float64 \(3,\)"),
        (lambda: np.array([0, 3]), "signals: action 3 is not allowed in row 1 at step 1"),
        (lambda: np.array([-1, 0]), "action -1 is not allowed in row 0"),
    ],
)
def test_a_rule_that_does_what_cannot_be_is_refused(choose, message):
    with pytest.raises(ConfigurationError, match=message):
        evaluate_rule(lambda environment: choose, Signals(masked=True), [1, 2])
    with pytest.raises(ConfigurationError, match="num_passes must be at least 1, got 0"):
        clone(MlpPolicy(Signals().spec), name_it, Signals(), num_passes=0)
    with pytest.raises(ConfigurationError, match="at least one seed"):
        evaluate_rule(name_it, Signals(), [])


def test_a_rule_whose_episodes_all_fail_teaches_nothing():
    class Broken(Signals):
        def reset(self, seeds):
            super().reset(seeds)
            self.signals = self.signals * 1
            return self._observations()

        def _observations(self):
            return super()._observations() * np.float32(np.nan if self.time else 1)

    with pytest.raises(ConfigurationError, match="signals: all 64 episodes of the rule failed"):
        clone(MlpPolicy(Signals().spec), name_it, Broken())
