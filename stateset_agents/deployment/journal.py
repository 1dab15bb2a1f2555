"""The journal of deployments: one SQLite file that only grows, in which every row confirms those before it.

    deployments   what was started: the plan, the salt
    transitions   every move, by whom, when, why, with the evidence at that moment
    assignments   each conversation's arm and its probability, written when it was first seen
    outcomes      how conversations ended
    answers       each checked answer, with its violations
    reassigned    conversations that changed to the baseline at the rollback

A row's hash is SHA-256 of the hash before it in the same table and deployment, and of its own values; the
first stands on the hash of the deployment's row. Rows cannot be changed or deleted through SQL; what changed
the file in another way is found when it is opened, which checks every page and index, the tables' definitions
and that each row is one of a deployment, numbered from 1 on, and when rows are read. It is no proof against
someone who computes all hashes anew.

Moves are written to the disk before they count (`synchronous=FULL`, which takes what came before them along),
and then merged into the file that is checked.
Other rows survive the end of the process at any point; a power failure may take the last of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from stateset_agents.deployment.guards import Violation
from stateset_agents.deployment.ledger import CheckedAnswer, OutcomeRow, Reassigned, Row
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.deployment.state import Arm, Assignment, Move, checked_mode
from stateset_agents.types.errors import ConfigurationError, JournalError

_VERSION = 2
"""Version of the tables; a file of another one is refused."""
_BUSY_TIMEOUT = 30.0
"""Seconds to wait for another process that is writing."""

_JSON = json.JSONEncoder(check_circular=False, default=repr)  # bytes, where a text has become them
_NONE = "[]"
"""No violations, as JSON."""

TABLES = {
    "transitions": "at REAL, mode TEXT, share REAL, who TEXT, why TEXT, forced INTEGER, evidence TEXT",
    "assignments": "at REAL, conversation TEXT, arm TEXT, probability REAL",
    "answers": "at REAL, assignment INTEGER, turn INTEGER, arm TEXT, seconds REAL, cost REAL, "
    "violations TEXT, agreement TEXT",
    "outcomes": "at REAL, assignment INTEGER, success REAL, reward REAL, is_timeout INTEGER",
    "reassigned": "at REAL, assignment INTEGER",
}
"""Columns of each table, in the order in which tables are read: an outcome's assignment comes before it."""
_ONCE = {
    "assignments": "conversation",
    "answers": "assignment, turn, arm",
    "outcomes": "assignment",
    "reassigned": "assignment",
}
"""Columns whose values stand in a table at most once in a deployment."""
_RECORD = ("id", "at", "who", "candidate", "baseline", "salt")
"""Columns of a deployment before its plan."""
_DEPLOYMENTS = "id TEXT PRIMARY KEY, at REAL, who TEXT, candidate TEXT, baseline TEXT, salt TEXT, plan TEXT"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentRecord:
    """A deployment as it was started."""

    id: str
    at: float
    who: str
    candidate: str
    baseline: str
    salt: str
    plan: DeploymentPlan

    @property
    def hash(self) -> str:
        """The hash before the first rows of its tables."""
        return _hash("", "deployments", self._values())

    def _values(self) -> list[Any]:
        return [getattr(self, name) for name in _RECORD] + [self.plan.model_dump_json()]


class Journal:
    """One connection to the file. It is for one thread at a time; processes may share the file."""

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        """Open the file, or make it. Raises JournalError if it is no journal, or is damaged; with `create`
        False also if there is none.

        Where this process may not write, as on a mount to read only, it can only be read.
        """
        self.path = Path(path)
        self._named = _Named(self.path)
        """Around calls of SQLite: its errors get the file's name."""
        self._is_durable: bool | None = None
        """The present setting of the connection."""
        if not create and not self.path.is_file():
            raise JournalError(f"there is no journal {str(path)!r}: `stateset-agents deploy` makes one")
        with self._named:
            if not self.path.exists():
                _create(self.path)
            self._may_write = os.access(self.path, os.W_OK) and os.access(self.path.parent, os.W_OK)
            self._frozen = None if self._may_write or self._has_log() else self._state()
            """State of the file when it was opened, if nobody writes beside it: SQLite reads it without
            locks."""
            mode = "rw" if self._may_write else "ro"
            self._connection = sqlite3.connect(
                f"{self.path.absolute().as_uri()}?mode={mode}&immutable={int(self._frozen is not None)}",
                uri=True,
                timeout=_BUSY_TIMEOUT,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            with self._named:
                self._check()
                if self._may_write:
                    self._connection.execute("PRAGMA journal_mode = WAL")
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_log(self) -> bool:
        """True if there are rows beside the file, which a process is writing or was killed over."""
        log = self.path.with_name(f"{self.path.name}-wal")
        return log.exists() and log.stat().st_size > 0

    def _state(self) -> tuple[int, int, bool]:
        status = self.path.stat()
        return status.st_mtime_ns, status.st_size, self._has_log()

    def _check(self) -> None:
        """Raises JournalError where the file is no journal, or where a bit of it is not as it was written."""
        sql = self._connection.execute
        if self.path.stat().st_size == 0:
            raise JournalError(f"the journal {str(self.path)!r} is empty: take its last copy, or delete it")
        with self.snapshot():
            [version] = sql("PRAGMA user_version").fetchone()
            if version != _VERSION:
                raise JournalError(
                    f"{str(self.path)!r} has journal version {version}, not {_VERSION}: name another file"
                )
            [sound] = sql("PRAGMA integrity_check(1)").fetchone()
            if sound != "ok":
                raise self._damaged(sound)
            if sql(_SCHEMA).fetchall() != _new_database()[1]:
                raise self._damaged("its tables are defined in another way")
            ids = [id for [id] in sql("SELECT id FROM deployments ORDER BY length(id), id")]
            if ids != [deployment_id(number) for number in range(1, len(ids) + 1)]:
                raise self._damaged(f"its deployments are {', '.join(map(str, ids))}")
            for table in TABLES:
                for deployment, count, first, last in sql(
                    f"SELECT deployment, count(*), min(number), max(number) FROM {table} GROUP BY deployment"
                ):
                    if deployment not in ids or (first, last) != (1, count):
                        raise self._damaged(
                            f"{table} of deployment {deployment} are {count} rows, numbered {first} to {last}"
                        )

    def _damaged(self, why: str) -> JournalError:
        return JournalError(
            f"the journal {str(self.path)!r} is damaged or was altered ({why}): take its last copy"
        )

    @contextmanager
    def transaction(self, *, durable: bool) -> Iterator[None]:
        """Rows that are written together or not at all. No other process writes meanwhile.

        `durable`: they are on the disk when it ends.
        """
        sql = self._connection.execute
        with self._named:
            if durable is not self._is_durable:
                sql(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._is_durable = durable
            sql("BEGIN IMMEDIATE")
            try:
                yield
                sql("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # an error of the disk ends it by itself
                    sql("ROLLBACK")
                raise

    def merge_log(self) -> None:
        """Bring the rows of the log, the file NAME-wal, into the journal itself, unless it is read just now.

        SQLite passes over a damaged log without a word, from the damage on, as after a power failure.
        """
        sql = self._connection.execute
        with self._named:
            sql("PRAGMA busy_timeout = 0")
            try:
                sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                sql(f"PRAGMA busy_timeout = {int(1000 * _BUSY_TIMEOUT)}")

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Reads inside see the journal of one moment."""
        sql = self._connection.execute
        with self._named:
            sql("BEGIN")
            try:
                yield
            finally:
                sql("COMMIT")

    def changes(self) -> int:
        """A number that is another one after every commit of another connection. Raises JournalError where
        somebody has begun to write beside a file that may only be read."""
        with self._named:
            if self._frozen is not None and self._frozen != self._state():
                raise JournalError(f"the journal {str(self.path)!r} is being written again: open it anew")
            [version] = self._connection.execute("PRAGMA data_version").fetchone()
        return int(version)

    def add(self, record: DeploymentRecord) -> None:
        """Write down what was started; inside a transaction."""
        values = record._values()
        _expect_kept("deployments", values)
        with self._named:
            self._connection.execute(
                "INSERT INTO deployments VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*values, record.hash)
            )

    def records(self) -> list[DeploymentRecord]:
        """Every deployment, the oldest first. Raises JournalError for one that was changed."""
        with self._named:
            rows = self._connection.execute("SELECT * FROM deployments ORDER BY length(id), id").fetchall()
        records = []
        for *values, digest in rows:
            if _hash("", "deployments", values) != digest:
                raise self._altered("deployments", values[0], 1)
            try:
                plan = DeploymentPlan.model_validate_json(values[6])
            except ValueError as error:
                raise JournalError(
                    f"{self.path}: the plan of deployment {values[0]} is none of this version"
                ) from error
            records.append(DeploymentRecord(**dict(zip(_RECORD, values[:6], strict=True)), plan=plan))
        return records

    def record(self, deployment: str) -> DeploymentRecord:
        """One deployment. Raises ConfigurationError for an id that is not there."""
        records = self.records()
        for record in records:
            if record.id == deployment:
                return record
        ids = ", ".join(record.id for record in records) or "it has none yet"
        raise ConfigurationError(f"{self.path} has no deployment {deployment!r}: {ids}")

    def rows_after(self, table: str, deployment: str, number: int) -> Iterator[Sequence[Any]]:
        """Rows with a higher number, as they are stored."""
        with self._named:
            yield from self._connection.execute(
                f"SELECT * FROM {table} WHERE deployment = ? AND number > ? ORDER BY number",
                (deployment, number),
            )

    def insert(self, table: str, values: Sequence[Any]) -> bool:
        """One row as it is to be stored; inside a transaction. False: it stands there already."""
        return self._connection.execute(_insertion(table, len(values)), values).rowcount == 1

    def find(self, table: str, deployment: str, **values: Any) -> Sequence[Any] | None:
        """The row with these values, as it is stored."""
        with self._named:
            row: Sequence[Any] | None = self._connection.execute(
                _query(table, tuple(values)), (deployment, *values.values())
            ).fetchone()
        return row

    def _altered(self, table: str, deployment: str, number: int) -> JournalError:
        return JournalError(
            f"the journal {str(self.path)!r} was altered: {table} of deployment {deployment}, row "
            f"{number}, does not "
            "follow from the row before it; take its last copy"
        )


class _Named:
    """Around calls of SQLite; a generator would take longer than the calls."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, sqlite3.Error | UnicodeDecodeError):  # of its message, where a name is damaged
            raise JournalError(
                f"the journal {str(self._path)!r} cannot be used ({error}): take its last copy, or name a "
                "file in a folder that exists and that you may write to"
            ) from error


class Pages:
    """The rows of one deployment: reads those that are new, each checked against the one before, and adds."""

    def __init__(self, journal: Journal, record: DeploymentRecord) -> None:
        self._journal = journal
        self._deployment = record.id
        self._last = dict.fromkeys(TABLES, (0, record.hash))
        """Number and hash of the last row that was read or added."""

    @property
    def hashes(self) -> dict[str, str]:
        """Hash of the last row of each table: keep a copy elsewhere to know a journal that lost its end."""
        return {table: digest for table, (_, digest) in self._last.items()}

    def new(self) -> Iterator[Row]:
        """Rows that were not read yet. Raises JournalError for one that was altered, or whose predecessor is
        missing."""
        for table in TABLES:
            for row in self._journal.rows_after(table, self._deployment, self._last[table][0]):
                _, number, *values, digest = row
                before, last = self._last[table]
                if number != before + 1 or _hash(last, table, [self._deployment, number, *values]) != digest:
                    raise self._journal._altered(table, self._deployment, number)
                self._last[table] = (number, digest)
                yield _read(table, number, values)

    def next_number(self, table: str) -> int:
        """The number of the next row."""
        return self._last[table][0] + 1

    def append(self, row: Row) -> Row | None:
        """Add one row after the last, inside a transaction in which all others were read; gives it as it will
        be read. None: what is written once stands there already."""
        table, values = _stored(row)
        _expect_kept(table, values)
        before, last = self._last[table]
        digest = _hash(last, table, [self._deployment, before + 1, *values])
        if not self._journal.insert(table, [self._deployment, before + 1, *values, digest]):
            return None
        self._last[table] = (before + 1, digest)
        return _read(table, before + 1, values)


def deployment_id(number: int) -> str:
    """The id of a journal's first deployment, its second, ..."""
    return f"{number:04d}"


def _create(path: Path) -> None:
    """A journal without deployments, unless another process is quicker; never the half of one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with partial.open("wb") as file:
                file.write(_new_database()[0])
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(partial, path)
            except FileExistsError:
                pass
            except OSError:  # a disk without hard links: what is replaced is an empty file of ours
                with suppress(FileExistsError):
                    path.touch(exist_ok=False)
                    partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise JournalError(
            f"the journal {str(path)!r} cannot be made ({error.strerror}): name a file where you may write"
        ) from error


_SCHEMA = "SELECT type, name, tbl_name, sql FROM sqlite_master"


@cache
def _new_database() -> tuple[bytes, list[tuple[Any, ...]]]:
    """A file without rows, and what it says of its tables."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    sql = connection.execute
    sql(f"CREATE TABLE deployments ({_DEPLOYMENTS}, hash TEXT) WITHOUT ROWID")
    for table, columns in TABLES.items():
        unique = f", UNIQUE (deployment, {_ONCE[table]})" if table in _ONCE else ""
        sql(
            f"CREATE TABLE {table} (deployment TEXT, number INTEGER, {columns}, hash TEXT, "
            f"PRIMARY KEY (deployment, number){unique}) WITHOUT ROWID"
        )
    for table in ("deployments", *TABLES):
        for verb in ("UPDATE", "DELETE"):
            sql(
                f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON {table} "
                "BEGIN SELECT RAISE(ABORT, 'a journal only grows'); END"
            )
    sql(f"PRAGMA user_version = {_VERSION}")
    file, tables = bytearray(connection.serialize()), sql(_SCHEMA).fetchall()
    connection.close()
    file[18:20] = 2, 2  # as `journal_mode = WAL` writes it
    return bytes(file), tables


_KINDS = {"REAL": (float, "a number"), "TEXT": (str, "a text"), "INTEGER": (int, "a whole number")}


@cache
def _columns(table: str) -> list[tuple[str, type, str]]:
    declared = _DEPLOYMENTS if table == "deployments" else TABLES[table]
    return [(name, *_KINDS[kind]) for name, kind, *_ in map(str.split, declared.split(", "))]


def _expect_kept(table: str, values: Sequence[Any]) -> None:
    """Raises ConfigurationError for a value that SQLite would give back as another one, so that its row would
    never follow from the one before."""
    for (name, kind, noun), value in zip(_columns(table), values, strict=True):
        if value is not None and (type(value) is not kind or value != value):
            raise ConfigurationError(f"{name} of {table} must be {noun}, got {value!r:.60}")


@lru_cache
def _insertion(table: str, num_columns: int) -> str:
    once = f" ON CONFLICT (deployment, {_ONCE[table]}) DO NOTHING" if table in _ONCE else ""
    return f"INSERT INTO {table} VALUES ({', '.join('?' * num_columns)}){once}"


@lru_cache
def _query(table: str, names: tuple[str, ...]) -> str:
    return f"SELECT * FROM {table} WHERE deployment = ? AND {' AND '.join(f'{name} = ?' for name in names)}"


def _hash(last: str, table: str, values: Sequence[Any]) -> str:
    """Floats are written as their shortest exact decimals, so equal text means equal bits."""
    return hashlib.sha256(_JSON.encode([last, table, *values]).encode()).hexdigest()


_ROWS: dict[str, type[Row]] = {
    "transitions": Move,
    "assignments": Assignment,
    "answers": CheckedAnswer,
    "outcomes": OutcomeRow,
    "reassigned": Reassigned,
}
_TABLE_OF = {kind: table for table, kind in _ROWS.items()}


def _exact(value: float) -> float:
    """The number as SQLite gives it back: it keeps no -0.0, and a hash of that would not be found again."""
    return float(value) + 0.0


def _known(value: float | None) -> float | None:
    """The number or None, also for NaN: SQLite has none, and an unknown value is no number."""
    return None if value is None or math.isnan(value) else _exact(value)


def _violations_as_text(violations: Sequence[Violation]) -> str:
    return json.dumps([astuple(violation) for violation in violations]) if violations else _NONE


def _violations(text: str) -> tuple[Violation, ...]:
    return () if text == _NONE else tuple(Violation(*parts) for parts in json.loads(text))


def _as_it_is(value: Any) -> Any:
    return value


_WRITERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("at", "share", "probability", "success"), _exact),
    **dict.fromkeys(("seconds", "cost", "reward"), _known),
    **dict.fromkeys(("forced", "is_timeout"), int),
    "evidence": lambda evidence: json.dumps(dict(evidence)),
    "violations": _violations_as_text,
}
"""Writers by column: a row's field in the type in which SQLite gives it back; others stay as they are."""


def _arm(name: str) -> Arm:
    return "candidate" if name == "candidate" else "baseline"


_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("forced", "is_timeout"), bool),
    "arm": _arm,
    "mode": checked_mode,
    "evidence": json.loads,
    "violations": _violations,
}
"""Readers by column: the field of a row for the stored value."""


@cache
def _coders(table: str) -> list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]]:
    """Each column's name, with what writes it and what reads it."""
    names = [name for name, *_ in _columns(table)]
    return [(name, _WRITERS.get(name, _as_it_is), _READERS.get(name, _as_it_is)) for name in names]


def _stored(row: Row) -> tuple[str, list[Any]]:
    """The row's table, and its columns from `at` on."""
    table = _TABLE_OF[type(row)]
    return table, [write(getattr(row, name)) for name, write, _ in _coders(table)]


def _read(table: str, number: int, values: Sequence[Any]) -> Row:
    fields = {name: read(value) for (name, _, read), value in zip(_coders(table), values, strict=True)}
    if table == "assignments":
        fields["number"] = number
    return _ROWS[table](**fields)


def read_assignment(row: Sequence[Any]) -> Assignment:
    """An assignment from the row as it is stored."""
    _, number, *values, _ = row
    assignment = _read("assignments", number, values)
    assert isinstance(assignment, Assignment)
    return assignment
