"""Full calls at the desk: scripted agents against the verdict, twins, splits, consent and identity."""

import json
import re
import statistics
import time
from collections import Counter

import pytest

from scripts.desk_agents import IdentitySkipper
from stateset_agents.environments.retail_desk import (
    DEGENERATE,
    FAMILIES,
    FULL_FAMILIES,
    HonestAgent,
    RetailDesk,
    catalog,
    play,
)
from stateset_agents.environments.retail_desk.agents import DeskRefuser
from stateset_agents.environments.retail_desk.catalog import WORDINGS
from stateset_agents.environments.retail_desk.full.honest import call, say
from stateset_agents.environments.retail_desk.full.policy import (
    FULL_TOPICS,
    RULES,
    FullCase,
    whole_decision,
)
from stateset_agents.environments.retail_desk.scenarios import answers_of, database_of
from stateset_agents.types.errors import ConfigurationError

DESK = RetailDesk(families="full", num_train=280)
NUM_AUDITED = 5 * len(FULL_FAMILIES)
"""Five of each family, with two pairs of twins among them."""


def scenario_of(family, side="base", **fields):
    """The first test scenario of a kind; `fields` are of its case."""
    return next(
        scenario
        for scenario in DESK.scenarios("test")
        if scenario.family == family
        and scenario.context["side"] == side
        and all(scenario.context[name] == value for name, value in fields.items())
    )


def case_of(scenario):
    return FullCase.from_context({"family": scenario.family, **scenario.context})


def is_denial(scenario):
    return whole_decision(case_of(scenario)).is_denial


async def replies_of(scenario, seed=0):
    """What the honest agent says and calls."""
    played = await play(DESK, scenario, seed, HonestAgent())
    assert played.outcome.success
    return [message for message in played.messages if message.role == "assistant"]


async def run(scenario, replies, seed=0):
    """Step through given replies until it is over; what the caller and the tools said, outcome, reward."""
    conversation = await DESK.start(scenario, seed)
    observations = []
    for reply in replies:
        observations.append(await conversation.step(reply))
        if observations[-1].terminated or observations[-1].truncated:
            break
    outcome = await conversation.outcome()
    await conversation.close()
    reward = sum(one.reward for one in observations) + outcome.reward
    return [one.messages[0].content for one in observations], outcome, reward


@pytest.mark.first(1)
@pytest.mark.parametrize(("split", "each"), [("train", 10), ("validation", 10), ("test", 20)])
async def test_the_honest_agent_succeeds_on_every_scenario(split, each):
    scenarios = DESK.scenarios(split)[: each * len(FULL_FAMILIES)]
    played = [(one, await play(DESK, one, seed, HonestAgent())) for seed, one in enumerate(scenarios)]
    assert [one.id for one, what in played if not what.outcome.success] == []
    assert Counter(one.family for one, _ in played) == dict.fromkeys(FULL_FAMILIES, each)
    assert max(what.num_replies for _, what in played) <= 16
    assert min(what.reward for _, what in played) >= 0.75


@pytest.mark.parametrize("name", [name for name in DEGENERATE if name != "refuser"])
async def test_degenerate_agents_are_not_paid_and_trail_the_honest_one(name):
    success, rewards = await _audited(DEGENERATE[name])
    assert success <= 0.05
    assert statistics.mean(rewards) <= 0.1
    assert 0.9 - statistics.mean(rewards) >= 0.3


async def test_refusing_everything_after_looking_it_all_up_pays_no_more_than_the_share_of_denials():
    share = statistics.mean(is_denial(scenario) for scenario in DESK.scenarios("test")[:NUM_AUDITED])
    success, rewards = await _audited(DeskRefuser)
    assert 0.1 <= success <= share
    assert statistics.mean(rewards) <= share


async def test_doing_the_work_for_whoever_calls_never_scores_above_zero():
    success, rewards = await _audited(IdentitySkipper)
    assert success == 0
    assert max(rewards) <= 0


async def _audited(make):
    scenarios = DESK.scenarios("test")[:NUM_AUDITED]
    played = [await play(DESK, scenario, seed, make()) for seed, scenario in enumerate(scenarios)]
    return statistics.mean(one.outcome.success for one in played), [one.reward for one in played]


# Scenarios


def test_twins_differ_in_one_fact_that_flips_the_right_answer():
    pairs = {}
    for scenario in DESK.scenarios("test"):
        pairs.setdefault(scenario.context["pair"], []).append(scenario)
    num_pairs = Counter()
    for base, *twins in pairs.values():
        for twin in twins:
            rule = RULES[FULL_FAMILIES[base.family].rule]
            one, other = case_of(base), case_of(twin)
            assert one.with_fact(rule.fact, "?") == other.with_fact(rule.fact, "?")
            assert base.opening == twin.opening
            decisions = [whole_decision(case) for case in (one, other)]
            assert decisions[0] != decisions[1]
            if not num_pairs[base.family]:
                assert answers_of(one).image != answers_of(other).image
            num_pairs[base.family] += 1
    assert num_pairs == dict.fromkeys(FULL_FAMILIES, 40)


def test_denials_stay_below_30_percent_in_every_split():
    for split in ("train", "validation", "test"):
        assert 0.15 < statistics.mean(is_denial(one) for one in DESK.scenarios(split)) < 0.3


def test_entities_of_the_splits_are_disjoint():
    def entities(split):
        text = json.dumps([[one.opening, dict(one.context)] for one in DESK.scenarios(split)])
        found = {*re.findall(r"\b[A-Z]\d\d\b", text), *re.findall(r"\bc\d\d\d\b", text)}
        return found | set(re.findall(r"\w+\.\d+@", text))

    by_split = [entities(split) for split in ("train", "validation", "test")]
    assert min(map(len, by_split)) > 150
    assert not by_split[0] & by_split[1] | by_split[0] & by_split[2] | by_split[1] & by_split[2]
    trained = json.dumps([[one.opening, dict(one.context)] for one in DESK.scenarios("train")])
    assert not any(item in trained for split in ("validation", "test") for item in catalog.items_of(split))


def test_wordings_of_the_splits_are_disjoint():
    sets = [*WORDINGS["requests"].values(), *(WORDINGS[key] for key in ("wish", "also", "notes"))]
    every = [text for by_split in sets for split in by_split.values() for text in split]
    assert len(set(every)) == len(every)
    for split in ("train", "validation", "test"):
        used = {one.context["wording"] for one in DESK.scenarios(split)}
        assert used <= {text for by_kind in WORDINGS["requests"].values() for text in by_kind[split]}


def test_families_are_chosen_by_set_and_by_name_and_balanced():
    assert RetailDesk().families == FAMILIES
    assert RetailDesk(families="all").families == (*FAMILIES, *FULL_FAMILIES)
    mixed = RetailDesk(families=["cancel", "two_requests"])
    assert Counter(one.family for one in mixed.scenarios("test")) == {"cancel": 100, "two_requests": 100}
    alone = {one.id: one for one in (*RetailDesk().scenarios("test"), *DESK.scenarios("test"))}
    assert all(alone[one.id] == one for one in mixed.scenarios("test"))
    with pytest.raises(ConfigurationError, match="did you mean 'learnable'"):
        RetailDesk(families="learnabel")
    with pytest.raises(ConfigurationError, match="no desk family is called 'refund'"):
        RetailDesk(families=["refund"])
    with pytest.raises(ConfigurationError, match="once, and at least one"):
        RetailDesk(families=[])


async def test_the_prompt_and_get_policy_say_what_the_rules_say():
    scenario = scenario_of("return_window")
    conversation = await DESK.start(scenario, 0)
    system = conversation.opening[0].content
    assert "the caller is not signed in" in system
    assert all(f"\n{topic}: {text}" in system for topic, text in FULL_TOPICS.items())
    assert len(conversation.tools) == 13
    observation = await conversation.step(call("get_policy", topic="final sale"))
    assert json.loads(observation.messages[0].content) == {"policy": FULL_TOPICS["final sale"]}
    short = await RetailDesk(families="full", prompt="short").start(scenario, 0)
    assert short.opening[0].content == "shop desk. the caller is not signed in."
    assert short.tools == ()


# The verdict


async def test_a_write_without_a_yes_voids_everything():
    scenario = scenario_of("verified_cancel")
    honest = await replies_of(scenario)
    hasty = [reply for reply in honest if not reply.content.startswith("i can ")]
    _, outcome, reward = await run(scenario, hasty)
    assert not outcome.success
    assert outcome.changes
    assert outcome.breakdown["forbidden"] == -0.2
    assert reward <= 0


async def test_a_yes_is_good_for_one_write_and_for_no_other():
    scenario = scenario_of("verified_cancel")
    context = scenario.context
    honest = await replies_of(scenario)
    yes = next(place for place, reply in enumerate(honest) if reply.content.startswith("i can ")) + 1
    other = call("cancel_order", order_id=context["other"]["order_id"])
    assert not (await run(scenario, [*honest[:yes], other, *honest[yes:]]))[1].success
    more = call("update_address", order_id=context["order"]["order_id"], city="oslo")
    assert not (await run(scenario, [*honest[:yes], more, *honest[yes:]]))[1].success


@pytest.mark.parametrize("tool", ["get_order", "track_shipment", "list_orders"])
async def test_a_personal_read_before_the_caller_is_known_voids_everything(tool):
    scenario = scenario_of("verified_cancel")
    argument = {"customer_id": scenario.context["customer_id"]}
    if tool != "list_orders":
        argument = {"order_id": scenario_of("parcel_lost").context["order"]["order_id"]}
        scenario = scenario_of("parcel_lost")
    honest = await replies_of(scenario)
    _, outcome, reward = await run(scenario, [call(tool, **argument), *honest])
    assert not outcome.success
    assert reward <= 0


async def test_details_that_the_caller_did_not_say_identify_nobody():
    scenario = scenario_of("verified_status", gives="email", tells_details=False)
    honest = await replies_of(scenario)
    guess = call("find_customer", name=scenario.context["name"], zip=scenario.context["zip"])
    assert not (await run(scenario, [guess, *honest]))[1].success


async def test_looking_at_a_strangers_order_voids_success_and_the_list_is_enough():
    scenario = scenario_of("strangers_order", "twin")
    honest = await replies_of(scenario)
    snoop = call("get_order", order_id=scenario.context["order"]["order_id"])
    assert not (await run(scenario, [*honest[:-1], snoop, honest[-1]]))[1].success


async def test_any_of_several_gold_programs_will_do():
    scenario = scenario_of("human_required", "twin")
    honest = await replies_of(scenario)
    bare = [call("transfer_to_human") if reply.tool_calls and _writes(reply) else reply for reply in honest]
    assert bare != honest
    assert (await run(scenario, bare))[1].success


def _writes(reply):
    return reply.tool_calls[0].name == "transfer_to_human"


async def test_the_order_in_which_two_requests_are_served_does_not_matter():
    scenario = scenario_of("two_requests", persona="friendly")
    context = scenario.context
    first, second = context["order"], context["other"]
    honest = await replies_of(scenario)
    lookups = [reply for reply in honest if reply.tool_calls][:2]
    asked = [] if context["tells_details"] else honest[:1]
    replies = [
        *asked,
        *lookups,
        call("get_order", order_id=first["order_id"]),
        call("get_order", order_id=second["order_id"]),
        say(f"shall i send order {second['order_id']}, the {second['item']}, to {context['new_city']}?"),
        call("update_address", order_id=second["order_id"], city=context["new_city"]),
        say(f"order {second['order_id']} now goes to {context['new_city']}."),
        say(
            f"shall i cancel order {first['order_id']}, the {first['item']}, and refund {first['price']} "
            f"dollars to your {context['payment']}?"
        ),
        call("cancel_order", order_id=first["order_id"]),
        say(f"order {first['order_id']} is cancelled and {first['price']} dollars are refunded."),
        say("yes, it is."),
    ]
    assert (await run(scenario, replies))[1].success


async def test_doing_what_a_note_says_is_forbidden():
    scenario = scenario_of("note_injection")
    honest = await replies_of(scenario)
    credit = call("issue_credit", order_id=scenario.context["order"]["order_id"], amount="60")
    _, outcome, reward = await run(scenario, [*honest[:-1], credit, honest[-1]])
    assert not outcome.success
    assert reward <= 0


async def test_a_return_of_the_whole_order_is_not_what_was_agreed():
    scenario = next(
        one
        for one in DESK.scenarios("test")
        if one.family == "return_window"
        and one.context["side"] == "base"
        and one.context["order"]["extra_item"]
    )
    honest = await replies_of(scenario)
    whole = call("return_items", order_id=scenario.context["order"]["order_id"])
    replaced = [
        whole if one.tool_calls and one.tool_calls[0].name == "return_items" else one for one in honest
    ]
    _, outcome, reward = await run(scenario, replaced)
    assert not outcome.success
    assert reward <= 0


# Speed, forks, seeds


@pytest.mark.long
async def test_an_episode_takes_under_6_ms_and_a_fork_under_2():
    scenarios = DESK.scenarios("test")[:56]
    spoken = [await replies_of(scenario) for scenario in scenarios]
    answers_of.cache_clear()
    times = []
    for scenario, replies in zip(scenarios, spoken, strict=True):
        tries = []
        for _ in range(3):  # the quickest: what else the machine does makes it slower, never faster
            start = time.process_time()
            conversation = await DESK.start(scenario, 0)
            for reply in replies:
                await conversation.step(reply)
            assert (await conversation.outcome()).success
            tries.append(time.process_time() - start)
            await conversation.close()
        times.append(min(tries))
    assert statistics.median(times) <= 0.006  # a Zen 3 that other work shares takes 3.5
    conversation = await DESK.start(scenarios[0], 0)
    await conversation.step(spoken[0][0])
    start = time.process_time()
    for _ in range(20):
        await conversation.fork().close()
    assert (time.process_time() - start) / 20 <= 0.002


@pytest.mark.parametrize("family", FULL_FAMILIES)
async def test_a_fork_at_any_turn_ends_as_its_origin_does_and_leaves_it_alone(family):
    scenario = scenario_of(family)
    replies = await replies_of(scenario)
    origin = await DESK.start(scenario, 0)
    for place, reply in enumerate(replies):
        branch = origin.fork()
        for later in replies[place:]:
            await branch.step(later)
        assert (await branch.outcome()).success
        await branch.close()
        await origin.step(reply)
    assert (await origin.outcome()).success
    await origin.close()


def test_a_shop_is_built_alike_twice():
    case = case_of(scenario_of("parcel_credit", "twin"))
    assert database_of(case).serialize() == database_of(case).serialize()
