"""Rewards by the name that a YAML file gives them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from builders import trajectory

from stateset_agents.core.reward import EnvironmentReward, RewardFunction, reward_function
from stateset_agents.errors import ConfigurationError
from stateset_agents.training.parts import REWARDS, make_reward


def brief(replies):
    return 1.0 / len(replies)


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's own."""
    module = ModuleType("shop_rewards")
    monkeypatch.setitem(sys.modules, "shop_rewards", module)
    return module


async def test_a_yaml_file_may_name_a_plain_function_a_decorated_one_or_what_makes_a_reward(shop):
    shop.brief = brief
    shop.decorated = reward_function(brief)
    shop.make = EnvironmentReward
    talk = trajectory("Hi", "a", "b", "c")
    for name in ("brief", "decorated"):
        assert (await make_reward({"name": f"shop_rewards:{name}"}).score(talk)).score == 0.5
    assert isinstance(make_reward({"name": "shop_rewards:make"}), EnvironmentReward)


def test_every_named_reward_can_be_made():
    more = {
        "domain": {"domain": "sales"},
        "judge": {"rubric": "Was it kind?", "url": "http://localhost:8000/v1", "model": "m"},
    }
    for name in REWARDS:
        assert isinstance(make_reward({"name": name, **more.get(name, {})}), RewardFunction)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "shop_rewards:breif",
            "reward 'shop_rewards:breif': module 'shop_rewards' has no 'breif' (did you mean 'brief'?)",
        ),
        ("shop_rewards.brief", "got 'shop_rewards.brief' (did you mean 'shop_rewards:brief'?)"),
        ("brief", "got 'brief' (of a file of your own: 'module:brief')"),
        ("shop_rewrds:brief", "No module named 'shop_rewrds'; give the command where it lies"),
    ],
)
def test_a_name_that_leads_nowhere_names_what_was_meant(shop, name, message):
    shop.brief = brief
    with pytest.raises(ConfigurationError) as error:
        make_reward({"name": name})
    assert message in str(error.value)
