"""Families of scenarios as parts: what one family's rewards are scaled by changes no other's advantage."""

from __future__ import annotations

import dataclasses

import pytest
from tiny_training import group_of

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ESTIMATORS, ScoredStep, ValueEstimate
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import TrajectoryGroup


def of_family(family: str, *rewards: float) -> TrajectoryGroup:
    group = group_of(*rewards, key=family)
    members = tuple(
        dataclasses.replace(member, scenario=dataclasses.replace(member.scenario, family=family))
        for member in group.trajectories
    )
    return dataclasses.replace(group, trajectories=members)


def scaled(estimator: str, strategy: str, factor: float) -> list[list[float]]:
    """The advantages of three groups, those of family b paid `factor` times as much."""
    groups = {
        0: of_family("a", 1.0, 0.0, 0.5),
        1: of_family("b", 1.0 * factor, 0.25 * factor, 0.0),
        2: of_family("a", 0.0, 0.0, 1.0),
    }
    config = TrainingConfig(
        advantage_estimator=estimator, advantage_normalization="batch", group_strategy=strategy
    )
    values = {}
    if ESTIMATORS[estimator].critic is not None:
        per_token = ESTIMATORS[estimator].critic == "token"
        values = {
            (index, member): ValueEstimate([0.0] * ((member + 1) if per_token else 1), 0.0)
            for index in groups
            for member in range(3)
        }
    found = ESTIMATORS[estimator].credit(ScoredStep(groups=groups, config=config, values=values)).scaled
    return [[number for member in group if member is not None for number in member] for group in found]


@pytest.mark.parametrize("estimator", ["group", "turn_gae", "token_gae", "hybrid"])
def test_a_familys_scale_changes_nothing_by_family_and_drowns_the_others_without(estimator: str) -> None:
    plain, large = scaled(estimator, "family", 1.0), scaled(estimator, "family", 9.0)
    for before, after in zip(plain, large, strict=True):
        assert after == pytest.approx(before, abs=1e-5)
    drowned = scaled(estimator, "none", 9.0)
    assert max(map(abs, drowned[0])) < 0.6 * max(map(abs, plain[0]))


def test_by_hand() -> None:
    groups = scaled("group", "family", 1.0)
    # each against its group, by the deviation of family a's rewards: 1, 0, .5, 0, 0 and 1
    deviation = (2.25 / 6 - (2.5 / 6) ** 2) ** 0.5
    assert groups[0] == pytest.approx([0.5 / deviation, -0.5 / deviation, 0], abs=1e-6)
    assert groups[2] == pytest.approx([-1 / 3 / deviation, -1 / 3 / deviation, 2 / 3 / deviation], abs=1e-6)


def test_one_family_is_the_whole_step() -> None:
    groups = {0: of_family("a", 1.0, 0.0), 1: of_family("a", 0.5, 0.0)}

    def credit(strategy: str) -> object:
        config = TrainingConfig(advantage_normalization="batch", group_strategy=strategy)
        return ESTIMATORS["group"].credit(ScoredStep(groups=groups, config=config, values={})).scaled

    assert credit("family") == credit("none")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set it to batch"),
        ({"advantage_estimator": "turn_group"}, "set it to batch"),
        (
            {
                "advantage_normalization": "batch",
                "multi_objective_aggregation": "normalize_then_sum",
                "reward_weights": {"a": 1.0, "b": 2.0},
            },
            "use one",
        ),
    ],
)
def test_what_has_no_deviation_of_the_step_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        TrainingConfig(**settings, group_strategy="family")
