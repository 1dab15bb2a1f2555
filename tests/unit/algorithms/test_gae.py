"""Token- and turn-level GAE against hand-worked numbers; observations change nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateset_agents.algorithms.advantages import (
    returns_to_go,
    rewards_on_agent_tokens,
    token_gae,
    turn_gae,
)
from stateset_agents.types.errors import ConfigurationError

ROW = {
    "rewards": [0, 0, 0, 0, 0, 0, 1],
    "values": [0.2, 0.3, 9, 9, 9, 0.4, 0.6],
    "action_mask": [1, 1, 0, 0, 0, 1, 1],
}


def test_token_gae_steps_over_observations():
    credit = token_gae(**ROW, gamma=1.0, lam=0.95)
    assert credit.advantages == pytest.approx([0.71845, 0.651, 0, 0, 0, 0.58, 0.4], abs=1e-9)
    assert credit.returns == pytest.approx([0.91845, 0.951, 0, 0, 0, 0.98, 1.0], abs=1e-9)


def test_a_frame_of_forced_tokens_decays_nothing():
    """Two choices with twenty forced tokens between them, and four behind the last one."""
    values = [0.2, *[9.0] * 20, 0.4, *[9.0] * 4]
    forced = [False, *[True] * 20, False, *[True] * 4]
    credit = token_gae([0.0] * 25 + [1.0], values, [1] * 26, gamma=1.0, lam=0.95, forced=forced)
    assert credit.advantages[0] == pytest.approx(0.4 - 0.2 + 0.95 * 0.6)
    assert credit.advantages[21] == pytest.approx(1.0 - 0.4)
    assert {value for value, is_forced in zip(credit.advantages, forced, strict=True) if is_forced} == {0.0}
    assert credit.returns[21:] == pytest.approx([1.0] * 5)  # what a forced state is worth follows it
    assert credit.returns[:21] == pytest.approx([0.4 + 0.95 * 0.6, *[1.0] * 20])
    unforced = token_gae([0.0, 1.0], [0.2, 0.4], [1, 1], gamma=1.0, lam=0.95)
    assert [credit.advantages[0], credit.advantages[21]] == pytest.approx(unforced.advantages)
    decayed = token_gae([0.0] * 25 + [1.0], values[:1] + [0.4] * 25, [1] * 26, gamma=1.0, lam=0.95)
    assert decayed.advantages[0] == pytest.approx(0.2 + 0.95**25 * 0.6)  # as it was: little comes through


def test_forced_tokens_pass_discount_and_rewards_on():
    """Choice, forced, [observation with reward .5], forced, choice, and the end."""
    credit = token_gae(
        [0, 0, 0.5, 0, 2.0],
        [0.3, 9, 9, 9, 0.7],
        [1, 1, 0, 1, 1],
        gamma=0.9,
        lam=0.8,
        forced=[False, True, False, True, False],
    )
    assert credit.advantages == pytest.approx([0.5 + 0.9 * 0.7 - 0.3 + 0.8 * 0.9 * 1.3, 0, 0, 0, 1.3])
    assert credit.returns[3] == pytest.approx(2.0)
    assert credit.returns[1] == pytest.approx(0.5 + 0.9 * 2.0)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.lists(st.integers(1, 4), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.booleans(),
)
def test_the_number_of_observation_tokens_changes_nothing(few, many, gamma, lam, terminated):
    """Two agent tokens per turn, any number of observations between turns and at the end."""
    turns = min(len(few), len(many))

    def agent_tokens(gaps: list[int]) -> list[tuple[float, float]]:
        rewards, values, mask = [], [], []
        for turn, gap in enumerate(gaps[:turns]):
            rewards += [0.1, 0.2] + [0.0] * (gap - 1) + [1.0]
            values += [turn + 0.5, turn - 0.5] + [99.0] * gap
            mask += [1, 1] + [0] * gap
        credit = token_gae(
            rewards, values, mask, gamma=gamma, lam=lam, terminated=terminated, final_value=2.0
        )
        return [pair for pair, acted in zip(zip(*credit, strict=True), mask, strict=True) if acted]

    assert agent_tokens(few) == agent_tokens(many)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), max_size=10))
def test_rewards_on_observations_move_to_the_last_agent_token_and_keep_their_sum(tail):
    row = [(1.0, True), *tail]
    moved = rewards_on_agent_tokens([reward for reward, _ in row], [acted for _, acted in row])
    assert math.fsum(moved) == pytest.approx(math.fsum(reward for reward, _ in row), abs=1e-9)
    assert all(value == 0 for value, (_, acted) in zip(moved, row, strict=True) if not acted)


def test_a_reward_after_the_last_agent_token_is_that_tokens():
    assert rewards_on_agent_tokens([0, 0, 0, 1], [0, 1, 1, 0]) == [0, 0, 1, 0]
    late = token_gae([0, 0, 1], [0.2, 0.4, 9], [1, 1, 0])
    assert late.advantages[:2] == token_gae([0, 1], [0.2, 0.4], [1, 1]).advantages


def test_a_reward_before_the_agent_spoke_is_refused():
    with pytest.raises(ValueError, match="position 0"):
        rewards_on_agent_tokens([1.0, 0.0], [0, 1])


def test_token_discount_acts_between_turns_and_never_within_one():
    short = token_gae([0, 0, 1], [0.0] * 3, [1, 0, 1], gamma=0.5, lam=1.0)
    long = token_gae([0, 0, 0, 0, 1], [0.0] * 5, [1, 1, 0, 1, 1], gamma=0.5, lam=1.0)
    assert short.advantages == [0.5, 0, 1]
    assert long.advantages == [0.5, 0.5, 0, 1, 1]


def test_turn_gae_of_two_turns_by_hand():
    credit = turn_gae([0.0, 1.0], [0.3, 0.5], gamma=0.9, lam=0.8)
    # delta_1 = 1 - .5 = .5; delta_0 = 0 + .9 * .5 - .3 = .15; A_0 = .15 + .72 * .5 = .51
    assert credit.advantages == pytest.approx([0.51, 0.5])
    assert credit.returns == pytest.approx([0.81, 1.0])


@pytest.mark.parametrize("gae", ["turn", "token"])
def test_termination_cuts_the_bootstrap_and_truncation_uses_the_last_states_value(gae):
    def last(terminated: bool) -> float:
        if gae == "turn":
            return turn_gae(
                [0.0, 1.0], [0.3, 0.5], gamma=0.9, terminated=terminated, final_value=2.0
            ).advantages[-1]
        return token_gae(
            [0.0, 1.0], [0.3, 0.5], [1, 1], gamma=0.9, terminated=terminated, final_value=2.0
        ).advantages[-1]

    assert last(terminated=True) == pytest.approx(1 - 0.5)
    assert last(terminated=False) == pytest.approx(1 + 0.9 * 2 - 0.5)


def test_turn_gae_with_lambda_one_is_the_return_less_the_value():
    rewards, values = [1.0, -1.0, 3.0], [0.2, 0.7, -0.4]
    credit = turn_gae(rewards, values, gamma=0.9, lam=1.0)
    assert credit.returns == pytest.approx(returns_to_go(rewards, gamma=0.9))


@pytest.mark.parametrize(("name", "value"), [("gamma", 1.1), ("lam", -0.1)])
def test_discounts_outside_zero_to_one_are_refused(name, value):
    with pytest.raises(ConfigurationError, match=name):
        turn_gae([1.0], [0.0], **{name: value})
