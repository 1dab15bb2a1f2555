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
from stateset_agents.tracking.jsonl import (
    SCHEMA_VERSION,
    GrowingFile,
    damage_named,
    dump,
    read_json,
    read_lines,
)
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.windows import Window
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, finite_json

_STAGE = re.compile(rb'\{"step":-?\d+,"stage":"(\w+)",')
"""The beginning of a line of rollouts.jsonl as the tracker writes it."""
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rb'\{"step":(-?\d+),"stage":(%s),"group":(%s),"weight":[^,]+,"branch_of":(null|\[\d+,\d+\]),'
    rb'"scenario":(%s),"family":(%s),' % (_TEXT, _TEXT, _TEXT, _TEXT)
)
"""The first fields of such a line."""
_RESULT = re.compile(
    rb'"status":("\w+"),"error":(?:null|%s),"success":(true|false|null),'
    rb'"reward":(null|-?[\d.eE+-]+),"breakdown":' % _TEXT
)
"""The fields behind them that say how the conversation ended."""


@dataclass(frozen=True, slots=True)
class MetricLine:
    """A line of metrics.jsonl."""

    step: int
    time: float
    """Seconds since the epoch when it was written."""
    values: Mapping[str, float]
    """NaN where the number was not finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """The numbers of messages and tokens of one turn, its rewards and its place."""

    prompt_tokens: int
    sampled_tokens: int
    feedback: int
    """Messages that answered the agent's."""
    finish_reason: str
    reward: float | None
    """The environment's own."""
    breakdown: Mapping[str, float] = field(default_factory=dict)
    """The parts of `reward`; empty where the environment did not name them."""
    earned: float | None = None
    """The turn's part of the conversation's reward; None while unscored."""
    follows: int | None = -1
    """The turn whose tokens stand before its own: its index, -1 for the turn before this one, None where this
    turn opens a row."""
    is_summary: bool = False
    """True if the agent wrote the turn for itself."""
    constraint: Mapping[str, Any] | None = None
    """The grammar's kind and digest, whose text is in events.jsonl, and the reply's limit; None: a free
    one."""
    forced: int = 0
    """Sampled tokens that do not train; see `Completion.forced`."""
    sampling_mask: Mapping[str, Sequence[int]] | None = None
    """What top-k and top-p kept: `token_ids`, and `counts` for each token; None: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """A conversation as it was recorded (see `tracker.rollout_record`)."""

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
    """The number of `messages` before the agent's first."""
    messages: tuple[Message, ...]
    """All messages, the agent's summaries for itself included."""
    turns: tuple[RecordedTurn, ...]
    token_ids: tuple[int, ...]  # [T] every turn's prompt and completion, behind one another
    mask: tuple[int, ...]  # [T]
    logprobs: tuple[float, ...]  # [T]
    versions: tuple[int, ...]  # [T]
    advantages: tuple[float, ...] | None
    """[sampled tokens]; None where the conversation did not train."""
    old_logprobs: tuple[float, ...] | None = None
    """[sampled tokens] under the policy that the ratio was to; None where not recorded."""
    learner_logprobs: tuple[float, ...] | None = None
    """[sampled tokens] under the learner before the last pass over the batch."""
    metadata: Mapping[str, Any]
    branch_of: tuple[int, int] | None = None
    """The member that a branch leaves, and the turn (from 0) at which; None for other conversations."""


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
        return _versioned(self.folder.config, read_yaml)

    def summary(self) -> dict[str, Any]:
        """The result of the run, without the file's schema version; empty until it has ended."""
        return _versioned(self.folder.summary, read_json)

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
        """Conversations as JSON has them, branches included; lines of other stages are not parsed."""

        def is_wanted(line: bytes) -> bool:
            stage = _STAGE.match(line)
            return stage is None or not stages or stage[1].decode() in stages

        for record in _records(self.folder.rollouts, is_wanted):
            if not stages or record["stage"] in stages:
                yield record

    def episodes(self, *stages: str) -> Iterator[dict[str, Any]]:
        """Episodes of a numeric training, in the order written (see `JsonlTracker.log_episodes`).

        All stages count when none is named."""
        for record in _records(self.folder.episodes):
            if not stages or record["stage"] in stages:
                yield record

    def windows(self) -> list[Window]:
        """Held-out episodes over time, of a numeric training that was measured."""
        data = _versioned(self.folder.windows, read_json)
        return [Window.from_json(record) for record in data["windows"]] if data else []

    def tokens(self) -> dict[int, str]:
        """The text of each token id; empty where the run's tokenizer was not at hand."""
        return {record["id"]: record["text"] for record in _records(self.folder.tokens)}

    def events(self) -> Iterator[dict[str, Any]]:
        """Records such as `{"event": "checkpoint saved", "time": "2026-01-31T12:00:00+00:00"}`."""
        return _records(self.folder.events)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """A line of rollouts.jsonl by the fields that say which conversation it is and how it ended."""

    offset: int
    """The byte at which the line begins."""
    line: bytes
    step: int
    stage: str
    group: str
    branch_of: Sequence[int] | None
    scenario: str
    family: str
    status: str
    success: bool | None
    reward: float | None
    rest: bytes
    """The line behind these fields, as the tracker writes it: turns, tokens and metadata."""


_SUMMARY_FIELDS = ("step", "stage", "group", "branch_of", "scenario", "family", "status", "success", "reward")


class RolloutLines(GrowingFile):
    """rollouts.jsonl while it grows, line by line; a line that the tracker wrote is not parsed."""

    def new_summaries(self) -> Iterator[RolloutSummary]:
        """The lines that were appended since the last call. Raises as `new_lines` does."""
        for offset, line in self.new_lines():
            head, result = _HEAD.match(line), _RESULT.search(line)
            if head and result and b"\0" not in line:  # which a torn write leaves within a line
                values = map(finite_json, (*head.groups(), *result.groups()))
                fields = dict(zip(_SUMMARY_FIELDS, values, strict=True))
                rest = line[result.end() :]
            else:  # another program wrote the line, or it is damaged
                record = {"branch_of": None, **self.parse(line, offset)}
                fields = {name: record.pop(name) for name in _SUMMARY_FIELDS}
                rest = dump({"turns": record["turns"], "metadata": record.get("metadata")}).encode()
            yield RolloutSummary(offset=offset, line=line, rest=rest, **fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """The results of one evaluation, by scenario; tries of one scenario are taken together."""

    success: Mapping[str, float]
    """Scenario -> share of its judged tries that succeeded."""
    reward: Mapping[str, float]
    """Scenario -> mean reward of its scored tries; of a numeric run start -> return."""


def held_out_results(log: RunLog) -> tuple[HeldOut, HeldOut]:
    """The results before and after training, without failed conversations and branches."""
    if log.folder.episodes.exists():
        before, after = (
            HeldOut(success={}, reward={str(seed): value for seed, value in returns.items()})
            for returns in held_out_returns(log.episodes("before", "after"))
        )
        return before, after
    records: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    for record in log.records("before", "after"):
        if record["status"] != "failed" and not record.get("branch_of"):
            records[record["stage"]].append(record)
    before, after = (
        HeldOut(success=_means(side, "success"), reward=_means(side, "reward")) for side in records.values()
    )
    return before, after


def _means(records: Iterable[Mapping[str, Any]], field: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for record in records:
        if record[field] is not None:
            values.setdefault(str(record["scenario"]), []).append(float(record[field]))
    return {name: fmean(scores) for name, scores in values.items()}


def held_out_gains(log: RunLog) -> list[float]:
    """The held-out results after training less those before it, scenario by scenario: shares of successful
    tries, mean rewards where the environment gives no verdict, returns of a numeric run; empty where they
    were not both kept."""
    before, after = held_out_results(log)
    for old, new in ((before.success, after.success), (before.reward, after.reward)):
        if gains := [value - old[name] for name, value in new.items() if name in old]:
            return gains
    return []


def held_out_returns(episodes: Iterable[Mapping[str, Any]]) -> tuple[dict[int, float], dict[int, float]]:
    """The held-out returns of a numeric run before and after training, by start; the last ones of a run that
    was made longer."""
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
    if not file.exists():  # as conversations of a numeric training, or a file that is new in this version
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


def _versioned(file: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    """The fields of a whole file without its schema version; empty where there is no such file."""
    if not file.exists():
        return {}
    data = read(file)
    if not isinstance(data, dict):
        raise ConfigurationError(f"{file} holds no fields, but {data!r:.50}: remove it")
    version = data.pop("schema_version", None)
    if version != SCHEMA_VERSION:
        raise ConfigurationError(
            f"{file} has schema version {version!r} and this program reads {SCHEMA_VERSION}: "
            "use the stateset-agents that wrote it"
        )
    return data


# Settings of runs side by side: flat, and those that differ. For `compare` and the page of many runs.

_IDENTITY = frozenset({"training.run_name", "training.output_dir"})
"""Settings that say which run it is, not what it does."""


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`training.seed`, `0` and so on, in the file's order."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Setting -> its value in each config, where not all agree; None where one does not have it.

    >>> differing_settings([{"training": {"beta": 0.1}}, {"training": {"beta": 0.0, "seed": 1}}])
    {'training.beta': ['0.1', '0.0'], 'training.seed': [None, '1']}
    """
    flat = [dict(flat_settings(config)) for config in configs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    values = {name: [settings.get(name) for settings in flat] for name in names}
    return {name: column for name, column in values.items() if len(set(column)) > 1}


def is_identity(name: str) -> bool:
    """True if the setting only says which run it is: a seed, its name, its folder.

    Runs that differ in nothing else are the same experiment.
    """
    return name in _IDENTITY or name.rpartition(".")[2] == "seed"
