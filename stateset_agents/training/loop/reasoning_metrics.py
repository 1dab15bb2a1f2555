"""What a step's replies that think look like, in numbers: format, length of thoughts, steps by difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from stateset_agents.core.chat.replies.thoughts import num_steps, read_reasoned
from stateset_agents.evaluation.rescoring import rank_correlation
from stateset_agents.types.trajectory import Trajectory

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
    kept = [(trajectory, reasoned) for trajectory, reasoned in pairs if reasoned is not None]
    metrics = {"reasoning/format": len(kept) / len(played)}
    if not kept:
        return metrics
    metrics["reasoning/steps"] = fmean(num_steps(reasoned.thinking) for _, reasoned in kept)
    for verdict in (True, False):
        chosen = [reasoned for trajectory, reasoned in kept if _is_right(trajectory) is verdict]
        if chosen:
            words = "right" if verdict else "wrong"
            thinking = fmean(len(reasoned.thinking.split()) for reasoned in chosen)
            metrics[f"reasoning/thinking_words_{words}"] = thinking
            metrics[f"reasoning/answer_words_{words}"] = fmean(len(one.answer.split()) for one in chosen)
    known = [
        (num_steps(reasoned.thinking), float(trajectory.scenario.context["difficulty"]))
        for trajectory, reasoned in kept
        if _is_right(trajectory) and isinstance(trajectory.scenario.context.get("difficulty"), int | float)
    ]
    if len(known) < _MIN_RELATED:
        return metrics
    related = rank_correlation([steps for steps, _ in known], [difficulty for _, difficulty in known])
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
