"""Credit from branches: hand-worked numbers, and the exact gradient by enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from stateset_agents.algorithms.advantages import (
    branch_credit,
    group_advantages,
    per_turn_group_credit,
    returns_to_go,
)
from stateset_agents.types.errors import ConfigurationError


def test_the_docstring_s_example():
    credit = branch_credit([[0, 1], [0]], [[[], [1, 0]], [[]]])
    assert credit == [[pytest.approx(2 / 3), 0.5], [pytest.approx(-2 / 3)]]


def test_a_turn_is_worth_what_all_ways_on_from_its_end_earned_and_is_compared_with_those_from_its_start():
    # returns to go 3, 2, 2; Q = 1 + mean(4, 0, 2), 0 + mean(6, 2), 2; V = 0 (no sibling), 2, 6
    assert branch_credit([[1, 0, 2]], [[[], [4, 0], [6]]]) == [[3, 2, -4]]


def test_gamma_discounts_what_comes_after_the_turn():
    # returns to go 2, 2: Q = 1 + .5 mean(4, 2), 2; V = 0, 4
    assert branch_credit([[1, 2]], [[[], [4]]], gamma=0.5) == [[2.5, -2]]


def test_the_first_turn_is_compared_with_what_the_siblings_first_turns_turned_out_to_be_worth():
    # Q_0 of the first: mean(0, 0, 3) = 1, not its own luck of 3; of the others 0 and 2
    first, second, third = branch_credit([[0, 3], [0], [2]], [[[], [0, 0]], [[]], [[]]])
    assert (first[0], second, third) == (1 - 1, [0 - 1.5], [2 - 0.5])


def test_a_state_that_lost_its_branches_is_compared_with_the_siblings_that_reached_that_turn():
    credit = branch_credit([[0, 3], [0, 1], [0]], [[[], []], [[], [5]], [[]]])
    assert credit[0][1] == 3 - 1  # the second member's Q_1 is 1; the third never got there
    assert credit[1][1] == 1 - 5


def test_without_any_branch_it_is_the_per_turn_credit_of_the_group():
    rewards = [[1, 2], [0], None, [0, 1, 5]]
    nothing = [[[] for _ in values or ()] for values in rewards]
    assert branch_credit(rewards, nothing) == per_turn_group_credit(rewards)


def test_conversations_of_one_turn_are_compared_by_leave_one_out():
    rewards = [1, 0, 0.5, 1]
    credit = branch_credit([[reward] for reward in rewards], [[[]]] * 4)
    (expected,) = group_advantages([rewards], baseline="leave_one_out", scaling="none")
    assert [value for (value,) in credit] == pytest.approx(expected)


def test_an_unscored_member_gets_none_and_is_nobody_s_sibling():
    assert branch_credit([None, [1], [0]], [[[], [9]], [[]], [[]]]) == [None, [1], [-1]]


def test_a_gamma_outside_the_unit_interval_is_refused():
    with pytest.raises(ConfigurationError, match=r"gamma must lie between 0 and 1, got 1\.5"):
        branch_credit([[1.0]], [[[]]], gamma=1.5)


# A policy that may go on (reward 1) or stop (reward 0, the end) at each of up to three turns, with
# probability 1/2 each; at the third, going on earns 2. With the logit of "go on" as parameter the exact
# gradient of J = p + p^2 + 2 p^3 is p (1 - p) (1 + 2 p + 6 p^2) = .875.
GO_ON, REWARDS, EXACT = 0.5, (1.0, 1.0, 2.0), 0.875
MOST_TURNS = len(REWARDS)

Groups = Sequence[Sequence[float] | None]
Branches = Sequence[Sequence[Sequence[float]]]
Estimator = Callable[[Groups, Branches], Sequence[Sequence[float] | None]]


@dataclass(frozen=True)
class Member:
    """One way a conversation and its branches can go, and how probable it is."""

    probability: float
    rewards: tuple[float, ...] | None
    scores: tuple[float, ...]
    """d log pi of each turn's choice."""
    branches: tuple[tuple[float, ...], ...]


def _ways_on(turn: int) -> list[tuple[float, list[float]]]:
    """Every continuation from the state before `turn`: its probability and its rewards."""
    continuations = []
    for n in range(turn, MOST_TURNS + 1):
        stop = n < MOST_TURNS
        rewards = [*REWARDS[turn:n], *([0.0] if stop else [])]
        continuations.append((GO_ON ** (n - turn) * (1 - GO_ON if stop else 1), rewards))
    return continuations


def _members(num_branches: int, lost: float, unscored: float, gamma: float) -> Iterator[Member]:
    """Each branch goes unscored with probability `lost`, each member with `unscored`."""

    def samples(turn: int) -> list[tuple[float, tuple[float, ...]]]:
        single: list[tuple[float, float | None]] = [
            (chance * (1 - lost), returns_to_go(rewards, gamma=gamma)[0])
            for chance, rewards in _ways_on(turn)
        ]
        single += [(lost, None)] if lost else []
        return [
            (math.prod(p for p, _ in drawn), tuple(value for _, value in drawn if value is not None))
            for drawn in itertools.product(single, repeat=num_branches)
        ]

    for chance, rewards in _ways_on(0):
        scores = tuple(1 - GO_ON if reward else -GO_ON for reward in rewards)
        for drawn in itertools.product(*(samples(turn) for turn in range(1, len(rewards)))):
            probability = chance * math.prod(p for p, _ in drawn)
            branches = ((), *(values for _, values in drawn))
            yield Member(probability * (1 - unscored), tuple(rewards), scores, branches)
            if unscored:
                yield Member(probability * unscored, None, scores, branches)


def _moments(
    estimator: Estimator,
    *,
    size: int = 2,
    num_branches: int = 1,
    lost: float = 0.0,
    unscored: float = 0.0,
    gamma: float = 1.0,
) -> tuple[float, float]:
    """Mean and variance, over everything that can happen, of sum over turns of credit times score / G."""
    mean = square = total = 0.0
    everyone = list(_members(num_branches, lost, unscored, gamma))
    for group in itertools.combinations_with_replacement(everyone, size):
        counts = [group.count(member) for member in dict.fromkeys(group)]
        orders = math.factorial(size) / math.prod(map(math.factorial, counts))
        probability = orders * math.prod(member.probability for member in group)
        credit = estimator([m.rewards for m in group], [m.branches for m in group])
        gradient = sum(
            value * score
            for member, values in zip(group, credit, strict=True)
            for value, score in zip(values or (), member.scores, strict=False)
        )
        total += probability
        mean += probability * gradient / size
        square += probability * (gradient / size) ** 2
    assert total == pytest.approx(1)
    return mean, square - mean**2


@pytest.mark.parametrize(
    "world",
    [
        {"size": 1},
        {"size": 2},
        {"size": 3},
        {"num_branches": 2},
        {"num_branches": 0},
        {"lost": 0.3},
        {"size": 1, "num_branches": 2, "lost": 0.3},
    ],
    ids=str,
)
def test_it_is_unbiased_whatever_is_lost(world):
    mean, _ = _moments(branch_credit, **world)
    assert mean == pytest.approx(EXACT, rel=1e-9)


def test_unscored_members_make_it_smaller_but_no_different():
    mean, _ = _moments(branch_credit, unscored=0.25)
    assert mean == pytest.approx(0.75 * EXACT, rel=1e-9)


def test_with_gamma_it_estimates_what_the_plain_discounted_return_estimates():
    def plain(rewards: Groups, branches: Branches) -> list[list[float] | None]:
        return [None if values is None else returns_to_go(values, gamma=0.8) for values in rewards]

    exact, _ = _moments(plain, num_branches=0)
    mean, _ = _moments(
        lambda rewards, continuations: branch_credit(rewards, continuations, gamma=0.8), gamma=0.8
    )
    assert mean == pytest.approx(exact, rel=1e-9)


def test_its_variance_is_below_the_group_s_and_falls_with_the_number_of_branches():
    _, by_group = _moments(lambda rewards, _: per_turn_group_credit(rewards), num_branches=0)
    _, single = _moments(branch_credit, num_branches=1)
    _, two = _moments(branch_credit, num_branches=2)
    assert two < single < by_group


def test_a_value_that_counts_the_member_s_own_way_on_is_biased():
    """What branch_credit must not do; the probe must be able to see it."""

    def with_own(rewards: Groups, branches: Branches) -> list[list[float] | None]:
        seen = [
            [
                (*continued, value)
                for continued, value in zip(continuations, returns_to_go(values), strict=True)
            ]
            for values, continuations in zip(rewards, branches, strict=True)
            if values is not None
        ]
        return branch_credit(rewards, [[(), *continuations[1:]] for continuations in seen])

    mean, _ = _moments(with_own, size=1)
    assert mean < 0.9 * EXACT


def test_no_credit_for_a_state_that_lost_its_branches_is_biased():
    def zero_when_lost(rewards: Groups, branches: Branches) -> list[list[float] | None]:
        return [
            None
            if values is None
            else [value if k == 0 or continuations[k] else 0.0 for k, value in enumerate(values)]
            for values, continuations in zip(branch_credit(rewards, branches), branches, strict=True)
        ]

    mean, _ = _moments(zero_when_lost, size=1, lost=0.3)
    assert mean < 0.95 * EXACT
