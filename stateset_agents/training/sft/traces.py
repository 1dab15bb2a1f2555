"""A teacher's replies that a verifier found right, as lines of a file that `sft` reads.

Rejection sampling, as DeepSeek-R1's third stage has it (https://arxiv.org/abs/2501.12948, section 2.3.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

from stateset_agents.core.chat.replies.thoughts import Reasoned, read_reasoned
from stateset_agents.evaluation.demonstrations import chat_of
from stateset_agents.tracking.jsonl import dump
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Status, Trajectory


class Trace(TypedDict):
    """One verified reply of a teacher: a line of the file."""

    id: str
    family: str
    messages: list[dict[str, Any]]
    """The whole conversation, in OpenAI's format with `reasoning`; what `sft` reads."""
    tools: NotRequired[list[dict[str, Any]]]
    success: NotRequired[bool]
    prompt: str
    """The user's last message before the reply."""
    thinking: str
    answer: str
    full_response: str
    """Thought and words, in tags."""
    reward: float | None
    """None where nothing verified it."""
    teacher: Mapping[str, Any]
    """Identity of the model: its name, its weights' fingerprint or its endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Counts of a teacher's conversations by their outcome; each counts once."""

    asked: int = 0
    kept: int = 0
    failed: int = 0
    """Broken off, or not answered."""
    cut: int = 0
    """The last reply was cut by max_new_tokens or the context."""
    unscored: int = 0
    """The verifier said nothing of it."""
    wrong: int = 0
    unformatted: int = 0
    """Right, and not in the format."""
    repeated: int = 0
    """Right, and word by word another one of the same prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """The verified replies of a teacher."""

    kept: tuple[Trace, ...]
    counts: Counts
    format: float
    """Share of its conversations that ended in the format, whatever they answered."""
    teacher: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.kept)

    def __iter__(self) -> Iterator[Trace]:
        return iter(self.kept)

    def __getitem__(self, index: int) -> Trace:
        return self.kept[index]

    def summary(self) -> dict[str, Any]:
        """The entries of `summary.json`."""
        return {"teacher": dict(self.teacher), **asdict(self.counts), "format": self.format}


def write_traces(traces: Iterable[Mapping[str, Any]], path: str | Path) -> None:
    """A file for `sft`, a trace a line. Raises ConfigurationError where it cannot be written."""
    lines = map(dump, traces)
    try:
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot write traces to {str(path)!r}: {error.strerror}") from error


def verified_traces(
    played: Iterable[tuple[Trajectory, tuple[Mapping[str, Any], ...]]],
    *,
    teacher: Mapping[str, Any],
    min_reward: float | None = 1.0,
    in_format: bool = True,
) -> Traces:
    """Keep what earned `min_reward`, was not judged a failure, ended by itself and, with `in_format`, is one
    thought and one answer.

    `played`: scored conversations, each with the tools that it was offered. `min_reward` None: nothing
    verifies them, and rewards are not asked.

    Raises ConfigurationError where none is left.
    """
    numbers = dict.fromkeys(asdict(Counts()), 0)
    rows: list[Trace] = []
    replies: set[tuple[str, str]] = set()
    num_formatted = 0
    for trajectory, tools in played:
        numbers["asked"] += 1
        reply = trajectory.replies[-1] if trajectory.replies else Message(role="assistant", content="")
        reasoned = read_reasoned(reply)
        num_formatted += reasoned is not None
        why = _why_not(trajectory, min_reward, reasoned if in_format else True)
        if why is None and (key := (trajectory.scenario.id, _as_text(reply))) in replies:
            why = "repeated"
        if why is not None:
            numbers[why] += 1
            continue
        replies.add(key)
        rows.append(_trace(trajectory, tools, reply, reasoned, teacher))
    counts = Counts(**{**numbers, "kept": len(rows)})
    if not rows:
        rest = ", ".join(f"{count} {name}" for name, count in numbers.items() if count and name != "asked")
        raise ConfigurationError(
            f"none of the teacher's {counts.asked} replies can be shown ({rest}): take a better teacher or "
            "easier prompts, or lower min_reward; in_format false takes replies without tags"
        )
    return Traces(kept=tuple(rows), counts=counts, format=num_formatted / counts.asked, teacher=dict(teacher))


def format_share(trajectories: Iterable[Trajectory]) -> float | None:
    """Share of conversations whose last reply is one thought and one answer; None where none was played."""
    played = [trajectory for trajectory in trajectories if trajectory.status is not Status.FAILED]
    matches = [
        trajectory
        for trajectory in played
        if trajectory.replies and read_reasoned(trajectory.replies[-1]) is not None
    ]
    return len(matches) / len(played) if played else None


def _why_not(trajectory: Trajectory, min_reward: float | None, formatted: object) -> str | None:
    """The field of `Counts` that it belongs to; None for one that is kept."""
    if trajectory.status is Status.FAILED or not trajectory.turns:
        return "failed"
    if trajectory.turns[-1].completion.finish_reason == "length":
        return "cut"
    if min_reward is not None and trajectory.reward is None:
        return "unscored"
    if min_reward is not None and (trajectory.success is False or (trajectory.reward or 0.0) < min_reward):
        return "wrong"
    return "unformatted" if formatted is None else None


def _trace(
    trajectory: Trajectory,
    tools: tuple[Mapping[str, Any], ...],
    reply: Message,
    reasoned: Reasoned | None,
    teacher: Mapping[str, Any],
) -> Trace:
    questions = [message.content for message in trajectory.messages if message.role == "user"]
    trace: Any = {
        **chat_of(trajectory, tools),
        "prompt": questions[-1] if questions else "",
        "thinking": (reply.reasoning or "") if reasoned is None else reasoned.thinking,
        "answer": reply.content if reasoned is None else reasoned.answer,
        "full_response": _as_text(reply),
        "reward": trajectory.reward,
        "teacher": dict(teacher),
    }
    return cast(Trace, trace)


def _as_text(reply: Message) -> str:
    if reply.reasoning is None:
        return reply.content
    return f"<think>{reply.reasoning}</think>{reply.content}"
