"""What is true in a full call's shop and what the caller wants; JSON values only.

Read by the policy (to decide), the scenarios (to build the shop), the caller (to ask) and grading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """One order with the item that the call is about."""

    order_id: str
    item: str
    price: int = 20
    """In dollars."""
    extra_item: str = ""
    """A second item in the same order."""
    extra_price: int = 0
    status: str = "delivered"
    """pending, shipped or delivered."""
    tracking: str = "moving"
    """moving, delivered or lost; read for shipped orders."""
    days: int = 10
    """Days since delivery; read for delivered orders."""
    arrives: str = "friday"
    final_sale: bool = False
    note: str = ""
    mine: bool = True
    """Is it the caller's?"""

    @property
    def total(self) -> int:
        """Dollars paid for the whole order."""
        return self.price + self.extra_price


@dataclass(frozen=True, slots=True, kw_only=True)
class FullCase:
    """One call: who it is, two orders, and what is wanted."""

    family: str
    customer_id: str
    order: Purchase
    other: Purchase
    """A second order of the caller's."""
    stranger_order_id: str
    name: str
    email: str
    zip: str
    """As the caller says it."""
    zip_on_file: str = ""
    """Empty where it is what the caller says."""
    city: str
    """Where the orders go."""
    payment: str = "card"
    """What the orders were paid with."""
    payment_open: bool = True
    wanted_payment: str = ""
    """Where the caller would like the refund; empty where they do not mind."""
    stock: int = 5
    """Of the item wanted in exchange; without an exchange, of the order's own item."""
    new_item: str = ""
    second_choice: str = ""
    """Wanted where `new_item` is out of stock; always in stock."""
    new_city: str = ""
    gives: str = "email"
    """What the caller says who they are with: email, or zip (with their name)."""
    tells_order_id: bool = True
    """Does the opening name the order?"""
    tells_details: bool = False
    """Does the opening say who is calling?"""
    persona: str = "friendly"

    @classmethod
    def from_context(cls, context: Mapping[str, Any]) -> FullCase:
        """The case that a scenario's context describes; other keys are left alone."""
        known = {name: context[name] for name in cls.__dataclass_fields__ if name in context}
        try:
            for name in ("order", "other"):
                if isinstance(known[name], Mapping):
                    known[name] = Purchase(**known[name])
            return cls(**known)
        except (TypeError, KeyError) as error:
            raise ConfigurationError(f"a retail desk scenario's context is incomplete: {error}") from error

    def with_fact(self, fact: str, value: Any) -> FullCase:
        """The same case with one fact changed: `stock`, or `order.days`."""
        outer, _, inner = fact.partition(".")
        if inner:
            value = dataclasses.replace(getattr(self, outer), **{inner: value})
        return dataclasses.replace(self, **{outer: value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing that the caller wants."""

    kind: str
    """status, cancel, return, exchange, address or lost."""
    order: Purchase
    new_item: str = ""
    city: str = ""


def payment_id_of(customer_id: str, kind: str) -> str:
    """`pay-c123-gift` is customer c123's gift card."""
    return f"pay-{customer_id}-{kind.split()[0]}"
