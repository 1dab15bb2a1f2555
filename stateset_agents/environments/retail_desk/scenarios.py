"""Scenarios by seed: balanced families, matched pairs, splits by wording and by entity.

Scenario `i` is of family `i % n` of the `n` chosen. Within a family scenarios come in blocks of ten: four
matched pairs, which differ in one database fact, then two more; a denial is the right answer for four of
ten in the families that can deny, 27 % overall of the learnable ones and 20 % of the full ones.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.full.families import FAMILIES as FULL_FAMILIES
from stateset_agents.environments.retail_desk.full.scenarios import (
    draw_item,
    full_scenario,
    pair_of,
    scenario_of,
)
from stateset_agents.environments.retail_desk.policy import FAMILIES, RULES, Case, FamilyRule
from stateset_agents.environments.retail_desk.wordings import GREETINGS, OPENINGS
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import nearest

TEST_EACH, VALIDATION_EACH = 100, 20
"""Held-out scenarios of each family."""
_UNNAMED = 0.35
"""Share of openings that leave the order id out."""


def families_named(which: str | Sequence[str]) -> tuple[str, ...]:
    """`learnable`, `full`, `all`, or a list of families -> their names.

    Raises ConfigurationError for a name that no family has and for a list that is empty or repeats one.
    """
    sets = {"learnable": FAMILIES, "full": tuple(FULL_FAMILIES), "all": (*FAMILIES, *FULL_FAMILIES)}
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


def make_scenarios(
    split: Split, count: int, seed: int = 0, families: Sequence[str] = FAMILIES
) -> Sequence[Scenario]:
    """The first `count` scenarios of a split; validation and test are the same for every seed."""
    return tuple(make_scenario(split, index, seed, families) for index in range(count))


def make_scenario(split: Split, index: int, seed: int = 0, families: Sequence[str] = FAMILIES) -> Scenario:
    """Scenario `index` of a split: there is one for every index from 0 on."""
    if split != "train":
        seed = 0
    family, number = families[index % len(families)], index // len(families)
    if family in FULL_FAMILIES:
        return full_scenario(split, family, number, seed)
    pair, is_second = pair_of(number)
    draw = random.Random(derive(seed, "desk scenario", split, family, pair))
    case, greeting, wording = _draw_case(RULES[family], split, draw)
    if is_second:
        rule = RULES[family]
        case = dataclasses.replace(case, **{rule.fact: draw.choice(rule.denies)})
    order = f"order {case.order_id}" if case.tells_order_id else "my order"
    opening = greeting + wording.format(
        order=order, item=case.item, new_item=case.new_item, new_city=case.new_city
    )
    return scenario_of(
        case, f"desk-{split}-{seed}-{family}-{number}", split, opening, wording, pair, is_second
    )


def _draw_case(rule: FamilyRule, split: Split, draw: random.Random) -> tuple[Case, str, str]:
    """A case that the rule grants, a greeting and an opening's wording."""
    order_id, other, stranger = draw.sample(catalog.order_ids_of(split), 3)
    city, new_city = draw.sample(catalog.CITIES, 2)
    item = draw_item(split, draw)
    case = Case(
        family=rule.family,
        customer_id=f"u{draw.randrange(100):02d}",
        order_id=order_id,
        item=item,
        status="shipped" if rule.family == "lost_parcel" else "delivered",
        days=draw.choice(RULES["return"].grants),
        arrives=draw.choice(catalog.WEEKDAYS[1:]),
        price=draw.randrange(11, 100),
        new_item=draw_item(split, draw, item) if rule.family == "exchange" else "",
        city=city,
        new_city=new_city if rule.family == "address" else "",
        name=draw.choice(catalog.NAMES),
        other_order_id=other,
        stranger_order_id=stranger,
        tells_order_id=draw.random() >= _UNNAMED,
    )
    case = dataclasses.replace(case, **{rule.fact: draw.choice(rule.grants)})
    return case, draw.choice(GREETINGS), draw.choice(OPENINGS[rule.family][split])
