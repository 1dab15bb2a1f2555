"""What a checkpoint and the run that goes on from it have in common, and processes that train together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateset_agents.types.errors import CheckpointError, ConfigurationError

__all__ = ["Compatibility", "Identity", "plain", "refuse_different"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a checkpoint and the run that goes on from it have in common."""

    base: str
    """Fingerprint of the weights at the start."""
    scenarios: str
    """Fingerprint of the train scenarios."""
    settings: Mapping[str, Any]
    """{"training": {"beta": 0.1, ...}, "agent": {...}, ...}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compatibility:
    """Which settings may differ between a checkpoint and the run that goes on from it, by dotted names."""

    may_differ: frozenset[str]
    """How long a run is, what it writes, where it runs; the weights themselves say which model it is."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """{"training": {...}, ...}: what stands for a setting that an older version did not know, for what that
    version did is today's default."""
    processes: str = "training.num_processes"
    """How many processes train together."""
    step_size: tuple[str, ...] = ()
    """Whose product, times the processes, is a step's episodes; the first can make up for the processes."""

    def check(self, path: Path, then: Mapping[str, Any], now: Identity) -> None:
        """Raises CheckpointError naming what differs in `then`, the identity of the run at `path`."""
        was, is_now = _flat(then["settings"]), _flat(plain(now.settings))
        was = {**{name: value for name, value in _flat(self.defaults).items() if name in is_now}, **was}
        may_differ = self.may_differ | self._divided_otherwise(was, is_now)
        differing = [
            f"{name} was {was.get(name)!r:.60} and is {is_now.get(name)!r:.60}"
            for name in sorted(was.keys() | is_now.keys())
            if name not in may_differ and was.get(name) != is_now.get(name)
        ]
        if differing:
            raise CheckpointError(
                f"{path} is from other settings ({', '.join(differing)}): resume with the same ones"
                + self._same_steps(was, is_now)
            )
        if then["base"] != now.base:
            raise CheckpointError(
                f"{path} was trained from other weights than the model holds now: resume with the model it "
                "started from"
            )
        if then["scenarios"] != now.scenarios:
            raise CheckpointError(
                f"{path} was trained on other scenarios than there are now: bring those back, or train anew"
            )

    def _divided_otherwise(self, was: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
        """The settings that may differ where another number of processes makes steps of as many episodes."""
        factors = (self.processes, *self.step_size)
        sizes = [math.prod(settings.get(name) or 1 for name in factors) for settings in (was, now)]
        other = was.get(self.processes) != now.get(self.processes)
        return set(factors) if other and sizes[0] == sizes[1] else set()

    def _same_steps(self, was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
        """How a step has as many episodes as before with another number of processes, where it can."""
        if was.get(self.processes) == now.get(self.processes) or not self.step_size:
            return ""
        factors, batch = (self.processes, *self.step_size), self.step_size[0]
        episodes = math.prod(was.get(name) or 1 for name in factors)
        others = math.prod(now.get(name) or 1 for name in factors if name != batch)
        if episodes % others:
            return ""
        return f", or with --set {batch}={episodes // others}, so that a step has as many episodes"


def refuse_different(identities: Sequence[Identity]) -> None:
    """Raises ConfigurationError where processes that are to train together have not the same before them."""
    first = identities[0]
    was = _flat(plain(first.settings))
    for rank, other in enumerate(identities):
        now = _flat(plain(other.settings))
        differing = [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
        differing += ["the model's weights"] * (other.base != first.base)
        differing += ["the scenarios"] * (other.scenarios != first.scenarios)
        if differing:
            raise ConfigurationError(
                f"process {rank} differs from process 0 in {', '.join(differing)}: start all with the same"
            )


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    values: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return values


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"training": {"beta": 1, "lora": {"rank": 8}}} -> {"training.beta": 1, "training.lora.rank": 8}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat
