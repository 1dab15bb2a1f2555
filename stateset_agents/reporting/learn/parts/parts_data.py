"""What `formation.html` and `advantages.html` hold: trajectories of a run, or made-up ones with two tasks.

`trajectories` have `features` [n][d] that are known before acting, and `returns`, `lengths`, `tasks`,
`raw` (the advantage before any normalisation) [n]; `outcome_names` says what returns and lengths are;
`steps` is one batch of a made-up control task.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stateset_agents.reporting.learn.lab.lab_data import lab_data
from stateset_agents.tracking.run_log import RunLog

MOST_TRAJECTORIES = 2000
_TASKS = ("cart_pole", "acrobot")
_RETURN, _LENGTH = 3, 4
"""Places of these columns behind three features; a page begins with two of them across and up."""


def run_parts(log: RunLog) -> dict[str, Any]:
    """Conversations of a run's training: tasks are families, and a raw advantage is the reward less its
    group's mean.

    Known before acting: how often conversations of the same family had succeeded in earlier steps of the
    page (their mean reward where nobody judged success), the family as an indicator, and the step. Raises
    ConfigurationError where the run recorded no conversation of training.
    """
    data = lab_data(log, MOST_TRAJECTORIES)
    families = sorted({group["family"] for step in data["steps"] for group in step["groups"]})
    earlier: dict[str, list[float]] = {family: [] for family in families}
    rows: list[dict[str, Any]] = []
    for step in data["steps"]:
        prior = {family: math.fsum(seen) / len(seen) if seen else 0.0 for family, seen in earlier.items()}
        for group in step["groups"]:
            rows += _conversations(
                group, step["step"], prior[group["family"]], families.index(group["family"])
            )
        for group in step["groups"]:
            results = (_result(member) for member in group["members"])
            earlier[group["family"]] += [result for result in results if result is not None]
    return {
        "source": f"{len(rows)} conversations of {data['run']}; a task is a family of scenarios",
        "task_names": families,
        "feature_names": ["earlier success", "family", "step"],
        "outcome_names": ["reward", "sampled tokens"],
        "begin": {"strategy": "task", "x": _LENGTH, "y": _RETURN},
        "trajectories": {name: [row[name] for row in rows] for name in rows[0]},
        "steps": None,
    }


def _conversations(group: dict[str, Any], step: int, prior: float, family: int) -> list[dict[str, Any]]:
    scored = [member for member in group["members"] if member["reward"] is not None]
    mean = math.fsum(member["reward"] for member in scored) / len(scored) if scored else 0.0
    return [
        {
            "features": [round(prior, 6), float(family), float(step)],
            "returns": member["reward"],
            "lengths": len(member["ids"]),
            "tasks": family,
            "raw": member["reward"] - mean,
        }
        for member in scored
    ]


def _result(member: dict[str, Any]) -> float | None:
    """Success as 0 or 1, else the reward; None where neither is known."""
    success, reward = member["success"], member["reward"]
    return reward if success is None else float(success)


def toy_parts(seed: int = 0) -> dict[str, Any]:
    """Two made-up tasks whose rewards differ a hundredfold in scale, 120 trajectories each; and one batch.

    The same seed gives the same numbers. Advantages lean on an action's quality in both tasks alike, so that
    what a partition does to the small task can be seen.
    """
    draw = np.random.default_rng(seed)
    count = 120
    tasks = np.repeat([0, 1], count)
    quality = draw.normal(size=2 * count)
    scale = np.where(tasks == 0, 1.0, 0.01)
    lengths = np.where(tasks == 0, 60 + 25 * quality, 300 - 60 * quality) + draw.normal(0, 12, 2 * count)
    lengths = np.clip(np.round(lengths), 5, 500).astype(int)
    returns = scale * np.where(tasks == 0, lengths, -lengths)
    features = np.stack(
        [
            np.where(tasks == 0, -0.6, 0.7) + draw.normal(0, 0.28, 2 * count),
            np.where(tasks == 0, 0.3, -0.2) + draw.normal(0, 0.35, 2 * count),
            draw.uniform(0, 1, 2 * count),
        ],
        axis=1,
    )
    raw = scale * (25 * quality + draw.normal(0, 8, 2 * count))
    return {
        "source": f"{2 * count} made-up trajectories of two tasks, drawn with seed {seed}",
        "task_names": list(_TASKS),
        "feature_names": ["angle", "speed", "time of day"],
        "outcome_names": ["return", "environment steps"],
        "begin": {"strategy": "auto", "x": 0, "y": 1},
        "trajectories": {
            "features": np.round(features, 4).tolist(),
            "returns": np.round(returns, 4).tolist(),
            "lengths": lengths.tolist(),
            "tasks": tasks.tolist(),
            "raw": np.round(raw, 5).tolist(),
        },
        "steps": _toy_steps(draw),
    }


def _toy_steps(draw: np.random.Generator) -> dict[str, Any]:
    """64 rows of 16 environments, half of each task: rewards, values, ends and ratios, as a critic and two
    passes would leave them."""
    rows, columns = 64, 16
    tasks = np.repeat([0, 1], columns // 2)
    ended = draw.random((rows, columns)) < np.where(tasks == 0, 0.05, 0.02)
    terminated = ended & (draw.random((rows, columns)) < 0.8)
    rewards = np.where(tasks == 0, 1.0, -0.01) * (1 + 0.3 * draw.normal(size=(rows, columns)))
    values = np.where(tasks == 0, 20.0, -0.6) * (1 + 0.15 * draw.normal(size=(rows, columns)))
    following = np.where(tasks == 0, 20.0, -0.6) * (1 + 0.15 * draw.normal(size=(rows, columns)))
    ratios = np.exp(0.15 * draw.normal(size=(rows, columns)))
    return {
        "tasks": tasks.tolist(),
        "rewards": np.round(rewards, 4).tolist(),
        "values": np.round(values, 4).tolist(),
        "next": np.round(following, 4).tolist(),
        "terminated": terminated.astype(int).tolist(),
        "ended": ended.astype(int).tolist(),
        "ratios": np.round(ratios, 4).tolist(),
    }
