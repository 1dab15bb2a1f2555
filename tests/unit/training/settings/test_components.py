"""Rewards by the name that a YAML file gives them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from builders import trajectory

from stateset_agents.core.reward import EnvironmentReward, RewardFunction, reward_function
from stateset_agents.runtime.named_code import imported
from stateset_agents.training.components import REWARDS, make_reward
from stateset_agents.types.errors import ConfigurationError


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


def test_such_a_folder_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stand").mkdir()
    (tmp_path / "stand" / "corner_stall.py").write_text("def brief(replies):\n    return 4\n")
    assert imported("reward", "stand/corner_stall:brief")([]) == 4


def test_a_module_is_looked_for_in_a_folder_that_stands_before_its_name(tmp_path):
    (tmp_path / "kiosk_rules.py").write_text("LIMIT = 3\n")
    (tmp_path / "kiosk.py").write_text(
        "from kiosk_rules import LIMIT\n\ndef brief(replies):\n    return LIMIT\n"
    )
    assert imported("reward", f"{tmp_path}/kiosk:brief")([]) == 3
    other = tmp_path / "other"
    other.mkdir()
    (other / "kiosk.py").touch()
    with pytest.raises(
        ConfigurationError, match=r"kiosk is imported from .*kiosk\.py already; rename one of them"
    ):
        imported("reward", f"{other}/kiosk:brief")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import numpyy", "ModuleNotFoundError: No module named 'numpyy' (at booth_0.py:1)"),
        (
            "from stateset_agents.core.tools import tool\n@tool\ndef find(order):\n    pass",
            "tool find: parameter 'order' needs a type, e.g. order: str (at booth_1.py:2)",
        ),
        (
            "from stateset_agents.core.tools import tool\n@tool\ndef find(order: 'Foo'):\n    pass",
            "tool find: a type in its signature is unknown: name 'Foo' is not defined (at booth_2.py:2)",
        ),
    ],
)
def test_a_module_that_breaks_inside_says_where(tmp_path, text, message):
    module = message.partition("(at ")[2].partition(".")[0]
    (tmp_path / f"{module}.py").write_text(text)
    with pytest.raises(ConfigurationError) as error:
        imported("reward", f"{tmp_path}/{module}:make")
    assert str(error.value).endswith(f"cannot be imported: {message}")


def test_a_folder_of_the_modules_name_is_no_module(tmp_path, monkeypatch):
    (tmp_path / "stand").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigurationError, match=r"'stand' is only a folder here: name a module in it, stand\.file:make"
    ):
        imported("environment", "stand:make")


def test_a_reward_that_is_made_already_takes_no_arguments(shop):
    shop.decorated = reward_function(brief)
    with pytest.raises(ConfigurationError, match="'shop_rewards:decorated' is made already: take out weight"):
        make_reward({"name": "shop_rewards:decorated", "weight": 2})
