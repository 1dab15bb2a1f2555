"""Reading plain text: facts told, prose, echoes, rudeness."""

from __future__ import annotations

import pytest
from stated_facts import states_fact

from stateset_agents.claims.fact_status import FactStatus, fact_statuses
from stateset_agents.claims.text_checks import (
    content_words,
    declines,
    echo,
    facts,
    is_courteous,
    is_displeased,
    is_pleased,
    is_prose,
    is_refusal,
    is_rude,
    words,
)
from stateset_agents.types.errors import ConfigurationError


def test_words_are_lower_case_with_numbers_whole_and_marks_gone():
    assert words("It's $5.50 for K27, isn’t it?") == ["it's", "$5.50", "for", "k27", "isn't", "it"]  # noqa: RUF001  # the typographic apostrophe is under test
    assert content_words("Where is my blue lamp K27?") == {"blue", "lamp", "k27"}


@pytest.mark.parametrize(
    "text",
    [
        "It takes 5 days.",
        "IT TAKES 5 DAYS",
        "Your refund takes 5 days, is that okay?",
        "There is no fee, and it takes 5 days.",
        "I can't change that but it takes 5 days.",
        "It takes (5 days).",
    ],
)
def test_a_fact_is_told_by_a_statement(text: str):
    assert states_fact(["5 days"], text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "It takes 15 days.",
        "It takes 5 long days.",
        "It will not take 5 days.",
        "It won't be 5 days.",
        "Does it take 5 days?",
        "It takes some days. I have 5 lamps.",
    ],
)
def test_a_fact_is_not_told_by_a_denial_a_question_or_other_words(text: str):
    assert not states_fact(["5 days"], text)


def test_one_of_several_wordings_is_enough_and_a_bare_number_finds_its_price():
    assert states_fact(["five days", "5 days"], "In 5 days.")
    assert states_fact(["20"], "It costs $20.")
    assert states_fact(["$1,000.50"], "It costs $1,000.50.")
    assert not states_fact(["$20"], "It takes 20 days.")


def test_facts_come_as_phrases_wordings_or_names():
    assert facts({}, "expected_facts") == {}
    assert facts({"expected_facts": "K27"}, "expected_facts") == {"K27": ("K27",)}
    assert facts({"expected_facts": ["K27", ["5 days", "five days"]]}, "expected_facts") == {
        "K27": ("K27",),
        "5 days": ("5 days", "five days"),
    }
    assert facts({"expected_facts": {"price": 20}}, "expected_facts") == {"price": ("20",)}


@pytest.mark.parametrize("given", [7, [[]], ["..."], [None], {"a": {}}])
def test_facts_that_cannot_be_told_are_refused(given: object):
    with pytest.raises(ConfigurationError, match="expected_facts"):
        facts({"expected_facts": given}, "expected_facts")


@pytest.mark.parametrize(
    "text",
    [
        "Done.",
        "You're welcome!",
        "your refund for K27 is done .",
        "which order is it ?",
        "Order K27, the blue lamp, was shipped on Monday and should be with you by Friday.",
        "I'm sorry to hear that. Could you give me your order number, please?",
        "Thanks for reaching out! I've gone ahead and processed the refund.",
        "No problem. Anything else I can help with today?",
        "Per our policy, orders under $50 cannot be exchanged after 30 days.",
        "Yes, yes, of course. I will cancel the order and send you an email to confirm it.",
        "Please restart the router, wait for the light to turn green, then try the page again.",
        "The lamp is in stock. The lamp ships today, and you can track it from your account.",
        "Hmm, the rhythm of the motor sounds off. Let me check the strengths listed in the manual.",
    ],
)
def test_what_people_write_is_prose(text: str):
    assert is_prose(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "...",
        "xqzt bfgh wrtp",
        "zzzzzz",
        "sorry sorry sorry sorry sorry",
        "refund refund order order refund refund order order",
        "refund order resolved delivered thanks customer service solved",
        "the refund is the refund is the refund is the refund is the refund",
        "I refund you and refund it and refund all and refund this and refund that",
    ],
)
def test_what_only_fills_space_is_not(text: str):
    assert not is_prose(text)


def test_other_languages_are_prose_when_english_is_not_asked_for():
    german = "Ihre Bestellung wurde gestern verschickt, Sie bekommen morgen Bescheid."
    assert not is_prose(german)
    assert is_prose(german, english=False)
    assert not is_prose("ja ja ja ja ja ja ja", english=False)


def test_an_echo_is_the_users_words_again():
    heard = ["Hi, my order K27 is late.", "I want a refund."]
    assert echo("Hi, my order K27 is late!", heard) == 1.0
    assert echo("I am sorry that your order K27 is late.", heard) < 0.5
    assert echo("I want a refund.", heard) == 0.0


def test_tone_is_read_off_phrases():
    assert is_rude("That's not my problem.")
    assert not is_rude("Let me solve your problem, I do care.")
    assert is_courteous("My apologies for the wait.")
    assert not is_courteous("The order was shipped.")
    assert is_refusal("I'm sorry, I can't help with that.")
    assert not is_refusal("I can help with that.")


DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]


def telling(wording: str, texts: list[str], expected: list[str]) -> FactStatus:
    return fact_statuses({name: (name,) for name in expected}, texts)[wording]


@pytest.mark.parametrize(
    "texts",
    [
        [" ".join(f"It arrives on {day}." for day in DAYS)],
        [f"It arrives on {day}." for day in DAYS],
        ["Pick one, Monday, Tuesday, Wednesday, Thursday, Friday, whatever you like."],
    ],
)
def test_a_fact_among_many_others_of_its_kind_is_named_and_not_told(texts: list[str]):
    assert telling("Friday", texts, ["Friday"]) is FactStatus.NAMED


def test_a_fact_by_itself_or_among_facts_that_are_expected_too_is_told():
    texts = ["It arrives on Friday. It is red, big, old, and heavy."]
    assert telling("Friday", texts, ["Friday"]) is FactStatus.TOLD
    every = ["We are open on Monday, Tuesday, Wednesday, Thursday, Friday."]
    assert telling("Friday", every, DAYS) is FactStatus.TOLD


@pytest.mark.parametrize(
    "text",
    [
        '{"order": "K27", "state": "sent"}',
        "Sent.<|im_end|><|im_start|>user",
        "<tool_call>refund</tool_call> it is done",
        "[INST] say that it is done [/INST]",
    ],
)
def test_syntax_and_control_tokens_are_no_prose(text: str):
    assert not is_prose(text)


def test_a_quotation_or_a_comparison_is_prose():
    assert is_prose('The label says "fragile" on it.')
    assert is_prose("Yes, 3 < 5.")


def test_declining_is_more_than_turning_a_user_away():
    assert declines("I am not allowed to share her address.")
    assert declines("I must decline.")
    assert declines("I can’t tell you that.")  # noqa: RUF001  # the typographic apostrophe is under test
    assert not declines("I can share that.")
    assert not is_refusal("I am not allowed to share her address.")


def test_thanks_please_and_complaints_do_not():
    assert is_pleased("Thank you, that helps a lot.")
    assert not is_pleased("No thanks.")
    assert not is_pleased("Where is it?")
    assert is_displeased("You have not answered me.")
    assert is_displeased("Let me talk to a human.")
    assert not is_displeased("I have a question about my lamp.")
