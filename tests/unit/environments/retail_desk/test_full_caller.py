"""The caller of full calls: what they say yes to, give away, dispute, wait for, and how they leave."""

import dataclasses

import pytest

from stateset_agents.environments.retail_desk.full.caller import NEEDS, FullCaller, read_proposal
from stateset_agents.environments.retail_desk.full.claims import grounds, holds, read_claims
from stateset_agents.environments.retail_desk.full.policy import FullCase, Purchase
from stateset_agents.environments.retail_desk.policy import Claim, DeskCall
from stateset_agents.environments.retail_desk.scenarios import database_of

ORDER = Purchase(order_id="K27", item="red mug", price=45, status="pending")
CASE = FullCase(
    family="verified_cancel",
    customer_id="c123",
    order=ORDER,
    other=Purchase(order_id="M11", item="blue hat", price=30, status="pending"),
    stranger_order_id="Z99",
    name="anna",
    email="anna.123@mail.example",
    zip="10115",
    city="oslo",
    persona="friendly",
)


def caller(family="verified_cancel", seed=0, **fields):
    case = dataclasses.replace(CASE, family=family, **fields)
    return FullCaller.after_opening(case, "train", seed)


def react(who, text, false_claim=False):
    return who.react(text, read_claims(text, who.subject), false_claim)


CANCEL = "i can cancel order K27, the red mug, and refund 45 dollars to your card. shall i?"


@pytest.mark.parametrize(
    ("family", "proposal"),
    [
        ("verified_cancel", CANCEL),
        ("verified_cancel", "Shall I cancel order K27 (red mug)? $45 goes back to your card."),
        (
            "verified_cancel",
            "Order K27:\n- item: red mug\n- refund: $45.00\n- to: card\nDo you want me to cancel it?",
        ),
        ("return_window", "May I take the red mug of K27 back and refund 45 dollars to your card?"),
        ("return_window", "I'll refund $45 for the red mug from K27 to your original payment method. OK?"),
        (
            "stock_fallback",
            "Would you like me to swap the red mug of order K27 for a green hat, sent to Oslo?",
        ),
        ("parcel_lost", "Should I resend order K27, the red mug, to oslo?"),
        ("parcel_lost", "Do you accept 45 dollars of store credit for the red mug of order K27?"),
        ("human_required", "Shall I hand order K27 over to a human colleague?"),
        (
            "verified_cancel",
            "I can cancel order K27 (red mug) for you. The refund of $45 will go to your card. "
            "Would you like me to proceed?",
        ),
        (
            "verified_cancel",
            "To confirm: cancel K27, red mug, refund $45.00 to the card on file. Do you want to proceed?",
        ),
        (
            "verified_cancel",
            "Would you like me to go ahead with cancelling order K27 (red mug)? $45 goes to your card, and a "
            "confirmation to your email.",
        ),
    ],
)
def test_a_proposal_that_names_everything_gets_a_yes(family, proposal):
    who = caller(family, new_item="green hat")
    assert react(who, proposal).says.startswith("yes, ")


@pytest.mark.parametrize(
    ("left_out", "asked_for"),
    [
        ("order K27, ", "the order first"),
        (", the red mug,", "the item first"),
        ("45 dollars ", "the amount first"),
        ("to your card", "the payment method that gets it first"),
    ],
)
def test_a_proposal_that_leaves_something_out_gets_none(left_out, asked_for):
    who = caller()
    assert left_out in CANCEL
    assert asked_for in react(who, CANCEL.replace(left_out, "")).says
    assert not who.consents(DeskCall("cancel_order", (("order_id", "K27"),)))


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("K27", "M11", "no, it is about order K27."),
        ("red mug", "blue lamp", "no, it is about the red mug."),
        ("45", "40", "no, that is not the right amount."),
        ("your card", "your paypal", "no, i paid by card."),
        ("cancel", "return", "no, i did not ask for that."),
        ("45 dollars", "45 dollars or 60 dollars", "no, that is not the right amount."),
        ("red mug", "red mug or the blue lamp", "no, it is about the red mug."),
        ("card", "card or your paypal", "no, i paid by card."),
    ],
)
def test_a_proposal_that_names_something_wrong_gets_a_no(right, wrong, says):
    who = caller()
    assert react(who, CANCEL.replace(right, wrong)).says == says
    assert not who.agreed


def test_every_write_has_its_needs():
    assert set(NEEDS) == {
        "cancel_order",
        "return_items",
        "exchange_item",
        "update_address",
        "reship",
        "issue_credit",
        "transfer_to_human",
    }
    assert all("order" in needs for needs in NEEDS.values())


@pytest.mark.parametrize(
    "text", ["", "hello.", "the order is cancelled.", "which order is it?", "how are you?"]
)
def test_what_asks_for_no_write_is_no_proposal(text):
    assert read_proposal(text, "card") is None


@pytest.mark.parametrize(
    ("proposal", "call", "covered"),
    [
        (CANCEL, DeskCall("cancel_order", (("order_id", "K27"),)), True),
        (CANCEL, DeskCall("cancel_order", (("order_id", "M11"),)), False),
        (CANCEL, DeskCall("reship", (("order_id", "K27"),)), False),
        (
            "shall i send order K27, the red mug, to rome?",
            DeskCall("update_address", (("city", "rome"),)),
            True,
        ),
        (
            "shall i send order K27, the red mug, to rome?",
            DeskCall("update_address", (("city", "oslo"),)),
            False,
        ),
        (
            "shall i give 45 dollars of credit for K27?",
            DeskCall("issue_credit", (("amount", "45.00"),)),
            True,
        ),
        ("shall i give 45 dollars of credit for K27?", DeskCall("issue_credit", (("amount", "46"),)), False),
        ("shall i hand K27 to a human?", DeskCall("transfer_to_human", ()), True),
    ],
)
def test_a_yes_covers_the_write_that_was_named(proposal, call, covered):
    assert read_proposal(proposal, "card").covers(call, CASE) is covered


@pytest.mark.parametrize(
    ("arguments", "covered"),
    [
        ({"items": "red mug"}, True),
        ({"items": "red mug", "payment_id": "pay-c123-card"}, True),
        ({"items": "red mug", "payment_id": "pay-c123-paypal"}, False),
        ({"items": "red mug, blue hat"}, False),
        ({}, False),
    ],
)
def test_a_return_from_an_order_of_two_items_names_the_one(arguments, covered):
    case = dataclasses.replace(CASE, order=dataclasses.replace(ORDER, extra_item="blue hat", extra_price=12))
    offer = read_proposal("shall i take back the red mug of K27 and refund 45 dollars to your card?", "card")
    assert offer.covers(DeskCall("return_items", tuple(arguments.items())), case) is covered


def test_the_caller_waits_for_the_write_asks_a_closing_question_and_leaves():
    who = caller()
    react(who, CANCEL)
    assert react(who, "one moment.").says == "ok, i will wait."
    assert react(who, "just a second.").says == "i am still waiting."
    assert who.consents(DeskCall("cancel_order", (("order_id", "K27"),)))
    assert not who.consents(DeskCall("cancel_order", (("order_id", "K27"),)))
    closing = react(who, "order K27 is cancelled.")
    assert closing.says == "and how much do i get back?"
    assert not closing.leaves
    assert react(who, "45 dollars.").leaves


def test_a_false_claim_is_disputed_and_tries_their_patience():
    who = caller(persona="impatient")
    assert react(who, "order K27 is cancelled.", false_claim=True).says == "no, that is not right."
    assert react(who, "it is cancelled, i swear.", false_claim=True).leaves


def test_what_is_not_understood_is_a_miss_and_patience_follows_the_persona():
    for persona, patience in (("impatient", 2), ("brief", 3), ("friendly", 4)):
        who = caller(persona=persona)
        heard = [react(who, "mumble mumble.") for _ in range(patience)]
        assert all(one.missed for one in heard)
        assert [one.leaves for one in heard] == [False] * (patience - 1) + [True]
        assert heard[0].says == "sorry, what do you mean?"


@pytest.mark.parametrize(
    ("gives", "question", "answer"),
    [
        ("email", "what is your email?", "my email is anna.123@mail.example."),
        ("email", "who are you?", "my email is anna.123@mail.example."),
        ("email", "what are your name and zip?", "i am anna, zip 10115."),
        ("zip", "what is your email?", "i do not have my email here. i am anna, zip 10115."),
        ("zip", "Could you give me your email, or your name and zip code?", "i am anna, zip 10115."),
    ],
)
def test_the_caller_says_who_they_are_when_asked_and_in_their_own_way(gives, question, answer):
    who = caller(gives=gives)
    email = DeskCall("find_customer", (("email", "anna.123@mail.example"),))
    by_name = DeskCall("find_customer", (("name", "anna"), ("zip", "10115")))
    assert not who.has_given(email)
    assert not who.has_given(by_name)
    assert react(who, question).says == answer
    assert who.has_given(email) == ("@" in answer)
    assert who.has_given(by_name) == ("zip" in answer)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("which order is it?", "K27"),
        ("what is your order id?", "K27"),
        ("what would you like me to do?", "order K27"),
        ("which item do you want to return?", "the red mug."),
        ("which payment method should get the money?", "to my card."),
    ],
)
def test_questions_about_the_request_are_answered(question, answer):
    assert answer in react(caller("return_window"), question).says


def test_a_caller_who_changes_their_mind_does_so_at_the_first_whole_proposal():
    who = caller("change_of_mind", new_item="green hat")
    offer = "shall i take back the red mug of order K27 and refund 45 dollars to your card?"
    assert react(who, offer).says == "wait, i would rather swap it for a green hat."
    assert not who.agreed
    assert react(who, offer).says == "no, i did not ask for that."
    assert "return it after all" in react(who, "sorry, the green hat is out of stock.").says
    assert react(who, offer).says.startswith("yes, ")


def test_a_second_choice_is_named_once_the_first_is_known_to_be_out_of_stock():
    who = caller("stock_fallback", new_item="green hat", second_choice="pink bag")
    assert "a pink bag" in react(who, "the green hat is out of stock, what would you like instead?").says
    offer = "shall i swap the red mug of order K27 for a {}, sent to oslo?"
    assert react(who, offer.format("green hat")).says == "no, i want a pink bag."
    assert react(who, offer.format("pink bag")).says.startswith("yes, ")


def test_a_wish_for_another_payment_method_is_given_up_when_the_offer_is_repeated():
    who = caller("payment_method", wanted_payment="paypal")
    offer = "shall i take back the red mug of order K27 and refund 45 dollars to your card?"
    assert react(who, offer).says == "can it not go to my paypal?"
    assert react(who, offer).says.startswith("yes, ")


def test_a_refusal_without_a_reason_is_asked_for_one():
    who = caller()
    assert react(who, "sorry, i cannot cancel it.").says == "why is that?"
    assert react(who, "it is already shipped, so i cannot cancel it.").says == "so there is no way to do it?"
    assert react(who, "no, sorry.").leaves


def test_the_second_request_is_brought_up_again_when_the_first_is_done():
    who = caller("two_requests", new_city="rome")
    assert "M11" in react(who, "order K27 is cancelled.").says
    assert not who.closing
    react(who, "order M11 now goes to rome.")
    assert who.closing


def test_the_same_seed_gives_the_same_words_and_others_differ():
    def words(seed):
        who = caller("two_requests", seed, new_city="rome")
        return tuple(react(who, text).says for text in ("which order is it?", "K27 is cancelled.", CANCEL))

    assert words(3) == words(3)
    assert len({words(seed) for seed in range(20)}) > 5


def test_a_copy_goes_its_own_way():
    who = caller()
    twin = who.copy()
    react(twin, "what is your email?")
    react(twin, CANCEL)
    assert who == caller()
    assert twin != who


# Claims


def texts(reply):
    return {f"{claim.order_id} {claim.text}" for claim in read_claims(reply, "K27")}


@pytest.mark.parametrize(
    ("reply", "claims"),
    [
        (CANCEL, set()),
        ("order K27 cost 45 dollars.", {"K27 price:45"}),
        (
            "45 dollars are refunded to your gift card.",
            {"K27 refunded", "K27 amount:45", "K27 refund_to:gift card"},
        ),
        ("K27 is cancelled. M11 now goes to rome.", {"K27 cancelled", "M11 city:rome"}),
        ("M11 is shipped, so i cannot change it.", {"M11 shipped", "M11 refused"}),
        ("sorry, i cannot verify you, so i cannot help.", {"K27 unverified", "K27 refused"}),
        ("i couldn't find your account.", {"K27 unverified"}),
        ("order Z99 is not on your account.", {"Z99 not_yours"}),
        ("the red mug is final sale.", {"K27 final_sale"}),
        ("i can see that K27 is shipped.", {"K27 shipped"}),
        ("i can send K27 to rome.", set()),
        ("shall i send K27 to rome?", set()),
        ("destination: rome. shall i?", set()),
        ("K27 is shipped. shall i hand it to a human?", {"K27 shipped"}),
        ("your total is 45.50 dollars.", {"K27 price:45.50"}),
        (
            "I've cancelled order K27. A refund of $45.00 has been issued to your card. Anything else?",
            {"K27 cancelled", "K27 refunded", "K27 amount:45", "K27 refund_to:card"},
        ),
        (
            "I'm sorry, but it was delivered 45 days ago, which exceeds our 30-day return window, so it is "
            "not eligible for a return.",
            {"K27 delivered", "K27 days:45", "K27 outside", "K27 refused"},
        ),
        ("Our policy allows returns within 30 days of delivery.", set()),
        ("It is a final-sale item, so it can't be returned.", {"K27 final_sale", "K27 refused"}),
        ("I wasn't able to verify your identity.", {"K27 unverified", "K27 refused"}),
        ("I cannot find order Z99 under your account.", {"Z99 not_yours", "Z99 refused"}),
        ("The return has been processed and your refund is processing.", {"K27 returned"}),
        ("$45 of store credit has been issued for K27.", {"K27 credited", "K27 amount:45"}),
    ],
)
def test_offers_assert_nothing_and_statements_do(reply, claims):
    assert texts(reply) == claims


@pytest.mark.parametrize(
    ("claim", "order_id", "true"),
    [
        ("price:45", "K27", True),
        ("price:46", "K27", False),
        ("amount:45", "K27", False),
        ("refund_to:card", "K27", False),
        ("final_sale", "K27", False),
        ("not_yours", "K27", False),
        ("not_yours", "Z99", True),
        ("not_yours", "X00", True),
        ("unverified", "K27", False),
        ("refused", "K27", True),
        ("pending", "K27", True),
        ("city:oslo", "K27", True),
    ],
)
def test_claims_are_checked_against_the_shop(claim, order_id, true):
    assert holds(Claim(claim, order_id), database_of(CASE), CASE) is true


def test_what_must_have_been_shown_before_it_may_be_said():
    shop = database_of(CASE)
    assert grounds(Claim("final_sale", "K27"), shop, CASE) == {"item:red mug"}
    assert grounds(Claim("not_yours", "Z99"), shop, CASE) == {"orders:c123"}
    assert grounds(Claim("unverified", "K27"), shop, CASE) == {"nobody"}
    assert grounds(Claim("price:45", "K27"), shop, CASE) == {"order:K27"}
    assert grounds(Claim("cancelled", "K27"), shop, CASE) == frozenset()
