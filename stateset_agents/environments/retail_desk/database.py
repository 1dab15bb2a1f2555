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
from pathlib import Path
from typing import Any

from stateset_agents.environments.retail_desk import catalog
from stateset_agents.runtime.yaml_files import read_yaml

Value = str | int | None
Row = tuple[str, Sequence[Value]]
"""A table and the values of one of its rows."""

TABLES: Mapping[str, str] = read_yaml(Path(__file__).with_name("tables.yaml"))
"""Columns of each table; the first is the key."""
_FREE_TEXT = frozenset({"note"})
"""Columns the agent words as it likes; they are logged, never graded."""


_COLUMNS = {table: [column.split()[0] for column in columns.split(", ")] for table, columns in TABLES.items()}


@functools.cache
def _trigger(event: str, table: str) -> str:
    """Makes the trigger that logs one kind of write to one table, unless it is there.

    A shop has no triggers until it is written to: to parse those of every table takes four times as long
    as to open it.
    """
    names = _COLUMNS[table]
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
    connection.execute(
        "CREATE TABLE change_log (seq INTEGER PRIMARY KEY, tab TEXT, key, before TEXT, after TEXT)"
    )
    for table, columns in TABLES.items():
        key, _, others = columns.partition(", ")
        rowid = "" if key.endswith("INTEGER") else " WITHOUT ROWID"
        connection.execute(f"CREATE TABLE {table} ({key} PRIMARY KEY NOT NULL, {others}){rowid}")
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
    skipped = _FREE_TEXT if change.before else _FREE_TEXT | {_COLUMNS[change.table][0]}
    columns = sorted({*before, *after} - skipped)
    differences = [
        (name, before.get(name), after.get(name)) for name in columns if before.get(name) != after.get(name)
    ]
    return json.dumps([change.table, change.key if change.before else "new", differences])


class Database(sqlite3.Connection):
    """One shop. Not shared between conversations."""

    def __init__(self, image: bytes | None = None) -> None:
        # A conversation may be stepped by another thread than the one that opened it, never by two at once.
        super().__init__(":memory:", isolation_level=None, check_same_thread=False)
        self.deserialize(_empty_image() if image is None else image)

    @classmethod
    def with_rows(
        cls,
        rows: Iterable[Row],
        variants: Mapping[str, tuple[int, int, int]] | None = None,
    ) -> Database:
        """A shop with these rows, an empty change log, and for some items the price in cents, the stock and
        whether they are of a final sale."""
        database = cls()
        run = database.execute
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

    def fork(self) -> Database:
        """An independent copy of the shop as it stands."""
        return Database(self.serialize())

    def rows(self, sql: str, *values: Value) -> list[tuple[Any, ...]]:
        """All rows of a query."""
        return self.execute(sql, values).fetchall()

    def row(self, sql: str, *values: Value) -> tuple[Any, ...] | None:
        """The first row of a query, or None."""
        row: tuple[Any, ...] | None = self.execute(sql, values).fetchone()
        return row

    def write(self, sql: str, *values: Value) -> None:
        """One INSERT, UPDATE or DELETE; a trigger logs it."""
        event, *words = sql.split(maxsplit=3)  # INSERT INTO orders, UPDATE orders, DELETE FROM orders
        self.execute(_trigger(event, words[0] if event == "UPDATE" else words[1]))
        self.execute(sql, values)

    def changes(self) -> tuple[Change, ...]:
        """Net row changes since the shop was opened; a row put back as it was is no change."""
        first_last: dict[tuple[str, str | int], list[str | None]] = {}
        for table, key, before, after in self.rows(
            "SELECT tab, key, before, after FROM change_log ORDER BY seq"
        ):
            first_last.setdefault((table, key), [before, after])[1] = after
        return tuple(
            Change(
                table=table, key=key, before=json.loads(before or "null"), after=json.loads(after or "null")
            )
            for (table, key), (before, after) in first_last.items()
            if before != after
        )


def order_rows(
    head: tuple[str, str, str, str, str],
    lines: Iterable[tuple[str, int]],
    *,
    days: int = 0,
    arrives: str = "monday",
    tracking: str = "moving",
    note: str = "",
) -> list[Row]:
    """The rows of an order, its items and its parcel.

    `head` has the order's id, customer, payment, status and city; `lines` each item with its price in cents.
    `days` since delivery are read for delivered orders, `arrives` and `tracking` for shipped ones.
    """
    order_id, status = head[0], head[3]
    delivered = (catalog.TODAY - datetime.timedelta(days=days)).isoformat()
    rows: list[Row] = [("orders", (*head, delivered if status == "delivered" else None, note))]
    rows += [("order_items", (None, order_id, item, price, "ordered")) for item, price in lines]
    if status == "shipped":
        day = catalog.TODAY + datetime.timedelta(days=catalog.WEEKDAYS.index(arrives))
        rows.append(("shipments", (None, order_id, tracking, day.isoformat())))
    if status == "delivered":
        rows.append(("shipments", (None, order_id, "delivered", delivered)))
    return rows
