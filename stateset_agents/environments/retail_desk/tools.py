"""The tools by name: their schemas, and `call_tool`, through which every call runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.environments.retail_desk import actions
from stateset_agents.environments.retail_desk.actions import Desk, Refused, Result


@dataclass(frozen=True, slots=True)
class DeskTool:
    """One tool: its function, and its parameters (name -> description; optional ones end with `?`)."""

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
                        name: {"type": "string", "description": text.rstrip("?")}
                        for name, text in self.parameters.items()
                    },
                    "required": [name for name, text in self.parameters.items() if not text.endswith("?")],
                },
            },
        }


_ORDER = {"order_id": "order id, such as K27"}


def _tool(function: Callable[..., Result], parameters: Mapping[str, str], writes: bool = False) -> DeskTool:
    """A tool of the function's name, with its docstring as the description that the model reads."""
    return DeskTool(function.__name__, str(function.__doc__), parameters, function, writes)


_LISTED = (
    _tool(
        actions.find_customer,
        {"email": "email?", "name": "first name?", "zip": "zip code?"},
    ),
    _tool(actions.get_order, _ORDER),
    _tool(
        actions.list_orders,
        {"customer_id": "customer id, such as u07"},
    ),
    _tool(actions.get_product, {"item": "colour and product, such as red lamp"}),
    _tool(actions.track_shipment, _ORDER),
    _tool(actions.get_policy, {"topic": "topic, such as return"}),
    _tool(actions.cancel_order, _ORDER, writes=True),
    _tool(
        actions.return_items,
        {
            **_ORDER,
            "items": "item names with commas between; all items when left out?",
            "payment_id": "where the refund goes; the original payment when left out?",
        },
        writes=True,
    ),
    _tool(
        actions.exchange_item,
        {
            **_ORDER,
            "new_item": "the item wanted",
            "item": "the item to give back; not needed when the order has one?",
        },
        writes=True,
    ),
    _tool(
        actions.update_address,
        {**_ORDER, "city": "the new city"},
        writes=True,
    ),
    _tool(actions.reship, _ORDER, writes=True),
    _tool(actions.issue_credit, {**_ORDER, "amount": "dollars"}, writes=True),
    _tool(
        actions.transfer_to_human,
        {"order_id": "order id?", "summary": "what it is about?"},
        writes=True,
    ),
)
TOOLS: Mapping[str, DeskTool] = {tool.name: tool for tool in _LISTED}
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
        texts = normalised_arguments(arguments)
        for parameter, text in tool.parameters.items():
            if not text.endswith("?") and not texts.get(parameter):
                raise Refused(f"missing {parameter}")
        if not texts.keys() <= tool.parameters.keys():
            raise Refused("takes " + ", ".join(tool.parameters))
        # Why a call on somebody else's order fails tells something of it, too.
        owners = frozenset(
            desk.database.row(
                "SELECT customer_id FROM orders WHERE order_id = ?", texts.get("order_id", "").upper()
            )
            or ()
        )
        return tool.function(desk, **texts)
    except Refused as error:
        return Result(fields={"error": str(error)}, owners=owners, shown=error.shown, failed=True)
