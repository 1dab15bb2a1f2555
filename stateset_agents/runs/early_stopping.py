"""Early stopping: the best step on the validation split, and whether it is worth going on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stateset_agents.types.errors import ConfigurationError


def crossed(every: int, before: int, now: int) -> bool:
    """True if a multiple of `every` was reached since `before`; never at 0, nor where `every` is 0.

    Every 50 steps: from 49 to 50 and from 40 to 63, not from 50 to 99.
    """
    return every > 0 and now // every > before // every


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation so far; a new one gives a new value (`after`)."""

    metric: str | None = None
    """`eval/success`, `eval/reward` or `eval/loss`; None before the first evaluation."""
    step: int | None = None
    value: float | None = None
    waits: int = 0
    """Evaluations in a row that did not exceed the best one by more than the threshold."""

    def chosen(self, wanted: str, metrics: Mapping[str, float]) -> Best:
        """This value with the metric chosen by what the first evaluation has; "auto" prefers success.

        Raises ConfigurationError where success is wanted and the environment gives no verdict.
        """
        if self.metric is not None:
            return self
        if wanted == "eval/success" and wanted not in metrics:
            raise ConfigurationError(
                "metric_for_best is eval/success and the environment gives no verdict: set it to eval/reward"
            )
        judged = "eval/success" if "eval/success" in metrics else "eval/reward"
        return replace(self, metric=judged if wanted == "auto" else wanted)

    def after(self, step: int, value: float | None, *, threshold: float) -> Best:
        """The value after an evaluation; `value` None (nothing could be judged) improves nothing.

        Any higher value (of a loss: any lower one) is the new best one, the earlier of two equals stays; only
        one that is better by more than `threshold` ends the waiting.
        """
        if value is None:
            return replace(self, waits=self.waits + 1)
        gain = math.inf if self.value is None else value - self.value
        if self.value is not None and self.metric == "eval/loss":
            gain = -gain
        waits = 0 if gain > threshold else self.waits + 1
        if gain <= 0:
            return replace(self, waits=waits)
        return replace(self, step=step, value=value, waits=waits)

    def exhausts(self, patience: int) -> bool:
        """True after `patience` evaluations without improvement; never where `patience` is 0."""
        return patience > 0 and self.waits >= patience

    def why_stopped(self) -> str:
        """The reason in one line, for the summary."""
        times = "evaluation" if self.waits == 1 else f"{self.waits} evaluations"
        if self.value is None:
            return f"stopped early: {self.metric} had no value in the last {times}"
        return (
            f"stopped early: {self.metric} did not improve on {self.value:.4g} of step {self.step} "
            f"in the last {times}"
        )
