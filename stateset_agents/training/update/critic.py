"""The trainer's critic: it predicts the values of a step's trajectories, and learns from their returns.

Called by the learners. Hidden states are those of the policy before its update; they are computed once,
for the prediction and for all passes of the head, and carry no gradient.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from stateset_agents.core.value_function import ValueFunction, create_value_function, explained_variance
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ESTIMATORS, ValueEstimate, bootstraps
from stateset_agents.training.rows.layout import Layout
from stateset_agents.training.update.batch import (
    ConversationRow,
    CreditedBatch,
    Sample,
    TrainedTurn,
    ValuePredictions,
    assign_credit,
    rows_of,
    trainable,
    trained_turns,
)
from stateset_agents.training.update.policy import seeded_rng
from stateset_agents.training.update.protocol import Learned
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Critic:
    """A value function on the policy's trunk, read before every turn or every agent token.

    V is read at the position that predicts what comes next, in the row in which the turn trains: a turn's at
    the last prompt token before it. After a turn it is read at the turn's last token, before anyone answers:
    what answers the last turn of a conversation that a limit cut is in no row. It learns there, too, what the
    next turn brought.
    """

    value_function: ValueFunction
    per: Literal["turn", "token"]
    iterations: int
    """Steps of the head on each batch."""
    bootstrap: bool
    """True where a truncated conversation continues in its value."""
    layouts: Callable[[Sequence[ConversationRow]], list[Layout]]
    """Lays rows out for their forwards."""
    hidden: Callable[[Layout], Tensor]
    """[R * T, H] the policy's last hidden states of them."""

    @torch.no_grad()
    def predict(self, trajectories: Sequence[Trajectory]) -> ValuePredictions:
        """V before every turn or token and after the last word, of trajectories with agent tokens."""
        rows = rows_of(trajectory.rows for trajectory in trajectories)
        before: list[dict[int, Tensor]] = [{} for _ in trajectories]
        after: list[dict[int, Tensor]] = [{} for _ in trajectories]
        for layout in self.layouts(rows):
            states = self.hidden(layout)
            for index, flat in zip(layout.rows, layout.flat, strict=True):
                conversation, row = rows[index]
                for trained in trained_turns(row):
                    positions = flat[torch.tensor(self._positions(trained))]
                    read = states.index_select(0, positions.to(states.device))
                    before[conversation][trained.number] = read[:-1]
                    after[conversation][trained.number] = read[-1:]
        hidden = [
            torch.cat([part[index] for part in parts for index in range(len(trajectory.turns))])
            for trajectory, parts in zip(trajectories, zip(before, after, strict=True), strict=True)
        ]
        counts = [len(states) for states in hidden]
        values = torch.split(self.value_function.values_of(torch.cat(hidden)), counts)
        estimates = [
            ValueEstimate(values=numbers[: -len(trajectory.turns)], final=numbers[-1])
            for numbers, trajectory in zip((part.tolist() for part in values), trajectories, strict=True)
        ]
        return ValuePredictions(estimates, hidden, list(values))

    def learn(
        self,
        predictions: ValuePredictions,
        trajectories: Sequence[Trajectory],
        returns: Sequence[Sequence[float]],
    ) -> dict[str, float]:
        """Move the head towards `returns` [trajectories][turns or tokens], and towards the returns that
        follow from them after the turns. Metrics as of `update_value_function`, explained variance of
        `returns` alone."""
        numbers: list[float] = []
        is_before: list[bool] = []
        for trajectory, before in zip(trajectories, returns, strict=True):
            after = self._returns_after(trajectory, before)
            numbers += [*before, *after]
            is_before += [True] * len(before) + [False] * len(after)
        device = predictions.hidden[0].device
        targets = torch.tensor(numbers, device=device)
        mask = targets.isfinite()
        if not bool(mask.any()):  # the hidden states overflowed; the policy's gradient says so
            return {}
        old = torch.cat(predictions.old_values)
        metrics = self.value_function.update_value_function(
            torch.cat(predictions.hidden), targets, mask=mask, old_values=old, iterations=self.iterations
        )
        selector = torch.tensor(is_before, device=device)
        metrics.pop("value/explained_variance", None)
        return metrics | explained_variance(old[selector], targets[selector])

    def _positions(self, trained: TrainedTurn) -> list[int]:
        """Positions in the row that predict the turn's first token, or all of its tokens; then its last
        token."""
        before, num_tokens = trained.start - 1, len(trained.turn.completion.token_ids)
        count = 1 if self.per == "turn" else num_tokens
        return [*range(before, before + count), before + num_tokens]

    def _returns_after(self, trajectory: Trajectory, returns: Sequence[float]) -> list[float]:
        """[num_turns] the return after each turn; nan where a limit cut the conversation."""
        sizes = [1 if self.per == "turn" else len(turn.completion.token_ids) for turn in trajectory.turns]
        firsts = list(itertools.accumulate(sizes))[:-1]
        gamma = self.value_function.gamma
        last = float("nan") if bootstraps(trajectory, bootstrap_truncated=self.bootstrap) else 0.0
        return [*(gamma * returns[first] if first < len(returns) else last for first in firsts), last]


def make_critic(
    model: nn.Module,
    config: TrainingConfig,
    *,
    layouts: Callable[[Sequence[ConversationRow]], list[Layout]],
    hidden: Callable[[Layout], Tensor],
    autocast: torch.dtype | None = None,
) -> Critic | None:
    """The critic that `advantage_estimator` needs, on `model`'s trunk; None where it needs none.

    `layouts` and `hidden` as of `Critic`; `autocast` as of `ValueFunction`.
    """
    per = ESTIMATORS[config.advantage_estimator].critic
    if per is None:
        return None
    with seeded_rng(derive(config.seed, "critic"), next(model.parameters()).device):
        value_function = create_value_function(
            model,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
            dropout=config.value_dropout,
            value_clip=config.value_clip,
            learning_rate=config.value_learning_rate,
            max_grad_norm=config.max_grad_norm,
            autocast=autocast,
        )
    return Critic(
        value_function,
        per=per,
        iterations=config.value_iterations,
        bootstrap=config.bootstrap_truncated,
        layouts=layouts,
        hidden=hidden,
    )


class ActorCritic(ABC):
    """Base of the learners: a policy, and a critic where the estimator needs one, which learns after it."""

    config: TrainingConfig
    critic: Critic | None
    midway = False
    """True from an update's begin to its end: weights and optimiser are of no step."""

    @abstractmethod
    def learn_from(self, samples: Sequence[Sample], *, step: int) -> Learned:
        """Update the policy alone, on one step's samples."""

    def credit(self, groups: Sequence[TrajectoryGroup]) -> CreditedBatch:
        """Credit a step's groups by `advantage_estimator`; the critic predicts first."""
        critic, members = self.critic, trainable(groups, self.config)
        if critic is None or not members:
            return assign_credit(groups, self.config)
        predictions = critic.predict([groups[group].trajectories[member] for group, member in members])
        values = dict(zip(members, predictions.estimates, strict=True))
        return replace(assign_credit(groups, self.config, values), predictions=predictions)

    def learn(self, batch: CreditedBatch, *, step: int) -> Learned:
        """Update the policy, then move the critic towards the batch's returns."""
        if not batch.samples:
            return Learned({"optimizer/skipped": 1.0})
        learned = self.learn_from(batch.samples, step=step)
        metrics = {**learned.metrics, **batch.metrics}
        if self.critic is not None and batch.predictions is not None:
            self.midway = True
            trajectories = [sample.trajectory for sample in batch.samples]
            with seeded_rng(derive(self.config.seed, "critic", step), batch.predictions.hidden[0].device):
                metrics |= self.critic.learn(batch.predictions, trajectories, batch.returns)
            self.midway = False
        return replace(learned, metrics=metrics)

    def critic_state(self) -> dict[str, Tensor]:
        """The critic's head and optimiser, the live tensors; empty without a critic."""
        return {} if self.critic is None else self.critic.value_function.state_dict()

    def restore_critic(self, state: Mapping[str, Tensor] | None) -> None:
        """Go on from what `critic_state` gave; without a critic nothing is read."""
        if self.critic is not None:
            self.critic.value_function.load_state_dict(state or {})
