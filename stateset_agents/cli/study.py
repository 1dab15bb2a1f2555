"""`stateset-agents study`: run arms on suites over seeds, and say what the difference is."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.output import (
    add_verb,
    check_writable,
    display_path,
    print_result,
)
from stateset_agents.cli.run_settings import overrides
from stateset_agents.numeric.studies.study import Cell, StudyFolder, analyse, study_report
from stateset_agents.runtime import event_loop
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

if TYPE_CHECKING:
    from stateset_agents.numeric.studies.runner import StudySettings


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """Register the verb's two verbs."""
    verbs = parser.add_subparsers(dest="study_verb", title="verbs", metavar="VERB")
    parser.set_defaults(help=parser.format_help)
    for verb in ("study run", "study report"):
        add_verb(verbs, verb, run)


def run(args: argparse.Namespace) -> int:
    """Carry out `study run` or `study report`; returns its exit code. Without either it shows the help."""
    if args.study_verb is None:
        print(args.help(), end="")
        return 0
    return report(args) if args.study_verb == "report" else run_cells(args)


def run_cells(args: argparse.Namespace) -> int:
    """Exit code 0 when all cells are finished, 130 if interrupted; the same command goes on."""
    from stateset_agents.numeric.studies.runner import run_study

    event_loop.run(run_study(args.folder, _settings(args), on_cell=_say))
    print(f"finished: stateset-agents study report {display_path(Path(args.folder))}")
    return 0


def report(args: argparse.Namespace) -> int:
    """Exit code 0 when there is a cell to report."""
    check_writable(args.out)
    folder = StudyFolder(Path(args.folder))
    with damage_named(folder.path):
        result, text = analyse(folder), study_report(folder).rstrip()
    print_result(result, args, text)
    return 0


def _settings(args: argparse.Namespace) -> StudySettings | None:
    """The settings of the options; None where the folder alone has them."""
    from stateset_agents.numeric.studies.runner import (
        ARMS,
        NAMED_ARMS,
        StudySettings,
        arms_of_grid,
        open_study,
    )

    seeds = None if args.seeds is None else _seeds(args)
    options = ("suite", "arm", "steps", "episodes", "set", "grid")
    if not any(getattr(args, name) for name in options):
        if seeds is None or not (Path(args.folder) / "study.yaml").is_file():
            return None
        settings = open_study(args.folder)[1]
        return settings.model_copy(update={"seeds": tuple(sorted({*settings.seeds, *seeds}))})
    strange = next((name for name in args.arm if name not in NAMED_ARMS), None)
    if strange is not None:
        raise ConfigurationError(
            f"--arm must be one of {', '.join(NAMED_ARMS)}, got {strange!r}{nearest(strange, NAMED_ARMS)}"
        )
    if not args.suite:
        raise ConfigurationError("a new study needs a suite: --suite mix_cart_pole_large, for one")
    arms: Mapping[str, Mapping[str, Any]] = {name: NAMED_ARMS[name] for name in args.arm or ARMS}
    axes = {
        name: value if isinstance(value, list) else [value]
        for name, value in overrides([_as_list(item) for item in args.grid], {}).items()
    }
    if axes:
        if len(args.arm) != 1:
            raise ConfigurationError(f"--grid is over one --arm, got {len(args.arm)}: name it")
        arms = arms_of_grid(NAMED_ARMS[args.arm[0]], axes)
    fields = {"total_steps": args.steps, "episodes": args.episodes, "seeds": seeds or _seeds(args)}
    return StudySettings(
        name=Path(args.folder).name,
        suites=tuple(args.suite),
        arms=arms,
        settings=overrides(args.set, {}),
        axes=axes,
        **{name: value for name, value in fields.items() if value is not None},
    )


def _seeds(args: argparse.Namespace) -> tuple[int, ...]:
    number, first = 5 if args.seeds is None else args.seeds, args.first_seed or 0
    if number < 1 or first < 0:
        raise ConfigurationError(
            f"--seeds must be at least 1 and --first-seed at least 0, got {number} and {first}"
        )
    return tuple(range(first, first + number))


def _as_list(item: str) -> str:
    """NAME=1,2 as NAME=[1,2], which YAML reads."""
    name, equals, values = item.partition("=")
    return f"{name}{equals}[{values}]" if equals else item


def _say(cell: Cell, number: int, cells: int) -> None:
    scores = ", ".join(
        f"{task} {score:.2f}" for task, score in zip(cell.tasks, cell.final["scores"], strict=True)
    )
    print(
        f"{number}/{cells} {cell.suite} {cell.arm} seed {cell.seed}: {scores} ({cell.cpu_seconds:.0f} CPU s)",
        flush=True,
    )


# ------------------------------------------------------------------------------ the data of the study's pages

_FIELDS = (
    *("suite", "tasks", "arm", "seed", "steps", "curve", "final", "worst_task", "fairness", "sign_flips"),
    *("absolute_shares", "parts", "settings", "cpu_seconds", "command"),
    "gradient_cosines",
)


def is_study(folder: str | Path) -> bool:
    """True if the folder has a study's settings."""
    return StudyFolder(Path(folder)).study.is_file()


def study_data(folder: str | Path) -> dict[str, Any]:
    """The study and its finished cells; a line that was cut off at the end is left out.

    Raises ConfigurationError where the folder is no study, or none of its cells has finished.
    """

    study = StudyFolder(Path(folder).resolve())
    with damage_named(study.path):
        analysis, settings = analyse(study), study.settings()
        return {
            "run": str(analysis["name"]),
            "total_steps": settings["total_steps"],
            "reference": analysis["reference"],
            "missing": analysis["missing"],
            "differences": analysis["differences"],
            "verdict": analysis["verdict"],
            "cells": [{name: getattr(cell, name) for name in _FIELDS} for cell in study.cells()],
        }
