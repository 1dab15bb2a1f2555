"""A judge's answers in a file, keyed by the question: the same question is asked once, in all runs."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
from pathlib import Path

from stateset_agents.types.errors import ConfigurationError

_VERSION = 1
"""Of the table; a file of another one is refused."""
_BUSY_TIMEOUT = 30.0
"""Seconds to wait for another process that is writing."""


class AnswerCache:
    """Answers by content: the key is a digest of who was asked (model, sampling) and of the whole prompt, so
    a changed rubric, model or conversation is another question. Threads and processes may share a file.

    The file is SQLite, one table `answers(key, asked_of, answer)`. It is opened at first use.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._process = 0

    @staticmethod
    def key(asked_of: str, prompt: str) -> str:
        """The content's address."""
        content = json.dumps([_VERSION, asked_of, prompt])
        return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()

    def get(self, key: str) -> str | None:
        """The answer, if it is known. Raises ConfigurationError for a file of another kind."""
        with self._lock:
            row = self._open().execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, asked_of: str, answer: str) -> None:
        """Keep an answer; one that is there stays. Half a character becomes a question mark."""
        text = answer.encode(errors="replace").decode()
        with self._lock:
            connection = self._open()
            with connection:
                connection.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", (key, asked_of, text))

    def close(self) -> None:
        """Let go of the file; the next use opens it again."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
            self._connection = None

    def __len__(self) -> int:
        with self._lock:
            return int(self._open().execute("SELECT count(*) FROM answers").fetchone()[0])

    def _open(self) -> sqlite3.Connection:
        """This process's connection; SQLite's must not be carried into a fork."""
        if self._connection is not None and self._process == os.getpid():
            return self._connection
        try:
            connection = sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT, check_same_thread=False)
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                [found] = connection.execute("PRAGMA user_version").fetchone()
                tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
                if found != _VERSION and (found or tables):
                    raise ConfigurationError(
                        f"{self.path} is no cache of this version (its version is {found}, not {_VERSION}): "
                        "name another file"
                    )
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers "
                    "(key TEXT PRIMARY KEY, asked_of TEXT NOT NULL, answer TEXT NOT NULL) WITHOUT ROWID"
                )
                connection.execute(f"PRAGMA user_version = {_VERSION}")
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"the judge's cache {str(self.path)!r} cannot be used ({error}): name a file in a folder "
                "that exists and that you may write to"
            ) from error
        self._connection, self._process = connection, os.getpid()
        return connection
