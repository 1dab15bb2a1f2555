"""Tasks of one change, made from tau2's retail database, judged by tau2's rules: `make test-tau2`."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from stateset_agents.environments.retail_desk import play
from stateset_agents.environments.tau2 import Tau2Environment
from stateset_agents.environments.tau2.tasks import FAMILIES, HELD_OUT, MADE_TOOLS
from stateset_agents.environments.tau2.verdict import Tau2Verdict
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

pytestmark = pytest.mark.tau2
SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def made() -> Tau2Environment:
    return Tau2Environment("retail", tasks="made")


async def test_the_oracle_has_them_all_and_doing_nothing_has_none(made: Tau2Environment) -> None:
    right: Counter[str] = Counter()
    for split in SPLITS:
        for scenario in made.scenarios(split):
            agents = {name: make() for name, make in made.floor_agents.items()}
            for name, agent in {"oracle": made.honest_agent(scenario), **agents}.items():
                played = await play(made, scenario, 0, agent)
                right[name] += played.outcome.success is True
    assert right == {"oracle": 850, "idle": 0, "transfer_at_once": 0}


async def test_tau2s_own_evaluators_agree() -> None:
    environment = Tau2Environment("retail", tasks="made", verdict="tau2")
    assert isinstance(environment._judge, Tau2Verdict)
    for scenario in environment.scenarios("test")[: 2 * len(FAMILIES)]:
        played = await play(environment, scenario, 0, environment.honest_agent(scenario))
        assert played.outcome.success is True
        played = await play(environment, scenario, 0, environment.floor_agents["idle"]())
        assert played.outcome.success is False


def test_families_and_their_twins_are_as_many_in_every_split(made: Tau2Environment) -> None:
    names = {f"{family}{end}" for family in FAMILIES for end in ("", "_refused")}
    assert len(FAMILIES) == 5
    for split, number in (("train", 600), *HELD_OUT.items()):
        scenarios = made.scenarios(split)
        assert Counter(one.family for one in scenarios) == dict.fromkeys(names, number // 10)
        pairs = Counter(one.context["pair"] for one in scenarios)
        assert set(pairs.values()) == {2}
    wishes = [one.context["reason_for_call"] for split in SPLITS for one in made.scenarios(split)]
    assert len(set(wishes)) == len(wishes) == 850


def test_no_user_of_one_split_is_in_another(made: Tau2Environment) -> None:
    users: dict[str, set[str]] = {split: set() for split in SPLITS}
    orders = made._domain.environment.tools.db.orders
    for entry in made._entries:
        [action] = entry.actions
        known = action.arguments.get("user_id") or orders[action.arguments["order_id"]].user_id
        users[entry.scenario.split].add(known)
    assert all(users.values())
    assert not users["train"] & users["test"]
    assert not users["train"] & users["validation"]
    assert not users["validation"] & users["test"]


def test_the_seed_draws_what_to_train_on_and_nothing_else(made: Tau2Environment) -> None:
    def wishes(environment: Tau2Environment, split: str) -> list[str]:
        return [one.context["reason_for_call"] for one in environment.scenarios(split)]

    other = Tau2Environment("retail", tasks="made", num_train=40, seed=1)
    again = Tau2Environment("retail", tasks="made", num_train=40, seed=1)
    assert len(wishes(other, "train")) == 40
    assert wishes(other, "train") == wishes(again, "train") != wishes(made, "train")[:40]
    assert wishes(other, "test") == wishes(made, "test")
    with pytest.raises(
        ConfigurationError, match=r"different cancel_order tasks to train on: lower num_train to"
    ):
        Tau2Environment("retail", tasks="made", num_train=100_000)


async def test_a_talk_is_short_and_fits_a_small_model(made: Tau2Environment) -> None:
    lengths = []
    for scenario in made.scenarios("test"):
        played = await play(made, scenario, 0, made.honest_agent(scenario))
        assert played.num_replies == 2
        lengths.append(sum(len(message.content) for message in played.messages))
    assert max(lengths) < 900
    conversation = await made.start(made.scenarios("test")[0], 0)
    assert [tool["function"]["name"] for tool in conversation.tools] == list(MADE_TOOLS)
    assert len(json.dumps(list(conversation.tools))) < 2300  # of 6,045 with tau2's descriptions
    assert conversation.tools[0]["function"]["description"] == "Cancel a pending order."
    bare = await Tau2Environment("retail", tasks="made", tools="none").start(made.scenarios("test")[0], 0)
    assert list(bare.tools) == []
    assert "\n" not in conversation.opening[0].content
    assert "\ncancel_pending_order(order_id, reason)\n" in bare.opening[0].content


async def test_always_refusing_and_always_granting_are_right_of_no_pair(made: Tau2Environment) -> None:
    pairs: Counter[str] = Counter()
    for scenario in made.scenarios("test"):
        conversation = await made.start(scenario, 0)
        await conversation.step(
            Message(role="assistant", content="It is not pending, not delivered, not found.")
        )
        await conversation.step(Message(role="assistant", content="Goodbye."))
        pairs[scenario.context["pair"]] += (await conversation.outcome()).success is True
    assert set(pairs.values()) == {1}  # the twin alone
