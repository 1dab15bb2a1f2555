"""Which facts a reply tells: the grammar, typed values, second values and claims, a rule at a time."""

from __future__ import annotations

import time

import pytest
from stated_facts import states_fact

from stateset_agents.claims.english import OPERATORS, Operator
from stateset_agents.claims.fact_status import FactStatus, claims_phrase, fact_statuses
from stateset_agents.claims.statements import MOST_READ, read_statements
from stateset_agents.claims.text_checks import choices
from stateset_agents.claims.typed_values import find_values
from stateset_agents.types.errors import ConfigurationError


def status(wording: str, *replies: str, **options: object) -> FactStatus:
    return fact_statuses({"fact": (wording,)}, replies, **options)["fact"]  # type: ignore[arg-type]  # passed on


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.example)
def test_no_example_of_the_grammar_tells_friday(operator: Operator):
    assert status("Friday", operator.example) is FactStatus.NAMED
    assert operator.pattern.search(operator.example.lower())


@pytest.mark.parametrize(
    "text",
    [
        "No problem, it comes on Friday.",
        "There is no doubt that it comes on Friday.",
        "It comes on Friday at the latest, and no later than Friday.",
        "If you have any questions, call us. It comes on Friday.",
        "I was not sure at first, but it comes on Friday.",
        "It comes on Friday, and if nobody is home, on Saturday.",
        "I can't tell you how sorry I am, it comes on Friday.",
        "I would like to confirm that it comes on Friday.",
        "It has moved from Thursday to Friday.",
    ],
)
def test_idioms_polite_conditions_and_what_follows_a_but_leave_friday_told(text: str):
    assert states_fact(["Friday"], text)


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("amount", ["$40", "$40.00", "40 dollars", "forty dollars", "USD 40", "US$40", "40 bucks"]),
        ("amount", ["€1,000.50", "1,000.50 euros", "EUR 1000.50", "1000,50 €"]),
        (
            "date",
            ["March 14", "14 March", "March 14th, 2026", "the 14th of March", "2026-03-14", "14/03/2026"],
        ),
        ("time", ["3 pm", "3pm", "3 p.m.", "15:00", "3:00 pm"]),
        ("duration", ["5 days", "five days", "5 business days", "5-day"]),
        ("percent", ["15%", "15 percent", "fifteen per cent"]),
        ("weekday", ["Friday", "friday", "Fri"]),
        ("frequency", ["twice a week", "two times a week", "2 times per week"]),
        ("number:degr", ["85 degrees", "85°C", "85 °C"]),
        ("id", ["Z482", "z482", "#Z482"]),
        ("status", ["shipped", "dispatched"]),
    ],
)
def test_a_value_is_the_same_in_each_of_its_forms(kind: str, texts: list[str]):
    values = [value for text in texts for value in find_values(text)]
    assert [value.kind for value in values] == [kind] * len(texts)
    assert len({value.value for value in values}) == 1


def test_bare_numbers_and_names_take_the_type_of_what_they_are_joined_to():
    def kinds(text: str) -> list[tuple[str, str]]:
        return [(value.kind, text[value.start : value.end]) for value in find_values(text)]

    assert kinds("$10, 20 or 40") == [("amount", "$10"), ("amount", "20"), ("amount", "40")]
    assert kinds("in 3-5 days") == [("duration", "3"), ("duration", "5 days")]
    assert kinds("in Paris or Lyon") == [("place", "Paris"), ("place", "Lyon")]
    assert kinds("in Lyon, France") == [("place", "Lyon")]


@pytest.mark.parametrize(
    "joined",
    [
        "{} or {}",
        "{}/{}",
        "{} - {}",
        "{}, {}",
        "{} and {}",
        "{}\n{}",
        "{}. {}",
        "from {} to {}",
        "{}; {}",
        "{} ({})",
    ],
)
def test_two_values_of_a_type_are_an_enumeration_however_they_are_joined(joined: str):
    for first, second in (("Friday", "Monday"), ("Monday", "Friday")):
        assert status("Friday", f"It comes {joined.format(first, second)}.") is FactStatus.NAMED
    assert status("$40", f"You get {joined.format('$30', '$40')}.") is FactStatus.NAMED


def test_one_guess_a_turn_is_an_enumeration_too_and_a_correction_is_not_but_once():
    days = ("Monday", "Tuesday", "Friday")
    assert status("Friday", *(f"It comes {day}." for day in days)) is FactStatus.NAMED
    assert status("Friday", "It comes Monday.", "Sorry, not Monday: Friday.") is FactStatus.TOLD
    twice = ("It comes Monday.", "Sorry, not Monday: Tuesday.", "Sorry, not Tuesday: Friday.")
    assert status("Friday", *twice) is FactStatus.NAMED


@pytest.mark.parametrize(
    "text",
    [
        "It does not come on Monday but on Friday.",
        "It was due Monday, it comes Friday.",
        "You ordered on Monday, and it comes on Friday.",
        "We shipped it on Monday, and it arrives on Friday.",
        "It comes on Friday. If nobody is home, it comes again on Monday.",
        "Instead of Monday it comes on Friday.",
    ],
)
def test_a_second_day_that_is_denied_past_or_about_something_else_takes_nothing_back(text: str):
    assert status("Friday", text, user_texts=["When does it arrive?"]) is FactStatus.TOLD


def test_the_users_own_values_and_those_of_the_context_may_be_repeated_but_not_as_the_answer():
    order = "Your parcel with number K27 has the new number Z48."
    assert status("Z48", order) is FactStatus.NAMED
    assert status("Z48", order, user_texts=["Where is K27?"]) is FactStatus.TOLD
    assert status("Z48", order, shown_texts=["order: K27"]) is FactStatus.TOLD
    assert status("Z48", "It is K27. It is Z48.", user_texts=["Where is K27?"]) is FactStatus.NAMED
    assert status("Z48", "It is K27 or Z48.", user_texts=["Where is K27?"]) is FactStatus.NAMED


def test_a_text_that_is_no_prose_tells_nothing_but_its_values_still_count():
    assert status("Friday", "It comes Friday.", "Monday Monday", sound=[0]) is FactStatus.NAMED
    assert status("Friday", "It comes Friday.", sound=[]) is FactStatus.NAMED
    assert status("Friday", "Hello.") is FactStatus.ABSENT


def test_choices_are_a_type_of_values_of_the_users_own():
    guesses = "We use aspen indoors. Terraces look best in cedar."
    assert status("aspen", guesses) is FactStatus.TOLD
    assert status("aspen", guesses, choices=[["aspen", "cedar", "red oak"]]) is FactStatus.NAMED
    assert status("aspen", "Not cedar but aspen.", choices=[["aspen", "cedar"]]) is FactStatus.TOLD
    assert choices({"choices": ["aspen", "red oak"]}) == (("aspen", "red oak"),)
    assert choices({"choices": [["aspen", "cedar"], [40, 41]]}) == (("aspen", "cedar"), ("40", "41"))
    assert choices({"choices": [40, 41]}) == (("40", "41"),)
    assert choices({}) == ()


@pytest.mark.parametrize("given", [7, "aspen", [], [[]], [{}]])
def test_choices_that_cannot_be_read_are_refused(given: object):
    with pytest.raises(ConfigurationError, match="choices"):
        choices({"choices": given})


def test_a_fact_that_is_a_denial_is_told_by_any_denial_and_taken_back_by_its_opposite():
    assert status("not eligible", "You are not eligible.") is FactStatus.TOLD
    assert status("not eligible", "You aren't eligible.") is FactStatus.TOLD
    assert status("not eligible", "You are eligible.") is FactStatus.NAMED
    assert status("not eligible", "You are not eligible. You are eligible.") is FactStatus.NAMED


@pytest.mark.parametrize(
    "text",
    [
        "You get a refund in full.",
        "We give full refunds.",
        "You will be fully refunded.",
        "You get all of your money back.",
        "We reimburse the entire price.",
        "There is no doubt that you get a full refund.",
        "It is not true that you won't get a full refund.",
        "Maybe you get a full refund.",
    ],
)
def test_a_forbidden_phrase_is_claimed_in_other_words_too(text: str):
    assert claims_phrase(["full refund"], text)


@pytest.mark.parametrize(
    "text",
    [
        "You get store credit for the whole price.",
        "We can't give you a full refund.",
        "A full refund is not possible.",
        "Nobody gets a full refund.",
        "Do you want a full refund?",
        "If it were new, you would get a full refund.",
        "We refund part of it. The full story is long.",
        "A full refund is only for orders of last week.",
    ],
)
def test_a_denial_question_condition_or_other_matter_is_no_claim(text: str):
    assert not claims_phrase(["full refund"], text)


@pytest.mark.parametrize(
    "unit",
    ["Friday ", "Friday or Monday ", "if ", "not ", "(if Z482 ", "$40 or ", "that was a lie. ", "1,", "\n"],
)
def test_the_work_grows_with_what_is_read_and_of_a_megabyte_only_the_start_is(unit: str):
    endless = unit * (1_000_000 // len(unit))
    start = time.process_time()
    states_fact(["Friday", "Z482", "store credit"], endless)
    claims_phrase(["full refund", "free shipping"], endless)
    assert time.process_time() - start < 2
    assert len(read_statements(endless).text) == MOST_READ


@pytest.mark.parametrize(
    ("wording", "text"),
    [
        ("$40", "You get at least $40."),
        ("$40", "You get $40 or less."),
        ("$40", "It can't be more than $40."),
        ("$40", "You get nearly $40."),
        ("$40", "You get half of $40."),
        ("$40", "It is $40 plus tax."),
        ("$40", "It went down by $40."),
        ("Friday", "It comes after Friday."),
        ("Friday", "It won't come before Friday."),
        ("Friday", "It comes two days after Friday."),
        ("Friday", "It comes on a Friday."),
        ("5 days", "It takes more than 5 days."),
        ("5 days", "It takes less than 5 days."),
        ("approved", "It is as good as approved."),
        ("room 12", "You are next to room 12."),
    ],
)
def test_an_operator_beside_a_value_makes_another_value_of_it(wording: str, text: str):
    assert status(wording, text) is FactStatus.NAMED


@pytest.mark.parametrize(
    ("wording", "text"),
    [
        ("Friday", "It comes by Friday."),
        ("Friday", "It won't come until Friday."),
        ("Friday", "It comes on Friday at the latest."),
        ("5 days", "It comes within 5 days."),
        ("5 days", "It takes no more than 5 days."),
        ("$40", "You get $40, no more and no less."),
        ("$20", "It is $20 plus $5 for shipping."),
    ],
)
def test_a_deadline_and_a_value_with_its_own_parts_are_told(wording: str, text: str):
    assert states_fact([wording], text)


def test_a_bound_is_told_where_the_question_asks_for_it():
    days = "You have up to 30 days."
    assert status("30 days", "The warranty is under 30 days.") is FactStatus.NAMED
    assert status("30 days", days, user_texts=["How many days do I have?"]) is FactStatus.TOLD
    hours = "You can come any time after 3 pm."
    assert status("3 pm", hours) is FactStatus.NAMED
    assert status("3 pm", hours, user_texts=["When can I check in?"]) is FactStatus.TOLD


@pytest.mark.parametrize(
    "text",
    [
        "It is $30 and $10, $40 in total.",
        "It was $55, less $15 it is $40.",
        "At $20 each the two are $40.",
        "It is 80% of $50, so $40.",
        "Two at $15 and one at $10 make $40.",
    ],
)
def test_terms_of_a_sum_take_nothing_back_where_they_add_up(text: str):
    assert states_fact(["$40"], text)


@pytest.mark.parametrize("text", ["It is $30 and $12, $40 in total.", "Two at $15 and one at $12 make $40."])
def test_terms_that_do_not_add_up_are_second_values(text: str):
    assert not states_fact(["$40"], text)


def test_a_value_belongs_to_what_its_clause_is_about():
    asked = {"user_texts": ["I want another shirt for that of K27. When do I get my refund?"]}
    assert status("Friday", "The refund comes on Friday, the shirt on Monday.", **asked) is FactStatus.TOLD
    assert status("Friday", "The refund comes on Friday, the refund on Monday.", **asked) is FactStatus.NAMED
    assert status("Friday", "Another customer gets a refund on Friday.", **asked) is FactStatus.NAMED
    assert status("Friday", "Order K28 comes on Friday.", **asked) is FactStatus.NAMED
    assert status("$12", "It is $12 a day.", user_texts=["What do I pay a month?"]) is FactStatus.NAMED
    assert status("$12", "It is $12 a month.", user_texts=["What do I pay a month?"]) is FactStatus.TOLD
