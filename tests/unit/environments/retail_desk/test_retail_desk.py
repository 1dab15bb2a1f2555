"""The desk end to end: honest and degenerate agents, grading, determinism, forks and speed."""

import asyncio
import statistics
import time

import pytest

from scripts.embedded_models.desk_habits import HabitAgent, Habits
from stateset_agents.environments.retail_desk import (
    DEGENERATE,
    FAMILIES,
    HonestAgent,
    RetailDesk,
    play,
)
from stateset_agents.environments.retail_desk.agents import PHRASES
from stateset_agents.environments.retail_desk.full.honest import call, say
from stateset_agents.environments.retail_desk.scenarios import answers_of
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario

DESK = RetailDesk(num_train=600)


def scenario_of(family, side="base", named=True):
    """The first test scenario of a kind."""
    return next(
        scenario
        for scenario in DESK.scenarios("test")
        if scenario.family == family
        and scenario.context["side"] == side
        and scenario.context["tells_order_id"] == named
    )


def run(scenario, *replies, seed=0):
    """Step through given replies; the conversation, its observations and its outcome."""

    async def main():
        conversation = await DESK.start(scenario, seed)
        observations = [await conversation.step(reply) for reply in replies]
        return conversation, observations, await conversation.outcome()

    return asyncio.run(main())


def whole_reward(observations, outcome):
    return sum(observation.reward for observation in observations) + outcome.reward


@pytest.mark.first(1)
@pytest.mark.parametrize("split", ["train", "validation", "test"])
async def test_the_honest_agent_succeeds_on_every_scenario_of_every_split(split):
    played = [(scenario, await play(DESK, scenario, 3, HonestAgent())) for scenario in DESK.scenarios(split)]
    assert [scenario.id for scenario, one in played if not one.outcome.success] == []
    assert max(one.num_replies for _, one in played) <= 5
    assert min(one.reward for _, one in played) >= 0.94
    assert {scenario.family for scenario, _ in played} == set(FAMILIES)


@pytest.mark.parametrize("name", DEGENERATE)
async def test_degenerate_agents_are_not_paid_and_trail_the_honest_one(name):
    scenarios = DESK.scenarios("test")[:120]
    honest = [(await play(DESK, scenario, 1, HonestAgent())).reward for scenario in scenarios]
    played = [await play(DESK, scenario, 1, DEGENERATE[name]()) for scenario in scenarios]
    rewards = [one.reward for one in played]
    assert statistics.mean(one.outcome.success for one in played) <= 0.05
    assert statistics.mean(rewards) <= 0.1
    assert statistics.mean(honest) - statistics.mean(rewards) >= 0.3


@pytest.mark.long
async def test_each_bad_habit_alone_lowers_success_and_reward():
    scenarios = DESK.scenarios("train")[:240]
    honest = [(await play(DESK, scenario, 1, HabitAgent(Habits(), 1))) for scenario in scenarios]
    assert all(one.outcome.success for one in honest)
    for habit in Habits.__dataclass_fields__:
        bad = [
            await play(DESK, scenario, 1, HabitAgent(Habits(**{habit: 1.0}), number))
            for number, scenario in enumerate(scenarios)
        ]
        assert statistics.mean(one.outcome.success for one in bad) < 0.75, habit
        assert statistics.mean(one.reward for one in bad) < 0.8, habit


@pytest.mark.long
async def test_messages_stay_short_enough_for_a_tiny_model():
    for number, scenario in enumerate(DESK.scenarios("train")[:300]):
        habits = Habits(
            guess_id=0.5, skip_lookup=0.5, violate_policy=0.5, wrong_action=0.3, wrong_closing=0.3
        )
        played = await play(DESK, scenario, 1, HabitAgent(habits, number))
        assert played.num_replies <= 6
        for message in played.messages:
            assert len(message.content.split()) <= 16
            assert message.content == message.content.strip()


async def test_the_same_seed_and_replies_give_the_same_transcript():
    for number, scenario in enumerate(DESK.scenarios("test")[:60]):
        agents = [HabitAgent(Habits(skip_lookup=0.5, wrong_closing=0.5), number) for _ in range(2)]
        first, second = [await play(DESK, scenario, 7, agent) for agent in agents]
        assert first == second


async def test_the_callers_words_depend_on_the_seed():
    scenario = scenario_of("cancel", named=False)
    answers = set()
    for seed in range(20):
        conversation = await DESK.start(scenario, seed)
        observation = await conversation.step(say(PHRASES["ask"][0]))
        answers.add(observation.messages[0].content)
    assert len(answers) == 2


def test_the_breakdown_adds_up_to_the_whole_reward():
    scenario = scenario_of("cancel")
    order_id = scenario.context["order_id"]
    replies = [
        call("get_order", order_id="Q"),
        call("get_order", order_id=order_id),
        call("get_order", order_id=order_id),
        say("hm."),
        call("cancel_order", order_id=order_id),
        say("done, your order is cancelled."),
    ]
    _, observations, outcome = run(scenario, *replies)
    assert outcome.success
    assert outcome.breakdown == pytest.approx(
        {
            "success": 0.7,
            "checked": 0.1,
            "acted": 0.1,
            "told": 0.1,
            "false_claim": 0.0,
            "forbidden": 0.0,
            "replies": -0.06,
            "tool_errors": -0.03,
            "repeats": -0.03,
            "user_miss": -0.03,
        }
    )
    assert whole_reward(observations, outcome) == pytest.approx(0.85)
    assert observations[-1].terminated
    reply = {"replies": -0.01}
    assert [one.breakdown for one in observations] == [
        {**reply, "tool_errors": -0.03},
        reply,
        {**reply, "repeats": -0.03},
        {**reply, "user_miss": -0.03},
        reply,
        reply,
    ]


def test_a_forbidden_write_never_scores_above_zero():
    scenario = scenario_of("cancel", "twin")
    order_id = scenario.context["order_id"]
    _, observations, outcome = run(
        scenario,
        call("get_order", order_id=order_id),
        call("cancel_order", order_id=order_id),
        say("done, your order is cancelled."),
    )
    assert not outcome.success
    assert outcome.breakdown["forbidden"] == -0.2
    assert whole_reward(observations, outcome) == pytest.approx(-0.23)
    assert [change["table"] for change in outcome.changes] == ["orders", "refunds"]


def test_a_right_write_with_a_wrong_one_beside_it_is_gated():
    scenario = scenario_of("cancel")
    context = scenario.context
    _, observations, outcome = run(
        scenario,
        call("get_order", order_id=context["order_id"]),
        call("cancel_order", order_id=context["order_id"]),
        call("cancel_order", order_id=context["other_order_id"]),
        say("done, your order is cancelled."),
    )
    assert not outcome.success
    assert whole_reward(observations, outcome) <= 0


def test_reading_a_strangers_order_voids_success():
    scenario = scenario_of("cancel")
    context = scenario.context
    honest = [
        call("get_order", order_id=context["order_id"]),
        call("cancel_order", order_id=context["order_id"]),
        say("done, your order is cancelled."),
    ]
    assert run(scenario, *honest)[2].success
    assert not run(scenario, call("get_order", order_id=context["stranger_order_id"]), *honest)[2].success


def test_a_false_claim_is_disputed_and_voids_success_even_when_put_right():
    scenario = scenario_of("cancel")
    order_id = scenario.context["order_id"]
    _, observations, outcome = run(
        scenario,
        say("done, your order is cancelled."),
        call("get_order", order_id=order_id),
        call("cancel_order", order_id=order_id),
        say("done, your order is cancelled."),
    )
    assert observations[0].messages[0].content == "no, that is not right."
    assert not outcome.success
    assert outcome.breakdown["false_claim"] == -0.1


def test_a_lucky_guess_is_an_unfounded_claim():
    scenario = scenario_of("order_status", "twin")
    status = scenario.context["status"]
    lucky = run(scenario, say(f"your order is {status}."))[2]
    looked = run(
        scenario, call("get_order", order_id=scenario.context["order_id"]), say(f"your order is {status}.")
    )[2]
    assert not lucky.success
    assert looked.success


def test_a_denial_needs_its_reason():
    scenario = scenario_of("return", "twin")
    look = call("get_order", order_id=scenario.context["order_id"])
    assert not run(scenario, look, say("sorry, i cannot return it."))[2].success
    assert run(scenario, look, say("sorry, it is over 30 days old, so i cannot return it."))[2].success


def test_calls_in_one_reply_run_in_order_and_extra_ones_are_refused():
    scenario = scenario_of("cancel")
    order_id = scenario.context["order_id"]
    names = ["get_order", "cancel_order", "cancel_order", "track_shipment", "get_order"]
    calls = tuple(
        ToolCall(name=name, arguments={"order_id": order_id}, id=f"c{number}")
        for number, name in enumerate(names)
    )
    _, observations, _ = run(scenario, Message(role="assistant", content="", tool_calls=calls))
    texts = [message.content for message in observations[0].messages]
    assert texts[1] == f'{{"result": "cancelled", "order_id": "{order_id}"}}'
    assert texts[2:] == [
        '{"error": "already cancelled"}',
        '{"error": "not shipped yet"}',
        '{"error": "too many calls"}',
    ]
    assert [message.tool_call_id for message in observations[0].messages] == ["c0", "c1", "c2", "c3", "c4"]


def test_an_unreadable_call_is_answered_and_charged():
    broken = Message(role="assistant", content="", tool_calls=(ToolCall(name="", error="not JSON"),))
    _, observations, outcome = run(scenario_of("cancel"), broken)
    assert observations[0].messages[0].content == '{"error": "bad call"}'
    assert observations[0].reward == pytest.approx(-0.04)
    assert outcome.changes == ()


def test_the_sixth_reply_cuts_the_conversation():
    scenario = scenario_of("cancel")
    look = call("get_order", order_id=scenario.context["order_id"])
    _, observations, outcome = run(scenario, *[look] * 6)
    assert [observation.truncated for observation in observations] == [False] * 5 + [True]
    assert not outcome.success


def test_stepping_a_conversation_that_is_over_is_an_error():
    with pytest.raises(ConfigurationError, match="is over"):
        run(scenario_of("cancel"), say("sorry, i cannot help."), say("hello?"))


async def test_a_fork_goes_on_from_the_same_state_and_leaves_the_original_alone():
    scenario = scenario_of("cancel")
    order_id = scenario.context["order_id"]
    original = await DESK.start(scenario, 0)
    await original.step(call("get_order", order_id=order_id))
    branch = original.fork()
    await branch.step(call("cancel_order", order_id=order_id))
    await branch.step(say("done, your order is cancelled."))
    assert (await branch.outcome()).success
    assert (await original.outcome()).changes == ()
    await branch.close()
    await original.step(call("cancel_order", order_id=order_id))
    await original.step(say("done, your order is cancelled."))
    assert (await original.outcome()).success


async def test_an_episode_takes_under_6_ms_and_a_fork_under_2():
    answers_of.cache_clear()
    times = []
    for scenario in DESK.scenarios("test")[:100]:
        start = time.process_time()
        await play(DESK, scenario, 1, HonestAgent())
        times.append(time.process_time() - start)
    assert statistics.median(times) <= 0.006  # a Zen 3 that other work shares takes 3.5
    conversation = await DESK.start(scenario_of("cancel"), 0)
    start = time.process_time()
    for _ in range(20):
        conversation.fork()
    assert (time.process_time() - start) / 20 <= 0.002


async def test_the_full_prompt_states_the_policy():
    conversation = await RetailDesk(prompt="full").start(scenario_of("return"), 0)
    assert "within 30 days" in conversation.opening[0].content
    names = {tool["function"]["name"] for tool in conversation.tools}
    assert {"find_customer", "get_policy", "issue_credit", "transfer_to_human"} <= names


async def test_the_named_prompt_shows_the_look_up_of_each_topic_and_offers_no_schema():
    conversation = await RetailDesk(prompt="named").start(scenario_of("return"), 0)
    first, *lines = conversation.opening[0].content.splitlines()
    assert first.endswith("is signed in.")
    assert "exchange: get_product" in lines
    assert len(lines) == len(FAMILIES)
    assert conversation.tools == ()
    full = RetailDesk(families="full", prompt="named")
    opening = (await full.start(full.scenarios("test")[0], 0)).opening[0].content
    assert "identity: find_customer" in opening.splitlines()


async def test_tools_are_offered_or_not_whatever_the_prompt():
    for prompt, unset in (("short", False), ("full", True)):
        for offer_tools, offered in ((None, unset), (True, True), (False, False)):
            desk = RetailDesk(prompt=prompt, offer_tools=offer_tools)
            conversation = await desk.start(scenario_of("return"), 0)
            assert bool(conversation.tools) is offered
            assert ("within 30 days" in conversation.opening[0].content) is (prompt == "full")
    with pytest.raises(ConfigurationError, match="offer_tools must be true, false or absent, got 'yes'"):
        RetailDesk(offer_tools="yes")


async def test_bad_settings_and_scenarios_are_named():
    with pytest.raises(ConfigurationError, match="max_turns must be at least 1, got 0"):
        RetailDesk(max_turns=0)
    with pytest.raises(ConfigurationError, match="num_train must be at least 1, got 0"):
        RetailDesk(num_train=0)
    with pytest.raises(ConfigurationError, match="prompt must be short, named or full, got 'long'"):
        RetailDesk(prompt="long")
    with pytest.raises(ConfigurationError, match="split must be train, validation or test, got 'dev'"):
        RetailDesk().scenarios("dev")
    with pytest.raises(ConfigurationError, match="unknown desk family 'refund'"):
        await DESK.start(
            Scenario(
                id="x",
                family="refund",
                context={"customer_id": "u01", "order_id": "K27", "item": "red mug"},
            ),
            0,
        )
    with pytest.raises(ConfigurationError, match="context is incomplete"):
        await DESK.start(Scenario(id="x", family="cancel"), 0)
