"""Scenarios from Hugging Face `datasets`: of the hub, of local files, or at hand.

`ConversationEnvironment(scenarios={"dataset": ..., "columns": ...})` comes here, and so do YAML files.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any

from stateset_agents.backends.pretrained.loading import why_out_of_reach
from stateset_agents.core.sources.files import arrow_row, datasets_library, read_rows
from stateset_agents.core.sources.scenario_files import load_scenarios, located_scenarios, read_scenarios
from stateset_agents.core.sources.trace_rows import Located
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario, Split, expect_split
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that, is_whole, nearest

_log = get_logger(__name__)
_FILES = (".csv", ".tsv", ".parquet", ".json", ".jsonl", ".ndjson", ".txt", ".gz")
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "json": json.loads,
}
_SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """The rows to read, and how: the arguments of `dataset_scenarios`.

    Raises ConfigurationError for a limit that is none, and for an unknown type.
    """

    dataset: Any
    """A name on the hub, a local csv, parquet or JSON file, a folder that `save_to_disk` wrote, or a
    `Dataset` or `DatasetDict` at hand."""
    _: KW_ONLY
    config: str | None = None
    """The dataset's configuration, where it has several."""
    revision: str | None = None
    """A commit or tag on the hub: the data stay what they are."""
    splits: Mapping[str, str] | None = None
    """Our split -> its split, which may be a slice, {"train": "train", "test": "test[:200]"}; those of train,
    validation and test that it has when not given. A file or `Dataset` is all "train"."""
    columns: Mapping[str, str] | None = None
    """Our key -> its column: `opening`, `family`, `id`, and whatever rewards and tools read in the context.
    Without it the rows are read as they are published (see `row_shapes`)."""
    types: Mapping[str, str] | None = None
    """Column -> int, float, bool or json, for columns of text, as all of a CSV file are. An empty cell is
    then no value."""
    family: str | None = None
    """The family of all scenarios."""
    limit: int | None = None
    """The most rows that are read of a split."""

    def __post_init__(self) -> None:
        limit = self.limit
        expect_that(limit is None or is_whole(limit, 1), "limit", "be a whole number of at least 1", limit)
        for name, type_name in (self.types or {}).items():
            rule = f"be one of {', '.join(_TYPES)}, or left out for text"
            expect_that(type_name in _TYPES, f"types: {name}", rule, type_name)

    @property
    def name(self) -> str:
        dataset = self.dataset
        return f"dataset {str(dataset)!r}" if isinstance(dataset, str | Path) else "the dataset"


def dataset_scenarios(dataset: Any, *, needs_opening: bool = True, **arguments: Any) -> list[Scenario]:
    """One scenario for each row.

        dataset_scenarios("openai/gsm8k", config="main")

    Args:
        dataset: A name on the hub, a file, a folder, or a `Dataset` at hand.
        needs_opening: Refuse rows in which nobody says anything, unless a topic or context is there to speak
            of.
        **arguments: The fields of `DatasetRows`: config, revision, splits, columns, types, family, limit.

    Raises ConfigurationError for a dataset, split or column that is not there.
    """
    source = DatasetRows(dataset, **arguments)
    return located_scenarios(_located_rows(source), of=source.name, needs_opening=needs_opening)


def _located_rows(source: DatasetRows, *, is_numbered: bool = True) -> list[Located]:
    """The rows with their places; those without an id are numbered, unless `is_numbered` is false: then a row
    names no split either, unless there are several."""
    located: list[Located] = []
    tables = _tables(source)
    for split, rows in tables.items():
        if isinstance(rows, list):
            mappings = (row for _, row in rows if isinstance(row, Mapping))  # others are refused below
            names: Sequence[str] = list(dict.fromkeys(key for row in mappings for key in row))
        else:
            names = rows.column_names
        _check_columns(names, source.columns, source.types)
        for index in range(len(rows) if source.limit is None else min(source.limit, len(rows))):
            if isinstance(rows, list):
                where, row = rows[index]
            else:
                where, row = f"row {index} of the dataset's split {split!r}", arrow_row(rows[index])
            data = _typed(row, source.types or {}, where)
            if source.columns:
                data = {key: data[column] for key, column in source.columns.items() if column in data}
            if source.family is not None:
                data["family"] = source.family
            if is_numbered:
                data["id"] = data.get("id") or f"{split}-{index}"
            if is_numbered or source.splits or len(tables) > 1:
                data["split"] = data.get("split") or split
            located.append((where, data))
    if not located:
        raise ConfigurationError(f"{source.name} has no row")
    return located


def read_any_scenarios(
    source: Iterable[Scenario | Mapping[str, Any]] | str | Path | Mapping[str, Any],
    *,
    needs_opening: bool = False,
) -> list[Scenario]:
    """Scenarios as an environment's `scenarios` gives them: scenarios or plain dicts, a `Dataset`, the path
    of a file (see `sources.files`), or the arguments of `dataset_scenarios`, {"dataset": ..., "columns":
    ...}.

    Raises ConfigurationError for an empty source, and for an argument that `dataset_scenarios` does not have.
    """
    if hasattr(source, "column_names"):
        return dataset_scenarios(source, needs_opening=needs_opening)
    if isinstance(source, str | Path):
        return read_scenarios(source, needs_opening=needs_opening)
    if not isinstance(source, Mapping):
        return load_scenarios(source, needs_opening=needs_opening)
    expect_dataset(source, "scenarios")
    return dataset_scenarios(**source, needs_opening=needs_opening)


def expect_dataset(source: Mapping[str, Any], of: str) -> None:
    """Raises ConfigurationError unless a mapping holds arguments of `dataset_scenarios`; `of`: what it
    gives."""
    known = [field.name for field in fields(DatasetRows)]
    if "dataset" not in source:
        raise ConfigurationError(f"{of} must be a list of {of}, got one mapping: [{source!r:.60}]")
    for name in source:
        if name not in known:
            raise ConfigurationError(
                f"{of} of a dataset have no argument {name!r}{nearest(str(name), known)}"
            )


def _typed(row: Any, types: Mapping[str, str], where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise ConfigurationError(f"{where}: a row must be a mapping, got {type(row).__name__}: {row!r:.60}")
    data = dict(row)
    for column, type_name in types.items():
        text = data.get(column)
        if text is None:
            continue
        if not isinstance(text, str):
            raise ConfigurationError(
                f"{where}: types: {column} is {type(text).__name__} already, take it out of types"
            )
        if not text.strip():
            del data[column]
            continue
        try:
            data[column] = _TYPES[type_name](text.strip())
        except (KeyError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{where}: column {column!r} must be {type_name} by types, got {text!r:.60}"
            ) from error
    return data


def _check_columns(
    names: Sequence[str], columns: Mapping[str, str] | None, types: Mapping[str, str] | None
) -> None:
    if columns is not None and (not isinstance(columns, Mapping) or not columns):
        raise ConfigurationError(f"columns must map our key to its column, got {columns!r:.60}")
    for column in (*(columns or {}).values(), *(types or ())):
        if column not in names:
            raise ConfigurationError(
                f"there is no column {column!r}{nearest(str(column), names)}; there are {', '.join(names)}"
            )


def _tables(source: DatasetRows) -> dict[str, Any]:
    """The rows of each split, by this package's names: train, validation, test."""
    dataset, splits = source.dataset, source.splits
    for ours in splits or ():
        expect_split(ours, "a split of splits")
    if isinstance(dataset, str | Path) and Path(dataset).suffix.lower() in _FILES:
        return _of_file(Path(dataset), splits)
    library = datasets_library()
    if isinstance(dataset, library.Dataset):
        if splits is not None:
            raise ConfigurationError("a Dataset has no splits: give a DatasetDict, or leave splits out")
        return {"train": dataset}
    if isinstance(dataset, library.DatasetDict):
        return _chosen(dataset, splits)
    if not isinstance(dataset, str | Path):
        raise ConfigurationError(
            f"dataset must be a name, a path, a Dataset or a DatasetDict, got {type(dataset).__name__}"
        )
    path = Path(dataset)
    with _without_progress_bars(library):
        try:
            if (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file():
                return _tables(DatasetRows(library.load_from_disk(str(path)), splits=splits))
            if why := why_out_of_reach(str(dataset), kind="dataset"):
                _log.warning(f"the hub does not answer ({why}): a copy on this machine is looked for")
            options = {"name": source.config, "revision": source.revision}
            if splits is None:
                return _chosen(library.load_dataset(str(dataset), **options), None)
            return {
                ours: library.load_dataset(str(dataset), split=theirs, **options)
                for ours, theirs in splits.items()
            }
        except (OSError, ValueError, library.exceptions.DatasetsError) as error:
            if isinstance(error, ConfigurationError):
                raise
            if "corresponds to no data" in str(error):
                raise ConfigurationError(f"dataset {str(dataset)!r} has no row") from error
            causes = [error] if error.__cause__ is None else [error, error.__cause__]
            why = ": ".join(" ".join(str(cause).split())[:300] for cause in causes)
            raise ConfigurationError(f"cannot load dataset {str(dataset)!r}: {why}") from error


def _chosen(tables: Mapping[str, Any], splits: Mapping[str, str] | None) -> dict[str, Any]:
    if splits is None:
        splits = {name: name for name in _SPLITS if name in tables}
    missing = next((theirs for theirs in splits.values() if theirs not in tables), None)
    if missing is not None or not splits:
        raise ConfigurationError(
            f"the dataset has no split {missing or 'train'!r}; there are {', '.join(tables)}: give splits, "
            f"such as {{train: {next(iter(tables), 'train')}}}"
        )
    return {ours: tables[theirs] for ours, theirs in splits.items()}


def _of_file(path: Path, splits: Mapping[str, str] | None) -> dict[str, list[tuple[str, Any]]]:
    """Our split -> rows of a file with their places; a file's own split is called train."""
    if not path.is_file():
        raise ConfigurationError(f"dataset file {str(path)!r} does not exist")
    if path.stat().st_size == 0:
        raise ConfigurationError(f"dataset file {str(path)!r} is empty")
    rows = [(f"{path}, {where}", row) for where, row in read_rows(path, of="dataset file")]
    if splits is None:
        return {"train": rows}
    instruction = datasets_library().ReadInstruction
    tables = {}
    for ours, theirs in splits.items():
        try:
            parts = instruction.from_spec(theirs).to_absolute({"train": len(rows)})
        except (AssertionError, ValueError) as error:
            raise ConfigurationError(
                f"split {theirs!r} of {path} cannot be read ({' '.join(str(error).split()):.200}): a file "
                "has train, or slices such as train[:80%]"
            ) from error
        tables[ours] = [row for part in parts for row in rows[part.from_ : part.to]]
    return tables


@contextlib.contextmanager
def _without_progress_bars(library: Any) -> Iterator[None]:
    """While open, no progress bars; then as it was before."""
    were_off = library.utils.are_progress_bars_disabled()
    library.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            library.enable_progress_bars()


# --- logged conversations ---

Chats = str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""A file of conversations, or these, in any shape of `row_shapes`; or where they are, by the arguments of
`dataset_scenarios`: {"dataset": FILE, "columns": {"messages": "turns"}}."""
_HELD_OUT: tuple[Split, ...] = ("validation", "test")


def located_chats(logs: Chats) -> list[Located]:
    """Conversations, each with its place. Raises ConfigurationError where there is none."""
    if isinstance(logs, str | Path):
        located = [(f"{logs}, {where}", row) for where, row in read_rows(logs, of="conversations")]
        of = f"{logs} holds"
    elif isinstance(logs, Mapping):
        expect_dataset(logs, "conversations")
        return _located_rows(DatasetRows(**logs), is_numbered=False)
    else:
        if not isinstance(logs, Iterable):
            raise ConfigurationError(f"conversations must be a file or a list of rows, got {logs!r:.60}")
        located = [(f"conversation {number}", row) for number, row in enumerate(logs, start=1)]
        of = "there is"
    if not located:
        raise ConfigurationError(f"{of} no conversation: give at least one")
    return located


def chat_scenarios(
    logs: Chats, *, shares: Mapping[str, float] | None = None, keep_duplicates: bool = False
) -> list[Scenario]:
    """Scenarios of logged conversations: a file's, or those given.

    `shares` holds some out, {"validation": 0.1, "test": 0.2}: of the conversations that name no split, about
    that share, chosen by id, the same in every run. Two that are equal, word by word, are refused unless
    `keep_duplicates`. Raises ConfigurationError naming the one that cannot be read.
    """
    located = located_chats(logs)
    of = str(logs) if isinstance(logs, str | Path) else "logs"
    scenarios = located_scenarios(located, of=of, needs_chat=True, keep_duplicates=keep_duplicates)
    return with_shares(scenarios, shares or {}, [bool(row.get("split")) for _, row in located])


def with_drawn_split(scenarios: Sequence[Scenario], split: Split) -> list[Scenario]:
    """The same scenarios, about a tenth of them in `split`, at least one of them and never all: those of the
    lowest hash."""
    by_hash = sorted(scenarios, key=_split_hash)
    number = sum(_split_hash(scenario) < 0.1 for scenario in scenarios)
    drawn = {scenario.id for scenario in by_hash[: min(max(number, 1), len(by_hash) - 1)]}
    return [replace(each, split=split) if each.id in drawn else each for each in scenarios]


def _split_hash(scenario: Scenario) -> float:
    """From 0 to 1, by the id alone."""
    return derive(0, "split", scenario.id) / 2**63


def with_shares(
    scenarios: Sequence[Scenario], shares: Mapping[str, float], named: Sequence[bool]
) -> list[Scenario]:
    """The same scenarios, about these shares of them held out, equal conversations together; those that are
    `named` keep their split, and equal ones that are not follow them."""
    for split, share in shares.items():
        if split not in _HELD_OUT:
            raise ConfigurationError(f"shares are of validation and test, got {split!r}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ConfigurationError(f"the share of {split} must be at least 0 and below 1, got {share!r}")
    if sum(shares.values()) >= 1:
        raise ConfigurationError(
            f"the shares {dict(shares)} leave nothing to train on: take less than 1 in all"
        )
    divided, firsts = [], dict[str, Scenario]()
    of_each = list(zip(map(_conversation_text, scenarios), scenarios, named, strict=True))
    last = sorted(of_each, key=lambda each: each[1].split != "train")  # what one row holds out is held out
    splits = {text: scenario.split for text, scenario, has_split in last if has_split}
    for text, scenario, has_split in of_each:
        position = _split_hash(firsts.setdefault(text, scenario))
        scenario = scenario if has_split else replace(scenario, split=splits.get(text, scenario.split))
        below = 0.0
        for split in _HELD_OUT:
            share = shares.get(split, 0.0)
            if text not in splits and below <= position < below + share:
                scenario = replace(scenario, split=split)
            below += share
        divided.append(scenario)
    return divided


def _conversation_text(scenario: Scenario) -> str:
    """All that is said in a conversation: equal ones have equal texts."""
    said = [scenario.context.get(key) for key in ("script", "recorded", "reference")]
    return repr((scenario.messages(), said))
