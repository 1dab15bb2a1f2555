"""Scored groups with advantages become rows for the model.

Prompt P, reply A, user U, reply B  ->  one row  P A U B, trained on A and B.

The rows of a step are cut into micro-batches of whole trajectories; the trained tokens of each are flat
[N] tensors with trajectory ids, and denominators are counted over the whole step, so that gradients add
up to the same sum however the step is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from stateset_agents.training.rows.layout import Layout
from stateset_agents.types.trajectory import Trajectory

__all__ = ["MicroBatch", "Sample", "empty_batch", "lengths", "micro_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory that trains, with its credit."""

    trajectory: Trajectory
    advantages: tuple[float, ...]
    """[N_i] one per agent token, in order."""
    weight: float = 1.0

    def __post_init__(self) -> None:
        if len(self.advantages) != self.trajectory.num_agent_tokens:
            raise ValueError(
                f"a trajectory of {self.trajectory.num_agent_tokens} agent tokens needs an advantage each, "
                f"got {len(self.advantages)}"
            )
        if self.trajectory.action_mask[:1] == [1]:
            raise ValueError("a trajectory's first token is the agent's: nothing predicts it, give a prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows for one forward, and the trained tokens among them, flat."""

    layout: Layout
    positions: Tensor
    """[N] flat index in the layout of the position that *predicts* each trained token."""
    targets: Tensor
    """[N] the trained tokens."""
    trajectory_ids: Tensor
    """[N] which trajectory of the step each belongs to."""
    old_logprobs: Tensor
    """[N] as stored at sampling."""
    advantages: Tensor
    """[N]"""
    versions: Tensor
    """[N] the policy version that sampled each."""

    def to(self, device: torch.device) -> MicroBatch:
        """With the trained tokens on `device`; a layout is moved when it is forwarded."""
        names = [field.name for field in fields(self) if field.name != "layout"]
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def empty_batch(layout: Layout) -> MicroBatch:
    """Rows without a trained token, for a process that must call the model as often as the others."""
    ids, numbers = torch.empty(0, dtype=torch.long), torch.empty(0)
    return MicroBatch(
        layout=layout,
        positions=ids,
        targets=ids,
        trajectory_ids=ids,
        old_logprobs=numbers,
        advantages=numbers,
        versions=ids,
    )


def micro_batch(samples: Sequence[Sample], layout: Layout) -> MicroBatch:
    """The trained tokens of the samples whose rows are in `layout`.

    Trajectory ids are indices in `samples`.
    """
    positions: list[Tensor] = []
    targets: list[int] = []
    trajectory_ids: list[int] = []
    old_logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    for index, flat in zip(layout.rows, layout.flat, strict=True):
        sample, trajectory = samples[index], samples[index].trajectory
        trained = [t for t, bit in enumerate(trajectory.action_mask) if bit]
        row, logprobs, sampled_by = trajectory.token_ids, trajectory.logprobs, trajectory.versions
        positions.append(flat[torch.tensor(trained, dtype=torch.long) - 1])
        targets.extend(row[t] for t in trained)
        trajectory_ids.extend([index] * len(trained))
        old_logprobs.extend(logprobs[t] for t in trained)
        versions.extend(sampled_by[t] for t in trained)
        advantages.extend(sample.weight * advantage for advantage in sample.advantages)
    return MicroBatch(
        layout=layout,
        positions=torch.cat(positions),
        targets=torch.tensor(targets, dtype=torch.long),
        trajectory_ids=torch.tensor(trajectory_ids, dtype=torch.long),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.long),
    )


def lengths(samples: Sequence[Sample]) -> Tensor:
    """[B] trained tokens of each."""
    return torch.tensor([sample.trajectory.num_agent_tokens for sample in samples], dtype=torch.long)
