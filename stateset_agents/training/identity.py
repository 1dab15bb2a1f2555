"""What a checkpoint and the run that goes on from it have in common, and processes that train together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.errors import CheckpointError, ConfigurationError
from stateset_agents.training.config import TrainingConfig

__all__ = ["MAY_DIFFER", "Identity", "plain", "refuse_different"]

MAY_DIFFER = frozenset(
    {
        "agent.model_name",
        "agent.device",
        "agent.temperature",
        "agent.seed",
        "training.max_steps",
        "training.parallelism",
        "training.num_episodes",
        "training.output_dir",
        "training.run_name",
        "training.rollout_sleep",
        "training.save_steps",
        "training.save_total_limit",
        "training.eval_steps",
        "training.eval_episodes",
        "training.early_stopping_patience",
        "training.early_stopping_threshold",
        "training.max_failed_steps",
        "training.load_best_at_end",
        "training.log_rollouts",
        "training.progress",
        "training.report_to",
        "training.turn_timeout",
        "training.reward_timeout",
        "training.episode_retries",
        "training.turn_retries",
        "training.reward_retries",
        "training.retry_backoff",
        "training.breaker_failures",
        "training.breaker_pause",
        "training.outage_patience",
        "training.episode_timeout",
    }
)
"""How long a run is, what it writes, where it runs; the weights themselves say which model it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a checkpoint and the run that goes on from it have in common."""

    base: str
    """Fingerprint of the weights at the start."""
    scenarios: str
    """Fingerprint of the train scenarios."""
    settings: Mapping[str, Any]
    """{"training": {"beta": 0.1, ...}, "agent": {...}, ...}."""

    def refuse_other(self, path: Path, then: Mapping[str, Any]) -> None:
        """Raises CheckpointError naming what differs in `then`, the identity of the run at `path`."""
        was, now = _flat(then["settings"]), _flat(plain(self.settings))
        was = {**{name: value for name, value in _defaults().items() if name in now}, **was}
        differing = [
            f"{name} was {was.get(name)!r:.60} and is {now.get(name)!r:.60}"
            for name in sorted(was.keys() | now.keys())
            if name not in MAY_DIFFER | _divided_otherwise(was, now) and was.get(name) != now.get(name)
        ]
        if differing:
            raise CheckpointError(
                f"{path} is from other settings ({', '.join(differing)}): resume with the same ones"
                + _same_steps(was, now)
            )
        if then["base"] != self.base:
            raise CheckpointError(
                f"{path} was trained from other weights than the model holds now: resume with the model it "
                "started from"
            )
        if then["scenarios"] != self.scenarios:
            raise CheckpointError(
                f"{path} was trained on other scenarios than there are now: bring those back, or train anew"
            )


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


_PER_STEP = tuple(
    f"training.{name}"
    for name in ("num_processes", "per_device_train_batch_size", "gradient_accumulation_steps")
)
"""Whose product is a step's episodes."""


def _divided_otherwise(was: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """The settings that may differ where another number of processes makes steps of as many episodes."""
    sizes = [math.prod(settings.get(name) or 1 for name in _PER_STEP) for settings in (was, now)]
    other = was.get(_PER_STEP[0]) != now.get(_PER_STEP[0])
    return set(_PER_STEP) if other and sizes[0] == sizes[1] else set()


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON gives it back."""
    values: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return values


def _defaults() -> dict[str, Any]:
    """What stands for a setting that an older version did not know: what that did is today's default."""
    sections: dict[str, Any] = {"agent": AgentConfig(model_name="any"), "training": TrainingConfig()}
    return _flat({name: section.model_dump(mode="json") for name, section in sections.items()})


def _same_steps(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """How a step has as many episodes as before with another number of processes, where it can."""
    processes, batch, _ = _PER_STEP
    episodes = math.prod(was.get(name) or 1 for name in _PER_STEP)
    others = math.prod(now.get(name) or 1 for name in _PER_STEP if name != batch)
    if was.get(processes) == now.get(processes) or episodes % others:
        return ""
    return f", or with --set {batch}={episodes // others}, so that a step has as many episodes"


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"training": {"beta": 1, "lora": {"rank": 8}}} -> {"training.beta": 1, "training.lora.rank": 8}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return flat
