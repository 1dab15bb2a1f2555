"""The shop's records: SQLite in memory, with a change log that triggers fill.

The tools write, grading reads the net row difference, a fork is a copy of the database's image.
Money is integer cents; today is `catalog.TODAY`.
"""

from __future__ import annotations

import datetime
import functools
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.policy import Case

Value = str | int | None

TABLES: Mapping[str, tuple[str, ...]] = {
    "customers": ("customer_id TEXT", "name TEXT", "email TEXT", "zip TEXT"),
    "payment_methods": (
        "payment_id TEXT",
        "customer_id TEXT",
        "kind TEXT",  # card, paypal, gift card
        "status TEXT",  # active, closed
    ),
    "variants": (
        "item TEXT",
        "product TEXT",
        "colour TEXT",
        "price_cents INTEGER",
        "stock INTEGER",
        "final_sale INTEGER",
    ),
    "orders": (
        "order_id TEXT",
        "customer_id TEXT",
        "payment_id TEXT",
        "status TEXT",  # pending, shipped, delivered, cancelled
        "city TEXT",
        "delivered_on TEXT",  # ISO date
        "note TEXT",
    ),
    "order_items": (
        "line_id INTEGER",
        "order_id TEXT",
        "item TEXT",
        "price_cents INTEGER",
        "status TEXT",  # ordered, returned, exchanged
    ),
    "shipments": (
        "shipment_id INTEGER",
        "order_id TEXT",
        "status TEXT",  # moving, delivered, lost
        "arrives_on TEXT",  # ISO date
    ),
    "refunds": (
        "refund_id INTEGER",
        "order_id TEXT",
        "payment_id TEXT",
        "amount_cents INTEGER",
        "kind TEXT",  # refund, credit
    ),
    "tickets": ("ticket_id INTEGER", "customer_id TEXT", "order_id TEXT", "note TEXT"),
}
"""Columns of each table; the first is the key."""

_FREE_TEXT = frozenset({"note"})
"""Columns the agent words as it likes; they are logged, never graded."""


def _schema() -> str:
    """The tables and their change log, which is filled by triggers (`_trigger`)."""
    statements = [
        "CREATE TABLE change_log (seq INTEGER PRIMARY KEY, tab TEXT, key, before TEXT, after TEXT)",
    ]
    for table, columns in TABLES.items():
        rowid = "" if columns[0].endswith("INTEGER") else " WITHOUT ROWID"
        head = f"{columns[0]} PRIMARY KEY NOT NULL"
        statements.append(f"CREATE TABLE {table} ({', '.join((head, *columns[1:]))}){rowid}")
    return ";\n".join(statements)


@functools.cache
def _trigger(event: str, table: str) -> str:
    """Makes the trigger that logs one kind of write to one table, unless it is there.

    A shop has no triggers until it is written to: to parse those of every table takes four times as long
    as to open it.
    """
    names = [column.split()[0] for column in TABLES[table]]
    old, new = (", ".join(f"'{name}', {age}.{name}" for name in names) for age in ("old", "new"))
    row, before, after = {
        "INSERT": ("new", "NULL", f"json_object({new})"),
        "UPDATE": ("old", f"json_object({old})", f"json_object({new})"),
        "DELETE": ("old", f"json_object({old})", "NULL"),
    }[event]
    return (
        f"CREATE TRIGGER IF NOT EXISTS {table}_{event.lower()} AFTER {event} ON {table} BEGIN "
        f"INSERT INTO change_log (tab, key, before, after) "
        f"VALUES ('{table}', {row}.{names[0]}, {before}, {after}); END"
    )


@functools.cache
def _empty_image() -> bytes:
    """The image of a shop with its catalogue and no customers."""
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA page_size = 1024")
    connection.executescript(_schema())
    connection.executemany(
        "INSERT INTO variants VALUES (?, ?, ?, 2000, 5, 0)",
        [(item, item.split()[1], item.split()[0]) for item in catalog.ITEMS],
    )
    connection.commit()
    connection.execute("VACUUM")
    image = connection.serialize()
    connection.close()
    return image


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The net change of one row: None before is a new row, None after a deleted one."""

    table: str
    key: str | int
    before: Mapping[str, Value] | None
    after: Mapping[str, Value] | None


def canonical(change: Change) -> str:
    """One change as text that two conversations share when they did the same.

    Keys of new rows and free text are left out, so neither the order of writes nor wording counts.
    """
    before, after = change.before or {}, change.after or {}
    key_column = TABLES[change.table][0].split()[0]
    skipped = _FREE_TEXT if change.before else _FREE_TEXT | {key_column}
    columns = sorted({*before, *after} - skipped)
    differences = [
        (name, before.get(name), after.get(name)) for name in columns if before.get(name) != after.get(name)
    ]
    return json.dumps([change.table, change.key if change.before else "new", differences])


class Database:
    """One shop. Not shared between conversations."""

    __slots__ = ("_connection",)

    def __init__(self, image: bytes | None = None) -> None:
        # A conversation may be stepped by another thread than the one that opened it, never by two at once.
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.deserialize(_empty_image() if image is None else image)

    @classmethod
    def with_rows(
        cls,
        rows: Iterable[tuple[str, Sequence[Value]]],
        variants: Mapping[str, tuple[int, int, int]] | None = None,
    ) -> Database:
        """A shop with these rows, an empty change log, and for some items the price in cents, the stock and
        whether they are of a final sale."""
        database = cls()
        run = database._connection.execute
        run("BEGIN")
        for table, values in rows:
            run(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", tuple(values))
        for item, values in (variants or {}).items():
            run(
                "UPDATE variants SET price_cents = ?, stock = ?, final_sale = ? WHERE item = ?",
                (*values, item),
            )
        run("COMMIT")
        return database

    def image(self) -> bytes:
        """The whole database as bytes; `Database(image)` is an independent copy."""
        return self._connection.serialize()

    def fork(self) -> Database:
        """An independent copy of the shop as it stands."""
        return Database(self.image())

    def rows(self, sql: str, *values: Value) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self._connection.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Value) -> tuple[Any, ...] | None:
        """The first row of a query, or None."""
        row: tuple[Any, ...] | None = self._connection.execute(sql, values).fetchone()
        return row

    def write(self, sql: str, *values: Value) -> None:
        """One INSERT, UPDATE or DELETE; a trigger logs it."""
        event, *words = sql.split(maxsplit=3)  # INSERT INTO orders, UPDATE orders, DELETE FROM orders
        self._connection.execute(_trigger(event, words[0] if event == "UPDATE" else words[1]))
        self._connection.execute(sql, values)

    def changes(self) -> tuple[Change, ...]:
        """Net row changes since the shop was opened; a row put back as it was is no change."""
        first_last: dict[tuple[str, str | int], list[str | None]] = {}
        for table, key, before, after in self.rows(
            "SELECT tab, key, before, after FROM change_log ORDER BY seq"
        ):
            first_last.setdefault((table, key), [before, after])[1] = after
        return tuple(
            Change(
                table=table,
                key=key,
                before=None if before is None else json.loads(before),
                after=None if after is None else json.loads(after),
            )
            for (table, key), (before, after) in first_last.items()
            if before != after
        )

    def close(self) -> None:
        """Drop the shop."""
        self._connection.close()


def database_of(case: Case) -> Database:
    """The shop of one case: the caller, the order, a second order, and a stranger's."""
    stranger = "v" + case.customer_id[1:]
    delivered = (catalog.TODAY - datetime.timedelta(days=case.days)).isoformat()
    arrives = catalog.TODAY + datetime.timedelta(days=catalog.WEEKDAYS.index(case.arrives))
    payment, other_payment = f"pay-{case.customer_id}", f"pay-{stranger}"
    rows: list[tuple[str, Sequence[Value]]] = [
        ("customers", (case.customer_id, case.name, f"{case.name}@mail.example", "10115")),
        ("customers", (stranger, "olga", "olga@mail.example", "20095")),
        ("payment_methods", (payment, case.customer_id, "card", "active")),
        ("payment_methods", (other_payment, stranger, "card", "active")),
        (
            "orders",
            (
                case.order_id,
                case.customer_id,
                payment,
                case.status,
                case.city,
                delivered if case.status == "delivered" else None,
                "",
            ),
        ),
        ("order_items", (1, case.order_id, case.item, case.price * 100, "ordered")),
        ("orders", (case.other_order_id, case.customer_id, payment, "pending", case.city, None, "")),
        ("order_items", (2, case.other_order_id, "red mug", 1200, "ordered")),
        ("orders", (case.stranger_order_id, stranger, other_payment, "pending", "oslo", None, "")),
        ("order_items", (3, case.stranger_order_id, "blue mug", 1300, "ordered")),
    ]
    if case.status == "shipped":
        rows.append(("shipments", (1, case.order_id, case.tracking, arrives.isoformat())))
    if case.status == "delivered":
        rows.append(("shipments", (1, case.order_id, "delivered", delivered)))
    return Database.with_rows(rows, {case.new_item: (2000, case.stock, 0)} if case.new_item else {})
