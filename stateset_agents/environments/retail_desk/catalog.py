"""The shop's words and which split may use them: order ids, items, cities, days, what callers say.

Read by scenarios (to draw), tools (to know an item), claims (to hear a city) and the tokenizer's recipe.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.scenario import Split
from stateset_agents.types.seeds import derive

WORDINGS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("wordings.yaml"))
"""The wordings of callers and scripted agents, by their names in `wordings.yaml`."""
TODAY = datetime.date(2026, 6, 1)
"""A Monday; nothing in the desk reads a clock."""
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
COLOURS = ("red", "blue", "green", "black", "white", "pink")
PRODUCTS = ("lamp", "mug", "shirt", "chair", "clock", "scarf", "bag", "hat")
CITIES = ("oslo", "paris", "rome", "madrid", "berlin", "vienna", "lisbon", "dublin", "athens", "prague")
NAMES = ("anna", "ben", "clara", "david", "emma", "felix", "grace", "henry", "iris", "jonas")
ITEMS = tuple(f"{colour} {product}" for product in PRODUCTS for colour in COLOURS)
"""A variant is named by colour and product, `blue lamp`."""
ITEM = re.compile(rf"\b(?:{'|'.join(COLOURS)}) (?:{'|'.join(PRODUCTS)})\b")
CITY = re.compile(rf"\b(?:{'|'.join(CITIES)})\b")


def _split_order_ids() -> dict[Split, tuple[str, ...]]:
    """2,600 ids, letter and two digits: 15 % test, 5 % validation, the rest training."""
    every = [f"{letter}{number:02d}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" for number in range(100)]
    every.sort(key=lambda order_id: derive(0, "order id", order_id))
    return {
        "test": tuple(sorted(every[:390])),
        "validation": tuple(sorted(every[390:520])),
        "train": tuple(sorted(every[520:])),
    }


_ORDER_IDS = _split_order_ids()
_HELD_OUT_ITEMS = tuple(
    f"{colour} {product}"
    for row, product in enumerate(PRODUCTS)
    for column, colour in enumerate(COLOURS)
    if (row + column) % 4 == 0
)
_ITEMS: dict[Split, tuple[str, ...]] = {
    "train": tuple(item for item in ITEMS if item not in _HELD_OUT_ITEMS),
    "validation": _HELD_OUT_ITEMS[0::3],
    "test": tuple(item for index, item in enumerate(_HELD_OUT_ITEMS) if index % 3),
}


def order_ids_of(split: Split) -> tuple[str, ...]:
    """The order ids that may stand in this split's texts; no id stands in two splits."""
    assert split in get_args(Split)
    return _ORDER_IDS[split]


def items_of(split: Split) -> tuple[str, ...]:
    """The items that only this split's texts name; each colour and each product is in training."""
    assert split in get_args(Split)
    return _ITEMS[split]
