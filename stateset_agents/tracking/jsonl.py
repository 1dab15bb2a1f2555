"""JSONL files that can be tailed, survive a kill, and say which schema they follow.

What reads them back takes nothing on trust: a damaged file is one line that names it (`damage_named`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.messages import finite_json

SCHEMA_VERSION = 1


class JsonlWriter:
    """Appends records to one file; nothing is held back.

    A new file gets the header `{"schema_version": 1, "file": NAME}`. A last line that a kill has torn is
    cut off when the file is opened. Raises ConfigurationError when the file cannot be written, a full disk
    included: then none of the records stands in the file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._stream = file.open("ab+", buffering=0)
            size = _complete_bytes(self._stream)
            self._stream.truncate(size)
        except OSError as error:
            raise ConfigurationError(
                f"cannot write {file}: {error.strerror}; choose another folder"
            ) from error
        if size == 0:
            self.write([{"schema_version": SCHEMA_VERSION, "file": file.stem}])

    def write(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Add the records: all of them, or none where the disk cannot take them."""
        lines = memoryview("".join(dump(record) + "\n" for record in records).encode())
        size = self._stream.seek(0, os.SEEK_END)
        try:
            while lines:  # a disk that fills up takes a part, and refuses the next write
                lines = lines[self._stream.write(lines) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # /dev/full has no length; the next opening cuts a torn line
                self._stream.truncate(size)
            raise self._write_error(error) from error

    def sync(self) -> None:
        """Put the lines on the disk now. Raises ConfigurationError when it cannot."""
        try:
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise self._write_error(error) from error

    def _write_error(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"cannot write {self.file}: {error.strerror}; free the disk, then resume the run"
        )

    def close(self) -> None:
        self._stream.close()


def dump(record: Mapping[str, Any], *, indent: int | None = None) -> str:
    """JSON, one line without `indent`; numbers that are not finite become null, for JSON has none."""
    separators = (",", ":" if indent is None else ": ")
    dumps = partial(json.dumps, indent=indent, separators=separators, ensure_ascii=False, default=str)
    try:
        text = dumps(record, allow_nan=False)
    except ValueError:
        text = dumps(_finite(record))
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_SURROGATE = re.compile("[\ud800-\udfff]")
"""Text cut in the middle of one (in UTF-16) may hold these; UTF-8 has none, JSON an escape."""


def read_lines(
    file: Path, is_wanted: Callable[[bytes], bool] = lambda line: True
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each record and the byte at which its line begins, the header included; a torn last line is left out.

    `is_wanted`: of a line, the header aside; others are not parsed.
    Raises ConfigurationError on another schema version, where a line in the middle is no JSON object, and
    where the file cannot be read.
    """
    start = 0
    with _opened(file) as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            if number > 1 and not is_wanted(line):
                start += len(line)
                continue
            record = parse_record(line, of=f"{file}, line {number}")
            if number == 1 and record.get("schema_version") != SCHEMA_VERSION:
                raise ConfigurationError(
                    f"{file} has schema version {record.get('schema_version')!r} and this program reads "
                    f"{SCHEMA_VERSION}: use the stateset-agents that wrote it"
                )
            yield start, record
            start += len(line)


class GrowingFile:
    """The lines that were appended to a file since the last call."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._num_read = 0  # bytes

    def was_truncated(self) -> bool:
        """True if the file is shorter than what was read, as after a resume; then all of it counts as new."""
        is_shorter = self._file.exists() and self._file.stat().st_size < self._num_read
        if is_shorter:
            self._num_read = 0
        return is_shorter

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of each complete new line, without the header, unparsed.

        Raises ConfigurationError on another schema version, and where the file cannot be read.
        """
        if not self._file.exists():
            return
        if self._num_read == 0:
            next(read_lines(self._file), None)  # checks the header
        with _opened(self._file) as stream:
            stream.seek(self._num_read)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                if self._num_read:  # else it is the header
                    yield self._num_read, line
                self._num_read += len(line)

    def records_at(self, offsets: Iterable[int]) -> Iterator[dict[str, Any]]:
        """The records whose lines begin there."""
        with _opened(self._file) as stream:
            for offset in offsets:
                stream.seek(offset)
                yield self.parse(stream.readline(), offset)

    def parse(self, line: bytes, offset: int) -> dict[str, Any]:
        """The record of a line that begins at `offset`."""
        return parse_record(line, of=f"{self._file}, byte {offset}")


def read_json(file: Path) -> dict[str, Any]:
    """The object that a whole file holds. Raises ConfigurationError where it is none or cannot be read."""
    with _opened(file) as stream:
        return parse_record(stream.read(), of=str(file))


def parse_record(text: bytes, *, of: str) -> dict[str, Any]:
    """A JSON object in UTF-8; `of` names it in the error. Raises ConfigurationError where it is none."""
    try:
        record = finite_json(text.decode())
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigurationError(
            f"{of}: not JSON ({reason}): {text[:50].decode(errors='replace')!r}; remove it"
        ) from error
    if not isinstance(record, dict):
        raise ConfigurationError(f"{of}: no JSON object, but {record!r:.50}; remove it")
    return record


@contextlib.contextmanager
def damage_named(path: Path | str) -> Iterator[None]:
    """Turn errors of the body, which reads a folder's files and computes with them, into one that names it.

    The body must call no code of the user. A field that is missing, of another type or too large becomes a
    ConfigurationError that names the folder: files are damaged in more ways than their readers can ask for
    one by one.
    """
    try:
        yield
    except StatesetError:
        raise
    except (
        *(ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RecursionError),
        *(TypeError, ValueError),
    ) as error:
        raise ConfigurationError(
            f"{path} holds what cannot be read ({type(error).__name__}: {error!s:.150}): move it away, or "
            "write it again"
        ) from error


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Raises ConfigurationError for what is no file, and what cannot be read."""
    if not file.is_file():  # a folder; a pipe would be waited for
        raise ConfigurationError(f"{file} is no file: remove it")
    try:
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error


def _complete_bytes(stream: FileIO) -> int:
    """Bytes up to and including the last newline."""
    end = stream.seek(0, 2)
    while end > 0:
        start = max(0, end - 65536)
        stream.seek(start)
        newline = stream.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
