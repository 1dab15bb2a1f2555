"""Tools: schemas from functions, and what an agent reads when its call does not fit."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

from stateset_agents.core.tools import Tool, Toolbox, ToolError, tool
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure
from stateset_agents.types.messages import ToolCall
from stateset_agents.types.scenario import Scenario


@tool
def refund(order_id: str, amount: float = 0.0, reason: Literal["late", "broken"] = "late") -> str:
    """Refund an order.

    Only orders that were paid can be refunded.

    Args:
        order_id: The order,
            for example K27.
        amount (float): In dollars.

    Returns:
        What was done.
    """
    if order_id == "K00":
        raise ToolError("no order K00")
    return f"refunded {order_id} {amount:.2f} {reason}"


@tool
async def lookup(order_ids: list[str], limit: int | None = None) -> dict[str, object]:
    return {"ids": order_ids, "limit": limit}


async def answer(entry: Tool, **arguments: object) -> str:
    return (await Toolbox([entry]).call(ToolCall(name=entry.name, arguments=arguments, id="c1"))).content


def test_a_schema_has_openais_shape_and_reads_the_docstring():
    assert refund.schema == {
        "type": "function",
        "function": {
            "name": "refund",
            "description": "Refund an order. Only orders that were paid can be refunded.",
            "parameters": {
                "type": "object",
                "properties": {
                    "order_id": {"type": "string", "description": "The order, for example K27."},
                    "amount": {"type": "number", "description": "In dollars.", "default": 0.0},
                    "reason": {"type": "string", "enum": ["late", "broken"], "default": "late"},
                },
                "required": ["order_id"],
                "additionalProperties": False,
            },
        },
    }


def test_lists_and_optionals_have_schemas_and_no_parameter_is_an_empty_object():
    @tool
    def now() -> str:
        return "noon"

    properties = lookup.schema["function"]["parameters"]["properties"]
    assert properties["order_ids"] == {"type": "array", "items": {"type": "string"}}
    assert properties["limit"] == {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
    assert now.schema["function"]["parameters"]["properties"] == {}


def test_a_decorated_function_is_still_a_function():
    assert refund("K27", 3.0) == "refunded K27 3.00 late"


async def test_a_call_answers_with_a_tool_message_for_its_id():
    message = await Toolbox([refund]).call(ToolCall(name="refund", arguments={"order_id": "K27"}, id="c1"))
    assert (message.role, message.name, message.tool_call_id) == ("tool", "refund", "c1")
    assert message.content == "refunded K27 0.00 late"


async def test_what_the_agent_gets_wrong_is_told_to_it_in_words():
    assert await answer(refund) == "error: refund: missing argument 'order_id'"
    assert await answer(refund, order_id="K27", city="Oslo") == "error: refund: unknown argument 'city'"
    assert await answer(refund, order_id=27) == (
        "error: refund: argument 'order_id': input should be a valid string, got 27"
    )
    assert await answer(refund, order_id="K27", reason="lost") == (
        "error: refund: argument 'reason': input should be 'late' or 'broken', got \"lost\""
    )
    assert await answer(refund, order_id="K00") == "error: no order K00"


async def test_arguments_are_not_converted_behind_the_agents_back():
    assert "valid number" in await answer(refund, order_id="K27", amount="12")
    assert "finite number" in await answer(refund, order_id="K27", amount=float("nan"))
    assert await answer(refund, order_id="K27", amount=12) == "refunded K27 12.00 late"


async def test_unknown_tools_and_unreadable_calls_are_answered_not_raised():
    toolbox = Toolbox([refund, lookup])

    async def said(call: ToolCall) -> str:
        return (await toolbox.call(call)).content

    assert await said(ToolCall(name="refnd")) == "error: unknown tool 'refnd'; did you mean refund?"
    assert await said(ToolCall(name="x")) == "error: unknown tool 'x'; there are: refund, lookup"
    assert await said(ToolCall(name="", error="arguments are no JSON")) == "error: arguments are no JSON"
    nothing = await Toolbox().call(ToolCall(name="x"))
    assert nothing.content == "error: unknown tool 'x'; there are no tools here"


async def test_results_are_text_or_compact_json():
    @dataclass
    class Order:
        id: str

    class Parcel(pydantic.BaseModel):
        weight: float

    @tool
    def give(kind: str) -> object:
        return {"text": "plain", "none": None, "order": Order("K27"), "parcels": [Parcel(weight=1.5)]}[kind]

    assert await answer(lookup, order_ids=["K27", "K28"]) == '{"ids":["K27","K28"],"limit":null}'
    assert await answer(give, kind="text") == "plain"
    assert await answer(give, kind="none") == "null"
    assert await answer(give, kind="order") == '{"id":"K27"}'
    assert await answer(give, kind="parcels") == '[{"weight":1.5}]'


async def test_a_result_without_json_form_is_one_line():
    @tool
    def odd() -> object:
        return object()

    with pytest.raises(ConfigurationError, match="tool odd returned object, which is no JSON"):
        await answer(odd)


async def test_a_broken_tool_is_an_environment_failure_and_a_programming_error_travels():
    @tool
    def broken(kind: str) -> str:
        if kind == "disk":
            raise OSError("disk full")
        return kind.nothing  # type: ignore[attr-defined]  # the mistake under test

    with pytest.raises(EnvironmentFailure, match="tool broken failed: OSError: disk full"):
        await answer(broken, kind="disk")
    with pytest.raises(AttributeError):
        await answer(broken, kind="code")


async def test_sync_tools_leave_the_event_loop_free():
    @tool
    def where() -> bool:
        return threading.current_thread() is threading.main_thread()

    assert await answer(where) == "false"


async def test_sync_calls_run_in_call_order_and_async_calls_together():
    log: list[str] = []
    met = asyncio.Event()

    @tool
    def note(text: str) -> str:
        log.append(text)
        return text

    @tool
    async def wait() -> str:
        await met.wait()
        return "met"

    @tool
    async def meet() -> str:
        met.set()
        return "here"

    calls = [
        ToolCall(name="wait"),
        *(ToolCall(name="note", arguments={"text": str(number)}) for number in range(20)),
        ToolCall(name="meet"),
    ]
    async with asyncio.timeout(5):
        answers = await Toolbox([note, wait, meet]).call_all(calls)
    numbers = [str(number) for number in range(20)]
    assert [message.content for message in answers] == ["met", *numbers, "here"]
    assert log == numbers


async def test_when_one_call_breaks_the_others_are_cancelled():
    cancelled = asyncio.Event()

    @tool
    async def slow() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ""

    @tool
    async def broken() -> str:
        await asyncio.sleep(0)
        raise OSError("gone")

    with pytest.raises(EnvironmentFailure):
        await Toolbox([slow, broken]).call_all([ToolCall(name="slow"), ToolCall(name="broken")])
    async with asyncio.timeout(5):
        await cancelled.wait()


async def test_a_scenario_parameter_is_filled_in_and_not_shown():
    @tool
    def status(order_id: str, scenario: Scenario) -> str:
        return f"{order_id}: {scenario.context['status']}"

    assert list(status.schema["function"]["parameters"]["properties"]) == ["order_id"]
    scenario = Scenario(id="s", context={"status": "shipped"})
    call = ToolCall(name="status", arguments={"order_id": "K27"})
    assert (await Toolbox([status]).call(call, scenario=scenario)).content == "K27: shipped"


async def test_parameters_may_have_any_name():
    @tool
    def odd(copy: str, json: int, self_: bool = True) -> str:
        return f"{copy} {json} {self_}"

    assert await answer(odd, copy="a", json=2) == "a 2 True"
    assert "missing argument 'json'" in await answer(odd, copy="a")


def test_annotated_constraints_reach_the_schema():
    @tool
    def buy(count: Annotated[int, pydantic.Field(ge=1)]) -> str:
        return str(count)

    assert buy.schema["function"]["parameters"]["properties"]["count"] == {"type": "integer", "minimum": 1}


def test_sync_tools_are_local_and_async_ones_only_when_declared():
    @tool(local=True)
    async def memory() -> str:
        return ""

    @tool(local=False, name="web")
    def fetch() -> str:
        return ""

    assert refund.local
    assert memory.local
    assert not lookup.local
    assert not fetch.local
    assert fetch.name == "web"
    assert Toolbox([refund, memory]).local
    assert not Toolbox([refund, lookup]).local


def test_functions_that_cannot_be_tools_are_refused():
    def untyped(order_id):
        return order_id

    def starred(*orders: str) -> str:
        return ""

    with pytest.raises(ConfigurationError, match="parameter 'order_id' needs a type"):
        tool(untyped)
    with pytest.raises(ConfigurationError, match="a tool must be a typed function, got <class"):
        tool(Tool)
    with pytest.raises(ConfigurationError, match="cannot be filled by name"):
        tool(starred)

    def field(count: int = pydantic.Field(3, ge=1)) -> str:
        return str(count)

    with pytest.raises(ConfigurationError, match="count has a Field as default: write Annotated"):
        tool(field)
    with pytest.raises(ConfigurationError, match="a type in its signature is unknown"):
        Toolbox([list[int]])
    with pytest.raises(ConfigurationError, match="'refund' stands twice"):
        Toolbox([refund, refund])


@pytest.mark.parametrize(
    ("named", "names"),
    [
        (["my_shop:track"], ["track"]),
        ("my_shop:track", ["track"]),
        ("my_shop:Till", ["sell"]),
        (["my_shop:Till", "my_shop:track", refund], ["sell", "track", "refund"]),
    ],
)
def test_functions_and_a_class_may_be_named_as_a_yaml_file_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: Any, names: list[str]
) -> None:
    (tmp_path / "my_shop.py").write_text(
        "class Till:\n    def sell(self, item: str) -> str:\n        return item\n\n"
        "def track(order_id: str) -> str:\n    return order_id\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert [schema["function"]["name"] for schema in Toolbox(named).schemas] == names
    with pytest.raises(ConfigurationError, match=r"'my_shop:trak': .*\(did you mean 'track'\?\)"):
        Toolbox(["my_shop:trak"])


async def test_a_class_offers_what_python_would_call() -> None:
    class Till:
        def sell(self, item: str) -> str:
            return f"sold {item}"

        def void(self) -> str:
            return "void"

    class Locked(Till):
        void = None

    class Dear(Locked):
        def sell(self, item: str) -> str:
            return f"sold {item} dear"

    box = Toolbox(Locked)
    assert [schema["function"]["name"] for schema in box.schemas] == ["sell"]
    [told] = await box.call_all([ToolCall(name="sell", arguments={"item": "tea"})], state=Dear())
    assert told.content == "sold tea dear"


def test_tools_that_are_no_list_are_refused() -> None:
    wrong: Any = 5
    with pytest.raises(
        ConfigurationError, match="tools must be a list of typed functions, or a class with methods, got 5"
    ):
        Toolbox(wrong)


async def test_a_tool_given_by_its_json_schema_shows_it_and_checks_its_arguments_itself() -> None:
    async def search(**arguments: object) -> str:
        if "text" not in arguments:
            raise ToolError("text is missing")
        return str(arguments)

    schema = {"type": "object", "title": "Search", "properties": {"title": {"type": "string", "title": "T"}}}
    ours = Tool(name="search", description="Find.", function=search, arguments=schema, local=False)
    assert ours.schema["function"]["parameters"] == {
        "type": "object",
        "properties": {"title": {"type": "string"}},
    }
    assert schema["title"] == "Search"
    box = Toolbox([ours])
    answers = await box.call_all(
        [ToolCall(name="search", arguments={"text": "x", "more": 1}), ToolCall(name="search")]
    )
    assert [answer.content for answer in answers] == ["{'text': 'x', 'more': 1}", "error: text is missing"]
