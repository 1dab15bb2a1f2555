"""Writes a run's metrics, conversations or episodes, and events into its folder; for the trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from stateset_agents.runtime.machine import sync
from stateset_agents.tracking.jsonl import JsonlWriter
from stateset_agents.tracking.run_folder import RunFolder, RunLock
from stateset_agents.tracking.run_log import RunLog

if TYPE_CHECKING:
    from stateset_agents.types.trajectory import TokenLogprobs, Trajectory, TrajectoryGroup, Turn


Stage = Literal["train", "before", "after", "validation"]
"""The stage of a conversation: in training, or in an evaluation before, during or after it."""

_DECIMALS = 6
_MIN_PAUSE = 1e-4
"""Seconds of the shortest pause that becomes a span."""


class JsonlTracker:
    """Metrics, conversations and events of one run. Close it, or use it as a context manager.

    Raises ConfigurationError if another process is writing the run.
    """

    def __init__(self, folder: RunFolder, piece: Callable[[int], str] | None = None) -> None:
        """`piece`: the tokenizer's text of a token id; the texts are written for the readers of the run."""
        self.folder = folder
        self._lock = RunLock(folder.path)
        self._piece = piece
        self._tokens = JsonlWriter(folder.tokens) if piece is not None else None
        self._logged_tokens = set(RunLog(folder).tokens())
        self._logged_grammars = {
            event["digest"] for event in RunLog(folder).events() if event.get("event") == "grammar"
        }
        self._metrics = JsonlWriter(folder.metrics)
        self._events = JsonlWriter(folder.events)
        self._others: dict[Path, JsonlWriter] = {}
        """The writers of files that not every run has: conversations with their times, or episodes."""
        for file in (folder.rollouts, folder.timeline, folder.episodes):
            if file.exists():
                self._writer(file)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line of numbers; names are `stage/quantity`, as `reward/mean`. ValueError otherwise."""
        plain = [name for name in metrics if "/" not in name]
        if plain:
            raise ValueError(f"metric names are stage/quantity, such as reward/mean; got {', '.join(plain)}")
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.write([{"step": step, "time": round(time.time(), 3), **values}])

    def log_rollouts(
        self,
        step: int,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[Sequence[Sequence[float] | None]] | None = None,
        logprobs: Sequence[Sequence[TokenLogprobs | None]] | None = None,
        *,
        stage: Stage = "train",
    ) -> None:
        """Every conversation of `groups`, in order: each group's members, then its branches.

        `advantages[g][m]` holds one number per token that member m of group g sampled, or None where
        that member does not train; None for all where nothing trains (an evaluation). `logprobs[g][m]`: of
        the update, where it recorded them.
        """
        records, times = [], []
        for index, group in enumerate(groups):
            credits = [None] * len(group.trajectories) if advantages is None else advantages[index]
            scores = [None] * len(group.trajectories) if logprobs is None else logprobs[index]
            head = {"step": step, "stage": stage, "group": group.key, "weight": group.weight}
            rows: list[tuple[Trajectory, dict[str, Any], Sequence[int] | None]] = [
                (member, rollout_record(member, credit, recorded), None)
                for member, credit, recorded in zip(group.trajectories, credits, scores, strict=True)
            ]
            for branch in group.branches:
                other = branch.trajectory
                rows.append((other, rollout_record(other), (other.member, branch.turn)))
            for trajectory, record, branch_of in rows:
                records.append({**head, "branch_of": branch_of, **record})
                line = {"step": step, "group": group.key, "branch_of": branch_of}
                times.append({**line, **timeline_record(trajectory)})
        self._log_tokens(records)
        self._log_grammars(group.trajectories for group in groups)
        self._writer(self.folder.rollouts).write(records)
        if stage == "train":
            self._writer(self.folder.timeline).write(times)

    def log_episodes(
        self, step: int, episodes: Sequence[Mapping[str, Any]], *, stage: Stage = "train"
    ) -> None:
        """Every episode of a numeric rollout: group, member, seed, return, components, length, ended."""
        self._writer(self.folder.episodes).write(
            [{"step": step, "stage": stage, **episode} for episode in episodes]
        )

    def _writer(self, file: Path) -> JsonlWriter:
        """The writer of a file, opened when it is first needed."""
        if file not in self._others:
            self._others[file] = JsonlWriter(file)
        return self._others[file]

    def _log_tokens(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the texts of token ids that no conversation had before."""
        if self._tokens is None or self._piece is None:
            return
        new = {id for record in records for id in record["token_ids"]} - self._logged_tokens
        self._tokens.write([{"id": id, "text": self._piece(id)} for id in sorted(new)])
        self._logged_tokens |= new

    def _log_grammars(self, members: Iterable[Iterable[Trajectory]]) -> None:
        """Write the text of each grammar that no reply had before, for `constraint` of the rollouts."""
        for trajectory in chain.from_iterable(members):
            for constraint in {turn.completion.constraint for turn in trajectory.turns}:
                if constraint is not None and constraint.digest not in self._logged_grammars:
                    self._logged_grammars.add(constraint.digest)
                    self.log_event("grammar", digest=constraint.digest, **asdict(constraint))

    def log_event(self, name: str, **fields: Any) -> None:
        """Write one event, such as `log_event("checkpoint saved", step=20)`."""
        self._events.write([{"event": name, "time": datetime.now(UTC).isoformat(), **fields}])

    def sync(self) -> None:
        """Flush all lines and the folder to the disk: after a power cut no checkpoint lacks its logs.

        Raises ConfigurationError if the disk is full.
        """
        for writer in self._writers():
            writer.sync()
        for folder in (self.folder.path, self.folder.path.parent):
            sync(folder)

    def close(self) -> None:
        for writer in self._writers():
            writer.close()
        self._lock.release()

    def _writers(self) -> list[JsonlWriter]:
        writers = (self._metrics, *self._others.values(), self._events, self._tokens)
        return [writer for writer in writers if writer is not None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SilentTracker(JsonlTracker):
    """The tracker of a process that does not write the run: it discards everything."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def _discard(self, *_: Any, **__: Any) -> None:
        """Write nothing."""

    log_metrics = log_rollouts = log_episodes = log_event = sync = close = _discard


def rollout_record(
    trajectory: Trajectory,
    advantages: Sequence[float] | None = None,
    logprobs: TokenLogprobs | None = None,
) -> dict[str, Any]:
    """A conversation as one JSON object, with all that is needed to show it and to score it again.

    `messages` has the opening, then for each turn the agent's message and its feedback, summaries for itself
    included; `turns` says how many messages and tokens belong to each, and which turn it follows where that
    is not the one before it. `token_ids`, `mask`, `logprobs` and `versions` [T] have all turns behind one
    another; `advantages` is as long as the tokens sampled, and so are `old_logprobs` and `learner_logprobs`,
    which stand there only where they were recorded. Log-probs and advantages have six decimals.
    """
    scenario, outcome, row = trajectory.scenario, trajectory.outcome, trajectory.end_to_end
    record = scenario.to_record()
    messages = [message for turn in trajectory.turns for message in (turn.completion.message, *turn.feedback)]
    turns = [
        _turn_record(turn, reward) for turn, reward in zip_longest(trajectory.turns, trajectory.turn_rewards)
    ]
    line = {
        "scenario": scenario.id,
        "family": scenario.family,
        "split": scenario.split,
        "scenario_opening": scenario.opening,
        **{f"scenario_{name}": record[name] for name in ("prompt", "tools") if name in record},
        "context": dict(scenario.context),
        "member": trajectory.member,
        "seed": trajectory.seed,
        "status": trajectory.status.value,
        "error": trajectory.error,
        "success": trajectory.success,
        "reward": trajectory.reward,
        "breakdown": dict(trajectory.breakdown),
        "outcome": outcome
        and {"reward": outcome.reward, "success": outcome.success, "breakdown": dict(outcome.breakdown)},
        "changes": [dict(change) for change in outcome.changes] if outcome else [],
        "opening": len(trajectory.opening),
        "messages": [message.to_record() for message in (*trajectory.opening, *messages)],
        "turns": turns,
        "token_ids": row.token_ids,
        "mask": row.action_mask,
        "logprobs": [round(value, _DECIMALS) for value in row.logprobs],
        "versions": row.versions,
        "advantages": None if advantages is None else [round(value, _DECIMALS) for value in advantages],
        "metadata": dict(trajectory.metadata),
    }
    if logprobs is not None:
        line["old_logprobs"] = [round(value, _DECIMALS) for value in logprobs.old]
        line["learner_logprobs"] = [round(value, _DECIMALS) for value in logprobs.learner]
    return line


def timeline_record(trajectory: Trajectory) -> dict[str, Any]:
    """The beginning of a conversation, by the monotonic clock of events.jsonl, and what it did for how long.

    `spans` are [what, seconds] one after the other: `environment`, `waiting`, `model`, `reward` (see
    `types.trajectory.Span`) and `idle`, which waits for the other members of its group. Seconds have four
    decimals.
    """
    spans: list[list[Any]] = []
    last_end = begin = trajectory.spans[0].begin if trajectory.spans else 0.0
    for span in trajectory.spans:
        if span.begin - last_end > _MIN_PAUSE:
            spans.append(["idle", round(span.begin - last_end, 4)])
        spans.append([span.doing, round(span.end - span.begin, 4)])
        last_end = span.end
    return {"member": trajectory.member, "begin": round(begin, 4), "spans": spans}


def _turn_record(turn: Turn, turn_reward: float | None) -> dict[str, Any]:
    """`follows` and `is_summary` only where they say something: versions before them read the others."""
    record: dict[str, Any] = {
        "prompt_tokens": len(turn.prompt_ids),
        "sampled_tokens": len(turn.completion.token_ids),
        "feedback": len(turn.feedback),
        "finish_reason": turn.completion.finish_reason,
        "reward": turn.reward,
        "breakdown": dict(turn.breakdown),
        "earned": turn_reward,
    }
    if turn.follows != -1:
        record["follows"] = turn.follows
    if turn.is_summary:
        record["is_summary"] = True
    if (constraint := turn.completion.constraint) is not None:
        kept_to = {name: getattr(constraint, name) for name in ("kind", "digest", "limit", "raised")}
        record["constraint"] = kept_to
    if constraint is not None or turn.completion.forced:
        record["forced"] = sum(turn.completion.forced)
    if (mask := turn.completion.sampling_mask) is not None:
        record["sampling_mask"] = {"token_ids": mask.token_ids.tolist(), "counts": mask.counts.tolist()}
    return record
