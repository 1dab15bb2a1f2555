"""How a candidate is let in: the shares, how long each holds, how much worse it may be, and what ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from stateset_agents.deployment.guards import (
    CostGuard,
    FailureGuard,
    Guard,
    LatencyGuard,
    RateGuard,
    WindowGuard,
)
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings

RATE_PART = 0.2
"""Of alpha, for the rate of unsafe answers: it is seen within hundreds of answers also with a small part,
where a few points of success take thousands of conversations."""


class GuardPlan(Settings):
    """What the candidate's answers must keep. An answer that failed is unsafe in any case."""

    latency: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="seconds; an answer that takes longer is unsafe"
    )
    cost: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="of one answer; one that costs more is unsafe"
    )
    rate: float | None = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="evidence that more than this share of the candidate's answers is unsafe rolls back; "
        "null: no such rule",
    )
    window: int | None = Field(
        default=None,
        ge=1,
        description="a fast brake: the last so many answers, of which more than `window_share` were unsafe, "
        "roll back; its false alarms are many",
    )
    window_share: float = Field(default=0.1, ge=0, lt=1, description="of the window")

    def checks(self) -> tuple[Guard, ...]:
        """The guards of a single answer."""
        guards: list[Guard] = [FailureGuard()]
        if self.latency is not None:
            guards.append(LatencyGuard(self.latency))
        if self.cost is not None:
            guards.append(CostGuard(self.cost))
        return tuple(guards)


class DeploymentPlan(Settings):
    """From shadow to full, or back."""

    stages: tuple[float, ...] = Field(
        default=(0.05, 0.25, 0.5),
        min_length=1,
        description="shares of new conversations, one after the other",
    )
    shadow_answers: int = Field(
        default=100, ge=0, description="answers of the candidate in shadow before the first stage may begin"
    )
    hold_outcomes: int = Field(default=500, ge=0, description="outcomes in a stage before the next may begin")
    hold_seconds: float = Field(
        default=3600.0, ge=0, allow_inf_nan=False, description="seconds of shadow, and of each stage"
    )
    margin: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description="how much lower the candidate's success may be; it is promoted once it is "
        "surely above that",
    )
    alpha: float = Field(
        default=0.05,
        gt=0,
        lt=0.5,
        description="probability of a promotion of a candidate that is worse by the margin or more, and of "
        "a rollback of one that is as good as the baseline and as safe as `guards.rate`",
    )
    outcome_timeout: float = Field(
        default=86_400.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds from a conversation's first request after which no outcome counts as a failure",
    )
    guards: GuardPlan = Field(default_factory=GuardPlan, description="what each answer must keep")
    salt: str | None = Field(
        default=None,
        min_length=8,
        description="key of the assignment; unset: drawn at random, as it should be",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(not 0 < share < 1 for share in self.stages):
            raise ConfigurationError(f"stages must be between 0 and 1, got {list(self.stages)}")
        if list(self.stages) != sorted(set(self.stages)):
            raise ConfigurationError(f"stages must grow from one to the next, got {list(self.stages)}")
        return self

    @property
    def alphas(self) -> dict[str, float]:
        """Of each decision. What may roll back shares `alpha` (Bonferroni); promotion has its own.

        >>> DeploymentPlan().alphas
        {'promote': 0.05, 'roll_back': 0.04, 'rate': 0.01}
        """
        if self.guards.rate is None:
            return {"promote": self.alpha, "roll_back": self.alpha}
        rate = RATE_PART * self.alpha
        return {"promote": self.alpha, "roll_back": self.alpha - rate, "rate": rate}

    def brakes(self) -> dict[str, WindowGuard | RateGuard]:
        """What counts unsafe answers, by name."""
        brakes: dict[str, WindowGuard | RateGuard] = {}
        if self.guards.rate is not None:
            brakes["rate"] = RateGuard(limit=self.guards.rate, alpha=self.alphas["rate"])
        if self.guards.window is not None:
            brakes["window"] = WindowGuard(size=self.guards.window, share=self.guards.window_share)
        return brakes

    def next_share(self, share: float) -> float:
        """The stage after this share, or 1.0 after the last.

        >>> DeploymentPlan().next_share(0.05), DeploymentPlan().next_share(0.5)
        (0.25, 1.0)
        """
        return next((stage for stage in self.stages if stage > share), 1.0)


def read_plan(path: Path) -> DeploymentPlan:
    """From a YAML file of the plan's fields. Raises ConfigurationError."""
    data: Any = read_yaml(path)
    if data is None:
        data = {}
    if not isinstance(data, dict) or not all(isinstance(name, str) for name in data):
        raise ConfigurationError(f"{path} must hold the fields of a plan, such as stages: [0.05, 0.25, 0.5]")
    return DeploymentPlan(**data)
