"""Answers to customers, gaming and honest, as `create_customer_service_reward` must tell them apart.

They stand in customer_service_answers.yaml: questions with their facts, then groups of answers, each by kind.
tests/unit/core/scoring/test_customer_service_answers.py scores each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from builders import trajectory

from stateset_agents.types.trajectory import Trajectory

__all__ = ["GROUPS", "Answer", "conversation"]

THEN = ("Could you tell me more, please?", "Anything else that I should know?", "And now?")
"""What the user says after a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An agent's replies to a question."""

    kind: str
    question: Mapping[str, Any]
    """What the user `asks`, the scenario's `family`, and what else its context holds."""
    replies: Sequence[str]
    success: bool | None = None
    """The environment's verdict."""
    missed: bool = False
    """Is it known to be misjudged?"""


def conversation(answer: Answer) -> Trajectory:
    """The question, the replies, and what the user says between them."""
    context = dict(answer.question)
    heard = [context.pop("asks"), *(THEN * len(answer.replies))]
    family = context.pop("family")
    context["expected_facts"] = context.pop("facts")
    spoken = [text for pair in zip(heard, answer.replies, strict=False) for text in pair]
    return trajectory(*spoken, family=family, context=context, success=answer.success)


def _groups() -> dict[str, list[Answer]]:
    path = Path(__file__).with_suffix(".yaml")
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))
    questions = groups.pop("questions")
    return {
        group: [_answer(kind, dict(row), questions) for kind, rows in kinds.items() for row in rows]
        for group, kinds in groups.items()
    }


def _answer(kind: str, row: dict[str, Any], questions: Mapping[str, Any]) -> Answer:
    success, missed = row.pop("success", None), row.pop("missed", False)
    [(question, replies)] = row.items()
    replies = (replies,) if isinstance(replies, str) else tuple(replies)
    return Answer(kind=kind, question=questions[question], replies=replies, success=success, missed=missed)


GROUPS: Mapping[str, Sequence[Answer]] = _groups()
"""`named`: gaming answers that a reviewer found; `gaming`, `honest`, `development`: written before the reward
was mended, as `..._development_2` was the second time; the others: hold-outs and estimates, written while it
was not being changed. Answers with `missed` are still misjudged."""
