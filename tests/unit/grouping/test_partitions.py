"""Who is in which part: keys, quantiles by hand, clusters that a page can draw again."""

from __future__ import annotations

import logging
from itertools import islice

import numpy as np
import pytest

from stateset_agents.grouping import partitions
from stateset_agents.grouping.partitioner import AdaptiveGrouper, finer_parts
from stateset_agents.grouping.partitions import (
    STRATEGIES,
    GroupingStrategy,
    Trajectories,
    create_group_masks,
    key_parts,
    kmeans,
    kmeans_parts,
    matched,
    mulberry32,
    quantile_parts,
    random_parts,
)
from stateset_agents.types.errors import ConfigurationError


def trajectories(number: int = 12) -> Trajectories:
    draw = np.random.default_rng(0)
    return Trajectories(
        returns=draw.normal(size=number),
        lengths=draw.integers(1, 50, number),
        tasks=np.arange(number) % 2,
        task_names=("pole", "acrobot"),
        features=draw.normal(size=(number, 3)),
    )


def test_mulberry32_draws_javascripts_numbers() -> None:
    # of the same function in Node 20
    assert list(islice(mulberry32(1), 3)) == [0.6270739405881613, 0.002735721180215478, 0.5274470399599522]
    assert next(mulberry32(2**32 + 1)) == next(mulberry32(1))


def test_quartiles_by_hand() -> None:
    parts = quantile_parts(np.array([0.0, 1, 2, 3, 4, 5, 6, 7, 8]))
    assert parts.boundaries is not None
    assert parts.boundaries.tolist() == [2, 4, 6]
    assert parts.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]  # one on a boundary belongs below it
    assert parts.outcome
    assert parts.sizes.tolist() == [3, 2, 2, 2]


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([5.0, 5, 5, 5], [0, 0, 0, 0]),
        ([0.0, 1, 0, 1], [0, 2, 0, 2]),  # quartiles 0, .5 and 1: each arm of the bandit for itself
        ([3.0], [0]),
        ([1.0, 2.0], [0, 3]),
        ([], []),
    ],
)
def test_ties_few_values_and_none_leave_parts_empty(values: list[float], labels: list[int]) -> None:
    parts = quantile_parts(np.array(values))
    assert parts.labels.tolist() == labels
    assert parts.num_parts == 4
    assert parts.sizes.sum() == len(values)


def test_quantiles_equal_numpys() -> None:
    values = np.random.default_rng(3).normal(size=101)
    for number in range(2, 9):
        ours = partitions.quantile_boundaries(values, number)
        assert ours == pytest.approx(np.quantile(values, np.arange(1, number) / number), abs=1e-12)


def test_a_value_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="only finite numbers"):
        quantile_parts(np.array([1.0, np.nan]))
    with pytest.raises(ConfigurationError, match="with one that is none"):
        kmeans(np.array([[np.inf]]), 1)
    with pytest.raises(ConfigurationError, match="between 1 and 8, got 9"):
        kmeans(np.zeros((20, 1)), 9)


def test_keys_are_parts_in_the_order_of_their_names() -> None:
    assert key_parts(["b", "a", "b"]).labels.tolist() == [1, 0, 1]
    named = key_parts(["b", "a", "b"], ["c", "b", "a"])
    assert named.labels.tolist() == [1, 2, 1]
    assert named.sizes.tolist() == [0, 2, 1]
    assert key_parts([1, 0], ["pole", "acrobot"]).labels.tolist() == [1, 0]
    with pytest.raises(ConfigurationError, match="task must be one of a, got 'b'"):
        key_parts(["b"], ["a"])
    with pytest.raises(ConfigurationError, match="task must be one of a, got '1'"):
        key_parts([1], ["a"])


def test_clusters_find_what_lies_apart() -> None:
    draw = np.random.default_rng(1)
    rows = np.concatenate([draw.normal(place, 0.1, (20, 2)) for place in (0.0, 5.0, 10.0)])
    for seed in range(20):
        parts = kmeans_parts(rows, 3, seed=seed)
        assert len({tuple(parts.labels[start : start + 20]) for start in (0, 20, 40)}) == 3
        assert all(len(set(parts.labels[start : start + 20].tolist())) == 1 for start in (0, 20, 40))
        assert parts.centres is not None
        assert sorted(np.round(parts.centres[:, 0])) == [0, 5, 10]  # in the units of the features


def test_clusters_of_equal_rows_and_of_few() -> None:
    same = kmeans_parts(np.ones((5, 2)), 4)
    assert same.labels.tolist() == [0] * 5
    assert same.num_parts == 4
    assert sorted(kmeans_parts(np.array([[0.0], [1.0]]), 4).labels.tolist()) == [0, 1]
    assert kmeans_parts(np.zeros((0, 2)), 4).labels.tolist() == []


def test_a_tie_goes_to_the_lower_number_and_an_empty_cluster_keeps_its_centre() -> None:
    found = kmeans(np.array([[0.0], [1.0], [2.0]]), 3, centres=np.array([[0.0], [2.0], [50.0]]))
    assert found.labels.tolist() == [0, 0, 1]
    assert found.centres[:, 0].tolist() == [0.5, 2.0, 50.0]
    assert found.inertia == 0.5


def test_centres_are_matched_to_those_before() -> None:
    assert matched(np.array([[0.0], [5.0], [9.0]]), np.array([[9.5], [0.2], [5.1]])) == (1, 2, 0)
    with pytest.raises(ConfigurationError, match="centres must be as many"):
        matched(np.zeros((2, 1)), np.zeros((3, 1)))


def test_parts_keep_their_numbers_over_20_batches_that_drift() -> None:
    draw = np.random.default_rng(2)
    grouper = AdaptiveGrouper(100, 3)
    first = None
    for batch in range(20):
        kinds = draw.permutation(np.repeat([0, 1, 2], 10))
        rows = (10.0 * kinds + 0.5 * batch)[:, None] + draw.normal(0, 0.3, (30, 2))
        labels = grouper.update_groups(rows)
        of_kind = [set(labels[kinds == kind].tolist()) for kind in range(3)]
        first = first or of_kind
        assert of_kind == first
        assert all(len(parts) == 1 for parts in of_kind)
        assert len(grouper.state()["window"]) == min(100, 30 * (batch + 1))  # bounded


def test_an_adaptive_grouper_goes_on_from_its_state() -> None:
    draw = np.random.default_rng(4)
    batches = [draw.normal(size=(20, 2)) for _ in range(6)]
    whole, halved = AdaptiveGrouper(), AdaptiveGrouper()
    for batch in batches[:3]:
        whole.update_groups(batch), halved.update_groups(batch)
    again = AdaptiveGrouper()
    again.load(halved.state())
    for batch in batches[3:]:
        assert whole.update_groups(batch).tolist() == again.update_groups(batch).tolist()


def test_random_parts_follow_their_seed_alone() -> None:
    parts = random_parts(1000, 4, seed=7)
    assert parts.labels.tolist() == random_parts(1000, 4, seed=7).labels.tolist()
    assert parts.labels[:3].tolist() == [int(u * 4) for u in islice(mulberry32(7), 3)]
    assert min(parts.sizes) > 200


def test_masks_hold_every_trajectory_once() -> None:
    labels = np.array([0, 2, 2])
    masks = create_group_masks(labels, 4)
    assert masks.tolist() == [[True, False, False], [False] * 3, [False, True, True], [False] * 3]
    assert create_group_masks(labels.reshape(3, 1), 4).shape == (4, 3, 1)


def test_parts_of_parts() -> None:
    both = finer_parts(key_parts(["a", "a", "b"]), random_parts(3, 2))
    assert both.num_parts == 4
    assert both.names[3] == "b, 1"
    assert not both.outcome
    assert set(both.labels[:2] // 2) == {0}
    assert both.labels[2] // 2 == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_divides_and_says_whether_it_looks_at_the_outcome(
    name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "_warned", set())
    given = trajectories()
    with caplog.at_level(logging.WARNING):
        strategy = GroupingStrategy(name, 3)
        GroupingStrategy(name, 3)
    parts = strategy.parts(given)
    assert len(parts.labels) == 12
    assert parts.labels.min() >= 0
    assert parts.labels.max() < parts.num_parts
    assert parts.outcome == STRATEGIES[name].outcome == (len(caplog.records) == 1)
    # does the outcome matter?
    other = Trajectories(
        returns=-given.returns, lengths=50 - given.lengths, tasks=given.tasks, features=given.features
    )
    same = strategy.parts(other).labels.tolist() == parts.labels.tolist()
    assert same != parts.outcome or name == "auto_outcome"  # clusters of mirrored outcomes are the same


def test_what_a_strategy_needs_is_said() -> None:
    bare = Trajectories(returns=np.zeros(2), lengths=np.ones(2, dtype=np.int64))
    with pytest.raises(ConfigurationError, match="give tasks"):
        GroupingStrategy("task").parts(bare)
    with pytest.raises(ConfigurationError, match="known before acting"):
        GroupingStrategy("auto").parts(bare)
    with pytest.raises(ConfigurationError, match="did you mean 'task'"):
        GroupingStrategy("tasks")
    with pytest.raises(ConfigurationError, match="n_groups must be at least 1, got 0"):
        GroupingStrategy("auto", 0)
