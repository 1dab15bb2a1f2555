"""Potential-based shaping: turns earn what they move, and the best policy stays the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from stateset_agents.core.reward import RewardOfRewards, as_term, parts_of
from stateset_agents.core.scoring.base import (
    Result,
    RewardFunction,
    RewardResult,
    score_trajectories,
    score_trajectory,
    turn_rewards,
)
from stateset_agents.core.scoring.function_reward import FunctionReward, Reward
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.settings import alternatives, expect_that, is_number
from stateset_agents.types.trajectory import Status, Trajectory

_OFFERED = ("messages", "replies", "scenario", "context")


def shaping_rewards(potentials: Sequence[float], *, gamma: float = 1.0) -> list[float]:
    """[K+1] potentials of the states s_0 .. s_K -> [K] F_k = gamma Phi(s_{k+1}) - Phi(s_k).

    >>> shaping_rewards([0.0, 0.5, 0.0])
    [0.5, -0.5]
    """
    return [gamma * after - before for before, after in pairwise(potentials)]


class PotentialShaping(RewardOfRewards):
    """A reward plus, for each of the agent's turns, what it moved a potential by (Ng et al. 1999).

        F_k = gamma Phi(s_{k+1}) - Phi(s_k)

    s_k is the conversation as it stood before the agent's turn k, s_K as it stood at the end. `potential` is
    a function, sync or async, of what it names: messages, replies, scenario, context.

        def asked(replies):
            return 0.5 if any("order number" in reply.content for reply in replies) else 0.0

        PotentialShaping(EnvironmentReward(), asked)

    The F_k land in the turn rewards and sum, discounted, to -Phi(s_0) whatever the agent does: the best
    policy stays the same, only the credit comes sooner. So Phi of an ended conversation is 0. One
    that a limit cut has Phi(s_K) where training adds the critic's value of s_K (`bootstrapped`), for the
    critic then learns values less Phi; where training takes the cut for the end, it is 0 too.

    Under whole-trajectory credit all F_k add up to the same constant for every member of a group and
    change nothing, and so they do for the branches of one turn: training refuses it there
    (`refuse_unfit_shaping`). No composite or scale may be put over it: put it around them. Each turn's
    reward is clipped to the training's `reward_clip`, so keep the potential well within it.
    """

    outermost = True

    def __init__(
        self,
        reward: Reward,
        potential: Callable[..., Any],
        *,
        gamma: float = 1.0,
        bootstrapped: bool = True,
        name: str = "shaped",
    ) -> None:
        """`gamma` must be training's; `bootstrapped` its `bootstrap_truncated`, False without a critic."""
        expect_that(is_number(gamma) and 0 < gamma <= 1, "gamma", "be above 0 and at most 1", gamma)
        if not callable(potential) or isinstance(potential, RewardFunction):
            raise ConfigurationError(
                f"a potential must be a plain function of messages, replies, scenario or context, "
                f"got {potential!r:.60}"
            )
        self.gamma = float(gamma)
        self.bootstrapped = bootstrapped
        self._reward = as_term("potential-based shaping", reward)
        self._potential = FunctionReward(potential, name=f"potential {getattr(potential, '__name__', '')}")
        unfit = set(self._potential.wanted) - set(_OFFERED)
        if unfit:
            raise ConfigurationError(
                f"a potential cannot see {', '.join(unfit)}: there are {', '.join(_OFFERED)}"
            )
        super().__init__(name, {self._reward.name: self._reward})
        self.local = self.local and self._potential.local

    async def score_group(self, trajectories: Sequence[Trajectory]) -> list[Result]:
        results = await score_trajectories(self._reward, trajectories)
        return await gather_or_cancel(
            self._shaped(trajectory, result) for trajectory, result in zip(trajectories, results, strict=True)
        )

    async def _shaped(self, trajectory: Trajectory, result: Result) -> Result:
        if isinstance(result, RewardFailure):
            return result
        breakdown = parts_of(self._reward.name, result)
        if result.score is None:
            return RewardResult(score=None, breakdown=breakdown)
        try:
            moves = shaping_rewards(await self._potentials(trajectory), gamma=self.gamma)
            earned_by_turn = turn_rewards(result, len(trajectory.turns))
        except RewardFailure as failure:
            return failure
        total = math.fsum(moves)
        return RewardResult(
            score=result.score + total,
            breakdown={**breakdown, "shaping": total},
            turn_rewards=tuple(reward + move for reward, move in zip(earned_by_turn, moves, strict=True)),
        )

    async def _potentials(self, trajectory: Trajectory) -> list[float]:
        """[K+1] of the states s_0 .. s_K."""
        num_turns = len(trajectory.turns)
        ends = trajectory.status is Status.TERMINATED or not self.bootstrapped
        states = [
            replace(trajectory, turns=trajectory.turns[:turns], outcome=None)
            for turns in range(num_turns if ends else num_turns + 1)
        ]
        values = await gather_or_cancel(self._potential_of(state) for state in states)
        return [*values, 0.0] if ends else values

    async def _potential_of(self, state: Trajectory) -> float:
        value = (await score_trajectory(self._potential, state)).score
        if value is None:
            raise RewardFailure(
                f"reward {self._potential.name} gave None: a potential is a number, 0 for nothing"
            )
        return value


def refuse_unfit_shaping(
    reward: RewardFunction, *, estimator: str, seen_by: Sequence[str], gamma: float, bootstrapped: bool
) -> None:
    """Raises ConfigurationError, with the cure, for shaping that this training would undo or bend.

    `seen_by`: the estimators that compare turns which start from different states; `estimator`: the
    training's. `bootstrapped`: does a conversation cut by a limit also get the critic's value of its last
    state?
    """
    if not isinstance(reward, PotentialShaping):
        return
    if estimator not in seen_by:
        raise ConfigurationError(
            "potential-based shaping adds one number to all that whole-trajectory and branch credit compare, "
            f"so they see nothing of it: set advantage_estimator to {alternatives(seen_by)}, or leave the "
            "shaping out"
        )
    if not math.isclose(reward.gamma, gamma):
        raise ConfigurationError(
            f"the shaping's gamma {reward.gamma:g} is not the training's {gamma:g}, which would change the "
            f"best policy: give PotentialShaping gamma={gamma:g}"
        )
    if reward.bootstrapped != bootstrapped:
        counts = "goes on behind" if bootstrapped else "ends at"
        raise ConfigurationError(
            f"for this training a conversation {counts} the limit that cuts it, for the shaping it does not: "
            f"give PotentialShaping bootstrapped={bootstrapped}"
        )
