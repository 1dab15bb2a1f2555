"""Write the learning pages of a run, of a study, or those that need neither, for `stateset-agents learn`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import numpy as np

from stateset_agents.algorithms.advantages import BASELINES, Scaling
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.reporting.conversations import LineGroup, within_limits
from stateset_agents.reporting.html import html_page
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.tracking.run_log import RolloutLines, RunLog
from stateset_agents.types.errors import ConfigurationError

# ------------------------------------------------------------------------------ lab.html: a run's own steps

MAX_CONVERSATIONS = 600
"""The most conversations of a page, in whole steps, evenly spaced."""
_MAX_BYTES = 12_000_000
"""The most bytes of rollouts.jsonl in one page."""
_LOSS = "grpo"
"""Shown for a run whose own the page does not know."""
_RECORDED = ("old_logprobs", "learner_logprobs")
"""Fields of a member that was forwarded in a run with `log_learner_logprobs`."""
_SETTINGS = ("advantage_estimator", "num_iterations", "max_staleness", "reward_clip", "advantage_clip")
"""Shown, and not to be changed on the page."""


def lab_data(log: RunLog, max_conversations: int = MAX_CONVERSATIONS) -> dict[str, Any]:
    """Steps with all their groups, so that a baseline over the batch can be computed, and the run's settings.

    A member has what it sampled: ids, log-probs (those of the update, too, where they were recorded) and the
    recorded advantages, as runs of [value, count] where the conversation trained. Raises ConfigurationError
    where the run recorded no conversation of training.
    """
    steps, total = _selected(log, max_conversations)
    if not steps:
        raise ConfigurationError(
            f"{log.folder.path.name} has no conversations in rollouts.jsonl: train with log_rollouts true"
        )
    token_ids = {
        token
        for step in steps
        for group in step["groups"]
        for member in group["members"]
        for token in member["ids"]
    }
    texts = log.tokens()
    return {
        "run": log.folder.path.name,
        "settings": _page_settings(log.config().get("training") or {}),
        "steps": steps,
        "total_steps": total,
        "texts": {token: texts[token] for token in token_ids if token in texts},
    }


def _page_settings(training: Mapping[str, Any]) -> dict[str, Any]:
    """The first values of the page's controls by name; `told` has settings that it only shows."""
    loss = training.get("loss_type", _LOSS)
    if loss not in LOSSES:
        loss = _LOSS
    low = training.get("clip_ratio", LOSSES[loss].clip.low)
    baseline, scaling = training.get("baseline_type"), training.get("advantage_normalization")
    return {
        "loss": loss,
        "low": low,
        "high": low if training.get("clip_ratio_high") is None else training["clip_ratio_high"],
        "dual": training.get("dual_clip"),
        "beta": training.get("beta", 0.0),
        "kl": training.get("kl_estimator", "k3"),
        "baseline": baseline if baseline in BASELINES else "group_mean",
        "scaling": scaling if scaling in get_args(Scaling) else "population",
        "length": training.get("loss_length", 512),
        "told": {name: training[name] for name in _SETTINGS if training.get(name) is not None},
    }


def _selected(log: RunLog, max_conversations: int) -> tuple[list[dict[str, Any]], int]:
    """The steps of the page, and how many the run has."""
    by_step: dict[int, LineGroup] = {}
    file = RolloutLines(log.folder.rollouts)
    for rollout in file.new_summaries():
        if rollout.stage == "train" and not rollout.branch_of:
            by_step.setdefault(rollout.step, LineGroup()).add(rollout.offset, len(rollout.line))
    numbers = {id(lines): step for step, lines in by_step.items()}
    line_groups = within_limits(list(by_step.values()), max_conversations, _MAX_BYTES)
    if by_step and not line_groups:  # a step above the limits: one is better than none
        line_groups = [next(iter(by_step.values()))]
    steps = [
        {"step": numbers[id(lines)], "groups": list(_groups(file.records_at(lines.offsets)))}
        for lines in line_groups
    ]
    return steps, len(by_step)


def _groups(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    by_key: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        by_key.setdefault(record["group"], []).append(record)
    for key, members in by_key.items():
        first = members[0]
        yield {
            "group": key,
            "scenario": first["scenario"],
            "family": first["family"],
            "members": [*map(_member, members)],
        }


def _member(record: Mapping[str, Any]) -> dict[str, Any]:
    sampled = [at for at, bit in enumerate(record["mask"]) if bit]
    advantages = record["advantages"]
    return {
        "reward": record["reward"],
        "success": record["success"],
        "ids": [record["token_ids"][at] for at in sampled],
        "logprobs": [record["logprobs"][at] for at in sampled],
        **{name: record[name] for name in _RECORDED if name in record},
        "turns": [turn["sampled_tokens"] for turn in record["turns"]],
        "advantages": None
        if advantages is None
        else [[value, len([*same])] for value, same in groupby(advantages)],
    }


# ------------------------------------------------------------------------------ parts.html: numeric runs

_MOST_UPDATES = 400
_OF_PARTS = ("partition/", "part_", "absolute_share/", "score/", "reward/mean", "credit/std")


def parts_data(log: RunLog) -> dict[str, Any]:
    """A numeric run's updates, at most 400, evenly spaced: `steps`, and the `series` [updates] of metrics,
    null where an update had none. Raises ConfigurationError before the first update."""
    lines = [line for line in log.metrics() if "time/rollout" in line.values]
    if not lines:
        raise ConfigurationError(f"{log.folder.path.name} has no finished update yet: train it first")
    places = np.unique(np.linspace(0, len(lines) - 1, _MOST_UPDATES).round().astype(int))
    updates = [lines[place] for place in places]
    names = dict.fromkeys(name for line in updates for name in line.values if name.startswith(_OF_PARTS))
    config = log.config()
    return {
        "run": log.folder.path.name,
        "environment": (config.get("environment") or {}).get("name"),
        "training": config.get("training") or {},
        "total_updates": len(lines),
        "steps": [line.step for line in updates],
        "series": {name: [line.values.get(name) for line in updates] for name in names},
    }


# ------------------------------------------------------------------------------ trajectories and parts
#
# The data of formation.html and advantages.html. `trajectories` of a run, or made-up ones of two tasks, have
# `features` [n][d] that are known before acting, and `returns`, `lengths`, `tasks` and `raw` [n], the
# advantage before any normalisation; `outcome_names` names returns and lengths; `steps` is one made-up batch.

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
        prior = {family: math.fsum(past) / len(past) if past else 0.0 for family, past in earlier.items()}
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


# ------------------------------------------------------------------------------ all pages

_STYLES = ("page/shared/page.css", "learn/learn.css")
_SHARED = (
    "page/shared/page.js",
    "page/shared/page.state.js",
    "learn/learn.math.js",
    "learn/learn.page.js",
    "learn/learn.figures.js",
)
_GROUPING = "parts/grouping.math.js"
_DERIVATION = "papers/derivation.js"
_STUDY_SCRIPTS = (_GROUPING, "study/study.math.js", "study/study.js")


@dataclass(frozen=True, slots=True)
class LearnPage:
    """The title and the scripts of a page."""

    title: str
    scripts: tuple[str, ...]
    """The page's own scripts, relative to `assets/learn/`; they follow those that all pages have."""


PAGES: Mapping[str, LearnPage] = {
    "lab": LearnPage("GRPO on your own run", ("learn.grpo.js", "lab/lab.js")),
    "grpo": LearnPage("GRPO, step by step", ("learn.grpo.js", _DERIVATION, "papers/grpo.js")),
    "gradient_surgery": LearnPage("Gradient surgery", (_DERIVATION, "papers/surgery.js")),
    "soft_modularization": LearnPage("Soft modularization", (_DERIVATION, "papers/modules.js")),
    "infinite_mixture": LearnPage(
        "An infinite mixture of Gaussian processes", (_DERIVATION, "papers/mixture.js")
    ),
    "parts": LearnPage("The parts of a run", ("parts/run.js",)),
    "formation": LearnPage("How parts form", (_GROUPING, "parts/formation.js")),
    "advantages": LearnPage("One normalisation, or one for each part", (_GROUPING, "parts/advantages.js")),
    "grpo_vs_ppo": LearnPage("Parts against PPO", (*_STUDY_SCRIPTS, "study/comparison.js")),
    "tasks": LearnPage("Task by task", (*_STUDY_SCRIPTS, "study/tasks.js")),
    "sensitivity": LearnPage("Which settings matter", (*_STUDY_SCRIPTS, "study/sensitivity.js")),
}
"""The pages by the names of their files, without `.html`."""


def render_learn_page(name: str, data: Mapping[str, Any]) -> str:
    """The page as HTML, with its data inside; it draws in SVG and needs no plotly.js."""
    page = PAGES[name]
    scripts = [*_SHARED, *(f"learn/{script}" for script in page.scripts)]
    return html_page("learn/learn.html", _STYLES, scripts, {"name": page.title, **data}, charts=False)


_PAPERS = ("grpo", "gradient_surgery", "soft_modularization", "infinite_mixture")
_PARTS = ("formation", "advantages")
_STUDY = ("grpo_vs_ppo", "tasks", "sensitivity")


def write_learn_pages(folder: str | Path | None = None, out: str | Path | None = None) -> list[Path]:
    """The pages of a run folder, or with `folder` None those that need none.

    `out`: where they go; else into `learn/`, in the folder where there is one. Returns their paths, the one
    to begin with first. Raises ConfigurationError where the folder is no run, has nothing to show, or the
    pages cannot be written.
    """
    if folder is None:
        data: dict[str, Mapping[str, Any]] = {name: {} for name in _PAPERS}
        data |= dict.fromkeys(_PARTS, toy_parts())
    else:
        log = RunLog.open(folder)
        with damage_named(log.folder.path):
            if log.config().get("kind") == "control":
                return _write(
                    {"parts": parts_data(log)}, Path(folder) / "learn" if out is None else Path(out)
                )
            data = {"lab": lab_data(log), **dict.fromkeys(_PARTS, run_parts(log))}
    return _write(data, Path(folder or "") / "learn" if out is None else Path(out))


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
    for name, page in data.items():
        replace_file(into / f"{name}.html", render_learn_page(name, page), "choose another folder with --out")
    return [into / f"{name}.html" for name in data]
