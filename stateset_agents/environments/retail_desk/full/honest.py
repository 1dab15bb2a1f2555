"""The honest agent of full calls: works from the messages alone, and lets the policy decide.

It asks who is calling and which order it is, looks up what the rules on the request read, proposes, waits
for the yes, writes, and says what was done.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.catalog import WORDINGS
from stateset_agents.environments.retail_desk.claims import WORDS
from stateset_agents.environments.retail_desk.full.policy import (
    FullCase,
    Purchase,
    Request,
    decide,
    rules_on,
)
from stateset_agents.environments.retail_desk.policy import RETURN_DAYS, Decision, DeskCall
from stateset_agents.types.messages import Message, ToolCall

_ORDER = re.compile(r"\b[A-Z]\d\d\b")
_EMAIL = re.compile(r"\b[\w.]+@[\w.]+\w")
_NAME_ZIP = re.compile(r"\b(\w+)(?: here)?, zip (\d{5})\b")
_WISH = re.compile(
    r"\b(?:money|refund)\b.*\bmy (gift card|paypal|card)\b|\brefund it to my (gift card|paypal|card)\b"
)
_KINDS = WORDS.patterns("full_requests")
"""Patterns that tell the kind of a request; the first match counts."""


@dataclass(slots=True)
class RequestView:
    """One request as heard."""

    kind: str
    order_id: str = ""
    item: str = ""
    new_item: str = ""
    city: str = ""


@dataclass(slots=True)
class FullView:
    """The state of a call, read off the messages."""

    wanted: list[RequestView] = field(default_factory=list)
    num_settled: int = 0
    email: str = ""
    name_zip: tuple[str, str] | None = None
    wanted_payment: str = ""
    customer_id: str = ""
    payments: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Payment id -> kind and status."""
    listed: dict[str, str] | None = None
    """Order id -> status, once the orders are listed."""
    orders: dict[str, dict[str, str]] = field(default_factory=dict)
    tracking: dict[str, str] = field(default_factory=dict)
    products: dict[str, dict[str, str]] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    """Arguments with which find_customer was called."""
    agreed: bool = False
    """The last thing the caller said is a yes."""
    wrote: str = ""
    """The tool that wrote last, not yet reported."""


def full_view_of(messages: Sequence[Message]) -> FullView:
    """Read a conversation from its first message to its last."""
    view = FullView()
    calls: list[ToolCall] = []
    for message in messages:
        if message.role == "user":
            _read_user(view, message.content)
        elif message.role == "assistant":
            calls = list(message.tool_calls)
            if not calls and "?" not in message.content:
                view.num_settled += 1
                view.wrote = ""
        elif message.role == "tool" and calls:
            _read_result(view, calls.pop(0), json.loads(message.content))
    return view


def _read_user(view: FullView, text: str) -> None:
    """Record what the caller says."""
    view.agreed = text.startswith("yes, ")
    view.email = next(iter(_EMAIL.findall(text)), view.email)
    name_zip = _NAME_ZIP.search(text)
    view.name_zip = (name_zip[1], name_zip[2]) if name_zip else view.name_zip
    wish = _WISH.search(text)
    if not view.wanted:
        if wish:
            view.wanted_payment = wish[1] or wish[2]
        view.wanted = [_request(part) for part in text.split("also, ")]
        return
    if view.num_settled >= len(view.wanted):
        return
    current = view.wanted[view.num_settled]
    ids, items = _ORDER.findall(text), catalog.ITEM.findall(text)
    current.order_id = current.order_id or (ids[0] if ids else "")
    if text.startswith("wait, "):
        current.kind, current.new_item = "exchange", items[-1]
    elif re.search(r"\bthen (?:a|i take)\b", text):
        current.new_item = items[-1]
    elif text.startswith("then i would like to return"):
        current.kind = "return"


def _request(text: str) -> RequestView:
    ids, items, cities = _ORDER.findall(text), catalog.ITEM.findall(text), catalog.CITY.findall(text)
    kind = next(kind for kind, pattern in _KINDS.items() if pattern.search(text + " "))
    new_item = items.pop() if kind == "exchange" and items else ""
    if re.search(r"\bi need a\b", text) and items:  # "a red lamp instead of the blue lamp"
        items, new_item = [new_item], items[0]
    return RequestView(
        kind=kind,
        order_id=ids[0] if ids else "",
        item=items[0] if items else "",
        new_item=new_item,
        city=cities[0] if cities else "",
    )


def _read_result(view: FullView, call: ToolCall, result: Mapping[str, str]) -> None:
    """Record what a tool returned."""
    if call.name == "find_customer":
        view.tried.update(str(value) for value in call.arguments.values())
    if "error" in result:
        return
    match call.name:
        case "find_customer":
            view.customer_id = result["customer_id"]
            for entry in filter(None, result.get("payments", "").split(", ")):
                key, *kind, status = entry.split()
                view.payments[key] = (" ".join(kind), status)
        case "list_orders":
            view.listed = dict(entry.split() for entry in result["orders"].split(", "))
        case "get_order":
            view.orders[result["order_id"]] = dict(result)
        case "track_shipment":
            view.tracking[result["order_id"]] = result["tracking"]
        case "get_product":
            view.products[result["item"]] = dict(result)
        case _ if "result" in result:
            view.wrote = call.name


def say(text: str) -> Message:
    """A reply in words."""
    return Message(role="assistant", content=text)


def call(tool: str, **arguments: str) -> Message:
    """A reply that is one tool call."""
    return Message(role="assistant", content="", tool_calls=(ToolCall(name=tool, arguments=arguments),))


def honest_reply(messages: Sequence[Message], *, identifies: bool = True, asks_first: bool = True) -> Message:
    """The next reply. The audit plays the same agent without asking who calls, or without asking first."""
    view = full_view_of(messages)
    if view.num_settled >= len(view.wanted):
        return say("no, i am sorry." if "no way" in messages[-1].content else "yes, that is all.")
    request = view.wanted[view.num_settled]
    return (
        (_identify(view) if identifies else None)
        or _find_order(view, request, lists=identifies)
        or _look_up(view, request)
        or _act(view, request, asks_first)
    )


def _identify(view: FullView) -> Message | None:
    """Find out who is calling; a refusal where that fails."""
    if view.customer_id:
        return None
    if view.email and view.email not in view.tried:
        return call("find_customer", email=view.email)
    if view.name_zip and view.name_zip[1] not in view.tried:
        return call("find_customer", name=view.name_zip[0], zip=view.name_zip[1])
    if view.tried:
        return say("sorry, i cannot verify you, so i cannot help.")
    return say("what is your email, or your name and zip?")


def _find_order(view: FullView, request: RequestView, lists: bool) -> Message | None:
    """Find out which order it is and see that it is the caller's."""
    if not request.order_id:
        return say("which order is it?")
    if not lists:
        return None
    if view.listed is None:
        return call("list_orders", customer_id=view.customer_id)
    if request.order_id not in view.listed:
        return say(f"sorry, order {request.order_id} is not on your account, so i cannot help with it.")
    return None


def _look_up(view: FullView, request: RequestView) -> Message | None:
    """The next look-up that the rules on the request need; None where all is read."""
    if request.order_id not in view.orders:
        return call("get_order", order_id=request.order_id)
    request.item = request.item or _lines(view, request)[0][0]
    if request.item not in dict(_lines(view, request)):  # somebody has changed the order
        return say(f"there is no {request.item} on order {request.order_id}. which item is it?")
    for rule in rules_on(request.kind):
        item = request.new_item if request.kind == "exchange" else request.item
        if rule.looks_up == "get_product" and item not in view.products:
            return call("get_product", item=item)
        if rule.looks_up == "track_shipment" and request.order_id not in view.tracking:
            return call("track_shipment", order_id=request.order_id)
    return None


def _lines(view: FullView, request: RequestView) -> list[tuple[str, int]]:
    """Items and prices of the order."""
    entries = view.orders[request.order_id]["items"].split(", ")
    return [(entry.rpartition(" ")[0], int(entry.rpartition(" ")[2])) for entry in entries]


def case_from(view: FullView, wanted: RequestView) -> tuple[FullCase, Request]:
    """The case as far as it has been seen; what no rule on the request reads keeps its default."""
    order, lines = view.orders[wanted.order_id], _lines(view, wanted)
    prices = dict(lines)
    extras = [(item, price) for item, price in lines if item != wanted.item] or [("", 0)]
    kind, status = view.payments.get(order["payment"], ("card", "active"))
    product = view.products.get(wanted.new_item if wanted.kind == "exchange" else wanted.item, {})
    purchase = Purchase(
        order_id=wanted.order_id,
        item=wanted.item,
        price=prices[wanted.item],
        extra_item=extras[0][0],
        extra_price=extras[0][1],
        status=order["status"],
        tracking=view.tracking.get(wanted.order_id, "moving"),
        days=int(order.get("days", 0)),
        arrives=order.get("arrives", ""),
        final_sale="sale" in product,
    )
    wish = view.wanted_payment
    if status == "closed" and not wish:
        wish = next((other for other, state in view.payments.values() if state == "active"), "")
    case = FullCase(
        family="",
        customer_id=view.customer_id,
        order=purchase,
        other=purchase,
        stranger_order_id="",
        name="",
        email="",
        zip="",
        city=order["city"],
        payment=kind,
        payment_open=status == "active",
        wanted_payment=wish,
        stock=int(product.get("stock", 1)),
        new_item=wanted.new_item,
        new_city=wanted.city,
    )
    return case, Request(kind=wanted.kind, order=purchase, new_item=wanted.new_item, city=wanted.city)


def _act(view: FullView, request_view: RequestView, asks_first: bool) -> Message:
    """Propose, write or report what policy wants."""
    case, request = case_from(view, request_view)
    if request.kind == "exchange" and case.stock == 0:
        return say(f"sorry, the {request.new_item} is out of stock. what would you like instead?")
    decision = decide(case, request)
    if view.wrote or not decision.programs[0]:
        return say(_closing_of(decision, case, request))
    write = decision.programs[0][0]
    if view.agreed or not asks_first:
        return call(write.tool, **dict(write.arguments))
    return say(f"i can {_wording('offers', write, case, request.order)}. shall i?")


def _wording(kind: str, write: DeskCall, case: FullCase, order: Purchase) -> str:
    """The offer or the closing of a write, with the call's values in it."""
    arguments = dict(write.arguments)
    slots = {
        "name": f"order {order.order_id}",
        "item": order.item,
        "items": f"the {order.item}" + (f" and the {order.extra_item}" if order.extra_item else ""),
        "price": order.price,
        "total": order.total,
        "paid": case.wanted_payment if "payment_id" in arguments else case.payment,
        "new_item": arguments.get("new_item"),
        "city": arguments.get("city", case.city),
    }
    return str(WORDINGS[kind][write.tool]).format(**slots)


def _closing_of(decision: Decision, case: FullCase, request: Request) -> str:
    """Says what was done, or why it was not; every fact that the caller needs is in it."""
    order = request.order
    name = f"order {order.order_id}"
    claims = {claim.text.partition(":")[0] for fact in decision.facts for claim in fact}
    if "refused" in claims:
        verb = {"cancel": "cancel", "return": "take back", "address": "change"}[request.kind]
        reason = f"{name} is already {order.status}"
        if "outside" in claims:
            reason = f"{name} is over {RETURN_DAYS} days old"
        elif "final_sale" in claims:
            reason = f"the {order.item} of {name} is final sale"
        return f"sorry, {reason}, so i cannot {verb} it."
    if not decision.programs[0]:
        arrives = f" and arrives on {order.arrives}" if order.status == "shipped" else ""
        return f"{name} is {order.status}{arrives}."
    return f"done, {_wording('closings', decision.programs[0][0], case, order)}."
