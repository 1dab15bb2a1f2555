"""Conversations of an evaluation, kept in a file as they end, so that a second call plays only the others.

    {"schema_version": 1, "file": "measured.conversations"}
    {"identity": {"model": "m", "url": "http://...", "seed": 0, "temperature": 1.0, ...}}
    {"conversation": {...}, "spent": {"num_requests": 4, "prompt_tokens": 812, ...}}
    {"spent": {...}}

A conversation is what rollouts.jsonl has of it, unscored: rewards are asked again. `spent` is what the
endpoint was asked for since the line before, for this conversation and others under way.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from stateset_agents.core.rollout.endpoint_agent import Usage
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.jsonl import JsonlWriter, dump, read_lines
from stateset_agents.tracking.run_folder import RunLock
from stateset_agents.tracking.run_log import read_rollout
from stateset_agents.tracking.tracker import rollout_record
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

_PLACE = {"step": 0, "stage": "evaluation", "group": "", "weight": 1.0, "advantages": None}
"""Fields that a line of a run has besides the conversation."""


class KeptConversations:
    """The file of one evaluation; close it, or use it as a context manager.

        with KeptConversations("measured.conversations.jsonl", usage=lambda: agent.usage) as kept:
            result = await evaluate(agent, environment, reward, scenarios, kept=kept)

    Conversations that failed are not kept: the next call plays them again.
    """

    def __init__(
        self,
        file: str | Path,
        *,
        identity: Mapping[str, Any] | None = None,
        usage: Callable[[], Usage] = Usage,
    ) -> None:
        """`identity`: what else the conversations depend on, such as the environment's settings.
        `usage`: what the agent's endpoint was asked for so far.

        Raises ConfigurationError for a file that cannot be written, that another process is writing, or that
        holds something else.
        """
        self.path = Path(file)
        self.num_found = 0
        """Conversations of earlier calls that this one took."""
        self.num_added = 0
        self._identity: dict[str, Any] = _plain(identity or {})
        self._usage = usage
        self._start = self._written = usage()
        self._spent_before = Usage()
        self._known: dict[tuple[str, int, int], dict[str, Any]] = {}
        self._first: dict[str, Any] | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"cannot make the folder of {self.path}: {error.strerror}; choose another file"
            ) from error
        self._lock = RunLock(self.path.parent, f".{self.path.name}.lock", writer="evaluation")
        try:
            if self.path.is_file():
                self._read()
            self._writer = JsonlWriter(self.path)
        except BaseException:
            self._lock.release()
            raise

    @property
    def spent(self) -> Usage:
        """Usage of all calls that wrote the file, conversations that did not end included."""
        return self._spent_before + self._usage() - self._start

    def __len__(self) -> int:
        return len(self._known)

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Declare what is to be played, besides what was given before; `evaluate` calls it.

        Raises ConfigurationError where the file holds conversations of something else.
        """
        identity_now = {**self._identity, **_plain(identity)}
        if self._first is None or (self._first != identity_now and not (self._known or self.num_added)):
            self._writer.write([{"identity": identity_now}])
            self._first = identity_now
            return
        for name in dict.fromkeys([*identity_now, *self._first]):
            before, now = self._first.get(name), identity_now.get(name)
            if before != now:
                raise ConfigurationError(
                    f"{self.path} holds conversations with {name} {before!r:.80}, and this evaluation has "
                    f"{now!r:.80}: give another file, or remove it"
                )

    def find(self, scenario: Scenario, *, seed: int, member: int) -> Trajectory | None:
        """The conversation of an earlier call, unscored; None where it is to be played.

        Raises ConfigurationError where the scenario has changed since.
        """
        record = self._known.get((scenario.id, seed, member))
        if record is None:
            return None
        trajectory = trajectory_of(read_rollout(_PLACE | dict(record)))
        old = trajectory.scenario
        asks = (scenario.family, scenario.opening, scenario.prompt, scenario.tools)
        is_same = (old.family, old.opening, old.prompt, old.tools) == asks
        if not is_same or dict(old.context) != _plain(scenario.context):
            raise ConfigurationError(
                f"{self.path} has scenario {scenario.id}, changed since: give another file, or remove it"
            )
        self.num_found += 1
        outcome = trajectory.outcome and replace(trajectory.outcome, metadata=trajectory.metadata)
        return replace(trajectory, scenario=scenario, outcome=outcome)

    def add(self, trajectory: Trajectory) -> None:
        """Write a conversation; it stands in the file when this returns."""
        self.num_added += 1
        self._write({"conversation": rollout_record(trajectory)})

    def close(self) -> None:
        """Write what was spent since the last conversation."""
        try:
            if self._usage() != self._written:
                self._write({})
        finally:
            self._writer.close()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        now = self._usage()
        self._writer.write([{**record, "spent": asdict(now - self._written)}])
        self._written = now

    def _read(self) -> None:
        for number, (_, record) in enumerate(read_lines(self.path)):
            with contextlib.suppress(KeyError, TypeError, AttributeError):
                if number == 1 or "identity" in record:
                    self._first = dict(record["identity"])
                if number > 0 and "spent" in record:
                    self._spent_before += Usage(**record["spent"])
                if number > 0 and "conversation" in record:
                    played = record["conversation"]
                    self._known[played["scenario"], played["seed"], played["member"]] = played
                continue
            raise ConfigurationError(
                f"{self.path}, line {number + 1}: no conversation of an evaluation: give another file"
            )


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """The value as the file has it."""
    plain: dict[str, Any] = json.loads(dump(dict(value)))
    return plain
