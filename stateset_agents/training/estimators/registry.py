"""Every `advantage_estimator` by name, read by settings, credit and critic; a new one is a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stateset_agents.training.estimators import branch, group, hybrid, token_gae, turn_gae, turn_group
from stateset_agents.training.estimators.base import Estimator

ESTIMATORS: Mapping[str, Estimator] = {
    "group": group.ESTIMATOR,
    "turn_group": turn_group.ESTIMATOR,
    "branch": branch.ESTIMATOR,
    "turn_gae": turn_gae.ESTIMATOR,
    "token_gae": token_gae.ESTIMATOR,
    "hybrid": hybrid.ESTIMATOR,
}

DEFAULT_ESTIMATOR = "group"


def estimators_with(has: Callable[[Estimator], object]) -> list[str]:
    """Names of the estimators for which `has` is true, in the registry's order."""
    return [name for name, estimator in ESTIMATORS.items() if has(estimator)]
