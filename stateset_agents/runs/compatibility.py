"""Compares a checkpoint with the run that goes on from it, and processes that train together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateset_agents.types.errors import CheckpointError, ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The properties that a checkpoint shares with the run that goes on from it."""

    base: str
    """Fingerprint of the weights at the start."""
    scenarios: str
    """Fingerprint of the train scenarios."""
    settings: Mapping[str, Any]
    """{"training": {"beta": 0.1, ...}, "agent": {...}, ...}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compatibility:
    """The settings that may differ between a checkpoint and the run that goes on from it, by dotted names."""

    may_differ: frozenset[str]
    """Settings of a run's length, output and machine; the model is compared by its weights."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """{"training": {...}, ...}: the value of a setting that an older version did not have, for what that
    version did is today's default."""
    processes: str = "training.num_processes"
    """Name of the setting that counts the processes."""
    step_size: tuple[str, ...] = ()
    """Settings whose product, times the processes, is a step's episodes; the first can make up for the
    processes."""

    def check(self, path: Path, saved: Mapping[str, Any], run: Identity) -> None:
        """Raises CheckpointError naming what differs in `saved`, the identity of the checkpoint at `path`."""
        old, new = _flatten(saved["settings"]), _flatten(as_json(run.settings))
        old = {**{name: value for name, value in _flatten(self.defaults).items() if name in new}, **old}
        may_differ = self.may_differ | self._divided_otherwise(old, new)
        differing = [
            f"{name} was {old.get(name)!r:.60} and is {new.get(name)!r:.60}"
            for name in _differing(old, new)
            if name not in may_differ
        ]
        if differing:
            raise CheckpointError(
                f"{path} is from other settings ({', '.join(differing)}): resume with the same ones"
                + self._same_steps(old, new)
            )
        if saved["base"] != run.base:
            raise CheckpointError(
                f"{path} was trained from other weights than the model's: resume with the one it started from"
            )
        if saved["scenarios"] != run.scenarios:
            raise CheckpointError(
                f"{path} was trained on other scenarios than there are now: bring those back, or train anew"
            )

    def _divided_otherwise(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
        """The settings that may differ where another number of processes makes steps of as many episodes."""
        factors = (self.processes, *self.step_size)
        differs = old.get(self.processes) != new.get(self.processes)
        return set(factors) if differs and _product(old, factors) == _product(new, factors) else set()

    def _same_steps(self, old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
        """Advice that keeps a step's number of episodes with another number of processes, if any."""
        if old.get(self.processes) == new.get(self.processes) or not self.step_size:
            return ""
        batch, *others = self.step_size
        episodes = _product(old, (self.processes, *self.step_size))
        fixed = _product(new, (self.processes, *others))
        if episodes % fixed:
            return ""
        return f", or with --set {batch}={episodes // fixed}, so that a step has as many episodes"


def check_identical(identities: Sequence[Identity]) -> None:
    """Raises ConfigurationError where processes that train together have other settings or weights."""
    first = identities[0]
    for rank, identity in enumerate(identities):
        differing = _differing(_flatten(as_json(first.settings)), _flatten(as_json(identity.settings)))
        differing += ["the model's weights"] * (identity.base != first.base)
        differing += ["the scenarios"] * (identity.scenarios != first.scenarios)
        if differing:
            raise ConfigurationError(
                f"process {rank} differs from process 0 in {', '.join(differing)}: start all with the same"
            )


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The values that JSON gives back: lists for tuples, text for what it does not know."""
    values: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return values


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]


def _product(settings: Mapping[str, Any], names: Sequence[str]) -> int:
    return math.prod(settings.get(name) or 1 for name in names)


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"training": {"beta": 1, "lora": {"rank": 8}}} -> {"training.beta": 1, "training.lora.rank": 8}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        flat |= _flatten(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return flat
