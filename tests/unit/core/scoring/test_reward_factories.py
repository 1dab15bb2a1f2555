"""The ready-made rewards, one rule at a time; test_reward_table.py holds whole conversations to them."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from builders import trajectory
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.claims import fact_status
from stateset_agents.claims.statements import MOST_READ, Statements
from stateset_agents.core.reward import (
    create_customer_service_reward,
    create_domain_reward,
    create_helpful_reward,
    create_task_reward,
    create_tutoring_reward,
)
from stateset_agents.rewards.factories import DOMAINS
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.trajectory import Trajectory

FACTS = {"expected_facts": ["$40", "5 days"], "forbidden": ["today"]}
GOOD = "I am sorry, we refund the $40 for your late order within 5 days."


def talk(*replies: str, **fields: object) -> Trajectory:
    said = [text for number, reply in enumerate(replies) for text in (f"My order is late, {number}.", reply)]
    return trajectory(*said, **fields)  # type: ignore[arg-type]  # fields go through as they are


async def test_all_facts_in_good_form_are_worth_one():
    result = await create_customer_service_reward().score(talk(GOOD, context=FACTS))
    assert result.score == 1.0
    assert result.breakdown == {
        "integrity": 1.0,
        "manner": 1.0,
        "form": 1.0,
        "form/courtesy": 1.0,
        "form/relevance": 1.0,
        "form/helpful": 1.0,
        "form/complete": 1.0,
        "facts": 1.0,
        "resolution": 1.0,
        "form_only": 0.0,
    }


async def test_facts_and_the_environments_verdict_count_half_each():
    half = await create_customer_service_reward().score(
        talk("Sorry, your late order.", context=FACTS, success=True)
    )
    assert (half.breakdown["facts"], half.breakdown["success"]) == (0.0, 1.0)
    assert half.breakdown["resolution"] == 0.5
    assert half.score == pytest.approx(0.8 * 0.5 + 0.2 * half.breakdown["form"])


@pytest.mark.parametrize("domain", list(DOMAINS))
async def test_what_the_environment_calls_unresolved_earns_a_half_at_most(domain: str):
    result = await create_domain_reward(domain).score(talk(GOOD, context=FACTS, success=False))
    assert (result.breakdown["facts"], result.breakdown["success"]) == (1.0, 0.0)
    assert result.score is not None
    assert result.score <= 0.5


async def test_a_fact_that_is_named_and_not_told_caps_the_score_at_a_half():
    told = await create_customer_service_reward().score(
        talk(GOOD.replace(" within 5 days", ""), context=FACTS)
    )
    assert told.score == pytest.approx(0.6)
    guessed = await create_customer_service_reward().score(
        talk(GOOD.replace("5", "3, 4 or 5"), context=FACTS)
    )
    assert (guessed.breakdown["facts"], guessed.breakdown["gambled"], guessed.score) == (0.5, 1.0, 0.5)


class Heard(logging.Handler):
    """Keeps what it is given."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture
def heard():
    handler, logger = Heard(), logging.getLogger("stateset_agents.rewards.factories")
    logger.addHandler(handler)
    yield handler.records
    logger.removeHandler(handler)


async def test_form_only_stays_at_a_half_and_says_so_once(heard):
    reward = create_customer_service_reward()
    results = [await reward.score(talk(GOOD)) for _ in range(3)]
    assert [(result.score, result.breakdown["form_only"]) for result in results] == [(0.5, 1.0)] * 3
    [entry] = heard
    assert entry.levelname == "WARNING"
    assert "reward=customer_service" in entry.getMessage()
    assert "expected_facts" in entry.getMessage()
    await create_customer_service_reward().score(talk(GOOD, context=FACTS))
    assert len(heard) == 1


async def test_a_forbidden_claim_takes_everything_and_its_denial_nothing():
    reward = create_customer_service_reward()
    lie = await reward.score(talk(GOOD, "It will be there today, I promise you.", context=FACTS))
    assert (lie.score, lie.breakdown["false_claim"]) == (0.0, 1.0)
    honest = await reward.score(talk(GOOD, "It will not be there today, I am sorry.", context=FACTS))
    assert honest.score == 1.0


async def test_facts_in_a_keyword_list_are_not_told():
    result = await create_customer_service_reward().score(talk("$40 refund 5 days order late", context=FACTS))
    assert (result.score, result.breakdown["facts"]) == (0.0, 0.0)


async def test_half_the_score_goes_when_half_the_replies_are_repeated():
    once = await create_customer_service_reward().score(talk(GOOD, context=FACTS))
    twice = await create_customer_service_reward().score(talk(GOOD, GOOD, context=FACTS))
    assert (once.score, twice.score) == (1.0, 0.5)


async def test_tool_calls_are_no_silence():
    call = Message(role="assistant", content="", tool_calls=(ToolCall(name="status"),))
    result = Message(role="tool", content="late", name="status")
    spoken = trajectory(
        "My order is late.", call, result, Message(role="assistant", content=GOOD), context=FACTS
    )
    assert (await create_customer_service_reward().score(spoken)).score == 1.0
    silent = trajectory("My order is late.", call, result, context=FACTS)
    assert (await create_customer_service_reward().score(silent)).score == 0.0


async def test_each_domain_pays_a_resolution_one_and_names_itself():
    reply = "I am sorry about the order. We refund the $40 within 5 days. Is that okay?"
    for name in DOMAINS:
        reward = create_domain_reward(name)
        assert (reward.name, reward.scope, reward.local) == (name, "trajectory", True)
        served = trajectory("My order is late.", reply, "Thank you, that helps.", context=FACTS)
        assert (await reward.score(served)).score == pytest.approx(1.0), name
        assert sum(DOMAINS[name].form.values()) == pytest.approx(1.0), name


async def test_the_domains_care_for_different_things():
    plain = "We refund the $40 for the late order within 5 days."
    long = f"I am sorry. {plain} {'We know that it matters to you and to all of us here. ' * 3}"
    asking = f"{plain} Does that suit you?"
    context = FACTS

    async def paid(reward: str, reply: str) -> float:
        score = (await create_domain_reward(reward).score(talk(reply, context=context))).score
        assert score is not None
        return score

    assert await paid("customer_service", f"I am sorry. {plain}") > await paid("customer_service", plain)
    assert await paid("tutoring", asking) > await paid("tutoring", plain)
    assert await paid("task", plain) > await paid("task", long)
    assert await paid("helpful", plain) == pytest.approx(1.0)


def test_the_named_factories_are_the_domains():
    assert create_customer_service_reward().name == "customer_service"
    assert create_helpful_reward().name == "helpful"
    assert create_task_reward().name == "task"
    assert create_tutoring_reward().name == "tutoring"


def test_an_unknown_domain_names_the_nearest():
    with pytest.raises(ConfigurationError, match=r"got 'tutorin' \(did you mean 'tutoring'\?\)"):
        create_domain_reward("tutorin")
    with pytest.raises(ConfigurationError, match=r"must be one of customer_service, .*, got 'xyz'$"):
        create_domain_reward("xyz")


async def test_other_languages_are_scored_without_the_english_checks():
    german = "Wir erstatten Ihnen die $40 für Ihre Bestellung, und zwar binnen 5 days."
    spoken = trajectory("Meine Bestellung ist zu spät.", german, context=FACTS)
    assert (await create_customer_service_reward().score(spoken)).score == 0.0
    result = await create_customer_service_reward(english=False).score(spoken)
    assert set(result.breakdown) >= {"form/relevance", "form/complete"}
    assert "form/courtesy" not in result.breakdown
    assert result.score is not None
    assert result.score > 0.8


async def test_facts_that_cannot_be_read_are_a_configuration_error():
    with pytest.raises(ConfigurationError, match=r"context\['expected_facts'\]"):
        await create_task_reward().score(talk(GOOD, context={"expected_facts": 5}))


@given(st.lists(st.text(max_size=80), min_size=1, max_size=5), st.booleans())
def test_any_text_at_all_gets_a_score_within_bounds(replies: list[str], checkable: bool):
    for english in (True, False):
        reward = create_customer_service_reward(english=english)
        spoken = talk(*replies, context=FACTS if checkable else {})
        score = asyncio.run(reward.score(spoken)).score
        assert score is not None
        assert 0 <= score <= (1.0 if checkable else 0.5)


@pytest.mark.parametrize("reply", ["the order was shipped, ", "a", "1,", "{", "I am sorry. "])
async def test_of_an_endless_reply_only_the_start_is_read_and_it_earns_nothing(
    reply: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    read = fact_status.read_statements

    def reading(text: str, conditions: frozenset[str] = frozenset()) -> Statements:
        lengths.append(len(read(text, conditions).text))
        return read(text, conditions)

    monkeypatch.setattr(fact_status, "read_statements", reading)
    endless = reply * (200_000 // len(reply))
    for spoken in (
        talk(f"{GOOD} {endless}", context=FACTS),
        trajectory(endless, "Thank you.", context=FACTS),
    ):
        await create_customer_service_reward().score(spoken)
    assert max(lengths) <= MOST_READ
    assert (await create_customer_service_reward().score(talk(f"{GOOD} {endless}", context=FACTS))).score == 0


async def test_a_forbidden_phrase_is_not_hidden_behind_a_long_reply():
    late = "Let me tell you about lamps. " * 1000 + "You will get $400."
    spoken = talk(GOOD, GOOD.replace("sorry", "so sorry"), late, context={**FACTS, "forbidden": ["$400"]})
    result = await create_customer_service_reward().score(spoken)
    assert (result.score, result.breakdown["false_claim"]) == (0.0, 1.0)


async def test_choices_of_the_context_are_a_type_of_values_and_what_a_tool_showed_may_be_repeated():
    context = {"expected_facts": ["aspen"], "choices": ["aspen", "cedar"]}
    guesses = "I am sorry, we use aspen indoors. Terraces look best in cedar."
    result = await create_customer_service_reward().score(talk(guesses, context=context))
    assert (result.breakdown["facts"], result.breakdown["gambled"]) == (0.0, 1.0)
    assert (
        await create_customer_service_reward().score(talk(guesses, context={"expected_facts": ["aspen"]}))
    ).score >= 0.9

    two = "Order 48112 is sorted, sorry: the new number is 48200 for your late order."
    call = Message(role="assistant", content="", tool_calls=(ToolCall(name="order"),))
    shown = Message(role="tool", content="order 48112", name="order")
    spoken = trajectory(
        "My order is late.",
        call,
        shown,
        Message(role="assistant", content=two),
        context={"expected_facts": ["48200"]},
    )
    assert (await create_customer_service_reward().score(spoken)).score >= 0.9
    unseen = await create_customer_service_reward().score(talk(two, context={"expected_facts": ["48200"]}))
    assert unseen.breakdown["facts"] == 0.0


@pytest.mark.parametrize("unit", ["Friday or Monday ", "if not ", "get $40 back or ", "That was a lie. "])
async def test_a_megabyte_of_hostile_text_is_scored_in_no_time(unit: str):
    endless = unit * (1_000_000 // len(unit))
    context = {"expected_facts": ["Friday", "$40"], "forbidden": ["full refund"]}
    start = time.process_time()
    result = await create_customer_service_reward().score(trajectory(endless, endless, context=context))
    assert time.process_time() - start < 3
    assert result.score == 0.0
