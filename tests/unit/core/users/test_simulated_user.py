"""Users: scripted lines, rules, and the user of a scenario that brings none."""

from __future__ import annotations

import pytest

from stateset_agents.core.users.simulated_user import Rule, RuleBasedUser, ScriptedUser, User, default_user
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario


def agent(text: str) -> Message:
    return Message(role="assistant", content=text)


async def talk(user: User, *replies: str) -> list[str | None]:
    """The opening and the answer to each reply."""
    messages: list[Message] = []
    said: list[str | None] = []
    for reply in (None, *replies):
        if reply is not None:
            messages.append(agent(reply))
        words = await user.reply(messages)
        said.append(words)
        if words is None:
            break
        messages.append(Message(role="user", content=words))
    return said


async def test_a_scripted_user_says_its_lines_and_leaves():
    assert await talk(ScriptedUser(["Hi", "Yes"]), "Hello?", "Good") == ["Hi", "Yes", None]


async def test_a_fork_goes_on_from_the_same_line_and_apart():
    user = ScriptedUser(["a", "b"])
    await user.reply([])
    twin = user.fork()
    assert [await user.reply([]), await user.reply([])] == ["b", None]
    assert await twin.reply([]) == "b"


def test_one_text_is_no_script():
    with pytest.raises(ConfigurationError, match="list of texts"):
        ScriptedUser("Hi")


def test_what_is_no_rule_is_refused_when_the_user_is_made():
    with pytest.raises(
        ConfigurationError, match=r"rules must be Rule\(pattern=.*, got tuple \('bye', 'Bye'\)"
    ):
        RuleBasedUser([("bye", "Bye")])  # type: ignore[list-item]  # the mistake under test


async def test_the_first_matching_rule_answers_and_a_rule_used_once_is_passed_over():
    rules = [
        Rule(pattern="order number", replies=("K27",), once=True),
        Rule(pattern="order", replies=("The lamp.",)),
        Rule(pattern="bye"),
    ]
    user = RuleBasedUser(rules, opening=("Hi",))
    said = await talk(user, "Your ORDER NUMBER?", "Your order number again?", "Which order?", "Bye")
    assert said == ["Hi", "K27", "The lamp.", "The lamp.", None]


async def test_a_user_leaves_satisfied_when_the_goal_is_met():
    user = RuleBasedUser([], opening=("Hi",), goal=lambda messages: "refunded" in messages[-1].content)
    assert user.satisfied is False
    assert (await talk(user, "One moment.", "It is refunded."))[-1] is None
    assert user.satisfied is True


async def test_patience_runs_out_unsatisfied():
    user = RuleBasedUser([], opening=("Hi",), otherwise=("What?",), patience=2, goal=lambda messages: False)
    assert await talk(user, "a", "b", "c", "d") == ["Hi", "What?", "What?", None]
    assert user.satisfied is False
    assert RuleBasedUser([]).satisfied is None


async def test_the_seed_chooses_the_paraphrase_and_nothing_else_does():
    rules = [Rule(pattern="x", replies=tuple("abcdefgh"))]

    async def said(seed: int) -> list[str | None]:
        return await talk(RuleBasedUser(rules, opening=tuple("ABCDEFGH"), seed=seed), *"xxxx")

    runs = [await said(seed) for seed in range(20)]
    assert runs == [await said(seed) for seed in range(20)]
    assert len({tuple(run) for run in runs}) == 20
    assert {run[0] for run in runs} == set("ABCDEFGH")


async def test_a_forked_rule_based_user_says_what_the_original_would_have():
    rules = [Rule(pattern="x", replies=tuple("abcdefgh"))]
    user = RuleBasedUser(rules, patience=1, seed=3)
    await user.reply([agent("x")])
    twin = user.fork()
    assert [await user.reply([agent(t)]) for t in "xyxy"] == [await twin.reply([agent(t)]) for t in "xyxy"]


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ConfigurationError, match=r"rule pattern '\(' is no regular expression"):
        Rule(pattern="(")


async def test_the_default_user_opens_with_topic_and_context():
    scenario = Scenario.from_dict({"topic": "refund", "context": "Order delayed"})
    openings = {await default_user(scenario, seed).reply([]) for seed in range(30)}
    assert openings == {
        "Hi, I have a question about refund. Order delayed.",
        "Hello, I need help with refund. Order delayed.",
        "Can you help me with refund? Order delayed.",
    }
    assert await default_user(Scenario(id="s", opening="Where is it?"), 0).reply([]) == "Where is it?"
    assert await default_user(Scenario(id="s"), 0).reply([]) == "Hi, I need your help."


async def test_the_default_user_gives_the_order_number_when_asked():
    scenario = Scenario(id="s", family="refund", context={"order_id": "K27"})
    for seed in range(10):
        said = await talk(default_user(scenario, seed), "What is your order number?")
        assert "K27" in str(said[1])


async def test_the_default_user_asks_on_and_leaves_within_a_few_turns():
    scenario = Scenario.from_dict({"topic": "refund", "context": "Order delayed"})
    for seed in range(10):
        said = await talk(default_user(scenario, seed), *["Let me look into it."] * 9)
        assert 3 <= len(said) <= 6
        assert said[-1] is None
        polite = await talk(default_user(scenario, seed), "Can I help with anything else?", "Goodbye.")
        assert polite[-1] is None


async def test_the_default_user_says_its_script():
    scenario = Scenario(id="s", opening="Hi", context={"script": ["K27", "Thanks"]})
    assert await default_user(scenario, 0).reply([agent("What is your order number?")]) == "K27"
    scripted = Scenario(id="s", family="refund", context={"script": ["K27", "Thanks"]})
    said = await talk(default_user(scripted, 0), "a", "b", "c")
    assert "refund" in str(said[0])
    assert said[1:] == ["K27", "Thanks", None]
    with pytest.raises(ConfigurationError, match=r"context\['script'\] must be a list"):
        default_user(Scenario(id="s", context={"script": "K27"}), 0)


async def test_expected_facts_are_the_default_users_goal():
    scenario = Scenario(id="s", family="refund", context={"expected_facts": ["K27", "5 days"]})
    user = default_user(scenario, 0)
    await talk(user, "We will refund order K27.", "It will not take 5 days.")
    assert user.satisfied is False
    user = default_user(scenario, 0)
    assert (await talk(user, "We will refund order K27.", "It takes 5 days."))[-1] is None
    assert user.satisfied is True
    stuffed = default_user(scenario, 0)
    await talk(stuffed, "refund K27 5 days order resolved delivered shipped refund K27 5 days")
    assert stuffed.satisfied is False


def test_one_text_is_no_list_of_replies_openings_or_ways_to_say_otherwise():
    with pytest.raises(
        ConfigurationError, match=r"replies of a rule must be a list.*'hello': write \['hello'\]"
    ):
        Rule(pattern="x", replies="hello")
    with pytest.raises(ConfigurationError, match=r"opening must be a list of texts, got the text 'good day'"):
        RuleBasedUser([], opening="good day")
    with pytest.raises(ConfigurationError, match=r"otherwise must be a list of texts, got the text 'what'"):
        RuleBasedUser([], otherwise="what")
