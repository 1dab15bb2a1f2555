"""Study folders as `study run` leaves them, with made-up numbers: `from study_folders import write_study`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from stateset_agents.grouping.weights import group_fairness

__all__ = ["ARMS", "comparison", "grid", "write_study"]

TASKS = ("cart_pole", "acrobot")
ARMS = {
    "none": {"group_strategy": "none"},
    "task": {"group_strategy": "task"},
    "difficulty": {"group_strategy": "difficulty"},
    "random": {"group_strategy": "random"},
}
_LEVELS = {"none": (0.8, 0.02), "task": (0.75, 0.7), "difficulty": (0.72, 0.6), "random": (0.78, 0.05)}


def cell(
    suite: str, arm: str, seed: int, levels: tuple[float, ...], settings: dict[str, Any], points: int = 40
) -> dict[str, Any]:
    """One line of cells.jsonl whose curves rise to about `levels`."""
    draw = np.random.default_rng([seed, *(ord(letter) for letter in arm)])
    ends = np.array(levels) + 0.05 * draw.normal(size=len(levels))
    at = np.arange(1, points + 1)
    curves = ends[None] * (1 - np.exp(-at[:, None] / 9)) + 0.03 * draw.normal(size=(points, len(levels)))
    scores = [[round(value, 4) for value in row] for row in curves.tolist()]
    scores[0][-1] = None  # a task without an episode in the first update
    final = [round(float(value), 4) for value in ends]
    weights = {"names": list(TASKS), "steps": [1000], "values": [[0.5, 0.5]]}
    return {
        "suite": suite,
        "tasks": list(TASKS[: len(levels)]),
        "arm": arm,
        "seed": seed,
        "steps": 2500 * points,
        "curve": {"steps": (2500 * at).tolist(), "returns": scores, "scores": scores},
        "final": {"returns": [round(500 * value, 1) for value in final], "scores": final},
        "worst_task": min(final),
        "fairness": group_fairness(final),
        "sign_flips": {"none": 0.26, "difficulty": 0.12, "random": 0.2}.get(arm, 0.0),
        "absolute_shares": [0.5, 0.5],
        "weights": weights,
        "parts": {"key": settings.get("group_strategy", "task"), "outcome": arm == "difficulty"},
        "settings": settings,
        "cpu_seconds": round(10 + 3 * float(draw.random()), 2),
        "command": f"stateset-agents study run {suite} --arm {arm} --seed {seed}",
        "gradient_cosines": _cosines(len(levels), arm, seed),
    }


def _cosines(tasks: int, arm: str, seed: int) -> list[list[float | None]]:
    """None of one task; the pair of seed 1 never had gradients."""
    if tasks == 1:
        return []
    pair = None if seed == 1 else round(-0.4 + 0.1 * seed + 0.01 * len(arm), 6)
    return [[1.0, pair], [pair, 1.0]]


def comparison(seeds: int = 5) -> list[dict[str, Any]]:
    """Four arms on a mix of two tasks, and on one task alone."""
    mix = [cell("mix_large", arm, seed, _LEVELS[arm], ARMS[arm]) for arm in ARMS for seed in range(seeds)]
    one = [cell("cart_pole", arm, seed, (0.8,), ARMS[arm]) for arm in ARMS for seed in range(seeds)]
    return mix + one


def grid(seeds: int = 3) -> list[dict[str, Any]]:
    """Four by four settings, one of which was not measured."""
    cells = []
    for n_groups, rate in itertools.product((2, 3, 4, 6), (0.0003, 0.001, 0.003, 0.01)):
        if (n_groups, rate) == (6, 0.01):
            continue
        level = 0.8 - 0.2 * abs(np.log10(rate / 0.001)) - 0.03 * abs(n_groups - 3)
        settings = {"n_groups": n_groups, "learning_rate": rate}
        arm = f"n{n_groups}-lr{rate}"
        cells += [cell("mix_large", arm, seed, (level, level - 0.1), settings) for seed in range(seeds)]
    return cells


def write_study(folder: Path, cells: Iterable[dict[str, Any]], name: str = "parts") -> Path:
    """The folder's two files; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = list(cells)
    study = {
        "schema_version": 1,
        "num_cells": len(cells),
        "name": name,
        "suites": list(dict.fromkeys(each["suite"] for each in cells)),
        "arms": {each["arm"]: each["settings"] for each in cells},
        "seeds": sorted({each["seed"] for each in cells}),
        "total_steps": 100_000,
        "settings": {},
        "command": "stateset-agents study run",
        "references": {task: [0.0, 500.0] for task in TASKS},
    }
    (folder / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False), encoding="utf-8")
    header = {"schema_version": 1, "file": "cells"}
    lines = "".join(json.dumps(each) + "\n" for each in (header, *cells))
    (folder / "cells.jsonl").write_text(lines + '{"suite": "mix_la', encoding="utf-8")  # a torn last line
    return folder
