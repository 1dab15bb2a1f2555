"""A conversation as TRL's batch has it: a prompt, a completion with everything after it, a mask, advantages.

    prompt P, reply A, user U, reply B  ->  prompt P, completion A U B, mask 1 0 1

A conversation of several rows is several of TRL's.

TRL pads a mask that is too short with ones and would train what the user said, so lengths are checked here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.training.update.batch import trained_turns
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Trajectory


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
    """The conversation's reward, for TRL's log."""
    conversation: int = 0
    """Index of its conversation in the batch."""

    @property
    def num_trained(self) -> int:
        """Number of tokens that train."""
        return sum(self.env_mask)

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


def trl_rows(
    trajectory: Trajectory,
    advantages: Sequence[float] | None,
    *,
    weight: float = 1.0,
    prompt_tokens: int | None = None,
    conversation: int = 0,
) -> list[TrlRow]:
    """The rows of a trajectory whose N agent tokens have these `advantages`, in order of turns; None where
    the trajectory does not train. Rows without a trained token are left out; where no row has one, all stay.

    `weight`: a factor of the advantages. `prompt_tokens`: the place at which to cut each row, by default
    before the first reply that trains in it. `conversation`: its number in the batch.
    """
    if advantages is not None and len(advantages) != trajectory.num_agent_tokens:
        raise ValueError(
            f"{trajectory.num_agent_tokens} agent tokens need an advantage each, got {len(advantages)}"
        )
    if any(turn.completion.forced for turn in trajectory.turns):
        raise ConfigurationError("TRL trains every reply: take `untrained` out of the environment")
    sizes = (len(turn.completion.token_ids) for turn in trajectory.turns)
    firsts = list(itertools.accumulate(sizes, initial=0))
    rows = trajectory.rows
    batch_rows = []
    for row in [row for row in rows if any(row.action_mask)] or rows[:1]:
        trained = list(trained_turns(row))
        ids, mask = row.token_ids, row.action_mask
        cut = prompt_tokens or trained[0].start
        if any(mask[:cut]):
            raise ValueError(f"the first reply begins before token {cut}: cut the row before it")
        credit = [0.0] * len(ids)
        for number, turn, start in trained:
            count = len(turn.completion.token_ids)
            if advantages is not None:
                values = advantages[firsts[number] : firsts[number] + count]
                credit[start : start + count] = [weight * advantage for advantage in values]
        batch_rows.append(
            TrlRow(
                prompt_ids=ids[:cut],
                completion_ids=ids[cut:],
                env_mask=[0] * len(ids[cut:]) if advantages is None else mask[cut:],
                logprobs=row.logprobs[cut:],
                advantages=credit[cut:],
                reward=trajectory.reward or 0.0,
                conversation=conversation,
            )
        )
    return batch_rows


def columns(
    rows: Sequence[TrlRow], rewards: Sequence[float | None], *, with_logprobs: bool
) -> dict[str, Any]:
    """The rows as the columns that TRL's `rollout_func` returns."""
    return {
        "prompt_ids": [row.prompt_ids for row in rows],
        "completion_ids": [row.completion_ids for row in rows],
        "env_mask": [row.env_mask for row in rows],
        "logprobs": [row.logprobs for row in rows] if with_logprobs else None,
        "conversation_reward": list(rewards),
    }


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


def shares_of_conversations(rows: Sequence[TrlRow]) -> list[float]:
    """[rows] of the tokens that train in a row's conversation, the share that trains in this row."""
    tokens: Counter[int] = Counter()
    for row in rows:
        tokens[row.conversation] += row.num_trained
    return [row.num_trained / max(1, tokens[row.conversation]) for row in rows]
