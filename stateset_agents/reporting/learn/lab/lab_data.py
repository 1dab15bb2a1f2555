"""What `lab.html` holds of a run: whole steps of rollouts.jsonl, and the settings that trained them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, get_args

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.algorithms.baselines import BASELINES
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.reporting.rollouts.line_groups import LineGroup, within_limits
from stateset_agents.tracking.jsonl import GrowingFile
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

MAX_CONVERSATIONS = 600
"""Of a page, in whole steps, evenly spaced."""
_MAX_BYTES = 12_000_000
"""Of rollouts.jsonl, in one page."""
_LOSS = "grpo"
"""Shown for a run whose own the page does not know."""
_RECORDED = ("old_logprobs", "learner_logprobs")
"""Of a member that was forwarded in a run with `log_learner_logprobs`."""
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
            f"{log.folder.path.name} has no conversations of training in rollouts.jsonl: train with "
            "log_rollouts true"
        )
    used = {
        token
        for step in steps
        for group in step["groups"]
        for own in group["members"]
        for token in own["ids"]
    }
    texts = log.tokens()
    return {
        "run": log.folder.path.name,
        "settings": _settings(log.config().get("training") or {}),
        "steps": steps,
        "total_steps": total,
        "texts": {token: texts[token] for token in used if token in texts},
    }


def _settings(training: Mapping[str, Any]) -> dict[str, Any]:
    """What the page begins with, under the names of its controls, and what it only tells."""
    loss = training.get("loss_type", _LOSS)
    if loss not in LOSSES:
        loss = _LOSS
    clip = LOSSES[loss].clip
    low = training.get("clip_ratio", clip.low)
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
    file = GrowingFile(log.folder.rollouts)
    for offset, line in file.new_lines():
        record = file.parse(line, offset)
        if record["stage"] == "train" and not record.get("branch_of"):
            by_step.setdefault(record["step"], LineGroup()).add(offset, len(line))
    numbers = {id(lines): step for step, lines in by_step.items()}
    chosen = within_limits(list(by_step.values()), max_conversations, _MAX_BYTES)
    if by_step and not chosen:  # a step above the limits: one is better than none
        chosen = [next(iter(by_step.values()))]
    steps = [
        {"step": numbers[id(lines)], "groups": list(_groups(file.records_at(lines.offsets)))}
        for lines in chosen
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
