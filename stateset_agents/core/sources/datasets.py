"""Scenarios from Hugging Face `datasets`: of the hub, of local files, or at hand.

`ConversationEnvironment(scenarios={"dataset": ..., "columns": ...})` comes here, and so do YAML files.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stateset_agents.backends.pretrained.hub import why_out_of_reach
from stateset_agents.core.sources.chat_logs import scenario_of_chat
from stateset_agents.core.sources.scenario_files import load_scenarios, read_scenarios
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.settings import nearest

__all__ = ["dataset_scenarios", "read_any_scenarios"]

_log = get_logger(__name__)
_READERS = {".csv": "csv", ".parquet": "parquet", ".json": "json", ".jsonl": "json", ".txt": "text"}
_SPLITS = ("train", "validation", "test")


def dataset_scenarios(
    dataset: Any,
    *,
    config: str | None = None,
    revision: str | None = None,
    splits: Mapping[str, str] | None = None,
    columns: Mapping[str, str] | None = None,
    family: str | None = None,
    limit: int | None = None,
) -> list[Scenario]:
    """One scenario for each row.

        dataset_scenarios("openai/gsm8k", config="main", columns={"opening": "question", "answer": "answer"})

    Args:
        dataset: A name on the hub, a local csv, parquet or JSON file, a folder that `save_to_disk` wrote, or
            a `Dataset` or `DatasetDict` at hand.
        config: The dataset's configuration, where it has several.
        revision: Of the hub, a commit or tag: the data stay what they are.
        splits: Our split -> its split, which may be a slice, {"train": "train", "test": "test[:200]"}; those
            of train, validation and test that it has when not given. A file or `Dataset` is all "train".
        columns: Our key -> its column: `opening`, `family`, `id`, and whatever rewards and tools read in the
            context. Without it columns are keys of the scenario, and one called `messages` a whole
            conversation (see `chat_logs`).
        family: Of all scenarios.
        limit: Most rows of a split.

    Raises ConfigurationError for a dataset, split or column that is not there.
    """
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigurationError(f"limit must be a whole number of at least 1, got {limit!r}")
    scenarios: list[Scenario] = []
    for split, rows in _tables(dataset, config, revision, splits).items():
        names: Sequence[str] = rows.column_names
        _check_columns(names, columns)
        number = len(rows) if limit is None else min(limit, len(rows))
        for index in range(number):
            try:
                scenarios.append(_scenario(rows[index], columns, family, split, index))
            except ConfigurationError as error:
                raise ConfigurationError(f"row {index} of the dataset's split {split!r}: {error}") from error
    return load_scenarios(scenarios)


def read_any_scenarios(
    source: Iterable[Scenario | Mapping[str, Any]] | str | Path | Mapping[str, Any],
) -> list[Scenario]:
    """Scenarios as an environment's `scenarios` gives them: scenarios or plain dicts, the path of a JSONL
    file, or the arguments of `dataset_scenarios`, {"dataset": ..., "columns": ...}.

    Raises ConfigurationError for an empty source, and for an argument that `dataset_scenarios` does not have.
    """
    if not isinstance(source, Mapping):
        return read_scenarios(source) if isinstance(source, str | Path) else load_scenarios(source)
    known = list(inspect.signature(dataset_scenarios).parameters)
    if "dataset" not in source:
        raise ConfigurationError(f"scenarios must be a list of scenarios, got one mapping: [{source!r:.60}]")
    for name in source:
        if name not in known:
            raise ConfigurationError(
                f"scenarios of a dataset have no argument {name!r}{nearest(str(name), known)}"
            )
    return dataset_scenarios(**source)


def _scenario(
    row: Mapping[str, Any], columns: Mapping[str, str] | None, family: str | None, split: str, index: int
) -> Scenario:
    data = {key: row[column] for key, column in columns.items()} if columns else dict(row)
    data = {"id": f"{split}-{index}", **data, "split": data.get("split") or split}
    if family is not None:
        data["family"] = family
    if "messages" in data:
        return scenario_of_chat(data)
    opening = data.get("opening")
    if opening is not None and not isinstance(opening, str):
        raise ConfigurationError(f"the opening must be text, got {type(opening).__name__} {opening!r:.60}")
    return Scenario.from_dict(data)


def _check_columns(names: Sequence[str], columns: Mapping[str, str] | None) -> None:
    if columns is None:
        if not {"opening", "messages", "topic", "context"} & set(names):
            raise ConfigurationError(
                "which column is the user's first message? give columns, such as "
                f"{{opening: {names[0] if names else 'question'}}}; there are {', '.join(names)}"
            )
        return
    if not isinstance(columns, Mapping) or not columns:
        raise ConfigurationError(f"columns must map our key to its column, got {columns!r:.60}")
    for column in columns.values():
        if column not in names:
            raise ConfigurationError(
                f"the dataset has no column {column!r}{nearest(str(column), names)}; there are "
                f"{', '.join(names)}"
            )


def _tables(
    dataset: Any, config: str | None, revision: str | None, splits: Mapping[str, str] | None
) -> dict[str, Any]:
    """Our split -> its rows."""
    for ours in splits or ():
        expect_split(ours, "a split of splits")
    library = _library()
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
                return _tables(library.load_from_disk(str(path)), None, None, splits)
            if path.suffix in _READERS:
                if not path.is_file():
                    raise ConfigurationError(f"dataset file {str(path)!r} does not exist")
                if path.stat().st_size == 0:
                    raise ConfigurationError(f"dataset file {str(path)!r} is empty")
                reader = _READERS[path.suffix]
                if splits is None:
                    return {"train": library.load_dataset(reader, data_files=str(path), split="train")}
                return {
                    ours: library.load_dataset(reader, data_files=str(path), split=theirs)
                    for ours, theirs in splits.items()
                }
            if why := why_out_of_reach(str(dataset), kind="dataset"):
                _log.warning(f"the hub does not answer ({why}): a copy on this machine is looked for")
            options = {"name": config, "revision": revision}
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


def _library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ConfigurationError(
            "scenarios from a dataset need the datasets library: pip install 'datasets>=4'"
        ) from error


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
