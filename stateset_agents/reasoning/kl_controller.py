"""`AdaptiveKLController`: `kl_coef` for a loop of one's own; a training has `kl_controller`."""

from __future__ import annotations

from stateset_agents.algorithms.kl_settings import KLController, SteppedKLController, ZieglerKLController


class AdaptiveKLController:
    """Moves the coefficient of GRPO's KL term by the KL that was measured.

    >>> controller = AdaptiveKLController(target_kl=0.01)
    >>> controller.update(0.02)  # more than half above the target: times 1.5
    0.06

    With `num_episodes` the pull is Ziegler's, slow and in proportion: at most a fifth per `horizon` episodes
    (https://arxiv.org/abs/1909.08593). Without, it is in steps, and `horizon` counts for nothing.
    """

    def __init__(self, target_kl: float = 0.01, horizon: int = 10_000) -> None:
        """`target_kl` in nats a token, as `kl_penalty / kl_coef` has it. Raises ConfigurationError for a
        target or a horizon that is not positive."""
        ZieglerKLController(target=target_kl, horizon=horizon)  # checks both
        self.target_kl = target_kl
        self.horizon = horizon
        self.kl_coef = 0.04
        """The coefficient of now; 0.04 at the start, unless it is set."""

    def update(self, current_kl: float, num_episodes: int | None = None) -> float:
        """The coefficient after a step that measured `current_kl`; from .001 to 1 where it moves in steps."""
        controller: KLController
        if num_episodes is None:
            controller = SteppedKLController(beta=self.kl_coef, target=self.target_kl)
        else:
            controller = ZieglerKLController(beta=self.kl_coef, target=self.target_kl, horizon=self.horizon)
        self.kl_coef = controller.updated(current_kl, num_episodes=num_episodes or 1).beta
        return self.kl_coef
