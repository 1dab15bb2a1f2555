"""Scored groups with advantages become rows for the model.

Prompt P, reply A, user U, reply B  ->  one row  P A U B, trained on A and B. Where the model saw another
prompt Q before B, there are two rows, P A and Q B. Advantages, trajectory ids and denominators are of
conversations, whatever their rows: every sampled token trains once, in the row in which it was sampled.

The rows of a step are cut into micro-batches; the trained tokens of each are flat [N] tensors with trajectory
ids, and denominators are counted over the whole step, so that gradients add up to the same sum however the
step is cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stateset_agents.training.rows.layout import Layout
from stateset_agents.types.trajectory import Row, Trajectory, Turn


class ConversationRow(NamedTuple):
    """A row of one of several conversations."""

    conversation: int
    """Which of them."""
    row: Row


class TrainedTurn(NamedTuple):
    """A turn in the row in which it trains."""

    number: int
    """Its index in its conversation."""
    turn: Turn
    start: int
    """Where its completion begins in the row."""


def rows_of(conversations: Iterable[Sequence[Row]]) -> list[ConversationRow]:
    """The rows of several conversations behind one another: what layouts number."""
    return [ConversationRow(index, row) for index, rows in enumerate(conversations) for row in rows]


def trained_turns(row: Row) -> Iterator[TrainedTurn]:
    """The turns that train in this row, in order."""
    end = 0
    for place, (number, turn) in enumerate(zip(row.indices, row.turns, strict=True)):
        start = end + len(turn.prompt_ids)
        end = start + len(turn.completion.token_ids)
        if place >= row.trains_from:
            yield TrainedTurn(number, turn, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory that trains, with its credit."""

    trajectory: Trajectory
    advantages: tuple[float, ...]
    """[N_i] one per agent token, in order of turns."""
    weight: float = 1.0
    rows: Sequence[Row] = field(init=False, repr=False, compare=False)
    """The trajectory's."""

    def __post_init__(self) -> None:
        if len(self.advantages) != self.trajectory.num_agent_tokens:
            raise ValueError(
                f"a trajectory of {self.trajectory.num_agent_tokens} agent tokens needs an advantage each, "
                f"got {len(self.advantages)}"
            )
        object.__setattr__(self, "rows", self.trajectory.rows)  # it is frozen, and they are computed
        trained = itertools.chain.from_iterable(map(trained_turns, self.rows))
        if any(one.start == 0 and one.turn.completion.token_ids for one in trained):
            raise ValueError("a row's first token is the agent's: nothing predicts it, give a prompt")


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
    places: Tensor
    """[N] which of its trajectory's trained tokens each is, in order of turns."""
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
        places=ids,
        old_logprobs=numbers,
        advantages=numbers,
        versions=ids,
    )


def micro_batch(samples: Sequence[Sample], layout: Layout) -> MicroBatch:
    """The tokens that train in the rows of `layout`, which numbers those of all samples behind one another.

    Trajectory ids are indices in `samples`.
    """
    rows = rows_of(sample.rows for sample in samples)
    positions: list[Tensor] = []
    targets: list[int] = []
    trajectory_ids: list[int] = []
    places: list[int] = []
    old_logprobs: list[float] = []
    advantages: list[float] = []
    versions: list[int] = []
    for index, flat in zip(layout.rows, layout.flat, strict=True):
        conversation, row = rows[index]
        sample = samples[conversation]
        firsts = _first_places(sample.trajectory)
        for number, turn, start in trained_turns(row):
            completion, first = turn.completion, firsts[number]
            count = len(completion.token_ids)
            positions.append(flat[start - 1 : start - 1 + count])
            targets.extend(completion.token_ids)
            trajectory_ids.extend([conversation] * count)
            places.extend(range(first, first + count))
            old_logprobs.extend(completion.logprobs)
            versions.extend(completion.versions)
            advantages.extend(sample.weight * value for value in sample.advantages[first : first + count])
    return MicroBatch(
        layout=layout,
        positions=torch.cat(positions) if positions else torch.empty(0, dtype=torch.long),
        targets=torch.tensor(targets, dtype=torch.long),
        trajectory_ids=torch.tensor(trajectory_ids, dtype=torch.long),
        places=torch.tensor(places, dtype=torch.long),
        old_logprobs=torch.tensor(old_logprobs, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        versions=torch.tensor(versions, dtype=torch.long),
    )


def _first_places(trajectory: Trajectory) -> list[int]:
    """[turns] how many tokens the agent sampled before each."""
    sizes = (len(turn.completion.token_ids) for turn in trajectory.turns)
    return list(itertools.accumulate(sizes, initial=0))


def lengths(samples: Sequence[Sample]) -> Tensor:
    """[B] trained tokens of each."""
    return torch.tensor([sample.trajectory.num_agent_tokens for sample in samples], dtype=torch.long)
