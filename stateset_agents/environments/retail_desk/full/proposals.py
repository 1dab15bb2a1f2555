"""Proposals: what an agent offers to write, read off its words, and which writes a yes to it covers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.claims import NEGATION
from stateset_agents.environments.retail_desk.full.case import FullCase, payment_id_of
from stateset_agents.environments.retail_desk.full.claims import OFFER, ORDER_ID, PAYMENT, plain, sentences
from stateset_agents.environments.retail_desk.policy import DeskCall

_ASKS = re.compile(r"\?|\b(?:please confirm|confirm if|say yes|reply yes|let me know if)\b")
_GO_AHEAD = re.compile(r"\b(?:proceed|confirm|go ahead|correct|right|agree|ok(?:ay)?|yes)\b")
_ACTIONS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (tool, re.compile(pattern))
    for tool, pattern in (
        ("transfer_to_human", r"\b(?:human|colleague|supervisor|specialist)\b"),
        ("issue_credit", r"\bcredit\b(?! card)"),
        ("reship", r"\b(?:re-?ship(?:ping)?|re-?send(?:ing)?|replacement)\b|\bsend(?:ing)?\b.*\bagain\b"),
        ("exchange_item", r"\b(?:exchang(?:e|ing)|swap(?:ping)?|switch(?:ing)?)\b"),
        ("cancel_order", r"\bcancel(?:l?ing|l?ation)?\b"),
        ("return_items", r"\b(?:return|refund)(?:ing)?\b|\btak(?:e|ing)\b.*\bback\b"),
        ("update_address", r"\b(?:chang|updat|redirect|send|shipp?|deliver)(?:e|ing)?\b"),
    )
)
"""The first that matches is meant: a cancellation also speaks of a refund."""
_NEW_ITEM = re.compile(rf"\b(?:for|to|into) (?:the |an? |one )?({catalog.ITEM.pattern})")
_AMOUNT = re.compile(r"\$ ?(\d+(?:\.\d\d)?)|\b(\d+(?:\.\d\d)?) dollars?\b")
_ORIGINAL = re.compile(r"\boriginal payment\b")

NEEDS: dict[str, tuple[str, ...]] = {
    "cancel_order": ("order", "item", "amount", "payment"),
    "return_items": ("order", "item", "amount", "payment"),
    "exchange_item": ("order", "item", "new item", "city"),
    "update_address": ("order", "item", "city"),
    "reship": ("order", "item", "city"),
    "issue_credit": ("order", "item", "amount"),
    "transfer_to_human": ("order",),
}
"""What a proposal must name; of a credit the destination is store credit, which its verb says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One write that the agent asks about; what it left out is empty."""

    tool: str
    order_id: str
    items: tuple[str, ...]
    """All that are named, the new one of an exchange apart."""
    new_item: str
    amounts: tuple[str, ...]
    cities: tuple[str, ...]
    payments: tuple[str, ...]
    """Kinds of payment method."""

    def missing(self) -> tuple[str, ...]:
        """Which of the things that it needs it does not name."""
        named = {
            "order": self.order_id,
            "item": self.items,
            "new item": self.new_item,
            "amount": self.amounts,
            "city": self.cities,
            "payment": self.payments,
        }
        return tuple(need for need in NEEDS[self.tool] if not named[need])

    def covers(self, call: DeskCall, case: FullCase) -> bool:
        """Is this the write agreed to? Left out, arguments mean all items and the order's payment."""
        arguments = dict(call.arguments)
        if call.tool != self.tool:
            return False
        if arguments.get("order_id", self.order_id) != self.order_id:
            return False
        order = case.order if case.order.order_id == self.order_id else case.other
        everything = {order.item, order.extra_item} - {""}
        match call.tool:
            case "return_items":
                items = {item.strip() for item in arguments.get("items", "").split(",")} - {""}
                paid = payment_id_of(case.customer_id, case.payment)
                agreed = payment_id_of(case.customer_id, self.payments[0])
                return (items or everything) == set(self.items) and arguments.get(
                    "payment_id", paid
                ) == agreed
            case "exchange_item":
                item = arguments.get("item")
                return arguments["new_item"] == self.new_item and (
                    item in self.items if item else everything == set(self.items)
                )
            case "update_address":
                return arguments["city"] == self.cities[0]
            case "issue_credit":
                return float(arguments["amount"]) == float(self.amounts[-1])
        return True


def _action(text: str) -> str | None:
    return next((tool for tool, pattern in _ACTIONS if pattern.search(text)), None)


def read_proposal(text: str, payment: str) -> Proposal | None:
    """The write that a reply asks a yes for; None where it asks for none. `payment` is the original one.

    What the asking and offering sentences leave out is looked for in the rest of the reply.
    """
    text = plain(text)
    if not _ASKS.search(text):
        return None
    asked = " ".join(
        sentence for sentence in sentences(text) if OFFER.search(sentence) or _ASKS.search(sentence)
    )
    tool = _action(asked)
    if tool is None and _GO_AHEAD.search(asked):  # "cancel order K27, ... do you want to proceed?"
        tool = _action(" ".join(sentence for sentence in sentences(text) if not NEGATION.search(sentence)))
    if tool is None:
        return None
    new_items = _NEW_ITEM.findall(asked) or _NEW_ITEM.findall(text)
    new_item = new_items[-1] if new_items and tool == "exchange_item" else ""
    items = [item for item in catalog.ITEM.findall(asked) or catalog.ITEM.findall(text) if item != new_item]
    orders = ORDER_ID.findall(asked) or ORDER_ID.findall(text)
    payments = PAYMENT.findall(asked) or PAYMENT.findall(text)
    if not payments and _ORIGINAL.search(text):
        payments = [payment]
    amounts = ["".join(found) for found in _AMOUNT.findall(asked) or _AMOUNT.findall(text)]
    return Proposal(
        tool=tool,
        order_id=orders[0].upper() if orders else "",
        items=tuple(dict.fromkeys(items)),
        new_item=new_item,
        amounts=tuple(amounts),
        cities=tuple(catalog.CITY.findall(asked) or catalog.CITY.findall(text)),
        payments=tuple(payments),
    )
