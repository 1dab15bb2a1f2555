"""Write the learning pages of a run, of a study, or those that need neither, for `stateset-agents learn`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stateset_agents.reporting.learn.lab.lab_data import lab_data
from stateset_agents.reporting.learn.learn_page import render_learn_page
from stateset_agents.reporting.learn.parts.parts_data import run_parts, toy_parts
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

_PAPERS = ("grpo", "gradient_surgery", "soft_modularization", "infinite_mixture")
_PARTS = ("formation", "advantages")
_STUDY = ("grpo_vs_ppo", "tasks", "sensitivity")


def write_learn_pages(folder: str | Path | None = None, out: str | Path | None = None) -> list[Path]:
    """The pages of a run folder, or with `folder` None those that need none.

    `out`: where they go; else into `learn/`, in the folder where there is one. Returns their paths, the one
    to begin with first. Raises ConfigurationError where the folder is no run, has nothing to show, or the
    pages cannot be written.
    """
    data = _papers() if folder is None else _of_run(folder)
    return _write(data, Path(out) if out is not None else Path("" if folder is None else folder) / "learn")


def write_study_pages(study: Mapping[str, Any], out: str | Path) -> list[Path]:
    """The pages of a study into `out`; returns their paths.

    `study`: `run` (its name), `cells`, `differences`, `reference`, `missing`, `total_steps`, as `study_data`
    of the command reads them by `analysis`. Raises ConfigurationError if they cannot be written.
    """
    return _write(dict.fromkeys(_STUDY, study), Path(out))


def _write(data: Mapping[str, Mapping[str, Any]], into: Path) -> list[Path]:
    try:
        into.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write pages in {str(into)!r}: {error.strerror}; choose another folder with --out"
        ) from error
    for name, own in data.items():
        replace_file(into / f"{name}.html", render_learn_page(name, own), "choose another folder with --out")
    return [into / f"{name}.html" for name in data]


def _papers() -> dict[str, Mapping[str, Any]]:
    parts = toy_parts()
    return {**{name: {} for name in _PAPERS}, **dict.fromkeys(_PARTS, parts)}


def _of_run(folder: str | Path) -> dict[str, Mapping[str, Any]]:
    log = RunLog.open(folder)
    with damage_named(log.folder.path):
        return {"lab": lab_data(log), **dict.fromkeys(_PARTS, run_parts(log))}
