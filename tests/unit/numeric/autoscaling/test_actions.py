"""The action space: every index is one action, and the other way round."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.numeric.autoscaling.actions import (
    ConfigAction,
    InfrastructureActionSpace,
    ScalingAction,
)
from stateset_agents.types.errors import ConfigurationError


@pytest.mark.parametrize(("traffic", "count"), [(True, 539), (False, 49)])
def test_decoding_undoes_encoding_for_every_action(traffic: bool, count: int) -> None:
    space = InfrastructureActionSpace(enable_traffic_actions=traffic)
    assert space.total_actions == count
    decoded = [space.decode_action(index) for index in range(count)]
    assert [space.encode_action(**action) for action in decoded] == list(range(count))
    assert len({tuple(action.values()) for action in decoded}) == count


def test_traffic_counts_fastest_and_replicas_slowest() -> None:
    space = InfrastructureActionSpace()
    first = {"scaling": -4, "config": 0, "traffic_weight": 0}
    assert space.decode_action(0) == first
    assert space.decode_action(1) == first | {"traffic_weight": 10}
    assert space.decode_action(11) == first | {"config": 1}
    assert space.decode_action(77) == first | {"scaling": -2}
    assert list(space.decode_action(0)) == ["scaling", "config", "traffic_weight"]


@given(data=st.data(), traffic=st.booleans())
def test_subsets_have_indices_of_their_own(data: st.DataObject, traffic: bool) -> None:
    scaling = data.draw(st.lists(st.sampled_from(ScalingAction), min_size=1, unique=True))
    config = data.draw(st.lists(st.sampled_from(ConfigAction), min_size=1, unique=True))
    space = InfrastructureActionSpace(scaling, config, traffic)
    assert space.total_actions == len(scaling) * len(config) * (11 if traffic else 1)
    index = data.draw(st.integers(0, space.total_actions - 1))
    assert space.encode_action(**space.decode_action(index)) == index


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"traffic_weight": 15}, r"traffic_weight must be 0, 10, .* or 100, got 15"),
        ({"scaling": 3}, r"scaling must be SCALE_DOWN_LARGE, .* got 3"),
        ({"config": 7}, r"config must be DECREASE_BATCH_SIZE, .* got 7"),
    ],
)
def test_what_is_no_action_is_refused(change: dict[str, Any], message: str) -> None:
    good = {"scaling": 0, "config": 6, "traffic_weight": 20}
    with pytest.raises(ConfigurationError, match=message):
        InfrastructureActionSpace().encode_action(**(good | change))


def test_indices_and_choices_outside_the_space_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"an action must be 0 to 48, got 49"):
        InfrastructureActionSpace(enable_traffic_actions=False).decode_action(49)
    with pytest.raises(ConfigurationError, match=r"traffic_weight must be None, got 10"):
        InfrastructureActionSpace(enable_traffic_actions=False).encode_action(0, 6, 10)
    with pytest.raises(ConfigurationError, match=r"scaling_actions must name at least one action"):
        InfrastructureActionSpace([])
    with pytest.raises(ConfigurationError, match=r"config_actions must be of ConfigAction, got 3"):
        InfrastructureActionSpace(config_actions=[3])  # type: ignore[list-item]  # what it refuses
