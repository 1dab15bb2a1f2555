"""The tools by name: their schemas, and `call_tool`, through which every call runs."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stateset_agents.core.tools import Tool
from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.database import Database
from stateset_agents.environments.retail_desk.policy import TOPICS

# Tools enforce physics only (an unknown id, no stock, already cancelled); policy is the agent's job. Results
# are flat JSON objects whose values are plain words, so that copying them is enough.


@dataclass(frozen=True, slots=True)
class Desk:
    """The shop and the customer on which a tool works."""

    database: Database
    customer_id: str
    """Customer who is signed in, or was found to be who they say; empty where nobody is."""
    topics: Mapping[str, str] = field(default_factory=lambda: TOPICS)
    """The policy by topic."""
    detailed: bool = False
    """True where look-ups show prices, cities, payments and notes; the small model's desk goes without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a tool call."""

    fields: Mapping[str, str]
    owners: frozenset[str] = frozenset()
    """Customers whose data were read or changed."""
    shown: frozenset[str] = frozenset()
    """Grounds that the agent now has: `order:K27`, `tracking:K27`, `item:red lamp`."""
    failed: bool = False


class Refused(Exception):
    """A call that the shop's state does not allow: the text shown to the agent, and the facts it may cite."""


def dollars(cents: int) -> str:
    """`4500` is `45`, `4550` is `45.50`."""
    return str(cents // 100) if cents % 100 == 0 else f"{cents / 100:.2f}"


def _order(desk: Desk, order_id: str, *, changes: bool = False) -> tuple[str, str, str, str, str | None]:
    """Customer, payment, status, city and delivery date of an order; none that is cancelled where it is to
    be changed."""
    row = desk.database.row(
        "SELECT customer_id, payment_id, status, city, delivered_on FROM orders WHERE order_id = ?",
        order_id,
    )
    if row is None:
        raise Refused("unknown order")
    if changes and row[2] == "cancelled":
        raise Refused("already cancelled")
    return row[0], row[1], row[2], row[3], row[4]


def _lines(desk: Desk, order_id: str) -> list[tuple[int, str, int, str]]:
    return desk.database.rows(
        "SELECT line_id, item, price_cents, status FROM order_items WHERE order_id = ? ORDER BY line_id",
        order_id,
    )


def _parcel(desk: Desk, order_id: str) -> dict[str, str]:
    """The tracking of an order's latest parcel, and the day it arrives; empty where none was sent."""
    row = desk.database.row(
        "SELECT status, arrives_on FROM shipments WHERE order_id = ? ORDER BY shipment_id DESC", order_id
    )
    if row is None:
        return {}
    fields = {"tracking": row[0]}
    if row[0] == "moving":
        fields["arrives"] = catalog.WEEKDAYS[datetime.date.fromisoformat(row[1]).weekday()]
    return fields


ToolFunction = Callable[..., Result]
TOOLS: dict[str, Tool] = {}
"""Tools by name, in the order in which their schemas are shown."""
WRITES: set[str] = set()
"""Names of the tools that change the shop."""


_WORD, _ITEM = {"pattern": "^[a-z]{2,12}$"}, {"pattern": "^[a-z]{2,12} [a-z]{2,12}$"}
_FORMATS: Mapping[str, Mapping[str, Any]] = {
    "order_id": {"pattern": "^[A-Z][0-9]{2}$"},
    "customer_id": {"pattern": "^[a-z][0-9]{2,3}$"},
    "payment_id": {"maxLength": 24},
    "email": {"pattern": "^[a-z0-9.]{1,24}@[a-z0-9.]{1,16}$"},
    "name": _WORD,
    "zip": {"pattern": "^[0-9]{5}$"},
    "item": _ITEM,
    "new_item": _ITEM,
    "items": {"maxLength": 60},
    "city": _WORD,
    "amount": {"pattern": r"^[0-9]{1,3}(\.[0-9]{2})?$"},
    "topic": {"pattern": "^[a-z ]{2,16}$"},
    "summary": {"maxLength": 40},
}
"""The form of the shop's data by argument: a reply under a grammar keeps to it, and ends in time. The tools
take whatever comes, and answer in their own words."""


def _tool(*, writes: bool = False, **parameters: str) -> Callable[[ToolFunction], ToolFunction]:
    """Registers a function as the tool of its name; models read its docstring as the description.

    `parameters`: name -> description; optional ones end with `?`.
    """
    arguments = {
        "type": "object",
        "properties": {
            name: {"type": "string", "description": text.rstrip("?"), **_FORMATS[name]}
            for name, text in parameters.items()
        },
        "required": [name for name, text in parameters.items() if not text.endswith("?")],
    }

    def register(function: ToolFunction) -> ToolFunction:
        name, description = function.__name__, str(function.__doc__)
        TOOLS[name] = Tool(
            name=name, description=description, function=function, arguments=arguments, local=True
        )
        if writes:
            WRITES.add(name)
        return function

    return register


_ORDER = "order id, such as K27"


@_tool(email="email?", name="first name?", zip="zip code?")
def find_customer(desk: Desk, email: str = "", name: str = "", zip: str = "") -> Result:
    """Find a customer by email, or by name and zip."""
    if email:
        row = desk.database.row("SELECT customer_id, name FROM customers WHERE email = ?", email)
    elif name and zip:
        row = desk.database.row(
            "SELECT customer_id, name FROM customers WHERE name = ? AND zip = ?", name, zip
        )
    else:
        raise Refused("give email, or name and zip")
    if row is None:
        raise Refused("unknown customer", "nobody")
    fields = {"customer_id": row[0], "name": row[1]}
    if desk.detailed:
        payments = desk.database.rows(
            "SELECT payment_id, kind, status FROM payment_methods WHERE customer_id = ? ORDER BY payment_id",
            row[0],
        )
        fields["payments"] = ", ".join(f"{key} {kind} {status}" for key, kind, status in payments)
    return Result(fields=fields, owners=frozenset({row[0]}), shown=frozenset({f"customer:{row[0]}"}))


@_tool(order_id=_ORDER)
def get_order(desk: Desk, order_id: str) -> Result:
    """Status and items of an order, and days since delivery."""
    owner, payment, status, city, delivered_on = _order(desk, order_id)
    fields = {"order_id": order_id, "status": status}
    if desk.detailed:
        fields["items"] = ", ".join(f"{line[1]} {dollars(line[2])}" for line in _lines(desk, order_id))
        fields["city"], fields["payment"] = city, payment
        note = desk.database.row("SELECT note FROM orders WHERE order_id = ?", order_id)
        if note is not None and note[0]:
            fields["note"] = note[0]
    else:
        fields["item"] = ", ".join(line[1] for line in _lines(desk, order_id))
    if status == "delivered" and delivered_on is not None:
        fields["days"] = str((catalog.TODAY - datetime.date.fromisoformat(delivered_on)).days)
    if status == "shipped" and "arrives" in (parcel := _parcel(desk, order_id)):
        fields["arrives"] = parcel["arrives"]
    return Result(fields=fields, owners=frozenset({owner}), shown=frozenset({f"order:{order_id}"}))


@_tool(customer_id="customer id, such as u07")
def list_orders(desk: Desk, customer_id: str) -> Result:
    """A customer's orders and their status."""
    rows = desk.database.rows(
        "SELECT order_id, status FROM orders WHERE customer_id = ? ORDER BY order_id", customer_id
    )
    if not rows:
        raise Refused("unknown customer")
    return Result(
        fields={"orders": ", ".join(f"{order_id} {status}" for order_id, status in rows)},
        owners=frozenset({customer_id}),
        shown=frozenset({f"orders:{customer_id}", *(f"listed:{order_id}" for order_id, _ in rows)}),
    )


@_tool(item="colour and product, such as red lamp")
def get_product(desk: Desk, item: str) -> Result:
    """Stock of an item."""
    row = desk.database.row("SELECT stock, final_sale, price_cents FROM variants WHERE item = ?", item)
    if row is None:
        raise Refused("unknown item")
    fields = {"item": item, "stock": str(row[0])}
    if desk.detailed:
        fields["price"] = dollars(row[2])
    if row[1]:
        fields["sale"] = "final"
    return Result(fields=fields, shown=frozenset({f"item:{item}"}))


@_tool(order_id=_ORDER)
def track_shipment(desk: Desk, order_id: str) -> Result:
    """Where the latest parcel of an order is."""
    owner, parcel = _order(desk, order_id)[0], _parcel(desk, order_id)
    if not parcel:
        raise Refused("not shipped yet")
    return Result(
        fields={"order_id": order_id, **parcel},
        owners=frozenset({owner}),
        shown=frozenset({f"tracking:{order_id}"}),
    )


@_tool(topic="topic, such as return")
def get_policy(desk: Desk, topic: str) -> Result:
    """The shop's policy on a topic."""
    text = desk.topics.get(topic)
    if text is None:
        raise Refused("topics: " + ", ".join(desk.topics))
    return Result(fields={"policy": text})


def _written(order_id: str, owner: str, result: str, **more: str) -> Result:
    return Result(
        fields={"result": result, "order_id": order_id, **more},
        owners=frozenset({owner} - {""}),
        shown=frozenset({f"done:{order_id}"}),
    )


def _refund(desk: Desk, order_id: str, payment_id: str, cents: int, kind: str = "refund") -> None:
    insert = "INSERT INTO refunds (order_id, payment_id, amount_cents, kind) VALUES (?, ?, ?, ?)"
    desk.database.write(insert, order_id, payment_id, cents, kind)


@_tool(writes=True, order_id=_ORDER)
def cancel_order(desk: Desk, order_id: str) -> Result:
    """Cancel an order and refund it."""
    owner, payment, *_ = _order(desk, order_id, changes=True)
    desk.database.write("UPDATE orders SET status = 'cancelled' WHERE order_id = ?", order_id)
    _refund(desk, order_id, payment, sum(line[2] for line in _lines(desk, order_id)))
    return _written(order_id, owner, "cancelled")


@_tool(
    writes=True,
    order_id=_ORDER,
    items="item names with commas between; all items when left out?",
    payment_id="where the refund goes; the original payment when left out?",
)
def return_items(desk: Desk, order_id: str, items: str = "", payment_id: str = "") -> Result:
    """Take items of an order back and refund them."""
    owner, payment, *_ = _order(desk, order_id, changes=True)
    names = [item.strip() for item in items.split(",") if item.strip()]
    lines = [line for line in _lines(desk, order_id) if not names or line[1] in names]
    if not lines or not set(names) <= {line[1] for line in lines}:
        raise Refused("not in the order")
    if any(line[3] == "returned" for line in lines):
        raise Refused("already returned")
    payment = payment_id or payment
    method = desk.database.row("SELECT status FROM payment_methods WHERE payment_id = ?", payment)
    if method is None:
        raise Refused("unknown payment method")
    if method[0] == "closed":
        raise Refused("payment method closed")
    for line in lines:
        desk.database.write("UPDATE order_items SET status = 'returned' WHERE line_id = ?", line[0])
    cents = sum(line[2] for line in lines)
    _refund(desk, order_id, payment, cents)
    return _written(order_id, owner, "returned", refund=dollars(cents))


@_tool(
    writes=True,
    order_id=_ORDER,
    new_item="the item wanted",
    item="the item to give back; not needed when the order has one?",
)
def exchange_item(desk: Desk, order_id: str, new_item: str, item: str = "") -> Result:
    """Exchange an item of an order for another one."""
    owner = _order(desk, order_id, changes=True)[0]
    lines = [line for line in _lines(desk, order_id) if not item or line[1] == item]
    if not lines:
        raise Refused("not in the order")
    if len(lines) > 1:
        raise Refused("which item")
    if lines[0][3] != "ordered":
        raise Refused(f"already {lines[0][3]}")
    stock = desk.database.row("SELECT stock FROM variants WHERE item = ?", new_item)
    if stock is None:
        raise Refused("unknown item")
    if stock[0] < 1:
        raise Refused("out of stock", f"item:{new_item}")
    desk.database.write("UPDATE variants SET stock = stock - 1 WHERE item = ?", new_item)
    desk.database.write(
        "UPDATE order_items SET item = ?, status = 'exchanged' WHERE line_id = ?", new_item, lines[0][0]
    )
    return _written(order_id, owner, "exchanged", new_item=new_item)


@_tool(writes=True, order_id=_ORDER, city="the new city")
def update_address(desk: Desk, order_id: str, city: str) -> Result:
    """Send an order to another city."""
    owner = _order(desk, order_id, changes=True)[0]
    if city not in catalog.CITIES:
        raise Refused("unknown city")
    desk.database.write("UPDATE orders SET city = ? WHERE order_id = ?", city, order_id)
    return _written(order_id, owner, "updated", city=city)


@_tool(writes=True, order_id=_ORDER)
def reship(desk: Desk, order_id: str) -> Result:
    """Send a parcel again."""
    owner = _order(desk, order_id, changes=True)[0]
    arrives = (catalog.TODAY + datetime.timedelta(days=4)).isoformat()
    insert = "INSERT INTO shipments (order_id, status, arrives_on) VALUES (?, 'moving', ?)"
    desk.database.write(insert, order_id, arrives)
    return _written(order_id, owner, "reshipped")


@_tool(writes=True, order_id=_ORDER, amount="dollars")
def issue_credit(desk: Desk, order_id: str, amount: str) -> Result:
    """Give store credit for an order."""
    owner, payment, *_ = _order(desk, order_id)
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{2})?", amount) is None or not float(amount):
        raise Refused("amount in dollars")
    _refund(desk, order_id, payment, round(float(amount) * 100), "credit")
    return _written(order_id, owner, "credited")


@_tool(writes=True, order_id="order id?", summary="what it is about?")
def transfer_to_human(desk: Desk, order_id: str = "", summary: str = "") -> Result:
    """Hand the caller over to a human."""
    owner = _order(desk, order_id)[0] if order_id else desk.customer_id
    desk.database.write(
        "INSERT INTO tickets (customer_id, order_id, note) VALUES (?, ?, ?)", owner, order_id, summary
    )
    return _written(order_id, owner, "transferred")


SCHEMAS: tuple[Mapping[str, Any], ...] = tuple(tool.schema for tool in TOOLS.values())


def normalised_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as the tools see them: texts with single spaces, lists joined by commas, in the case in which
    the shop keeps them, a summary apart; null ones are left out. Raises when one is no text."""
    texts: dict[str, str] = {}
    for name, value in arguments.items():
        if isinstance(value, list | tuple) and len(value) <= 10 and all(isinstance(v, str) for v in value):
            value = ", ".join(value)
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise Refused("arguments must be text")
        if value is None:
            continue
        if len(value) > 200 if isinstance(value, str) else not abs(value) < 10**9:
            raise Refused("argument too long")
        if isinstance(value, str):
            # Lone surrogates can't be stored as UTF-8.
            text = " ".join(value.encode("utf-8", "replace").decode().split())
        else:
            text = str(value) if isinstance(value, int) else f"{value:.2f}"
        texts[str(name)] = text.upper() if name == "order_id" else text if name == "summary" else text.lower()
    return texts


def call_tool(desk: Desk, name: str, arguments: Mapping[str, Any]) -> Result:
    """Run one call. Whatever is wrong with it comes back as `{"error": ...}`, never as an exception."""
    tool, owners = TOOLS.get(name), frozenset[str]()
    try:
        if tool is None:
            raise Refused("unknown tool")
        texts = normalised_arguments(arguments)
        assert isinstance(tool.arguments, Mapping)  # a schema, of `_tool`
        for parameter in tool.arguments["required"]:
            if not texts.get(parameter):
                raise Refused(f"missing {parameter}")
        parameters = tool.arguments["properties"]
        if not texts.keys() <= parameters.keys():
            raise Refused("takes " + ", ".join(parameters))
        # Why a call on somebody else's order fails tells something of it, too.
        owners = frozenset(
            desk.database.row("SELECT customer_id FROM orders WHERE order_id = ?", texts.get("order_id", ""))
            or ()
        )
        result: Result = tool.function(desk, **texts)
        return result
    except Refused as error:
        reason, *values = error.args
        return Result(fields={"error": reason}, owners=owners, shown=frozenset(values), failed=True)
