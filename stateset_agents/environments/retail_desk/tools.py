"""The tools by name: their schemas, and the one door through which calls come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.environments.retail_desk import actions
from stateset_agents.environments.retail_desk.actions import Desk, Refused, Result

__all__ = ["SCHEMAS", "TOOLS", "Desk", "Result", "Tool", "call_tool", "normalised_arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool: its function, and its parameters (name -> what it is; optional ones end with `?`)."""

    name: str
    description: str
    parameters: Mapping[str, str]
    function: Callable[..., Result]
    writes: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """OpenAI's function schema."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string", "description": what.rstrip("?")}
                        for name, what in self.parameters.items()
                    },
                    "required": [name for name, what in self.parameters.items() if not what.endswith("?")],
                },
            },
        }


_ORDER = {"order_id": "order id, such as K27"}
TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            name="find_customer",
            description="Find a customer by email, or by name and zip.",
            parameters={"email": "email?", "name": "first name?", "zip": "zip code?"},
            function=actions.find_customer,
        ),
        Tool(
            name="get_order",
            description="Status and items of an order, and days since delivery.",
            parameters=_ORDER,
            function=actions.get_order,
        ),
        Tool(
            name="list_orders",
            description="A customer's orders and their status.",
            parameters={"customer_id": "customer id, such as u07"},
            function=actions.list_orders,
        ),
        Tool(
            name="get_product",
            description="Stock of an item.",
            parameters={"item": "colour and product, such as red lamp"},
            function=actions.get_product,
        ),
        Tool(
            name="track_shipment",
            description="Where the latest parcel of an order is.",
            parameters=_ORDER,
            function=actions.track_shipment,
        ),
        Tool(
            name="get_policy",
            description="The shop's policy on a topic.",
            parameters={"topic": "topic, such as return"},
            function=actions.get_policy,
        ),
        Tool(
            name="cancel_order",
            description="Cancel an order and refund it.",
            parameters=_ORDER,
            function=actions.cancel_order,
            writes=True,
        ),
        Tool(
            name="return_items",
            description="Take items of an order back and refund them.",
            parameters={
                **_ORDER,
                "items": "item names with commas between; all items when left out?",
                "payment_id": "where the refund goes; the original payment when left out?",
            },
            function=actions.return_items,
            writes=True,
        ),
        Tool(
            name="exchange_item",
            description="Exchange an item of an order for another one.",
            parameters={
                **_ORDER,
                "new_item": "the item wanted",
                "item": "the item to give back; not needed when the order has one?",
            },
            function=actions.exchange_item,
            writes=True,
        ),
        Tool(
            name="update_address",
            description="Send an order to another city.",
            parameters={**_ORDER, "city": "the new city"},
            function=actions.update_address,
            writes=True,
        ),
        Tool(
            name="reship",
            description="Send a parcel again.",
            parameters=_ORDER,
            function=actions.reship,
            writes=True,
        ),
        Tool(
            name="issue_credit",
            description="Give store credit for an order.",
            parameters={**_ORDER, "amount": "dollars"},
            function=actions.issue_credit,
            writes=True,
        ),
        Tool(
            name="transfer_to_human",
            description="Hand the caller over to a human.",
            parameters={"order_id": "order id?", "summary": "what it is about?"},
            function=actions.transfer_to_human,
            writes=True,
        ),
    )
}
SCHEMAS: tuple[Mapping[str, Any], ...] = tuple(tool.schema for tool in TOOLS.values())


def _text(value: object) -> str:
    """An argument as plain text: whitespace collapsed, lists joined by commas."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Sequence):
        raise Refused("arguments must be text")
    if isinstance(value, int | float):
        if not abs(value) < 10**9:
            raise Refused("argument too long")
        return str(value) if isinstance(value, int) else f"{value:.2f}"
    if isinstance(value, str):
        if len(value) > 200:
            raise Refused("argument too long")
        # Lone surrogates can't be stored as UTF-8.
        return " ".join(value.encode("utf-8", "replace").decode().split())
    if len(value) > 10 or not all(isinstance(part, str) for part in value):
        raise Refused("arguments must be text")
    return _text(", ".join(value))


def normalised_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as the tools see them, null ones left out; raises when one is no text."""
    return {str(name): _text(value) for name, value in arguments.items() if value is not None}


def call_tool(desk: Desk, name: str, arguments: Mapping[str, Any]) -> Result:
    """Run one call. Whatever is wrong with it comes back as `{"error": ...}`, never as an exception."""
    tool, owners = TOOLS.get(name), frozenset[str]()
    try:
        if tool is None:
            raise Refused("unknown tool")
        given = normalised_arguments(arguments)
        for parameter, what in tool.parameters.items():
            if not what.endswith("?") and not given.get(parameter):
                raise Refused(f"missing {parameter}")
        if not given.keys() <= tool.parameters.keys():
            raise Refused("takes " + ", ".join(tool.parameters))
        owners = _owners_of(desk, given.get("order_id", ""))
        return tool.function(desk, **given)
    except Refused as error:
        return Result(fields={"error": str(error)}, owners=owners, shown=error.shown, failed=True)


def _owners_of(desk: Desk, order_id: str) -> frozenset[str]:
    """Whose order that is: why a call on it fails tells something of it too."""
    row = desk.database.row("SELECT customer_id FROM orders WHERE order_id = ?", order_id.upper())
    return frozenset() if row is None else frozenset({row[0]})
