"""What a step's conversations looked like, in numbers: rewards, success, failures, tokens."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from stateset_agents.algorithms.advantages import zero_variance_fraction
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.distributed.processes import worst_of
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup

__all__ = [
    "of_all_processes",
    "rollout_metrics",
    "staleness_metrics",
    "why_nothing_trained",
]


def rollout_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Figures of one step's groups; shares are of the conversations that did not fail.

    `success/rate` is left out where the environment gives no verdict, `reward/*` where nothing is scored.
    Branches are counted apart, as what they cost: none of the other figures is theirs.
    """
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    played = [trajectory for trajectory in everyone if trajectory.status is not Status.FAILED]
    metrics = {
        "rollout/conversations": float(len(everyone)),
        "rollout/failed": float(len(everyone) - len(played)),
        "rollout/unscored": float(sum(t.reward is None for t in played)),
        "group/zero_variance": zero_variance_fraction([group.rewards for group in groups]),
    }
    if played:
        metrics |= _shape(played)
    if branches := [branch for group in groups for branch in group.branches]:
        metrics |= {
            "rollout/branches": float(len(branches)),
            "rollout/branches_unscored": float(sum(b.trajectory.reward is None for b in branches)),
            "tokens/branches": float(sum(branch.num_agent_tokens for branch in branches)),
        }
    rewards = [t.reward for t in played if t.reward is not None]
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
    for term in sorted({name for t in played for name in t.breakdown}):
        metrics[f"reward/{term}"] = fmean(t.breakdown[term] for t in played if term in t.breakdown)
    judged = [t for t in played if t.success is not None]
    if judged:
        metrics["success/rate"] = fmean(t.success is True for t in judged)
        for family in sorted({t.scenario.family for t in judged}):
            metrics[f"success/{family}"] = fmean(
                t.success is True for t in judged if t.scenario.family == family
            )
    return metrics


def _shape(played: Sequence[Trajectory]) -> dict[str, float]:
    agent = sum(t.num_agent_tokens for t in played)
    whole = sum(len(t.token_ids) for t in played)
    replies = [reply for t in played for reply in t.replies]
    cut = sum(turn.completion.finish_reason == "length" for t in played for turn in t.turns)
    unreadable = sum(any(call.error is not None for call in reply.tool_calls) for reply in replies)
    return {
        "rollout/turns": fmean(len(t.turns) for t in played),
        "rollout/truncated": fmean(t.status is Status.TRUNCATED for t in played),
        "rollout/malformed": unreadable / max(1, len(replies)),
        "rollout/cut_replies": cut / max(1, len(replies)),
        "tokens/agent": float(agent),
        "tokens/environment": float(whole - agent),
        "tokens/per_turn": agent / max(1, sum(len(t.turns) for t in played)),
    }


def staleness_metrics(groups: Sequence[TrajectoryGroup], versions: Sequence[int]) -> dict[str, float]:
    """How many policies lie between each sampled token and the one that is to be updated: mean and worst.

    `versions`: of the policies so far, ascending, the one to be updated last. Nothing without a token.
    """
    tokens: Counter[int] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            for turn in trajectory.turns:
                for span in turn.completion.version_spans:
                    tokens[len(versions) - bisect_right(versions, span.version)] += span.end - span.start
    if not tokens:
        return {}
    mean = sum(staleness * count for staleness, count in tokens.items()) / tokens.total()
    return {"staleness/mean": mean, "staleness/max": float(max(tokens))}


def of_all_processes(figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What each process counted and measured of one step, as one: times are those of the slowest, breakers
    stand as the worst does, counts are added up, and the engines' occupancy is that of all their rows."""
    if len(figures) == 1:
        return dict(figures[0])
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for one in figures for name in one):
        values = [one[name] for one in figures if name in one]
        merged[name] = worst_of(values) if name.startswith(("time/", "breaker/")) else sum(values)
    if "engine/occupancy" in merged:
        used = sum(one.get("engine/occupancy", 0.0) * one.get("engine/decode_rows", 0.0) for one in figures)
        rows = merged.get("engine/decode_rows", 0.0)
        merged["engine/occupancy"] = used / rows if rows else 1.0
    return merged


def _is_broken(number: float | None) -> bool:
    return number is not None and not math.isfinite(number)


def why_nothing_trained(
    groups: Sequence[TrajectoryGroup], metrics: Mapping[str, float], config: TrainingConfig, *, scaled: bool
) -> str | None:
    """What went wrong in a step; None for one that trained, or in which all were equally good.

    `scaled`: under fp16's gradient scaler an infinite gradient is no mishap, it finds the scale.
    """
    broken = [name for name in ("loss/policy", "loss/kl", "kl/reference") if _is_broken(metrics.get(name))]
    if broken:
        advice = "lower learning_rate, use precision fp32 or bf16, or look at the rewards"
        return f"has {broken[0]} {metrics[broken[0]]}: {advice}"
    norm = metrics.get("optimizer/grad_norm", 0.0)
    if not (math.isfinite(norm) or scaled):
        return f"has a gradient of norm {norm}: lower learning_rate, or look at the rewards"
    if any(len(group.scored) >= config.min_group_size for group in groups):
        return None
    members = [trajectory for group in groups for trajectory in group.trajectories]
    failed = sum(trajectory.status is Status.FAILED for trajectory in members)
    least = config.min_group_size
    scored = "a scored member" if least == 1 else f"{least} scored members"
    nothing = "every reward is None: it says nothing of these scenarios, or a return is missing"
    why = next((trajectory.error for trajectory in members if trajectory.error), nothing)
    return f"has no group with {scored} ({failed} of {len(members)} conversations failed); first cause: {why}"
