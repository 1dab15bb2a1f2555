"""An environment with windows of what was observed."""

from __future__ import annotations

import numpy as np
import pytest
from control_toys import Signals

from stateset_agents.numeric.autoscaling.grpo.environments import MetricsHistory
from stateset_agents.numeric.environments.base import check_environment
from stateset_agents.types.errors import ConfigurationError


def test_a_window_ends_with_the_observation_of_now() -> None:
    environment, plain = MetricsHistory(Signals(), 3), Signals()
    assert check_environment(environment)
    seen = [plain.reset([1, 2])] * 3
    found = environment.reset([1, 2])
    for action in (0, 1, 2, 0):
        assert np.array_equal(found["metrics_history"], np.stack(seen[-3:], axis=1))
        assert np.array_equal(found["current_metrics"], seen[-1])
        actions = np.array([action, 1])
        theirs, ours = plain.step(actions), environment.step(actions)
        assert np.array_equal(theirs.rewards, ours.rewards)
        seen.append(theirs.observations)
        found = ours.observations
    fork = environment.fork(np.array([1, 1]))
    assert np.array_equal(
        fork.step(actions).observations["metrics_history"][0, :2], found["metrics_history"][1, 1:]
    )
    assert MetricsHistory(Signals(masked=True)).spec.num_actions == 4
    for wrong, message in (
        ((Signals(), 0), "history_length must be at least 1"),
        ((environment, 3), "one array"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            MetricsHistory(*wrong)
