"""The trainer's critic: what it expected of a step's trajectories, and what it learns from them.

Called by the learner. Hidden states are those of the policy before its update; they are computed once,
for the expectation and for all passes of the head, and carry no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from stateset_agents.core.trajectory import Trajectory
from stateset_agents.core.value_function import ValueFunction
from stateset_agents.training.batch import cut, padded
from stateset_agents.training.credit import Valued

__all__ = ["Critic", "Expected"]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the critic expected of a step's trajectories, and what it saw of them."""

    valued: list[Valued]
    """One per trajectory."""
    hidden: Tensor
    """[M, H] before every turn or token, of all trajectories in order."""
    old_values: Tensor
    """[M] what it made of them."""


class Critic:
    """A value function on the policy's trunk, read before every turn or every agent token."""

    def __init__(
        self,
        value_function: ValueFunction,
        *,
        per: Literal["turn", "token"],
        iterations: int,
        max_rows: int,
        max_tokens: int,
    ) -> None:
        """`max_rows` and `max_tokens` bound one forward; `iterations`: steps of the head on each batch."""
        self.value_function = value_function
        self._per = per
        self._iterations = iterations
        self._max_rows = max_rows
        self._max_tokens = max_tokens

    def expect(self, trajectories: Sequence[Trajectory]) -> Expected:
        """V before every turn or token, and after the last word.

        V is read at the position that predicts what comes next: a turn's at the last prompt token before
        it. What answers the last turn is in no row, so V after the last word is that of its last token.
        """
        rows = [trajectory.token_ids for trajectory in trajectories]
        hidden: list[Tensor] = [torch.empty(0)] * len(rows)
        lengths = [len(row) for row in rows]
        for places in cut(lengths, max_rows=self._max_rows, max_tokens=self._max_tokens):
            states = self.value_function.hidden_states(padded([rows[place] for place in places]).clamp_min(0))
            for place, row_states in zip(places, states, strict=True):
                wanted = torch.tensor(self._positions(trajectories[place]), device=states.device)
                hidden[place] = row_states.index_select(0, wanted)
        everything = torch.cat(hidden)
        values = self.value_function.values_of(everything)
        counts = [len(states) for states in hidden]
        before = torch.tensor([place < count - 1 for count in counts for place in range(count)])
        before = before.to(values.device)
        valued = [
            Valued(values=own[:-1], final=own[-1])
            for own in (piece.tolist() for piece in torch.split(values, counts))
        ]
        return Expected(valued, everything[before], values[before])

    def learn(self, expected: Expected, returns: Sequence[Sequence[float]]) -> dict[str, float]:
        """Move the head towards `returns` [trajectories][turns or tokens]; see `update_value_function`."""
        targets = torch.tensor([value for own in returns for value in own])
        return self.value_function.update_value_function(
            expected.hidden, targets, old_values=expected.old_values, iterations=self._iterations
        )

    def _positions(self, trajectory: Trajectory) -> list[int]:
        """Where V is read in the row: before every turn or token, and last after everything."""
        positions: list[int] = []
        end = 0
        for turn in trajectory.turns:
            start = end + len(turn.prompt_ids)
            end = start + len(turn.completion.token_ids)
            positions.extend(range(start - 1, end - 1) if self._per == "token" else [start - 1])
        return [*positions, end - 1]
