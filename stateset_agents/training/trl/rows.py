"""A conversation as TRL's batch has it: a prompt, a completion with everything after it, a mask, advantages.

    prompt P, reply A, user U, reply B  ->  prompt P, completion A U B, mask 1 0 1

TRL pads a mask that is too short with ones and would train what the user said, so lengths are checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stateset_agents.types.trajectory import Trajectory

__all__ = ["TrlRow", "padding_row", "trl_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRow:
    """One row of TRL's batch, and what each of its tokens is worth."""

    prompt_ids: list[int]
    """[P]"""
    completion_ids: list[int]
    """[T] at least one."""
    env_mask: list[int]
    """[T] 1 on the tokens that train; all 0 in a row that does not."""
    logprobs: list[float]
    """[T] of the policy that sampled, 0.0 on what it did not."""
    advantages: list[float]
    """[T] 0.0 where the mask is."""
    reward: float = 0.0
    """What the conversation earned, for TRL's log."""

    def __post_init__(self) -> None:
        columns = (self.completion_ids, self.env_mask, self.logprobs, self.advantages)
        if len({len(column) for column in columns}) != 1 or not self.completion_ids or not self.prompt_ids:
            raise ValueError(
                f"a row needs a prompt and a completion whose ids, mask, log-probs and advantages are of one "
                f"length, got {len(self.prompt_ids)} prompt tokens and {len(self.completion_ids)}, "
                f"{len(self.env_mask)}, {len(self.logprobs)} and {len(self.advantages)} others"
            )
        if any(bit not in (0, 1) for bit in self.env_mask):
            raise ValueError(f"a mask is made of 0 and 1, got {sorted(set(self.env_mask))}")


def trl_row(
    trajectory: Trajectory,
    advantages: Sequence[float] | None,
    *,
    weight: float = 1.0,
    prompt_tokens: int | None = None,
) -> TrlRow:
    """The row of a trajectory whose agent tokens have these `advantages` [N]; None: it does not train.

    `prompt_tokens`: where to cut, by default before the first reply.
    """
    ids, mask, logprobs = trajectory.token_ids, trajectory.action_mask, trajectory.logprobs
    cut = prompt_tokens or len(trajectory.turns[0].prompt_ids)
    if advantages is None:
        mask = [0] * len(mask)
    elif len(advantages) != sum(mask):
        raise ValueError(f"{sum(mask)} agent tokens need an advantage each, got {len(advantages)}")
    if any(mask[:cut]):
        raise ValueError(f"the first reply begins before token {cut}: cut the row before it")
    credit = iter(advantages or ())
    weighted = [weight * next(credit) if bit else 0.0 for bit in mask]
    return TrlRow(
        prompt_ids=ids[:cut],
        completion_ids=ids[cut:],
        env_mask=mask[cut:],
        logprobs=logprobs[cut:],
        advantages=weighted[cut:],
        reward=trajectory.reward or 0.0,
    )


def padding_row(pad_id: int, *, reward: float) -> TrlRow:
    """A row that trains nothing, for TRL's batches are all of one size. `reward`: the mean of the others, so
    that TRL's log stays right."""
    return TrlRow(
        prompt_ids=[pad_id],
        completion_ids=[pad_id],
        env_mask=[0],
        logprobs=[0.0],
        advantages=[0.0],
        reward=reward,
    )
