"""The critic of a training by TRL, which has none: a value head on the hidden states of TRL's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stateset_agents.core.value_function import create_value_function, trunk_of
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators.registry import ESTIMATORS
from stateset_agents.training.rows.layout import Layout, padded_layouts
from stateset_agents.training.update.critic import Critic
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Trajectory

__all__ = ["trl_critic"]

_MOST_TOKENS = 16384
"""Of one forward, padding included."""


def trl_critic(model: Any, config: TrainingConfig) -> Critic | None:
    """The critic that the estimator needs, or None."""
    per = ESTIMATORS[config.advantage_estimator].critic
    if per is None:
        return None
    with torch.random.fork_rng():
        torch.manual_seed(derive(config.seed, "critic"))
        value_function = create_value_function(
            model,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            dropout=config.value_dropout,
            value_clip=config.value_clip,
            learning_rate=config.value_learning_rate,
            max_grad_norm=config.max_grad_norm,
        )

    def layouts(trajectories: Sequence[Trajectory]) -> list[Layout]:
        rows = [one.token_ids for one in trajectories]
        return padded_layouts(rows, max_rows=len(rows), max_tokens=_MOST_TOKENS)

    def hidden(layout: Layout) -> Tensor:
        training = model.training
        model.eval()  # its forward is another in training, by some bits
        output = trunk_of(model)(**layout.forward_arguments(model.device)).last_hidden_state
        model.train(training)
        states: Tensor = output.flatten(0, 1).float()
        return states

    return Critic(
        value_function,
        per=per,
        iterations=config.value_iterations,
        bootstrap=config.bootstrap_truncated,
        layouts=layouts,
        hidden=hidden,
    )
