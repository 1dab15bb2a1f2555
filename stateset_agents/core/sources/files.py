"""The rows of a file, each with its place: JSON lines, a JSON array, either gzipped, CSV, TSV, parquet."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stateset_agents.core.sources.row_shapes import read_json
from stateset_agents.core.sources.trace_rows import Located, read_traces, reason_lines
from stateset_agents.runtime.named_code import library
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import OPENING_COLUMNS
from stateset_agents.types.schemas import without_nulls

_LISTS = ("simulations", "samples", "problems", "data", "rows", "runs")
"""Keys under which a JSON object has its rows: of tau2-bench, of Inspect, of ours, and of others."""
_log = get_logger(__name__)
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


def read_rows(path: str | Path, *, of: str) -> list[Located]:
    """The rows of a file, in its order; of an export of traces its conversations, in the order of their ends.
    Rows need not be mappings: who reads them says what they must be.

    All values of CSV and TSV are text, as they stand. `of` names the file in errors: "scenario file".

    Raises ConfigurationError, naming file and line, for what cannot be read.
    """
    located = read_records(path, of=of)
    traces = read_traces(located)
    if traces is None:
        return located
    left_out = "".join(f"; left out: {line}" for line in reason_lines(traces.left_out))
    counts = f"{traces.num_calls} calls of models are {len(traces.rows)} conversations"
    _log.warning(f"{path}: {traces.platform}, {counts}{left_out}")
    return traces.rows


def read_records(path: str | Path, *, of: str) -> list[Located]:
    """What stands in a file as it stands there. Raises as `read_rows`."""
    path = Path(path)
    name = path.name.lower().removesuffix(".gz")
    suffix = Path(name).suffix
    if suffix == ".parquet":
        return list(_parquet(path, of))
    if suffix == ".eval":
        raise ConfigurationError(
            f"{of} {path} is packed: `inspect log convert {path} --to json` writes it as JSON"
        )
    text = _text(path, of)
    if suffix in _DELIMITERS:
        return list(_table(path, text, _DELIMITERS[suffix]))
    if suffix == ".txt":
        lines = enumerate(text.splitlines(), start=1)
        return [(f"line {number}", {"text": line}) for number, line in lines if line.strip()]
    # OpenTelemetry's SDK prints objects over several lines each, one behind another
    text, num_more = re.subn(r"^\}\s*^\{", "},\n{", text, flags=re.MULTILINE)
    text = f"[{text}]" if num_more else text
    if suffix == ".json" or text.lstrip()[:1] == "[":
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            is_lines = text.lstrip()[:1] == "[" or not isinstance(
                read_json(text.lstrip().partition("\n")[0]), str
            )
            if suffix == ".json" and not is_lines:
                at = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
                raise ConfigurationError(f"{path}{at}: not JSON ({error})") from error
        else:
            return _entries(data, path)
    return list(_lines(path, text))


_CHATS = ("messages", "conversations", "traj", "prompt", "completion")
"""Columns of messages, of whose nulls the schemas of tools tell which are arguments."""


def arrow_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table without the nulls that Arrow may have added. In columns of messages they stay."""
    return {
        key: value if key in _CHATS else without_nulls(value)
        for key, value in row.items()
        if value is not None
    }


def datasets_library() -> Any:
    """Hugging Face's `datasets`. Raises ConfigurationError with the cure where it is missing."""
    return library(
        "datasets", "parquet files and datasets need the datasets library: pip install 'datasets>=4'"
    )


def _text(path: Path, of: str) -> str:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigurationError(f"{of} {path} is a broken gzip file ({error}): copy it again") from error
    except OSError as error:
        where = "" if path.is_absolute() else f" (looked for {path.absolute()})"
        raise ConfigurationError(f"cannot read {of} {path}: {error.strerror}{where}") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{of} {path} is not UTF-8 text (byte {error.start}), line {line}: save it as UTF-8"
        ) from error


def _lines(path: Path, text: str) -> Iterator[Located]:
    for number, line in enumerate(text.split("\n"), start=1):  # JSON texts may hold other line ends
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:  # the latter, and long numbers, Python cannot read
                what = "not JSON" if isinstance(error, json.JSONDecodeError) else "cannot be read"
                why = f"{what} ({getattr(error, 'msg', error)})"
                raise ConfigurationError(f"{path}, line {number}: {why}: {line[:60]!r}") from error


def _entries(data: Any, path: Path) -> list[Located]:
    """The items of an array, or of the list under a known name in an object; else the object itself.

    Raises ConfigurationError for an object that has such a list and could be a row.
    """
    if isinstance(data, Mapping):
        lists = [key for key in _LISTS if isinstance(data.get(key), list)]
        named = [*lists, *(key for key in ("opening", *OPENING_COLUMNS) if data.get(key) is not None)]
        if lists and len(named) > 1:
            raise ConfigurationError(
                f"{path}: it has {' and '.join(map(repr, named))}, and nothing says which are its rows: "
                "leave one, or write it as [{...}] if it is a row"
            )
        data = data[lists[0]] if lists else [data]
    items = data if isinstance(data, list) else [data]
    return [(f"entry {number}", item) for number, item in enumerate(items, start=1)]


def _table(path: Path, text: str, delimiter: str) -> Iterator[Located]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        start = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise ConfigurationError(f"{path}, line {start}: not CSV ({error})") from error
        if not cells:
            continue
        if names is None:
            names = cells
            if len(set(names)) < len(names) or "" in names:
                raise ConfigurationError(
                    f"{path}, line {start}: each column needs a name of its own, got {names!r:.200}"
                )
        elif len(cells) != len(names):
            raise ConfigurationError(
                f"{path}, line {start}: {len(cells)} cells where the header has {len(names)}: quote a comma"
            )
        else:
            yield f"line {start}", dict(zip(names, cells, strict=True))


def _parquet(path: Path, of: str) -> Iterator[Located]:
    library = datasets_library()
    if not path.is_file():
        _text(path, of)  # says why not
    try:
        table = importlib.import_module("pyarrow.parquet").read_table(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read {of} {path}: {' '.join(str(error).split()):.300}") from error
    for number, row in enumerate(library.Dataset(table), start=1):
        yield f"row {number}", arrow_row(row)
