"""Potential-based shaping: by hand, and by the exact gradient of a small conversation."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
from builders import trajectory

from stateset_agents.algorithms.advantages import (
    branch_credit,
    group_advantages,
    per_turn_group_credit,
    returns_to_go,
    turn_gae,
)
from stateset_agents.core.reward import CompositeReward, EnvironmentReward, reward_function
from stateset_agents.core.scoring.base import RewardResult
from stateset_agents.rewards.composites import GatedReward, NormalizedReward, ScaledReward
from stateset_agents.rewards.shaping import PotentialShaping, refuse_unfit_shaping, shaping_rewards
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.trajectory import Outcome, Status, Trajectory


def words_said(replies):
    """Phi: .1 for each reply, .5 from the first that asks."""
    return 0.1 * len(replies) + 0.5 * any("?" in reply.content for reply in replies)


def talk(*replies: str, reward: float = 1.0, **fields: object) -> Trajectory:
    said = [text for reply in replies for text in ("and?", reply)]
    return trajectory(*said, outcome=Outcome(reward=reward), **fields)  # type: ignore[arg-type]  # as they are


TALK = talk("Hello.", "Which order?", "Done.")


def test_a_turn_earns_what_it_moves_the_potential_by():
    assert shaping_rewards([0.25, 0.5, 0.0]) == [0.25, -0.5]
    assert shaping_rewards([0.25, 0.5, 0.0], gamma=0.5) == [0.0, -0.5]


async def test_shaping_lands_in_the_turn_rewards_and_leaves_the_outcome():
    result = await PotentialShaping(EnvironmentReward(), words_said).score(TALK)
    # Phi: 0, .1, .7 and, for the conversation has ended, 0
    assert result.turn_rewards == pytest.approx((0.1, 0.6, -0.7))
    assert result.score == pytest.approx(1.0)
    assert result.breakdown == {"environment": 1.0, "shaping": pytest.approx(0.0)}


async def test_turn_rewards_of_the_reward_itself_are_kept():
    own = trajectory("Hi", "a", "b", "c?", turn_rewards=[0.25, 0.5], outcome=Outcome(reward=1.0))
    result = await PotentialShaping(EnvironmentReward(), words_said).score(own)
    assert result.turn_rewards == pytest.approx((0.25 + 0.1, 0.5 - 0.1))
    assert result.score == pytest.approx(1.75)


async def test_a_cut_conversation_keeps_the_potential_of_its_last_state_where_training_bootstraps():
    cut = talk("Hello.", "Which order?", status=Status.TRUNCATED)
    goes_on = await PotentialShaping(EnvironmentReward(), words_said, gamma=0.5).score(cut)
    assert goes_on.turn_rewards == pytest.approx((0.05, 0.5 * 0.7 - 0.1))
    ends = await PotentialShaping(EnvironmentReward(), words_said, gamma=0.5, bootstrapped=False).score(cut)
    assert ends.turn_rewards == pytest.approx((0.05, -0.1))


async def test_the_potential_sees_each_state_before_the_agents_turn_and_never_the_end():
    seen = []

    async def look(messages, replies, scenario, context):
        seen.append((messages[-1].content, len(replies), scenario.id, dict(context)))
        return 0.0

    reward = PotentialShaping(EnvironmentReward(), look)
    await reward.score(trajectory("Hi", "a", "more", "b", "bye", context={"order": 1}, success=True))
    assert sorted(seen, key=lambda state: state[1]) == [
        ("Hi", 0, "s", {"order": 1}),
        ("more", 1, "s", {"order": 1}),
    ]
    assert not reward.local


async def test_what_is_unscored_stays_unscored():
    silent = PotentialShaping(lambda: None, words_said)
    assert await silent.score(TALK) == RewardResult(score=None)
    for broken, why in ((lambda: None, "a potential is a number"), (lambda: math.nan, "finite")):
        [failure] = await PotentialShaping(EnvironmentReward(), broken).score_group([TALK])
        assert isinstance(failure, RewardFailure)
        assert why in str(failure)


async def test_whole_trajectory_credit_sees_nothing_of_it():
    replies = ("a", "b?", "c"), ("a?",), ("a", "b"), ("a?", "b?", "c", "d")
    group = [talk(*said, reward=reward) for said, reward in zip(replies, (1.0, 0.0, 0.5, 1.0), strict=True)]
    results = await PotentialShaping(EnvironmentReward(), words_said).score_group(group)
    shaped = [result.score for result in results if isinstance(result, RewardResult)]
    [with_shaping] = group_advantages([shaped], baseline="leave_one_out", scaling="none")
    [without] = group_advantages([[1.0, 0.0, 0.5, 1.0]], baseline="leave_one_out", scaling="none")
    assert without == pytest.approx([0.5, -5 / 6, -1 / 6, 0.5])
    assert with_shaping == pytest.approx(without, abs=1e-12)


async def test_per_turn_credit_differs_by_the_potentials_of_the_states():
    group = [talk("a?", "b", "c", reward=1.0), talk("a", "b?", reward=0.0)]
    results = await PotentialShaping(EnvironmentReward(), words_said).score_group(group)
    outcomes = [[0.0, 0.0, 1.0], [0.0, 0.0]]
    shaped = [
        [base + extra for base, extra in zip(own, result.turn_rewards, strict=True)]
        for own, result in zip(outcomes, results, strict=True)
        if isinstance(result, RewardResult)
    ]
    first, second = per_turn_group_credit(outcomes)
    with_first, with_second = per_turn_group_credit(shaped)
    # Phi(s_0), Phi(s_1), Phi(s_2): 0, .6, .7 and 0, .1; credit moves by minus the own one plus the siblings'
    assert (first, second) == ([1.0, 1.0, 1.0], [-1.0, -1.0])
    assert with_first == pytest.approx([1.0, 1.0 - 0.6 + 0.1, 1.0 - 0.7])
    assert with_second == pytest.approx([-1.0, -1.0 - 0.1 + 0.6])


def test_branches_of_one_turn_see_nothing_of_it():
    potentials, gamma = [0.2, 0.7, 0.4], 0.9
    own, others = [0.0, 0.5, 1.0], [[0.25], [0.0, 2.0]]
    [plain] = branch_credit(
        [own], [[[], [returns_to_go(way, gamma=gamma)[0] for way in others], []]], gamma=gamma
    )
    moved = [
        reward + move
        for reward, move in zip(own, shaping_rewards([*potentials, 0.0], gamma=gamma), strict=True)
    ]
    ways = []
    for way, later in zip(others, ([], [0.9]), strict=True):
        moves = shaping_rewards([potentials[1], *later, 0.0], gamma=gamma)
        ways.append(returns_to_go([r + m for r, m in zip(way, moves, strict=True)], gamma=gamma)[0])
    [shaped] = branch_credit([moved], [[[], ways, []]], gamma=gamma)
    assert plain is not None
    assert shaped is not None
    assert shaped[1] == pytest.approx(plain[1], abs=1e-12)


@pytest.mark.parametrize("terminated", [True, False])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_gae_with_values_less_the_potential_is_the_same_whatever_lambda(terminated: bool, lam: float):
    gamma, rewards, values, last = 0.9, [0.0, 0.25, 1.0], [0.5, 0.75, 0.25], 0.6
    potentials = [0.1, 0.7, 0.3, 0.0 if terminated else 0.8]
    moves = shaping_rewards(potentials, gamma=gamma)
    plain = turn_gae(rewards, values, gamma=gamma, lam=lam, terminated=terminated, final_value=last)
    shaped = turn_gae(
        [reward + move for reward, move in zip(rewards, moves, strict=True)],
        [value - phi for value, phi in zip(values, potentials, strict=False)],
        gamma=gamma,
        lam=lam,
        terminated=terminated,
        final_value=last - potentials[3],
    )
    assert shaped.advantages == pytest.approx(plain.advantages, abs=1e-12)


ASKS, ENDS = 0, 1
PARAMETERS = {(): 0.3, (ASKS,): -0.4, (ASKS, ASKS): 0.1}
"""State, by what was done so far -> logit of asking again; at most three turns, ending ends it."""
POTENTIAL = {(): 0.2, (ASKS,): 0.9, (ASKS, ASKS): -0.3}


def exact_gradient(gamma: float, *, phi_at_the_end: float | None) -> list[float]:
    """Of the expected return, by enumeration; the end's Phi, or no shaping for None."""
    gradient = dict.fromkeys(PARAMETERS, 0.0)
    plays = {(ENDS,): 0.25, (ASKS, ENDS): 1.0, (ASKS, ASKS, ENDS): 0.5, (ASKS, ASKS, ASKS): 0.0}
    for actions, reward in plays.items():
        states = [actions[:turn] for turn in range(len(actions))]
        asking = [1 / (1 + math.exp(-PARAMETERS[state])) for state in states]
        chances = [p if act == ASKS else 1 - p for p, act in zip(asking, actions, strict=True)]
        rewards = [0.0] * (len(actions) - 1) + [reward]
        if phi_at_the_end is not None:
            potentials = [POTENTIAL[state] for state in states] + [phi_at_the_end * (actions[-1] == ENDS)]
            moves = shaping_rewards(potentials, gamma=gamma)
            rewards = [own + move for own, move in zip(rewards, moves, strict=True)]
        for turn, state in enumerate(states):
            to_go = sum(gamma**later * r for later, r in enumerate(rewards[turn:]))
            score = (actions[turn] == ASKS) - asking[turn]
            gradient[state] += math.prod(chances) * gamma**turn * score * to_go
    return list(gradient.values())


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_shaping_changes_no_gradient_when_the_end_has_potential_zero(gamma: float):
    plain = exact_gradient(gamma, phi_at_the_end=None)
    assert max(map(abs, plain)) > 0.01
    assert exact_gradient(gamma, phi_at_the_end=0.0) == pytest.approx(plain, abs=1e-12)
    bent = exact_gradient(gamma, phi_at_the_end=0.7)
    assert max(abs(a - b) for a, b in zip(bent, plain, strict=True)) > 0.05


def test_training_that_would_undo_or_bend_it_is_refused_with_the_cure():
    refuse = partial(refuse_unfit_shaping, estimator="turn_gae", seen_by=["turn_group", "turn_gae"])
    shaped = PotentialShaping(EnvironmentReward(), words_said, gamma=0.9)
    with pytest.raises(ConfigurationError, match="advantage_estimator to turn_group or turn_gae, or leave"):
        refuse(shaped, estimator="group", gamma=0.9, bootstrapped=True)
    with pytest.raises(ConfigurationError, match=r"gamma 0\.9 is not the training's 1.*gamma=1$"):
        refuse(shaped, gamma=1.0, bootstrapped=True)
    with pytest.raises(ConfigurationError, match=r"ends at the limit.*bootstrapped=False$"):
        refuse(shaped, gamma=0.9, bootstrapped=False)
    refuse(shaped, gamma=0.9, bootstrapped=True)
    for estimator, bootstrapped in product(("group", "turn_gae"), (True, False)):
        refuse(EnvironmentReward(), estimator=estimator, gamma=1.0, bootstrapped=bootstrapped)


def test_nothing_is_put_over_it():
    shaped = PotentialShaping(EnvironmentReward(), words_said)
    for make in (
        lambda: CompositeReward([(shaped, 1.0)]),
        lambda: GatedReward([(EnvironmentReward(), 1.0)], then=shaped),
        lambda: NormalizedReward(shaped),
        lambda: ScaledReward(shaped),
        lambda: PotentialShaping(shaped, words_said),
    ):
        with pytest.raises(ConfigurationError, match="cannot be put over shaped"):
            make()


def test_potentials_that_cannot_work_are_refused():
    with pytest.raises(ConfigurationError, match="cannot see success: there are messages"):
        PotentialShaping(EnvironmentReward(), lambda success: 1.0)
    with pytest.raises(ConfigurationError, match="a potential must be a plain function"):
        PotentialShaping(EnvironmentReward(), reward_function(lambda: 1.0))
    with pytest.raises(ConfigurationError, match="gamma must be above 0 and at most 1, got 2"):
        PotentialShaping(EnvironmentReward(), words_said, gamma=2)
