"""A step's conversations in numbers: rewards, success, failures, tokens."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from statistics import fmean, pstdev

from stateset_agents.algorithms.advantages import zero_variance_fraction
from stateset_agents.algorithms.intervals import mean_interval, share_interval
from stateset_agents.core.chat.replies.thoughts import num_steps, read_reasoned
from stateset_agents.evaluation.rescoring import rank_correlation
from stateset_agents.tracking.diagnostics import part_name
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import max_or_nan
from stateset_agents.training.rows.layout import num_distinct_tokens
from stateset_agents.types.trajectory import Status, Trajectory, TrajectoryGroup

# What a step's replies that think look like, in numbers: format, length of thoughts, steps by difficulty.

_FORMAT_TERMS = ("format", "reasoning_format")
"""Terms of a reward that pay for the format; the name of one inside a composite ends with it."""
_ANSWER_TERMS = ("answer", "math_answer")
_MIN_RELATED = 3
"""Right replies before which a correlation of steps and difficulty says nothing at all."""


def reasoning_metrics(played: Sequence[Trajectory]) -> dict[str, float]:
    """Figures of the replies that end conversations, where a term of the reward is for their format.

    - reasoning/format: share in the format, as `split_reasoning` has it;
    - reasoning/thinking_words_right, ..._wrong, reasoning/answer_words_right, ..._wrong: mean words of the
      thoughts and answers in the format, by the verdict on the conversation;
    - reasoning/steps: mean steps of the thoughts;
    - reasoning/steps_by_difficulty: rank correlation of steps and `context["difficulty"]` among right replies
      in the format; left out where all have the same difficulty or as many steps.
    """
    if not any(_term(trajectory, _FORMAT_TERMS) is not None for trajectory in played):
        return {}
    answered = [trajectory for trajectory in played if trajectory.replies]
    pairs = [(trajectory, read_reasoned(trajectory.replies[-1])) for trajectory in answered]
    reasoned_pairs = [(trajectory, reasoned) for trajectory, reasoned in pairs if reasoned is not None]
    metrics = {"reasoning/format": len(reasoned_pairs) / len(played)}
    if not reasoned_pairs:
        return metrics
    metrics["reasoning/steps"] = fmean(num_steps(reasoned.thinking) for _, reasoned in reasoned_pairs)
    for verdict in (True, False):
        replies = [reasoned for trajectory, reasoned in reasoned_pairs if _is_right(trajectory) is verdict]
        if replies:
            words = "right" if verdict else "wrong"
            thinking = fmean(len(reasoned.thinking.split()) for reasoned in replies)
            metrics[f"reasoning/thinking_words_{words}"] = thinking
            metrics[f"reasoning/answer_words_{words}"] = fmean(
                len(reasoned.answer.split()) for reasoned in replies
            )
    points = [
        (num_steps(reasoned.thinking), float(trajectory.scenario.context["difficulty"]))
        for trajectory, reasoned in reasoned_pairs
        if _is_right(trajectory) and isinstance(trajectory.scenario.context.get("difficulty"), int | float)
    ]
    if len(points) < _MIN_RELATED:
        return metrics
    related = rank_correlation([steps for steps, _ in points], [difficulty for _, difficulty in points])
    return metrics if related is None else {**metrics, "reasoning/steps_by_difficulty": related}


def _is_right(trajectory: Trajectory) -> bool | None:
    """The environment's verdict, else the reward's for the answer; None without either."""
    if trajectory.success is not None:
        return trajectory.success
    answer = _term(trajectory, _ANSWER_TERMS)
    return None if answer is None else answer >= 1


def _term(trajectory: Trajectory, names: Sequence[str]) -> float | None:
    """The first term of the reward's breakdown with one of these names, also inside a composite."""
    return next((value for term, value in trajectory.breakdown.items() if term.split("/")[-1] in names), None)


_LARGEST = ("time/", "memory/", "breaker/")
"""Metrics of which the largest of all processes counts, by their beginnings."""


def rollout_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Figures of one step's groups; shares are of the conversations that did not fail.

    `success/rate` is left out where the environment gives no verdict, `reward/*` where nothing is scored,
    `reasoning/*` where the reward does not ask for thoughts.
    Branches are counted apart, as what they cost: none of the other figures is theirs.
    """
    members = [trajectory for group in groups for trajectory in group.trajectories]
    played = [trajectory for trajectory in members if trajectory.status is not Status.FAILED]
    metrics = {
        "rollout/conversations": float(len(members)),
        "rollout/failed": float(len(members) - len(played)),
        "rollout/unscored": float(sum(t.reward is None for t in played)),
        "group/zero_variance": zero_variance_fraction([group.rewards for group in groups]),
    }
    if played:
        agent = sum(t.num_agent_tokens for t in played)
        rows = [[row.token_ids for row in t.rows] for t in played]
        tokens = sum(map(num_distinct_tokens, rows))
        replies = [reply for t in played for reply in t.replies]
        num_turns = sum(len(t.turns) for t in played)
        cut = sum(turn.completion.finish_reason == "length" for t in played for turn in t.turns)
        unreadable = sum(any(call.error is not None for call in reply.tool_calls) for reply in replies)
        metrics |= {
            "rollout/turns": fmean(len(t.turns) for t in played),
            "rollout/rows": fmean(map(len, rows)),
            "rollout/rows_max": float(max(map(len, rows))),
            "rollout/truncated": fmean(t.status is Status.TRUNCATED for t in played),
            "rollout/malformed": unreadable / max(1, len(replies)),
            "rollout/cut_replies": cut / max(1, num_turns),
            "tokens/agent": float(agent),
            "tokens/environment": float(tokens - agent),
            "tokens/per_turn": agent / max(1, num_turns),
        }
        if any(turn.completion.constraint or turn.completion.forced for t in played for turn in t.turns):
            metrics["tokens/forced"] = float(agent - sum(t.num_trained for t in played))
    if branches := [branch for group in groups for branch in group.branches]:
        metrics |= {
            "rollout/branches": float(len(branches)),
            "rollout/branches_unscored": float(sum(b.trajectory.reward is None for b in branches)),
            "tokens/branches": float(sum(branch.num_agent_tokens for branch in branches)),
        }
    rewards = [t.reward for t in played if t.reward is not None]
    if rewards:
        metrics |= {"reward/mean": fmean(rewards), "reward/std": pstdev(rewards)}
        metrics |= _bounds("reward", mean_interval, [(t.scenario.id, t.reward) for t in played])
    for term in sorted({name for t in played for name in t.breakdown}):
        name = part_name(f"reward/{term}", metrics)
        metrics[name] = fmean(t.breakdown[term] for t in played if term in t.breakdown)
    metrics |= reasoning_metrics(played)
    judged = [t for t in played if t.success is not None]
    if judged:
        metrics["success/rate"] = fmean(t.success is True for t in judged)
        metrics |= _bounds("success", share_interval, [(t.scenario.id, t.success) for t in judged])
        for family in sorted({t.scenario.family for t in judged}):
            metrics[part_name(f"success/{family}", metrics)] = fmean(
                t.success is True for t in judged if t.scenario.family == family
            )
    return metrics


def untrained_tokens(groups: Sequence[TrajectoryGroup], trained_tokens: Set[int]) -> dict[str, float]:
    """`tokens/untrained`: the share of the prompts' tokens that are not among `trained_tokens`, those that
    the model's own training had. Nothing where no prompt has a token."""
    prompts = (
        turn.prompt_ids for group in groups for trajectory in group.trajectories for turn in trajectory.turns
    )
    share = untrained_share(prompts, trained_tokens)
    return {} if share is None else {"tokens/untrained": share}


def untrained_share(prompts: Iterable[Iterable[int]], trained_tokens: Set[int]) -> float | None:
    """The share of the prompts' tokens that are not trained; None where there is no token."""
    counts = Counter(itertools.chain.from_iterable(prompts))
    foreign = sum(count for id, count in counts.items() if id not in trained_tokens)
    return foreign / counts.total() if counts else None


def _bounds(
    name: str,
    interval_of: Callable[[Sequence[float]], tuple[float, float] | None],
    results: Iterable[tuple[str, float | None]],
) -> dict[str, float]:
    """95 % of the step's mean over scenarios: conversations of one scenario are alike, and count as one.

    Nothing for a single scenario, and for rewards that are all equal.
    """
    by_scenario: dict[str, list[float]] = {}
    for scenario, result in results:
        if result is not None:
            by_scenario.setdefault(scenario, []).append(result)
    interval = (
        interval_of([fmean(values) for values in by_scenario.values()]) if len(by_scenario) > 1 else None
    )
    return (
        {} if interval is None else {f"rollout/{name}_low": interval[0], f"rollout/{name}_high": interval[1]}
    )


def staleness_metrics(groups: Sequence[TrajectoryGroup], versions: Sequence[int]) -> dict[str, float]:
    """The number of policies between each sampled token and the one that is to be updated: mean and worst.

    `versions`: of the policies so far, ascending; the last one is to be updated. Empty where nothing was
    sampled.
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


def merge_processes(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of one step from those of each process: times, memory and breakers are the largest, counts
    are added up, and the engines' occupancy is that of all their rows."""
    if len(parts) == 1:
        return dict(parts[0])
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        merged[name] = max_or_nan(values) if name.startswith(_LARGEST) else sum(values)
    if "engine/occupancy" in merged:
        total = sum(part.get("engine/occupancy", 0.0) * part.get("engine/decode_rows", 0.0) for part in parts)
        rows = merged.get("engine/decode_rows", 0.0)
        merged["engine/occupancy"] = total / rows if rows else 1.0
    return merged


def why_nothing_trained(groups: Sequence[TrajectoryGroup], config: TrainingConfig) -> str | None:
    """Why nothing could be learned from a step's groups; None where something could, or where all were
    equally good."""
    if any(len(group.scored) >= config.min_group_size for group in groups):
        return None
    members = [trajectory for group in groups for trajectory in group.trajectories]
    failed = sum(trajectory.status is Status.FAILED for trajectory in members)
    scored = "a scored member" if config.min_group_size == 1 else f"{config.min_group_size} scored members"
    num_none = sum(trajectory.reward is None for trajectory in members)
    unscored = (
        f"the reward is None or NaN for {num_none} of {len(members)} conversations: give each a number"
        if num_none < len(members)
        else "every reward is None: it says nothing of these scenarios (`environment`, the default, needs "
        "the environment's verdict or rewards), or a return is missing"
    )
    cause = next((trajectory.error for trajectory in members if trajectory.error), unscored)
    return (
        f"has no group with {scored} ({failed} of {len(members)} conversations failed); first cause: {cause}"
    )
