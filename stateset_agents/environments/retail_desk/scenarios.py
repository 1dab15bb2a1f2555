"""Scenarios by seed, the shop of each, and what it should end in.

Scenario `i` is of family `i % n` of the `n` chosen. Within a family scenarios come in blocks of ten: four
matched pairs, which differ in one database fact on which the right answer turns, then two more; a denial is
the right answer for four of ten in the families that can deny, 27 % overall of the learnable ones and 20 % of
the full ones. Orders, items, wordings, notes and customers of the splits are disjoint (a held-out split also
speaks of items from training).
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence

from stateset_agents.environments.retail_desk import catalog, claims
from stateset_agents.environments.retail_desk.catalog import WORDINGS
from stateset_agents.environments.retail_desk.database import Database, Row, order_rows
from stateset_agents.environments.retail_desk.full import claims as full_claims
from stateset_agents.environments.retail_desk.full import policy as full
from stateset_agents.environments.retail_desk.full.policy import FullCase, Purchase, payment_id_of
from stateset_agents.environments.retail_desk.grading import Answers, allowed_by
from stateset_agents.environments.retail_desk.policy import FAMILIES, RULES, Case, Decision
from stateset_agents.environments.retail_desk.tools import Desk
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import nearest

TEST_EACH, VALIDATION_EACH = 100, 20
"""Held-out scenarios of each family."""
KINDS_OF_PAYMENT = ("card", "paypal", "gift card")
_UNNAMED, _INTRODUCED, _TWO_ITEMS = 0.35, 0.4, 0.4
"""Share of openings without the order id, of full calls' openings that say who calls, and of returns and
exchanges from an order of two items."""


def families_named(which: str | Sequence[str]) -> tuple[str, ...]:
    """`learnable`, `full`, `all`, or a list of families -> their names.

    Raises ConfigurationError for a name that no family has and for a list that is empty or repeats one.
    """
    sets = {"learnable": FAMILIES, "full": tuple(full.FAMILIES), "all": (*FAMILIES, *full.FAMILIES)}
    if isinstance(which, str):
        if which not in sets:
            raise ConfigurationError(
                f"families must be learnable, full, all or a list of families, got {which!r:.60}"
                f"{nearest(which, (*sets, *sets['all']))}"
            )
        return sets[which]
    names = tuple(which)
    if not names or len(set(names)) < len(names):
        raise ConfigurationError(f"families must name each family once, and at least one, got {names!r:.80}")
    for name in names:
        if name not in sets["all"]:
            raise ConfigurationError(f"no desk family is called {name!r:.60}{nearest(name, sets['all'])}")
    return names


def make_scenario(split: Split, index: int, seed: int = 0, families: Sequence[str] = FAMILIES) -> Scenario:
    """Scenario `index` of a split: there is one for every index from 0 on.

    Those of validation and test are the same for every seed.
    """
    if split != "train":
        seed = 0
    family, number = families[index % len(families)], index // len(families)
    # Of ten scenarios the first eight make four pairs; the last two stand alone.
    block, within = divmod(number, 10)
    pair = block * 6 + (within // 2 if within < 8 else within - 4)
    is_second = within < 8 and within % 2 == 1
    draw_call = _draw_full_call if family in full.FAMILIES else _draw_call
    case, wording, opening = draw_call(family, split, seed, pair, is_second)
    context = {
        **dataclasses.asdict(case),
        "pair": f"{family}-{pair}",
        "side": "twin" if is_second else "base",
        "wording": wording,
    }
    id = f"desk-{split}-{seed}-{family}-{number}"
    return Scenario(id=id, family=family, opening=opening, context=context, split=split)


def _draw_call(family: str, split: Split, seed: int, pair: int, is_second: bool) -> tuple[Case, str, str]:
    """The case of a learnable call, its wording and its opening."""
    rule, draw = RULES[family], random.Random(derive(seed, "desk scenario", split, family, pair))
    order_id, other, stranger = draw.sample(catalog.order_ids_of(split), 3)
    city, new_city = draw.sample(catalog.CITIES, 2)
    item = draw_item(split, draw)
    case = Case(
        family=family,
        customer_id=f"u{draw.randrange(100):02d}",
        order_id=order_id,
        item=item,
        status="shipped" if family == "lost_parcel" else "delivered",
        days=draw.choice(RULES["return"].grants),
        arrives=draw.choice(catalog.WEEKDAYS[1:]),
        price=draw.randrange(11, 100),
        new_item=draw_item(split, draw, item) if family == "exchange" else "",
        city=city,
        new_city=new_city if family == "address" else "",
        name=draw.choice(catalog.NAMES),
        other_order_id=other,
        stranger_order_id=stranger,
        tells_order_id=draw.random() >= _UNNAMED,
    )
    case = dataclasses.replace(case, **{rule.fact: draw.choice(rule.grants)})
    greeting, wording = draw.choice(WORDINGS["greetings"]), draw.choice(WORDINGS["openings"][family][split])
    if is_second:
        case = dataclasses.replace(case, **{rule.fact: draw.choice(rule.denies)})
    order = f"order {case.order_id}" if case.tells_order_id else "my order"
    slots = {"order": order, "item": item, "new_item": case.new_item, "new_city": case.new_city}
    return case, wording, greeting + wording.format(**slots)


def _draw_full_call(
    name: str, split: Split, seed: int, pair: int, is_second: bool
) -> tuple[FullCase, str, str]:
    """The case of a full call, the first request's wording and the opening."""
    family = full.FAMILIES[name]
    rule, draw = full.RULES[family.rule], random.Random(derive(seed, "full desk scenario", split, name, pair))
    case = _draw_full_case(family, split, draw).with_fact(rule.fact, draw.choice(rule.grants))
    wording, opening = _opening(family, case, split, draw)
    if is_second:
        case = case.with_fact(rule.fact, draw.choice(rule.denies))
    return case, wording, opening


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


def _draw_full_case(family: full.Family, split: Split, draw: random.Random) -> FullCase:
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
            days=draw.choice(full.RULES["return"].grants),
            arrives=draw.choice(catalog.WEEKDAYS[1:]),
            note=draw.choice(WORDINGS["notes"][split]) if family.noted else "",
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
        tells_details=draw.random() < _INTRODUCED,
        persona=draw.choice(list(WORDINGS["personas"])),
    )


def _opening(family: full.Family, case: FullCase, split: Split, draw: random.Random) -> tuple[str, str]:
    """The first request's wording, and the whole opening."""
    wants = (family.at_first,) if family.at_first else family.wants
    wording = draw.choice(WORDINGS["requests"][wants[0]][split])
    parts = [case.fill(wording, case.order, named=case.tells_order_id)]
    for kind, order in zip(wants[1:], (case.other,), strict=False):
        also = draw.choice(WORDINGS["also"][split])
        parts.append(also + case.fill(draw.choice(WORDINGS["requests"][kind][split]), order))
    if case.wanted_payment:
        parts.append(case.fill(draw.choice(WORDINGS["wish"][split]), case.order))
    if case.tells_details:
        details = draw.choice(WORDINGS["details"][case.gives])
        parts.append(details.format(email=case.email, name=case.name, zip=case.zip))
    return wording, draw.choice(WORDINGS["persona_greetings"][case.persona]) + " ".join(parts)


@functools.lru_cache(maxsize=256)
def answers_of(case: Case | FullCase) -> Answers:
    """The answers to a case, for grading; runs its gold programs on copies of the shop."""
    database = database_of(case)
    image, desk = database.serialize(), desk_of(case, database, case.customer_id)
    decision = decision_of(case)
    if isinstance(case, FullCase):
        looks_up, subject = full.subject_of(case)
    else:
        looks_up = RULES[case.family].looks_up
        kind = {"get_product": "item", "track_shipment": "tracking"}.get(looks_up, "order")
        subject = f"{kind}:{case.new_item if kind == 'item' else case.order_id}"
    return Answers(
        image=image,
        allowed=allowed_by(decision.programs, desk),
        facts=decision.facts,
        denial=decision.is_denial,
        looks_up=looks_up,
        subject=subject,
        read=full_claims.read_claims if isinstance(case, FullCase) else claims.read_claims,
        holds=(
            functools.partial(full_claims.holds, case=case)
            if isinstance(case, FullCase)
            else functools.partial(claims.holds, start_city=case.city)
        ),
        grounds=(
            functools.partial(full_claims.grounds, case=case)
            if isinstance(case, FullCase)
            else lambda claim, database: claims.grounds(claim)
        ),
        strict=isinstance(case, FullCase),
    )


def desk_of(case: Case | FullCase, database: Database, customer_id: str) -> Desk:
    """The desk at which a call is taken; only that of full calls shows all."""
    if isinstance(case, FullCase):
        return Desk(database, customer_id, topics=full.FULL_TOPICS, detailed=True)
    return Desk(database, customer_id)


def decision_of(case: Case | FullCase) -> Decision:
    """The policy's decision on a call."""
    return full.whole_decision(case) if isinstance(case, FullCase) else RULES[case.family].decision(case)


def database_of(case: Case | FullCase) -> Database:
    """The shop of a case: the caller with two orders, and a stranger with one."""
    if isinstance(case, FullCase):
        return _full_database(case)
    stranger = "v" + case.customer_id[1:]
    payment, other_payment = f"pay-{case.customer_id}", f"pay-{stranger}"
    rows = [
        ("customers", (case.customer_id, case.name, f"{case.name}@mail.example", "10115")),
        ("customers", (stranger, "olga", "olga@mail.example", "20095")),
        ("payment_methods", (payment, case.customer_id, "card", "active")),
        ("payment_methods", (other_payment, stranger, "card", "active")),
        *order_rows(
            (case.order_id, case.customer_id, payment, case.status, case.city),
            [(case.item, case.price * 100)],
            days=case.days,
            arrives=case.arrives,
            tracking=case.tracking,
        ),
        *order_rows(
            (case.other_order_id, case.customer_id, payment, "pending", case.city), [("red mug", 1200)]
        ),
        *order_rows(
            (case.stranger_order_id, stranger, other_payment, "pending", "oslo"), [("blue mug", 1300)]
        ),
    ]
    return Database.with_rows(rows, {case.new_item: (2000, case.stock, 0)} if case.new_item else {})


def _full_database(case: FullCase) -> Database:
    """The shop of a full case, in which the caller has two payment methods."""
    caller, stranger = case.customer_id, "d" + case.customer_id[1:]
    second_kind = case.wanted_payment or next(kind for kind in KINDS_OF_PAYMENT if kind != case.payment)
    paid = payment_id_of(caller, case.payment)
    strangers_card = payment_id_of(stranger, "card")
    rows: list[Row] = [
        ("customers", (caller, case.name, case.email, case.zip_on_file or case.zip)),
        ("customers", (stranger, "olga", f"olga.{caller[1:]}@mail.example", "20095")),
        ("payment_methods", (paid, caller, case.payment, "active" if case.payment_open else "closed")),
        ("payment_methods", (payment_id_of(caller, second_kind), caller, second_kind, "active")),
        ("payment_methods", (strangers_card, stranger, "card", "active")),
        *order_rows(
            (case.stranger_order_id, stranger, strangers_card, "pending", "oslo"), [("blue mug", 1300)]
        ),
    ]
    for order in (case.order, case.other):
        owner, payment = (caller, paid) if order.mine else (stranger, strangers_card)
        lines = [(order.item, order.price), (order.extra_item, order.extra_price)]
        rows += order_rows(
            (order.order_id, owner, payment, order.status, case.city),
            [(item, price * 100) for item, price in lines if item],
            days=order.days,
            arrives=order.arrives,
            tracking=order.tracking,
            note=order.note,
        )
    variants = {
        case.second_choice: (case.order.price, 5, 0),
        case.order.item: (case.order.price, 5 if case.new_item else case.stock, case.order.final_sale),
        case.new_item: (case.order.price, case.stock, 0),
    }
    variants.pop("", None)
    return Database.with_rows(
        rows, {item: (price * 100, stock, int(sale)) for item, (price, stock, sale) in variants.items()}
    )
