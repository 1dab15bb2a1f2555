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
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from stateset_agents.algorithms.advantages import broadcast_turns, clipped
from stateset_agents.backends.grammars import Grammars, Packed
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import (
    ESTIMATORS,
    ScoredStep,
    ValueEstimate,
    flat,
    tokens_per_turn,
)
from stateset_agents.training.rows.layout import Layout
from stateset_agents.training.rows.token_masks import TokenMasks
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion
from stateset_agents.types.settings import expect_that
from stateset_agents.types.trajectory import Row, Trajectory, TrajectoryGroup, Turn

_T = TypeVar("_T")


class ConversationRow(NamedTuple):
    """A row of one of several conversations."""

    conversation: int
    """Index of the conversation."""
    row: Row


class TrainedTurn(NamedTuple):
    """A turn in the row in which it trains."""

    number: int
    """Index of the turn in its conversation."""
    turn: Turn
    start: int
    """Position in the row at which its completion begins."""


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
    """A trajectory with its credit. An update leaves it out where its gradient is 0."""

    trajectory: Trajectory
    advantages: tuple[float, ...]
    """[N_i] one per agent token, in order of turns."""
    weight: float = 1.0
    rows: Sequence[Row] = field(init=False, repr=False, compare=False)
    """The trajectory's."""

    def __post_init__(self) -> None:
        if len(self.advantages) != self.trajectory.num_agent_tokens:
            raise ValueError(
                f"{self.trajectory.num_agent_tokens} tokens need advantages, got {len(self.advantages)}"
            )
        object.__setattr__(self, "rows", self.trajectory.rows)  # it is frozen, and they are computed
        trained = itertools.chain.from_iterable(map(trained_turns, self.rows))
        if any(start == 0 and turn.completion.token_ids for _, turn, start in trained):
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
    """[N] log-probs under pi_old: as stored at sampling, until the objective computes them again."""
    advantages: Tensor
    """[N]"""
    ref_logprobs: Tensor | None = None
    """[N] log-probs under the reference, once the objective has prepared the batch."""
    behaviour_logprobs: Tensor | None = None
    """[N] log-probs under the policy that sampled, where pi_old may be another."""
    masks: TokenMasks | None = None
    """Which tokens each was chosen among; None where all were free."""

    def to(self, device: torch.device) -> MicroBatch:
        """The batch with the trained tokens on `device`; a layout is moved when it is forwarded."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "layout"}
        moved: dict[str, Any] = {
            name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None
        }
        return replace(self, **moved)


def _raised(completion: Completion) -> Iterator[tuple[int, float]]:
    """For each token of a reply the one that was raised beside it, and by how much."""
    ids, constraint = completion.token_ids, completion.constraint
    near = len(constraint.raised[0]) if constraint is not None and constraint.raised is not None else 0
    for place in range(len(ids)):
        if constraint is None or place >= near:
            yield 0, 0.0
        else:
            yield constraint.raised_behind(ids[:place])


def micro_batch(samples: Sequence[Sample], layout: Layout, grammars: Grammars | None = None) -> MicroBatch:
    """The tokens that train in the rows of `layout`, which numbers those of all samples behind one another.

    Trajectory ids are indices in `samples`. Without samples no token trains: a batch for a process that must
    call the model as often as the others. Forced tokens do not train, and are in no count. `grammars`: of the
    model's tokenizer, for replies that were constrained.
    """
    rows = rows_of(sample.rows for sample in samples)
    numbered = zip(layout.rows, layout.flat, strict=True) if samples else ()
    positions = [torch.empty(0, dtype=torch.long)]
    tokens: list[tuple[int, int, int, float, float]] = []
    masks: list[Packed | None] = []
    sets: list[array[int]] = []
    raised: list[tuple[int, float]] = []
    for index, row_positions in numbered:
        conversation, row = rows[index]
        sample = samples[conversation]
        # How many tokens the agent sampled before each turn.
        firsts = list(itertools.accumulate(tokens_per_turn(sample.trajectory), initial=0))
        for number, turn, start in trained_turns(row):
            completion, first = turn.completion, firsts[number]
            end = first + len(completion.token_ids)
            advantages = (sample.weight * value for value in sample.advantages[first:end])
            columns = (completion.token_ids, range(first, end), completion.logprobs, advantages)
            selectors = [not forced for forced in completion.forced] or [True] * (end - first)
            positions.append(row_positions[start - 1 : start - 1 + end - first][selectors])
            every = [(conversation, *token) for token in zip(*columns, strict=True)]
            tokens += itertools.compress(every, selectors)
            masks += itertools.compress(_masks(completion, grammars), selectors)
            sets += itertools.compress(_sets(completion), selectors)
            raised += itertools.compress(_raised(completion), selectors)
    ids, targets, places, logprobs, credit = zip(*tokens, strict=True) if tokens else [()] * 5
    return MicroBatch(
        layout=layout,
        positions=torch.cat(positions),
        targets=torch.tensor(targets, dtype=torch.long),
        trajectory_ids=torch.tensor(ids, dtype=torch.long),
        places=torch.tensor(places, dtype=torch.long),
        old_logprobs=torch.tensor(logprobs, dtype=torch.float32),
        advantages=torch.tensor(credit, dtype=torch.float32),
        masks=TokenMasks.of(masks, sets, raised),
    )


def _masks(completion: Completion, grammars: Grammars | None) -> Iterable[Packed | None]:
    """[T] the tokens that each of a reply's tokens was chosen among."""
    if completion.constraint is None:
        return itertools.repeat(None, len(completion.token_ids))
    if grammars is None:
        raise ConfigurationError("a reply was constrained by a grammar, and this update knows none")
    return grammars.replay(completion.constraint, completion.token_ids)


def _sets(completion: Completion) -> Iterable[array[int]]:
    """[T] what top-k and top-p kept for each of a reply's tokens, empty where nothing was left out. Raises
    BackendError for a token outside its set."""
    if completion.sampling_mask is None:
        return itertools.repeat(array("i"), len(completion.token_ids))
    completion.sampling_mask.expect(completion.token_ids)
    return completion.sampling_mask.sets()


def lengths(samples: Sequence[Sample]) -> Tensor:
    """[B] trained tokens of each."""
    return torch.tensor([sample.trajectory.num_trained for sample in samples], dtype=torch.long)


# ------------------------------------------------------------------------------ credit


@dataclass(frozen=True, slots=True)
class ValuePredictions:
    """The critic's values of a step's trajectories, and the hidden states they are computed from."""

    estimates: list[ValueEstimate]
    """One per trajectory."""
    hidden: list[Tensor]
    """[positions of V, H] of each trajectory: before every turn or token, then after every turn, in order of
    turns."""
    old_values: list[Tensor]
    """[positions of V] the values there."""


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    """The samples that a step trains on, what it leaves out, and the critic's predictions."""

    samples: list[Sample]
    num_dropped_groups: int
    """Groups with fewer scored members than `min_group_size`."""

    advantages: list[list[tuple[float, ...] | None]]
    """[groups][members] advantages per agent token, None where a member gets no credit."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """advantage/mean and advantage/std, before they are scaled."""
    returns: list[Sequence[float]] = field(default_factory=list)
    """[samples][turns or agent tokens] the critic's targets; empty without one."""
    predictions: ValuePredictions | None = None
    """The critic's values; None where the estimator has no critic."""

    def by_member(self, values: Sequence[_T | None]) -> list[list[_T | None]]:
        """[groups][members] a value of each sample; None where a member gets no credit, or there are none."""
        left = iter(values)
        return [
            [None if advantages is None else next(left, None) for advantages in group]
            for group in self.advantages
        ]


def trainable(groups: Sequence[TrajectoryGroup], config: TrainingConfig) -> list[tuple[int, int]]:
    """(group, member) of the trajectories that train, in order: scored, with an agent token, in a group
    with at least `min_group_size` scored members."""
    return [
        (index, member)
        for index, group in enumerate(groups)
        if len(group.scored) >= config.min_group_size
        for member, trajectory in enumerate(group.trajectories)
        if trajectory.reward is not None and trajectory.num_trained
    ]


def given_credit(groups: Sequence[TrajectoryGroup], advantages: Sequence[Sequence[float]]) -> CreditedBatch:
    """The batch of [groups][members] advantages that somebody else computed, one for a whole conversation;
    its rewards are not read.

    Raises ConfigurationError for other shapes.
    """
    sizes, shape = [len(group.trajectories) for group in groups], [len(numbers) for numbers in advantages]
    expect_that(shape == sizes, "advantages", f"be one for each trajectory, {sizes} in groups", shape)
    members = [member for group in groups for member in group.trajectories]
    numbers = [float(number) for of_group in advantages for number in of_group]
    credit = [(number,) * member.num_agent_tokens for number, member in zip(numbers, members, strict=True)]
    pairs = zip(members, credit, strict=True)
    samples = [Sample(trajectory=member, advantages=tokens) for member, tokens in pairs if tokens]
    left = iter(credit)
    return CreditedBatch(samples, 0, [[next(left) or None for _ in range(size)] for size in sizes])


def assign_credit(
    groups: Sequence[TrajectoryGroup],
    config: TrainingConfig,
    values: Mapping[tuple[int, int], ValueEstimate] | None = None,
) -> CreditedBatch:
    """`advantage_estimator`'s credit of every trajectory that trains, spread over its agent tokens.

    Unscored members train nothing and enter no baseline; a group with fewer than `min_group_size` scored
    members is left out. `values`: the critic's predictions for each of `trainable(groups)`.
    """
    used = {index: group for index, group in enumerate(groups) if len(group.scored) >= config.min_group_size}
    estimator = ESTIMATORS[config.advantage_estimator]
    estimate = estimator.credit(ScoredStep(used, config, values or {}))
    rows = {index: row for row, index in enumerate(used)}
    samples: list[Sample] = []
    returns: list[Sequence[float]] = []
    credit: list[list[tuple[float, ...] | None]] = [[None] * len(group.trajectories) for group in groups]
    for index, member in trainable(groups, config):
        numbers = estimate.scaled[rows[index]][member]
        assert numbers is not None  # it is scored
        group, trajectory = groups[index], groups[index].trajectories[member]
        numbers = [clipped(number, config.advantage_clip) for number in numbers]
        if estimator.per == "conversation":
            numbers = numbers * trajectory.num_agent_tokens
        elif estimator.per == "turn":
            numbers = broadcast_turns(numbers, tokens_per_turn(trajectory))
        per_token = tuple(numbers)
        credit[index][member] = per_token
        samples.append(Sample(trajectory=trajectory, advantages=per_token, weight=group.weight))
        if estimate.returns is not None:
            returns.append(estimate.returns[rows[index]][member] or ())
    raw = flat(estimate.raw)
    metrics = {"advantage/mean": fmean(raw), "advantage/std": pstdev(raw)} if raw else {}
    return CreditedBatch(samples, len(groups) - len(used), credit, metrics, returns)
