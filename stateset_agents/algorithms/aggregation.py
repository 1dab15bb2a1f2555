"""Averages the loss over tokens, with the same result for any division of the batch into micro-batches.

Tensors are flat: [N] holds only the tokens that the agent sampled, so prompt, user, tool and padding
positions have no loss term. `trajectory_ids` [N] is each token's trajectory, as an index into
`Denominators.tokens_per_trajectory` [B].

Every mean divides by a count of the whole global batch, fixed before the first micro-batch. A piece
returns its *share*, so micro-batches and accumulation steps are simply added, in any split:

    loss(tokens 0..N) == loss(tokens 0..k) + loss(tokens k..N)

Under data-parallel training the gradients must be *summed* over processes, not averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from stateset_agents.types.errors import ConfigurationError

Averaging = Literal["trajectory", "token", "constant"]
"""- trajectory: 1/B sum_i 1/|y_i| sum_t; each conversation counts alike (GRPO, GSPO);
- token: sum / all trained tokens of the batch; each token counts alike (DAPO);
- constant: sum / (B * max_length); no length in it at all (Dr. GRPO).
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Denominators:
    """The counts of one whole optimiser step, over all micro-batches and processes.

    `|y_i|` and B count trajectories, however many rows a trajectory is laid out in. They are counted
    before any token is rejected (see `keep` in `policy_loss`): rejection must not raise the rest's weight.
    """

    tokens_per_trajectory: Tensor
    """[B] trained tokens of each trajectory; a process needs only those it holds."""
    num_trajectories: int
    """B over all processes: trajectories with at least one trained token."""
    num_tokens: int
    """Trained tokens over all processes."""
    max_length: int | None = None
    """L_max of Dr. GRPO; None where no loss of the step averages by a constant."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or self.num_trajectories < 1:
            raise ValueError("a batch without a trained token has no loss; skip its optimiser step")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigurationError(f"max_length must be at least 1, got {self.max_length!r}")

    @classmethod
    def of(
        cls, tokens_per_trajectory: Sequence[int] | Tensor, *, max_length: int | None = None
    ) -> Denominators:
        """Count a batch that one process holds. With several, `dataclasses.replace` the two totals by
        their sums over processes."""
        counts = torch.as_tensor(tokens_per_trajectory)
        return cls(
            tokens_per_trajectory=counts,
            num_trajectories=int((counts > 0).sum()),
            num_tokens=int(counts.sum()),
            max_length=max_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metrics:
    """Metrics of a loss; `+` merges micro-batches, inner losses and processes."""

    shares: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> 0-d tensor: this piece's share of a mean over the global batch. Shares add."""
    maxima: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> 0-d tensor: the largest value in this piece. Of maxima the larger stays."""

    def __add__(self, other: Metrics) -> Metrics:
        shares, maxima = dict(self.shares), dict(self.maxima)
        for name, share in other.shares.items():
            shares[name] = shares[name] + share if name in shares else share
        for name, top in other.maxima.items():
            maxima[name] = torch.maximum(maxima[name], top) if name in maxima else top
        return Metrics(shares=shares, maxima=maxima)

    def to_dict(self) -> dict[str, float]:
        """Plain numbers, once the pieces of the batch have been added."""
        return {name: float(value) for name, value in {**self.shares, **self.maxima}.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """One piece's share of a loss."""

    loss: Tensor
    """0-d, with gradient; sums over the pieces of a batch. A step whose sum is not finite moves no weight."""
    metrics: Metrics
    """Told, and nothing else: no name or value of them decides whether a step is taken."""


def aggregate(
    values: Tensor,
    trajectory_ids: Tensor,
    denominators: Denominators,
    averaging: Averaging,
    *,
    keep: Tensor | None = None,
) -> Tensor:
    """This piece's share of the batch mean of `values` [N]; a 0-d tensor.

    Tokens where `keep` [N] is False add nothing, while the denominator stays what it was.
    """
    if keep is not None:
        values = torch.where(keep, values, torch.zeros_like(values))
    match averaging:
        case "trajectory":
            lengths = denominators.tokens_per_trajectory.to(values.device)[trajectory_ids]
            return (values / lengths.to(values.dtype)).sum() / denominators.num_trajectories
        case "token":
            return values.sum() / denominators.num_tokens
        case "constant":
            if denominators.max_length is None:
                raise ConfigurationError("averaging by a constant needs Denominators.max_length, got None")
            return values.sum() / (denominators.num_trajectories * denominators.max_length)
    raise ConfigurationError(f"averaging must be one of {', '.join(get_args(Averaging))}, got {averaging!r}")


def mean_per_trajectory(values: Tensor, trajectory_ids: Tensor, denominators: Denominators) -> Tensor:
    """[N] -> [N]: every token gets the mean over its whole trajectory, without gradient.

    Raises ValueError unless all tokens of each trajectory are here: a mean of some of them would depend on
    the division of the batch.
    """
    lengths = denominators.tokens_per_trajectory.to(values.device)
    num_present = torch.bincount(trajectory_ids, minlength=len(lengths))
    is_incomplete = (num_present > 0) & (num_present != lengths)
    if bool(is_incomplete.any()):
        index = int(is_incomplete.nonzero()[0])
        raise ValueError(
            f"trajectory {index} has {int(lengths[index])} tokens but {int(num_present[index])} are in this"
            " micro-batch: a sequence-level loss needs each trajectory whole in one micro-batch"
        )
    sums = values.new_zeros(len(lengths)).index_add(0, trajectory_ids, values.detach())
    return (sums / lengths.clamp(min=1).to(values.dtype)).index_select(0, trajectory_ids)
