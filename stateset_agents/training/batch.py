"""Scored groups with advantages become rows for the model.

Prompt P, reply A, user U, reply B  ->  one row  P A U B, trained on A and B.

The rows of a step are cut into micro-batches of whole trajectories; the trained tokens of each are flat
[N] tensors with trajectory ids, and denominators are counted over the whole step, so that gradients add
up to the same sum however the step is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stateset_agents.core.trajectory import Trajectory

__all__ = ["MicroBatch", "Sample", "cut", "make_micro_batches", "padded"]


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

    input_ids: Tensor
    """[R, T] right-padded; padding needs no mask, causal attention never looks at it."""
    positions: Tensor
    """[N] flat index (row * T + t) of the position that *predicts* each trained token."""
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

    @property
    def has_advantages(self) -> bool:
        """False where every advantage is 0: without KL and entropy terms its gradient is exactly 0."""
        return bool(self.advantages.any())

    @property
    def num_padding(self) -> int:
        """Positions of [R, T] that hold no token of a conversation."""
        return int((self.input_ids == _PADDING).sum())

    @property
    def model_input(self) -> Tensor:
        """[R, T] ids the model can embed."""
        return self.input_ids.clamp_min(0)

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


_PADDING = -1


def make_micro_batches(samples: Sequence[Sample], *, max_rows: int, max_tokens: int) -> list[MicroBatch]:
    """Cut the step's samples into micro-batches of at most `max_rows` rows and `max_tokens` tokens.

    Rows are sorted by length first, so that a micro-batch pads little; a row longer than `max_tokens`
    stands alone. Samples whose advantages are all 0 stand in micro-batches of their own (see
    `MicroBatch.has_advantages`). Trajectory ids are the samples' places in `samples`.
    """
    lengths = [len(sample.trajectory.token_ids) for sample in samples]
    idle = [not any(sample.advantages) for sample in samples]
    batches = cut(lengths, apart=idle, max_rows=max_rows, max_tokens=max_tokens)
    return [_micro_batch(samples, places) for places in batches]


def cut(
    lengths: Sequence[int], *, max_rows: int, max_tokens: int, apart: Sequence[bool] | None = None
) -> list[list[int]]:
    """Places of rows that are forwarded together, shorter ones first; see `make_micro_batches`.

    Rows of which one stands `apart` and the other does not are never together.
    """
    flags = apart or [False] * len(lengths)
    batches: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: (flags[place], lengths[place], place)):
        current = batches[-1] if batches else []
        fits = len(current) < max_rows and (len(current) + 1) * lengths[place] <= max_tokens
        if current and fits and flags[current[0]] == flags[place]:
            current.append(place)
        else:
            batches.append([place])
    return batches


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """[R, T] ids, filled up on the right with -1."""
    input_ids = torch.full((len(rows), max(len(row) for row in rows)), _PADDING, dtype=torch.long)
    for place, row in enumerate(rows):
        input_ids[place, : len(row)] = torch.tensor(row)
    return input_ids


def _micro_batch(samples: Sequence[Sample], places: Sequence[int]) -> MicroBatch:
    rows = [samples[place].trajectory.token_ids for place in places]
    input_ids = padded(rows)
    width = input_ids.shape[1]
    positions: list[int] = []
    trajectory_ids: list[int] = []
    old_logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    for row_index, place in enumerate(places):
        trajectory = samples[place].trajectory
        trained = [t for t, bit in enumerate(trajectory.action_mask) if bit]
        logprobs, made_by = trajectory.logprobs, trajectory.versions
        positions.extend(row_index * width + t - 1 for t in trained)
        trajectory_ids.extend([place] * len(trained))
        old_logprobs.extend(logprobs[t] for t in trained)
        versions.extend(made_by[t] for t in trained)
        weight = samples[place].weight
        advantages.extend(weight * value for value in samples[place].advantages)
    flat = torch.tensor(positions, dtype=torch.long)
    return MicroBatch(
        input_ids=input_ids,
        positions=flat,
        targets=input_ids.flatten().index_select(0, flat + 1),
        trajectory_ids=torch.tensor(trajectory_ids, dtype=torch.long),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.long),
    )
