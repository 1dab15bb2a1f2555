"""How the desk reads what an agent asserts."""

import pytest

from stateset_agents.environments.retail_desk.agents import PHRASES
from stateset_agents.environments.retail_desk.claims import MAX_CHARACTERS, grounds, holds, read_claims
from stateset_agents.environments.retail_desk.policy import Case, Claim
from stateset_agents.environments.retail_desk.scenarios import database_of


def texts(reply):
    return {claim.text for claim in read_claims(reply, "K27")}


@pytest.mark.parametrize(
    ("reply", "claims"),
    [
        ("order K27 is shipped and arrives on friday.", {"shipped", "arrives:friday"}),
        ("sorry, K27 has shipped, so i cannot cancel it.", {"shipped", "refused"}),
        ("Your order isn't shipped.", set()),
        ("is it shipped?", set()),
        ("if it is shipped, it arrives on friday?", set()),
        ("your order will be cancelled.", set()),
        ("your order can be cancelled.", set()),
        ("done, it is cancelled and 45 dollars are refunded.", {"cancelled", "refunded", "amount:45"}),
        ("i refunded $45.50.", {"refunded", "amount:45.50"}),
        ("the red lamp is out of stock.", {"out_of_stock:red lamp"}),
        ("the red lamp is in stock.", {"in_stock:red lamp"}),
        ("exchanged for a red lamp.", {"exchanged", "exchanged_for:red lamp"}),
        ("it now goes to oslo.", {"city:oslo"}),
        ("i can't send it to oslo.", {"refused"}),
        ("it is over 30 days old.", {"outside"}),
        ("it came 45 days ago.", {"days:45"}),
        ("no problem, it is sent again.", {"reshipped"}),
        ("a human now looks after it.", {"human"}),
        ("hello! how are you?", set()),
        ("", set()),
    ],
)
def test_claims_are_read_clause_by_clause(reply, claims):
    assert texts(reply) == claims


def test_a_clause_speaks_of_the_order_that_it_names():
    claims = read_claims("order M11 is pending, K27 is shipped.", "K27")
    assert set(claims) == {Claim("pending", "M11"), Claim("shipped", "K27")}
    assert read_claims("it is pending.", "K27") == (Claim("pending", "K27"),)


def test_a_message_too_long_to_read_claims_nothing():
    assert read_claims("shipped. " * MAX_CHARACTERS, "K27") == ()


def test_every_phrase_of_the_scripted_agents_claims_what_it_should():
    slots = {"order_id": "K27", "arrives": "friday", "refund": "45", "new_item": "red lamp", "city": "oslo"}
    expected = {
        "ask": set(),
        "unknown": {"refused"},
        "sorry": {"refused"},
        "pending": {"pending"},
        "shipped": {"shipped", "arrives:friday"},
        "delivered": {"delivered"},
        "cancelled": {"cancelled"},
        "returned": {"returned", "refunded", "amount:45"},
        "exchanged": {"exchanged", "exchanged_for:red lamp"},
        "updated": {"city:oslo"},
        "reshipped": {"reshipped"},
        "transferred": {"human"},
        "credited": {"credited"},
        "no_cancel": {"refused", "shipped"},
        "no_address": {"refused", "shipped"},
        "no_return": {"refused", "outside"},
        "no_exchange": {"refused", "out_of_stock:red lamp"},
    }
    assert set(PHRASES) == set(expected)
    for key, wordings in PHRASES.items():
        assert all(texts(phrase.format(**slots)) == expected[key] for phrase in wordings)


@pytest.mark.parametrize(
    ("claim", "true_when"),
    [
        ("pending", {"pending"}),
        ("shipped", {"shipped"}),
        ("delivered", {"delivered"}),
        ("lost", {"shipped"}),
        ("arrives:friday", set()),
        ("arrives:monday", set()),
        ("city:oslo", {"pending", "shipped", "delivered"}),
        ("city:rome", set()),
        ("days:45", {"delivered"}),
        ("outside", {"delivered"}),
        ("inside", set()),
        ("cancelled", set()),
        ("returned", set()),
        ("refunded", set()),
        ("amount:20", set()),
        ("exchanged", set()),
        ("exchanged_for:red mug", set()),
        ("updated", set()),
        ("reshipped", set()),
        ("human", set()),
        ("credited", set()),
        ("in_stock:red lamp", {"pending", "shipped", "delivered"}),
        ("out_of_stock:red lamp", set()),
        ("refused", {"pending", "shipped", "delivered"}),
    ],
)
def test_claims_are_checked_against_the_shop(claim, true_when):
    found = set()
    for status in ("pending", "shipped", "delivered"):
        case = Case(
            family="cancel",
            customer_id="u01",
            order_id="K27",
            item="red mug",
            status=status,
            tracking="lost",
            days=45,
            arrives="friday",
            city="oslo",
            other_order_id="M11",
            stranger_order_id="Z99",
        )
        database = database_of(case)
        if holds(Claim(claim, "K27"), database, "oslo"):
            found.add(status)
        assert not holds(Claim("pending", "X00"), database, "oslo")
    assert found == true_when


def test_only_a_moving_parcel_arrives_and_on_its_own_day():
    case = Case(
        family="order_status",
        customer_id="u01",
        order_id="K27",
        item="red mug",
        status="shipped",
        tracking="moving",
        arrives="friday",
        other_order_id="M11",
        stranger_order_id="Z99",
    )
    database = database_of(case)
    assert holds(Claim("arrives:friday", "K27"), database, "oslo")
    assert not holds(Claim("arrives:monday", "K27"), database, "oslo")
    assert not holds(Claim("arrives:friday", "M11"), database, "oslo")


def test_what_the_agent_read_is_what_it_may_speak_of():
    assert grounds(Claim("outside", "K27")) == {"order:K27"}
    assert grounds(Claim("lost", "K27")) == {"tracking:K27"}
    assert grounds(Claim("out_of_stock:red lamp", "K27")) == {"item:red lamp"}
    assert grounds(Claim("shipped", "K27")) == {"order:K27", "tracking:K27", "listed:K27"}
    assert grounds(Claim("cancelled", "K27")) == frozenset()
