"""Reads a run folder back as typed values: for reports, for scoring again, for your own plots."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.tracking.jsonl import SCHEMA_VERSION, damage_named, read_json, read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.windows import Window
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message

_STAGE = re.compile(rb'\{"step":-?\d+,"stage":"(\w+)",')
"""How the tracker begins a line of rollouts.jsonl."""


@dataclass(frozen=True, slots=True)
class MetricLine:
    """One line of metrics.jsonl."""

    step: int
    time: float
    """Seconds since the epoch when it was written."""
    values: Mapping[str, float]
    """NaN where the number was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """Whose the messages and tokens of one turn are."""

    prompt_tokens: int
    sampled_tokens: int
    feedback: int
    """Messages that answered the agent's."""
    finish_reason: str
    reward: float | None
    """The environment's own."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """What `reward` is made of; empty where the environment did not say."""
    earned: float | None = None
    """Its own part of the conversation's reward; None while unscored."""
    follows: int | None = -1
    """The turn whose tokens stand before its own: its index, -1 for the turn before this one, None where this
    turn opens a row."""
    is_summary: bool = False
    """Did the agent write it for itself?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """One conversation as it was recorded (see `tracker.rollout_record`)."""

    step: int
    stage: str
    """"train", "before", "after" or "validation"."""
    group: str
    weight: float
    scenario: str
    family: str
    split: str
    scenario_opening: str
    scenario_prompt: tuple[Message, ...] = ()
    scenario_tools: tuple[Mapping[str, Any], ...] | None = None
    context: Mapping[str, Any]
    member: int
    seed: int
    status: str
    error: str | None
    success: bool | None
    reward: float | None
    breakdown: Mapping[str, float]
    outcome: Mapping[str, Any] | None
    changes: tuple[Mapping[str, Any], ...]
    opening: int
    """How many of `messages` stand before the agent's first."""
    messages: tuple[Message, ...]
    """With the agent's summaries for itself."""
    turns: tuple[RecordedTurn, ...]
    token_ids: tuple[int, ...]  # [T] every turn's prompt and completion, behind one another
    mask: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T]
    versions: tuple[int, ...]  # [T]
    advantages: tuple[float, ...] | None
    """One per sampled token; None where the conversation did not train."""
    old_logprobs: tuple[float, ...] | None = None
    """One per sampled token, under the policy that the ratio was to; None where not recorded."""
    learner_logprobs: tuple[float, ...] | None = None
    """The same under the learner before the last pass over the batch."""
    metadata: Mapping[str, Any]
    branch_of: tuple[int, int] | None = None
    """For a branch, the member of its group and the turn (from 0) at which it leaves that one's turns."""


@dataclass(frozen=True, slots=True)
class RunLog:
    """A run on disk. A run that is still going on can be read too: a half-written line is left out."""

    folder: RunFolder

    @classmethod
    def open(cls, path: str | Path) -> RunLog:
        """Raises ConfigurationError when `path` is no run folder."""
        return cls(RunFolder.open(path))

    def config(self) -> dict[str, Any]:
        """The settings, without the file's schema version; empty where none were saved."""
        if not self.folder.config.exists():
            return {}
        return _versioned(self.folder.config, read_yaml(self.folder.config))

    def summary(self) -> dict[str, Any]:
        """How the run ended, without the file's schema version; empty while it has not."""
        if not self.folder.summary.exists():
            return {}
        return _versioned(self.folder.summary, read_json(self.folder.summary))

    def metrics(self) -> Iterator[MetricLine]:
        for record in _records(self.folder.metrics):
            with damage_named(self.folder.path):
                step, time = record.pop("step"), record.pop("time")
                values = {name: math.nan if value is None else 1.0 * value for name, value in record.items()}
                line = MetricLine(operator.index(step), 1.0 * time, values)
            yield line

    def rollouts(self, *stages: str, branches: bool = False) -> Iterator[RecordedRollout]:
        """Conversations in the order written; of all stages when none is named.

        `branches`: with the other ways on that were played from their turns, which train nothing and count
        in no reward or success.
        """
        for record in self.records(*stages):
            if branches or not record.get("branch_of"):
                with damage_named(self.folder.path):
                    rollout = read_rollout(record)
                yield rollout

    def records(self, *stages: str) -> Iterator[dict[str, Any]]:
        """The same as JSON has them, branches included; lines of other stages are not parsed."""

        def is_wanted(line: bytes) -> bool:
            stage = _STAGE.match(line)
            return stage is None or not stages or stage[1].decode() in stages

        for record in _records(self.folder.rollouts, is_wanted):
            if not stages or record.get("stage") in stages:
                yield record

    def episodes(self, *stages: str) -> Iterator[dict[str, Any]]:
        """Of a numeric training, in the order written (see `JsonlTracker.log_episodes`); of all stages when
        none is named."""
        for record in _records(self.folder.episodes):
            if not stages or record.get("stage") in stages:
                yield record

    def windows(self) -> list[Window]:
        """Of a numeric training that was measured: held-out episodes over time."""
        if not self.folder.windows.exists():
            return []
        records = _versioned(self.folder.windows, read_json(self.folder.windows))["windows"]
        return [Window.from_json(record) for record in records]

    def tokens(self) -> dict[int, str]:
        """What each token id of the conversations says; empty where the run's tokenizer was not at hand."""
        if not self.folder.tokens.exists():
            return {}
        return {record["id"]: record["text"] for record in _records(self.folder.tokens)}

    def events(self) -> Iterator[dict[str, Any]]:
        """Records such as `{"event": "checkpoint saved", "time": "2026-01-31T12:00:00+00:00"}`."""
        return _records(self.folder.events)


def held_out_gains(log: RunLog) -> list[float]:
    """The held-out results after training less those before it, scenario by scenario: shares of successful
    tries, mean rewards where the environment gives no verdict, returns of a numeric run; empty where they
    were not both kept."""
    if log.folder.episodes.exists():
        returns = held_out_returns(log.episodes("before", "after"))
        return [value - returns[0][seed] for seed, value in returns[1].items() if seed in returns[0]]
    tries: dict[str, dict[str, list[dict[str, Any]]]] = {"before": {}, "after": {}}
    for record in log.records("before", "after"):
        if record["status"] != "failed" and not record.get("branch_of"):
            tries[record["stage"]].setdefault(record["scenario"], []).append(record)
    return _gains(tries, "success") or _gains(tries, "reward")


def _gains(tries: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], field: str) -> list[float]:
    before, after = (
        {
            name: fmean(values)
            for name, records in side.items()
            if (values := [float(record[field]) for record in records if record[field] is not None])
        }
        for side in (tries["before"], tries["after"])
    )
    return [value - before[name] for name, value in after.items() if name in before]


def held_out_returns(episodes: Iterable[Mapping[str, Any]]) -> tuple[dict[int, float], dict[int, float]]:
    """Of a numeric run's episodes: the held-out returns before and after training, by start. Of a run that
    was made longer, the last ones."""
    returns: dict[str, dict[int, float]] = {"before": {}, "after": {}}
    steps: dict[str, int] = {}
    for episode in episodes:
        stage = episode["stage"]
        if steps.setdefault(stage, episode["step"]) != episode["step"]:
            steps[stage] = episode["step"]
            returns[stage].clear()
        if episode["return"] is not None:
            returns[stage][episode["seed"]] = episode["return"]
    return returns["before"], returns["after"]


def _records(file: Path, is_wanted: Callable[[bytes], bool] = lambda line: True) -> Iterator[dict[str, Any]]:
    if (
        not file.exists()
    ):  # conversations of a numeric training, or a file that an earlier version did not have
        return
    lines = read_lines(file, is_wanted)
    next(lines, None)  # the header
    for _, record in lines:
        yield record


def read_rollout(record: dict[str, Any]) -> RecordedRollout:
    """A line of rollouts.jsonl; takes the record over."""
    for name in ("token_ids", "mask", "logprobs", "versions", "changes"):
        record[name] = tuple(record[name])
    for name in ("advantages", "branch_of", "old_logprobs", "learner_logprobs"):
        if record.get(name) is not None:
            record[name] = tuple(record[name])
    record["turns"] = tuple(RecordedTurn(**turn) for turn in record["turns"])
    for name in ("messages", "scenario_prompt"):
        record[name] = tuple(map(Message.from_record, record.get(name, ())))
    if "scenario_tools" in record:
        record["scenario_tools"] = tuple(record["scenario_tools"])
    return RecordedRollout(**record)


def _versioned(file: Path, data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ConfigurationError(f"{file} holds no fields, but {data!r:.50}: remove it")
    version = data.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise ConfigurationError(
            f"{file} has schema version {version!r} and this program reads {SCHEMA_VERSION}: "
            "use the stateset-agents that wrote it"
        )
    return data
