"""What the pages hold of a study folder: its cells, and what `analysis` says of them.

A cell is one suite, arm and seed. The verdicts and their intervals are `analysis.study.analyse`'s; the pages
compute what their controls change from what the cells say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stateset_agents.numeric.studies.study import analyse
from stateset_agents.numeric.studies.study_folder import StudyFolder
from stateset_agents.tracking.jsonl import damage_named

_FIELDS = (
    *("suite", "tasks", "arm", "seed", "steps", "curve", "final", "worst_task", "fairness", "sign_flips"),
    *("absolute_shares", "parts", "settings", "cpu_seconds", "command"),
    "gradient_cosines",
)


def is_study(folder: str | Path) -> bool:
    """Does the folder have a study's settings?"""
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
