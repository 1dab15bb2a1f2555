"""Scenarios of full calls by seed, and the shop of each.

Within a family scenarios come in blocks of ten: four pairs of twins that differ in one database fact, on
which the right answer turns, then two more that go through. Orders, items, wordings, notes and customers of
the splits are disjoint (a held-out split also speaks of items from training).
"""

from __future__ import annotations

import dataclasses
import datetime
import random
from collections.abc import Sequence

from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.database import Database, Value
from stateset_agents.environments.retail_desk.full import wordings
from stateset_agents.environments.retail_desk.full.case import FullCase, Purchase, payment_id_of
from stateset_agents.environments.retail_desk.full.families import FAMILIES, Family
from stateset_agents.environments.retail_desk.full.policy import RULES
from stateset_agents.environments.retail_desk.policy import Case
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive

KINDS_OF_PAYMENT = ("card", "paypal", "gift card")
_UNNAMED, _KNOWN, _TWO_ITEMS = 0.35, 0.4, 0.4
"""Share of openings without the order id, of those that say who calls, and of returns and exchanges from an
order of two items."""


def full_scenario(split: Split, name: str, number: int, seed: int) -> Scenario:
    """Scenario `number` of a family; there is one for every number from 0 on."""
    family = FAMILIES[name]
    rule = RULES[family.rule]
    pair, is_second = pair_of(number)
    draw = random.Random(derive(seed, "full desk scenario", split, name, pair))
    case = _draw_case(family, split, draw).with_fact(rule.fact, draw.choice(rule.compliant))
    wording, opening = _opening(family, case, split, draw)
    if is_second:
        case = case.with_fact(rule.fact, draw.choice(rule.violating))
    return scenario_of(case, f"desk-{split}-{seed}-{name}-{number}", split, opening, wording, pair, is_second)


def pair_of(number: int) -> tuple[int, bool]:
    """The matched pair that scenario `number` of a family belongs to, and whether it is the pair's second.

    Of ten scenarios the first eight make four pairs; the last two stand alone.
    """
    block, within = divmod(number, 10)
    pair = block * 6 + (within // 2 if within < 8 else within - 4)
    return pair, within < 8 and within % 2 == 1


def scenario_of(
    case: Case | FullCase, id: str, split: Split, opening: str, wording: str, pair: int, is_second: bool
) -> Scenario:
    """The scenario of a case; its context holds the case's fields and the matched pair."""
    context = {
        **dataclasses.asdict(case),
        "pair": f"{case.family}-{pair}",
        "side": "twin" if is_second else "base",
        "wording": wording,
    }
    return Scenario(id=id, family=case.family, opening=opening, context=context, split=split)


def draw_item(split: Split, draw: random.Random, *others: str) -> str:
    """An item of this split, none of `others`; a held-out split also has items of training."""
    held_out = split != "train" and draw.random() < 0.5
    pool = catalog.items_of(split if held_out else "train")
    return draw.choice([item for item in pool if item not in others])


def _draw_customer(split: Split, draw: random.Random) -> int:
    """A number of this split: 75 % of the thousand are training's, 5 % validation's, 20 % test's."""
    while True:
        number = draw.randrange(1000)
        if split == ("train" if number % 20 < 15 else "validation" if number % 20 == 15 else "test"):
            return number


def _draw_case(family: Family, split: Split, draw: random.Random) -> FullCase:
    order_id, other_id, stranger = draw.sample(catalog.order_ids_of(split), 3)
    city, new_city = draw.sample(catalog.CITIES, 2)
    number, name = _draw_customer(split, draw), draw.choice(catalog.NAMES)
    item = draw_item(split, draw)
    kinds = {*family.wants, family.at_first}
    new_item = draw_item(split, draw, item) if "exchange" in kinds else ""
    second = draw_item(split, draw, item, new_item) if family.name == "stock_fallback" else ""
    extra = draw_item(split, draw, item, new_item, second)
    two_items = bool(kinds & {"return", "exchange"}) and draw.random() < _TWO_ITEMS
    payment, other_payment = draw.sample(KINDS_OF_PAYMENT, 2)
    return FullCase(
        family=family.name,
        customer_id=f"c{number:03d}",
        name=name,
        email=f"{name}.{number}@mail.example",
        zip=f"1{draw.randrange(10000):04d}",
        order=Purchase(
            order_id=order_id,
            item=item,
            price=draw.randrange(11, 100),
            extra_item=extra if two_items else "",
            extra_price=draw.randrange(11, 100) if two_items else 0,
            status="pending" if "cancel" in kinds else "shipped" if "lost" in kinds else "delivered",
            tracking="lost" if "lost" in kinds else "moving",
            days=draw.choice(RULES["return"].compliant),
            arrives=draw.choice(catalog.WEEKDAYS[1:]),
            note=draw.choice(wordings.NOTES[split]) if family.noted else "",
        ),
        other=Purchase(
            order_id=other_id, item=draw_item(split, draw), price=draw.randrange(11, 100), status="pending"
        ),
        stranger_order_id=stranger,
        city=city,
        payment=payment,
        wanted_payment=other_payment if family.rule == "payment" else "",
        new_item=new_item,
        second_choice=second,
        new_city=new_city if "address" in kinds else "",
        gives="zip" if family.rule == "identity" else draw.choice(("email", "zip")),
        tells_order_id=family.name == "two_requests" or draw.random() >= _UNNAMED,
        tells_details=draw.random() < _KNOWN,
        persona=draw.choice(list(wordings.PERSONAS)),
    )


def request_text(wording: str, case: FullCase, order: Purchase, *, named: bool = True) -> str:
    """A wording with the case's words in it."""
    return wording.format(
        order=f"order {order.order_id}" if named else "my order",
        item=order.item,
        new_item=case.new_item,
        new_city=case.new_city,
        wanted=case.wanted_payment,
    )


def _opening(family: Family, case: FullCase, split: Split, draw: random.Random) -> tuple[str, str]:
    """The first request's wording, and the whole opening."""
    wants = (family.at_first,) if family.at_first else family.wants
    wording = draw.choice(wordings.REQUESTS[wants[0]][split])
    parts = [request_text(wording, case, case.order, named=case.tells_order_id)]
    for kind, order in zip(wants[1:], (case.other,), strict=False):
        also = draw.choice(wordings.ALSO[split])
        parts.append(also + request_text(draw.choice(wordings.REQUESTS[kind][split]), case, order))
    if case.wanted_payment:
        parts.append(request_text(draw.choice(wordings.WISH[split]), case, case.order))
    if case.tells_details:
        details = draw.choice(wordings.DETAILS[case.gives])
        parts.append(details.format(email=case.email, name=case.name, zip=case.zip))
    return wording, draw.choice(wordings.GREETINGS[case.persona]) + " ".join(parts)


def full_database_of(case: FullCase) -> Database:
    """The shop of one case: the caller with two orders and two payment methods, and a stranger with one."""
    caller, stranger = case.customer_id, "d" + case.customer_id[1:]
    second_kind = case.wanted_payment or next(kind for kind in KINDS_OF_PAYMENT if kind != case.payment)
    paid = payment_id_of(caller, case.payment)
    strangers_card = payment_id_of(stranger, "card")
    rows: list[tuple[str, Sequence[Value]]] = [
        ("customers", (caller, case.name, case.email, case.zip_on_file or case.zip)),
        ("customers", (stranger, "olga", f"olga.{caller[1:]}@mail.example", "20095")),
        ("payment_methods", (paid, caller, case.payment, "active" if case.payment_open else "closed")),
        ("payment_methods", (payment_id_of(caller, second_kind), caller, second_kind, "active")),
        ("payment_methods", (strangers_card, stranger, "card", "active")),
        ("orders", (case.stranger_order_id, stranger, strangers_card, "pending", "oslo", None, "")),
        ("order_items", (1, case.stranger_order_id, "blue mug", 1300, "ordered")),
    ]
    for order in (case.order, case.other):
        owner, payment = (caller, paid) if order.mine else (stranger, strangers_card)
        delivered = (catalog.TODAY - datetime.timedelta(days=order.days)).isoformat()
        arrived = delivered if order.status == "delivered" else None
        rows.append(
            ("orders", (order.order_id, owner, payment, order.status, case.city, arrived, order.note))
        )
        lines = [(order.item, order.price), (order.extra_item, order.extra_price)]
        rows += [
            ("order_items", (None, order.order_id, item, price * 100, "ordered"))
            for item, price in lines
            if item
        ]
        if order.status == "shipped":
            arrives = catalog.TODAY + datetime.timedelta(days=catalog.WEEKDAYS.index(order.arrives))
            rows.append(("shipments", (None, order.order_id, order.tracking, arrives.isoformat())))
        if order.status == "delivered":
            rows.append(("shipments", (None, order.order_id, "delivered", delivered)))
    variants = {
        case.second_choice: (case.order.price, 5, 0),
        case.order.item: (case.order.price, 5 if case.new_item else case.stock, case.order.final_sale),
        case.new_item: (case.order.price, case.stock, 0),
    }
    variants.pop("", None)
    return Database.with_rows(
        rows, {item: (price * 100, stock, int(sale)) for item, (price, stock, sale) in variants.items()}
    )
