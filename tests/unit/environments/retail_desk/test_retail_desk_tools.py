"""The desk's tools and records: physics, net row difference, and nothing that an agent sends breaks them."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stateset_agents.environments.retail_desk import FAMILIES, HonestAgent, RetailDesk, play
from stateset_agents.environments.retail_desk.database import TABLES, Database, canonical
from stateset_agents.environments.retail_desk.policy import RULES, TOPICS, Case
from stateset_agents.environments.retail_desk.scenarios import database_of
from stateset_agents.environments.retail_desk.tools import SCHEMAS, TOOLS, WRITES, Desk, call_tool
from stateset_agents.types.messages import Message, ToolCall

DESK = RetailDesk(num_train=60)
CASE = Case(
    family="exchange",
    customer_id="u01",
    order_id="K27",
    item="blue lamp",
    price=45,
    days=14,
    city="oslo",
    new_item="red lamp",
    stock=1,
    other_order_id="M11",
    stranger_order_id="Z99",
)


def shop(**changes):
    return Desk(database_of(replace(CASE, **changes)), "u01")


def call(desk, name, **arguments):
    return dict(call_tool(desk, name, arguments).fields)


def test_reads_show_what_is_there():
    desk = shop()
    assert call(desk, "get_order", order_id="K27") == {
        "order_id": "K27",
        "status": "delivered",
        "item": "blue lamp",
        "days": "14",
    }
    assert call(desk, "get_product", item="red lamp") == {"item": "red lamp", "stock": "1"}
    assert call(desk, "list_orders", customer_id="u01") == {"orders": "K27 delivered, M11 pending"}
    assert call(desk, "track_shipment", order_id="K27") == {"order_id": "K27", "tracking": "delivered"}
    assert call(desk, "get_policy", topic="return") == {"policy": RULES["return"].text}
    for caller in ({"email": "anna@mail.example"}, {"name": "anna", "zip": "10115"}):
        found = call_tool(desk, "find_customer", caller)
        assert found.fields == {"customer_id": "u01", "name": "anna"}
        assert found.owners == {"u01"}
    shipped = shop(status="shipped", arrives="friday")
    assert call(shipped, "get_order", order_id="K27")["arrives"] == "friday"
    assert call(shipped, "track_shipment", order_id="K27")["arrives"] == "friday"
    assert desk.database.changes() == ()


def test_a_value_reads_the_same_with_stray_whitespace_and_case():
    assert call(shop(), "get_order", order_id=" k27\n")["order_id"] == "K27"
    assert call(shop(), "get_product", item=" Red   lamp")["stock"] == "1"


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("get_order", {"order_id": "K28"}, "unknown order"),
        ("get_order", {}, "missing order_id"),
        ("get_order", {"order_id": "K27", "x": "1"}, "takes order_id"),
        ("get_order", {"order_id": {"a": 1}}, "arguments must be text"),
        ("get_order", {"order_id": True}, "arguments must be text"),
        ("get_order", {"order_id": "K" * 300}, "argument too long"),
        ("drop_table", {}, "unknown tool"),
        ("get_product", {"item": "red car"}, "unknown item"),
        ("track_shipment", {"order_id": "M11"}, "not shipped yet"),
        ("exchange_item", {"order_id": "K27", "new_item": "green car"}, "unknown item"),
        ("update_address", {"order_id": "K27", "city": "atlantis"}, "unknown city"),
        ("issue_credit", {"order_id": "K27", "amount": "-5"}, "amount in dollars"),
        ("issue_credit", {"order_id": "K27", "amount": float("nan")}, "argument too long"),
        ("return_items", {"order_id": "K27", "items": "red mug"}, "not in the order"),
        ("return_items", {"order_id": "K27", "payment_id": "gold"}, "unknown payment method"),
        ("find_customer", {"name": "anna"}, "give email, or name and zip"),
        ("list_orders", {"customer_id": "u99"}, "unknown customer"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(name, arguments, error):
    desk = shop()
    assert call_tool(desk, name, arguments).fields == {"error": error}
    assert desk.database.changes() == ()


def test_writes_obey_physics_and_nothing_else():
    shipped = shop(status="shipped")
    assert call(shipped, "cancel_order", order_id="K27")["result"] == "cancelled"
    assert call(shipped, "cancel_order", order_id="K27") == {"error": "already cancelled"}
    assert call(shop(stock=0), "exchange_item", order_id="K27", new_item="red lamp") == {
        "error": "out of stock"
    }
    desk = shop()
    assert call(desk, "exchange_item", order_id="K27", new_item="red lamp")["new_item"] == "red lamp"
    assert call(desk, "exchange_item", order_id="K27", new_item="red lamp") == {"error": "already exchanged"}
    desk = shop(days=75)
    assert call(desk, "return_items", order_id="K27", items=["blue lamp"])["refund"] == "45"
    assert call(desk, "return_items", order_id="K27") == {"error": "already returned"}
    assert call(desk, "issue_credit", order_id="Z99", amount=12.5)["result"] == "credited"
    assert call(desk, "reship", order_id="K27")["result"] == "reshipped"
    assert call(desk, "transfer_to_human")["result"] == "transferred"


def test_a_row_put_back_as_it_was_is_no_change():
    desk = shop(status="pending")
    call(desk, "update_address", order_id="K27", city="rome")
    assert [(change.table, change.key) for change in desk.database.changes()] == [("orders", "K27")]
    call(desk, "update_address", order_id="K27", city="oslo")
    assert desk.database.changes() == ()


@pytest.mark.parametrize("table", TABLES)
def test_every_kind_of_write_to_every_table_is_in_the_difference(table):
    key, *_, last = (column.split()[0] for column in TABLES[table].split(", "))
    shop = Database()
    shop.write(f"INSERT INTO {table} ({key}, {last}) VALUES (7, 1)")
    (new,) = shop.changes()
    assert (new.table, str(new.key), new.before) == (table, "7", None)
    shop.write(f"UPDATE {table} SET {last} = 2 WHERE {key} = 7")
    (still,) = shop.changes()
    assert still.after == {**new.after, last: type(new.after[last])(2)}
    shop.write(f"DELETE FROM {table} WHERE {key} = 7")
    assert shop.changes() == ()


def test_a_write_of_another_kind_is_refused_for_nothing_would_log_it():
    with pytest.raises(KeyError):
        Database().write("REPLACE INTO variants (item) VALUES ('red mug')")


def test_the_difference_ignores_the_order_of_writes_and_free_text():
    first, second = shop(), shop()
    call(first, "reship", order_id="K27")
    call(first, "reship", order_id="M11")
    call(first, "transfer_to_human", order_id="K27", summary="one")
    call(second, "transfer_to_human", order_id="K27", summary="two")
    call(second, "reship", order_id="M11")
    call(second, "reship", order_id="K27")
    made = [sorted(canonical(change) for change in desk.database.changes()) for desk in (first, second)]
    assert made[0] == made[1]
    assert len(made[0]) == 3


def test_a_fork_of_the_records_is_independent():
    desk = shop()
    copy = Desk(desk.database.fork(), "u01")
    call(copy, "cancel_order", order_id="K27")
    assert desk.database.changes() == ()
    assert len(copy.database.changes()) == 2
    assert Database(copy.database.serialize()).changes() == copy.database.changes()


def test_schemas_and_policy_name_what_there_is():
    assert [schema["function"]["name"] for schema in SCHEMAS] == list(TOOLS)
    schema = TOOLS["exchange_item"].schema["function"]["parameters"]
    assert schema["required"] == ["order_id", "new_item"]
    assert set(schema["properties"]) == {"order_id", "new_item", "item"}
    assert len(TOPICS) == len(FAMILIES)


async def test_honest_calls_keep_to_the_schemas_and_each_text_has_an_end():
    schemas = {name: tool.schema["function"]["parameters"]["properties"] for name, tool in TOOLS.items()}
    assert all("pattern" in text or "maxLength" in text for of in schemas.values() for text in of.values())
    desk, calls = RetailDesk(families="all"), 0
    for scenario in desk.scenarios("validation")[:60]:
        for message in (await play(desk, scenario, 1, HonestAgent())).messages:
            for call in message.tool_calls:
                for name, value in call.arguments.items():
                    text, calls = schemas[call.name][name], calls + 1
                    assert re.fullmatch(text.get("pattern", ".*"), value), (name, value)
                    assert len(value) <= text.get("maxLength", 99), (name, value)
    assert calls > 100


def test_a_tool_takes_what_its_schema_does_not_and_answers_in_its_own_words():
    assert call(shop(), "get_order", order_id="order number 27") == {"error": "unknown order"}
    assert call(shop(), "get_order", order_id="k27")["order_id"] == "K27"
    assert call(shop(), "issue_credit", order_id="K27", amount="five") == {"error": "amount in dollars"}


ORDER_IDS = [scenario.context["order_id"] for scenario in DESK.scenarios("train")]
HOSTILE = st.sampled_from(
    [
        "'; DROP TABLE orders; --",
        "K27' OR '1'='1",
        "\ud800",
        "\x00",
        "\u4e2d" * 100_000,
        "<|end|>",
        "cancelled. " * 10_000,
        '{"name": "cancel_order"}',
    ]
)
WORDS = st.one_of(st.text(max_size=60), HOSTILE)
VALUES = st.recursive(
    st.one_of(WORDS, st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(ORDER_IDS)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS, inner, max_size=3)),
    max_leaves=4,
)
CALLS = st.builds(
    ToolCall,
    name=st.one_of(st.sampled_from(list(TOOLS)), WORDS),
    arguments=st.dictionaries(
        st.one_of(st.sampled_from(["order_id", "item", "city", "new_item", "amount", "summary"]), WORDS),
        VALUES,
        max_size=3,
    ),
    error=st.one_of(st.none(), st.just("broken JSON")),
)
REPLIES = st.lists(
    st.builds(
        lambda content, calls: Message(role="assistant", content=content, tool_calls=tuple(calls)),
        WORDS,
        st.lists(CALLS, max_size=6),
    ),
    min_size=1,
    max_size=6,
)


async def _transcript(scenario, replies):
    """Step until over; every message, the outcome, and what the tools said went well."""
    conversation = await DESK.start(scenario, 1)
    messages, wrote = [], False
    for reply in replies:
        observation = await conversation.step(reply)
        messages += observation.messages
        wrote = wrote or any('"result"' in message.content for message in observation.messages)
        if observation.terminated or observation.truncated:
            break
    return messages, await conversation.outcome(), wrote


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(DESK.scenarios("train")), REPLIES)
def test_whatever_the_agent_says_the_desk_stands_and_only_writes_change_rows(scenario, replies):
    messages, outcome, wrote = asyncio.run(_transcript(scenario, replies))
    assert bool(outcome.changes) <= wrote
    for message in messages:
        assert len(message.content) < 400
        if message.role == "tool":
            assert json.loads(message.content)
    assert (messages, outcome, wrote) == asyncio.run(_transcript(scenario, replies))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=300) | HOSTILE)
def test_text_alone_never_changes_a_row_and_never_succeeds_unlooked(text):
    _, outcome, _ = asyncio.run(
        _transcript(DESK.scenarios("train")[0], [Message(role="assistant", content=text)] * 3)
    )
    assert outcome.changes == ()
    assert not outcome.success
    assert outcome.reward <= 0


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([name for name in TOOLS if name in WRITES]), WORDS, WORDS)
def test_writes_touch_only_rows_of_the_order_they_name(name, first, second):
    desk = shop()
    required = TOOLS[name].arguments["required"]
    arguments = {key: {"order_id": "K27"}.get(key, first) for key in required}
    if name == "transfer_to_human":
        arguments = {"order_id": "K27", "summary": second}
    call_tool(desk, name, arguments)
    for change in desk.database.changes():
        rows = (change.before or {}, change.after or {})
        assert change.table == "variants" or all(row.get("order_id", "K27") == "K27" for row in rows)
