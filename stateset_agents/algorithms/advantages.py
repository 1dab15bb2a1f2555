"""Advantages of conversations, turns and tokens: within groups, per turn within groups, and GAE.

The trainer calls it between scoring and batching. Arguments and results are plain lists, without torch, so
that every number can be checked by hand. Sums are `math.fsum`, so the order of the members changes nothing.

    rewards [1, 0, .5, 1]  --group_mean, population-->  [.905, -1.508, -.302, .905]
                           --leave_one_out, none----->  [.5, -.833, -.167, .5]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple, get_args

from stateset_agents.types.errors import RewardFailure
from stateset_agents.types.settings import expect_that

# What a conversation's reward is compared with, by the name of `baseline_type`; a new one is one entry.


@dataclass(frozen=True, slots=True)
class Baseline:
    """A rule for what each reward is compared with.

    Unbiased or not is said for scaling `none` and a loss that averages by a constant
    (tests/unit/training/update/test_credit_gradient.py).
    """

    compute: Callable[[Sequence[float]], list[float]]
    """[N] rewards, two of which differ -> [N] what each is compared with."""
    over: Literal["group", "batch"] = "group"
    """The rewards it is given: those of the scored members of one group, or of all groups."""
    refuses_scaling: bool = False
    """True for a baseline with an unbiased gradient, which any scaling but `none` would bend."""


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value; their order changes nothing."""
    return math.fsum(values) / len(values)


def _mean_of_all(rewards: Sequence[float]) -> list[float]:
    return [mean(rewards)] * len(rewards)


def _mean_of_the_others(rewards: Sequence[float]) -> list[float]:
    total, others = math.fsum(rewards), len(rewards) - 1
    return [(total - reward) / others for reward in rewards]


BASELINES: Mapping[str, Baseline] = {
    # The member's own reward included, which shrinks the gradient by 1 - 1/G
    # (DeepSeekMath, https://arxiv.org/abs/2402.03300).
    "group_mean": Baseline(_mean_of_all),
    # Unmoved by one outlier; biased, as a member's own reward moves it unevenly.
    "group_median": Baseline(lambda rewards: [median(rewards)] * len(rewards)),
    # Every scored reward of the batch, which shrinks the gradient by 1 - 1/(number of rewards).
    "global_mean": Baseline(_mean_of_all, over="batch"),
    # Keeps the gradient unbiased (RLOO, https://arxiv.org/abs/2402.14740).
    "leave_one_out": Baseline(_mean_of_the_others, refuses_scaling=True),
}


def is_over_batch(name: object) -> bool:
    """True where this `baseline_type` compares groups with each other: a group whose members tie then
    teaches."""
    return name in BASELINES and BASELINES[str(name)].over == "batch"


Scaling = Literal["population", "sample", "batch", "none"]
"""The divisor of the difference (a spread plus `eps`, which stands outside the root):

- population: the standard deviation with ddof 0;
- sample: with ddof 1, as TRL and verl compute it;
- batch: population deviation of every scored reward in the batch (https://arxiv.org/abs/2508.08221);
- none: nothing. Dividing by a group's own spread weighs easy and hard scenarios up
  (Dr. GRPO, https://arxiv.org/abs/2503.20783); this leaves them alone.
"""

EPS: dict[Scaling, float] = {"population": 1e-8, "sample": 1e-6, "batch": 1e-8, "none": 0.0}


class Credit(NamedTuple):
    """The result of GAE."""

    advantages: list[float]
    returns: list[float]
    """Advantage + value: the targets of the value function."""


# ------------------------------------------------------------------- whole trajectories in a group


def group_advantages(
    rewards: Sequence[Sequence[float | None]],
    *,
    baseline: str = "group_mean",
    scaling: Scaling = "population",
    eps: float | None = None,
    clip: float | None = None,
) -> list[list[float | None]]:
    """One advantage per member, for all groups of a batch.

    `rewards` is [groups][members], of any sizes; None is an unscored member: it gets None and enters
    neither mean nor spread. Rewards that all tie with what they are compared with get exactly 0: those of a
    group, a single scored member included, and under `global_mean` those of the batch. A tied group in a
    batch that differs has advantages there: it was better or worse than the others.

    `eps` defaults to 1e-8, with `sample` scaling to 1e-6. `clip` bounds the result to ±clip; scaled
    population advantages never pass sqrt(G - 1), so a bound of 3 acts only above ten members.

    We differ from the papers in one place: under `global_mean` the spread, too, is the batch's, since a
    group that nearly ties would otherwise divide a large difference by almost nothing.

    Raises RewardFailure on a reward that is not finite, ConfigurationError on an unknown choice.
    """
    expect_that(baseline in BASELINES, "baseline", f"be one of {', '.join(BASELINES)}", baseline)
    expect_that(scaling in get_args(Scaling), "scaling", f"be one of {', '.join(get_args(Scaling))}", scaling)
    expect_that(eps is None or eps >= 0, "eps", "not be negative", eps)
    expect_that(clip is None or clip > 0, "clip", "be positive (None for no bound)", clip)
    margin = EPS[scaling] if eps is None else eps  # added to the deviation, outside its root
    batch = [reward for group in rewards for reward in _scored(group)]
    rule = BASELINES[baseline]
    over_batch = rule.over == "batch"
    of_batch = iter(rule.compute(batch) if over_batch and not _ties(batch) else ())
    advantages = []
    for group in rewards:
        scored = _scored(group)
        peers = batch if over_batch else scored
        spread = 0.0 if _ties(peers) else _deviation(peers, batch, scaling) + margin
        if spread == 0.0:
            advantages.append([None if reward is None else 0.0 for reward in group])
            continue
        expected = of_batch if over_batch else iter(rule.compute(scored))
        differences = [None if reward is None else reward - next(expected) for reward in group]
        advantages.append([None if value is None else clipped(value / spread, clip) for value in differences])
    return advantages


def zero_variance_fraction(rewards: Sequence[Sequence[float | None]]) -> float:
    """Share of the groups with a score in which all scored members tie: compared with themselves, they teach
    nothing.

    [[1, 1], [0, 1]] -> 0.5. A batch without any score gives 0.0.
    """
    groups = [scored for group in rewards if (scored := _scored(group))]
    return sum(_ties(group) for group in groups) / len(groups) if groups else 0.0


def standardized(values: Sequence[float], *, eps: float = 1e-8) -> list[float]:
    """(value - mean) / (population deviation + eps) over all values, as PPO treats a batch of GAE
    advantages; equal values give exactly 0."""
    if _ties(values):
        return [0.0] * len(values)
    centre, spread = mean(values), _deviation(values, values, "population")
    return [(value - centre) / (spread + eps) for value in values]


def _scored(group: Sequence[float | None]) -> list[float]:
    scored = [reward for reward in group if reward is not None]
    for reward in scored:
        if not math.isfinite(reward):
            raise RewardFailure(f"a reward must be a finite number or None (unscored), got {reward!r}")
    return scored


def _ties(values: Sequence[float]) -> bool:
    return not values or max(values) == min(values)


def _deviation(peers: Sequence[float], batch: Sequence[float], scaling: Scaling) -> float:
    if scaling == "none":
        return 1.0
    values = batch if scaling == "batch" else peers
    centre, ddof = mean(values), 1 if scaling == "sample" else 0
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - ddof))


# ------------------------------------------------------------------------------ turns in a group


def returns_to_go(rewards: Sequence[float], *, gamma: float = 1.0) -> list[float]:
    """Each step's reward plus the discounted rest: [1, 0, 2] -> [3, 2, 2]."""
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.append(total)
    return returns[::-1]


def per_turn_group_credit(
    turn_rewards: Sequence[Sequence[float] | None], *, gamma: float = 1.0
) -> list[list[float] | None]:
    """One credit per turn of every member of one group: return-to-go minus the siblings' mean return-to-go.

    The baseline at turn k is the mean return-to-go at k of the *other* members that reached turn k; it
    does not depend on the member's own choices, so the gradient stays unbiased. Comparing a turn with
    the mean of its own index, own return included, does not: the policy decides how many turns it takes, and
    that estimate can lose more than half of the gradient. With no sibling left at a turn the baseline is
    0 and the return itself is the credit (an advantage of 0 there would bias it again). Not divided by
    any spread, for the same reason.

    `turn_rewards` is [members][turns]; a whole-trajectory reward belongs on its last turn. None marks an
    unscored member: it gets None and is no sibling of others. `gamma` discounts per turn.

    [[1, 2], [0]]  ->  [[3 - 0, 2 - 0], [0 - 3]]
    """
    check_unit("gamma", gamma)
    returns = [
        None if rewards is None else returns_to_go(_scored(rewards), gamma=gamma) for rewards in turn_rewards
    ]
    return _against_siblings(returns, [[()] * len(rewards or ()) for rewards in turn_rewards])


def _against_siblings(
    values: Sequence[Sequence[float] | None], baselines: Sequence[Sequence[Sequence[float]]]
) -> list[list[float] | None]:
    """[members][turns] each value minus the mean of its baselines; where it has none, of the siblings' values
    at its turn; where no sibling is left, minus 0."""
    credit: list[list[float] | None] = []
    for member, of_member in enumerate(values):
        if of_member is None:
            credit.append(None)
            continue
        siblings = [sibling for i, sibling in enumerate(values) if i != member and sibling is not None]
        peers = [
            baselines[member][turn] or [sibling[turn] for sibling in siblings if turn < len(sibling)]
            for turn in range(len(of_member))
        ]
        pairs = zip(of_member, peers, strict=True)
        credit.append([value - (mean(others) if others else 0.0) for value, others in pairs])
    return credit


def clipped(advantage: float, limit: float | None) -> float:
    """Within ±limit, where there is one: -4 and 3 -> -3."""
    return advantage if limit is None else max(-limit, min(limit, advantage))


def broadcast_turns(credit: Sequence[float], tokens_per_turn: Sequence[int]) -> list[float]:
    """Give every sampled token its turn's credit: [.5, -1], [2, 1] -> [.5, .5, -1]."""
    return [value for value, count in zip(credit, tokens_per_turn, strict=True) for _ in range(count)]


# -------------------------------------------------------------- generalised advantage estimation


def turn_gae(
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    terminated: bool = True,
    final_value: float = 0.0,
) -> Credit:
    """GAE over the turns of one trajectory (https://arxiv.org/abs/1506.02438).

        delta_k = r_k + gamma V_{k+1} - V_k        A_k = delta_k + gamma lam A_{k+1}

    `rewards` and `values` are [K]: what turn k earned, and V of the state before it. `final_value` is V
    of the state after the last turn: it is used when a limit cut the conversation (`terminated=False`)
    and ignored when the conversation ended by itself. One trajectory per call, so nothing leaks over its end.
    """
    check_unit("gamma", gamma)
    check_unit("lam", lam)
    next_value = 0.0 if terminated else final_value
    advantage, advantages = 0.0, []
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * advantage
        advantages.append(advantage)
        next_value = value
    advantages.reverse()
    return Credit(advantages, [a + v for a, v in zip(advantages, values, strict=True)])


def token_gae(
    rewards: Sequence[float],
    values: Sequence[float],
    action_mask: Sequence[int],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    terminated: bool = True,
    final_value: float = 0.0,
    forced: Sequence[bool] = (),
) -> Credit:
    """GAE over the sampled tokens of one row; observations are stepped over, not through.

    All arguments are [T]; `action_mask` is 1 where the agent sampled. Advantage and return are 0.0 on
    observations, whose values are never read. Rewards on observations go to the agent token before them.
    `gamma` discounts only between turns (where observations lie between two agent tokens) and at the
    end of the row; within a turn it is 1, or long replies would be punished. `lam` acts on every token but
    the `forced` ones (empty: none is), beside which no other was allowed: these are no choices, their
    advantage is 0, and their states pass on what follows.
    `terminated` and `final_value` as in `turn_gae`.
    """
    check_unit("gamma", gamma)
    check_unit("lam", lam)
    token_rewards = rewards_on_agent_tokens(rewards, action_mask)
    advantages, returns = [0.0] * len(token_rewards), [0.0] * len(token_rewards)
    next_value = 0.0 if terminated else final_value
    last_advantage, discount = 0.0, gamma
    for t in reversed(range(len(token_rewards))):
        if not action_mask[t]:
            discount = gamma
            continue
        if forced and forced[t]:
            next_value = token_rewards[t] + discount * next_value
            last_advantage, discount = discount * last_advantage, 1.0
            returns[t] = next_value + last_advantage
            continue
        delta = token_rewards[t] + discount * next_value - values[t]
        last_advantage = delta + discount * lam * last_advantage
        advantages[t], returns[t] = last_advantage, last_advantage + values[t]
        next_value, discount = values[t], 1.0
    return Credit(advantages, returns)


def rewards_on_agent_tokens(rewards: Sequence[float], action_mask: Sequence[int]) -> list[float]:
    """Move each reward on an observation to the last agent token before it; the sum is preserved.

    Raises ValueError on a reward before the agent's first token: nobody has earned it.
    """
    moved, last = [0.0] * len(rewards), None
    for t, (reward, acted) in enumerate(zip(rewards, action_mask, strict=True)):
        last = t if acted else last
        if last is not None:
            moved[last] += reward
        elif reward:
            raise ValueError(f"reward {reward!r} at position {t} comes before the agent's first token")
    return moved


def check_unit(name: str, value: float) -> None:
    """Raises ConfigurationError for a value outside of 0 to 1."""
    expect_that(0.0 <= value <= 1.0, name, "lie between 0 and 1", value)


# Credit per turn from branches, which are other continuations of the same state. Plain lists.


def branch_credit(
    turn_rewards: Sequence[Sequence[float] | None],
    branches: Sequence[Sequence[Sequence[float]]],
    *,
    gamma: float = 1.0,
) -> list[list[float] | None]:
    """One credit per turn of every member of one group, by Monte Carlo values of the states between turns
    (after VinePPO, https://arxiv.org/abs/2410.01679).

        Q_k = r_k + gamma mean(branches from s_{k+1}, and the member's own return from turn k+1 on)
        A_k = Q_k - V(s_k),   V(s_k) = mean(branches from s_k)

    where s_k is the state before turn k. V never sees what the member itself did from s_k on, so the
    gradient stays unbiased; Q may, since the member's own continuation is one more sample of V(s_{k+1}).
    A state without a branch (s_0 has none, and others may have lost theirs) is compared with the siblings'
    Q_k, of those that reached turn k: another member's words do not depend on this one's either. With no
    sibling left the baseline is 0. Q of a turn that no branch follows is the return-to-go itself. Nothing
    is divided by a spread, which would depend on the member's own return.

    `turn_rewards` is [members][turns] as in `per_turn_group_credit`: a whole-trajectory reward belongs on
    its last turn, None is an unscored member, which gets None and is no sibling of others. `branches` is
    [members][turns][any number]: returns of the branches from the state before that turn, discounted from
    there; branches that failed or went unscored are left out. `gamma` discounts per turn.

    Two members, the first with two branches before its second turn:

    [[0, 1], [0]], [[[], [1, 0]], [[]]]
      ->  Q = [[mean(1, 0, 1), 1], [0]]
      ->  [[2/3 - 0, 1 - 1/2], [0 - 2/3]]
    """
    check_unit("gamma", gamma)
    q_values = [
        None if rewards is None else _q_values(rewards, of_member, gamma)
        for rewards, of_member in zip(turn_rewards, branches, strict=True)
    ]
    return _against_siblings(q_values, branches)


def _q_values(rewards: Sequence[float], branches: Sequence[Sequence[float]], gamma: float) -> list[float]:
    """[turns] of one member: each turn's reward plus the mean return of all known continuations."""
    returns = returns_to_go(rewards, gamma=gamma)
    values = [mean([*branched, value]) for branched, value in zip(branches, returns, strict=True)]
    return [reward + gamma * after for reward, after in zip(rewards, [*values[1:], 0.0], strict=True)]


# ------------------------------------------------------------------------------ parts of a reward (GDPO)

Scores = Sequence[Sequence[float | None]]
"""[groups][members], None where a member has none."""


def summed_advantages(
    parts: Mapping[str, Scores],
    weights: Mapping[str, float],
    *,
    baseline: str,
    scaling: Scaling,
) -> list[list[float | None]]:
    """[groups][members] each part's advantages within its groups, times its weight, summed over the parts.

    `parts` has the scores of every name in `weights`; `baseline` and `scaling` as in `group_advantages`. A
    member that lacks a part is not compared in it, and the part adds nothing for it; one that lacks all of
    them gets None. Raises as `group_advantages` does.
    """
    by_part = [
        [
            [None if value is None else weight * value for value in members]
            for members in group_advantages(parts[name], baseline=baseline, scaling=scaling)
        ]
        for name, weight in weights.items()
    ]
    return [
        [_sum_of_known(values) for values in zip(*members, strict=True)]
        for members in zip(*by_part, strict=True)
    ]


def decoupled_advantages(
    parts: Mapping[str, Scores],
    weights: Mapping[str, float],
    *,
    baseline: str,
    scaling: Scaling,
) -> list[list[float | None]]:
    """`summed_advantages`, centred and divided by their deviation over the whole batch.

        A_k = (r_k - mean of its group) / deviation of its group        A = sum of w_k A_k
        result = (A - mean of the batch) / (population deviation of the batch + 1e-8)

    GDPO (https://arxiv.org/abs/2601.05242). In a group of two, summed rewards (0, 1) and (0, 2) both give
    advantages of -1 and 1; by parts, whoever leads in two of them gets 2. The second line keeps the range
    where it was, however many parts there are. Where all groups tie in every part, the result is exactly 0.
    """
    summed = summed_advantages(parts, weights, baseline=baseline, scaling=scaling)
    scaled = iter(standardized([value for members in summed for value in members if value is not None]))
    return [[None if value is None else next(scaled) for value in members] for members in summed]


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) if numbers else None
