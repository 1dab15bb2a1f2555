"""A whole run from one YAML file: evaluate, train, evaluate again, summary and report.

The command line's `train` and `evaluate` call this; in a program, use `MultiTurnGRPOTrainer` itself.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, field_validator

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment, Environment
from stateset_agents.core.reward import (
    EnvironmentReward,
    RewardFunction,
    create_customer_service_reward,
    create_helpful_reward,
    create_task_reward,
    create_tutoring_reward,
)
from stateset_agents.errors import ConfigurationError
from stateset_agents.evaluation.evaluator import Evaluation, evaluate, held_out
from stateset_agents.reporting.report import write_report
from stateset_agents.settings import Settings
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker, Stage
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer

__all__ = ["EvaluationConfig", "Experiment", "ExperimentConfig", "load_experiment", "measure"]


def _retail_desk(**options: Any) -> Environment:
    from stateset_agents.environments.retail_desk import RetailDesk

    return RetailDesk(**options)


ENVIRONMENTS: Mapping[str, Callable[..., Environment]] = {
    "retail_desk": _retail_desk,
    "conversation": ConversationEnvironment,
}
"""Environments by the name a YAML file gives them; the other keys of its section are arguments."""

REWARDS: Mapping[str, Callable[..., RewardFunction]] = {
    "environment": EnvironmentReward,
    "customer_service": create_customer_service_reward,
    "helpful": create_helpful_reward,
    "task": create_task_reward,
    "tutoring": create_tutoring_reward,
}
"""Reward functions by name."""


class EvaluationConfig(Settings):
    """The measurement before and after training."""

    split: str = Field(default="test", description="Held-out scenarios; training never sees them.")
    episodes: int | None = Field(default=None, ge=1, description="How many of them; all when unset.")
    seed: int = Field(default=0, ge=0, description="Of users and sampling; not the training seed.")
    max_concurrent: int = Field(default=64, ge=1, description="Conversations at once.")


class ExperimentConfig(Settings):
    """What a YAML file says: agent, environment, reward, training, evaluation."""

    agent: AgentConfig = AgentConfig()
    environment: Mapping[str, Any] = Field(
        description='`name` (or "package.module:Class") and its arguments.'
    )
    reward: str | Mapping[str, Any] = Field(
        default="environment", description="A name, or `name` and arguments."
    )
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig | None = Field(
        default=None, description="Unset: no measurement around training."
    )

    @field_validator("training", mode="before")
    @classmethod
    def _from_profile(cls, value: Any) -> Any:
        if isinstance(value, Mapping):
            rest = {name: setting for name, setting in value.items() if name != "profile"}
            return TrainingConfig.from_profile(value.get("profile", "balanced"), **rest)
        return value


def load_experiment(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Read a YAML file; `overrides` are dotted names, e.g. {"training.seed": 1}.

    Raises ConfigurationError naming the file and what is wrong in it.
    """
    path = Path(path)
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path} must hold sections such as agent, environment, training")
    data.pop("schema_version", None)
    for name, value in (overrides or {}).items():
        section, _, field = name.partition(".")
        if not field:
            data[section] = value
            continue
        if not isinstance(data.setdefault(section, {}), dict):
            data[section] = {"name": data[section]}
        data[section][field] = value
    try:
        return ExperimentConfig(**data)
    except ConfigurationError as error:
        raise ConfigurationError(f"{path}: {error}") from None


def _make(what: str, known: Mapping[str, Callable[..., Any]], spec: str | Mapping[str, Any]) -> Any:
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigurationError(f"{what} needs a name: one of {', '.join(known)}, or package.module:Class")
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            make = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"{what} {name!r} cannot be imported: {error}") from error
    elif name in known:
        make = known[name]
    else:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigurationError(f"{what} must be one of {', '.join(known)}, got {name!r}{hint}")
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigurationError(f"{what} {name!r} does not take these arguments: {error}") from error


async def measure(
    agent: MultiTurnAgent, environment: Environment, reward_fn: RewardFunction, config: EvaluationConfig
) -> tuple[dict[str, Any], Evaluation]:
    """Success sampled at temperature 1 (with interval and families) and greedy, as `summary.json` has it."""
    scenarios = held_out(environment, config.split, config.episodes)
    sampled, greedy = [
        await evaluate(
            agent,
            environment,
            reward_fn,
            scenarios,
            temperature=temperature,
            seed=config.seed,
            max_concurrent=config.max_concurrent,
        )
        for temperature in (1.0, 0.0)
    ]
    return {**sampled.summary(), "greedy": greedy.success, "greedy_interval": list(greedy.interval)}, sampled


class Experiment:
    """One run folder's life: new from a configuration, or resumed from the folder."""

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        run: RunFolder | None = None,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        self.config = config
        self._resumes = run is not None
        environment: Environment = _make("environment", ENVIRONMENTS, config.environment)
        reward_fn: RewardFunction = _make("reward", REWARDS, config.reward)
        self.trainer = MultiTurnGRPOTrainer(
            MultiTurnAgent(config.agent),
            environment,
            reward_fn,
            config.training,
            run=run,
            description=config.model_dump(mode="json", exclude={"agent", "training"}),
            on_step=on_step,
        )
        self.summary: dict[str, Any] = {}

    @property
    def run(self) -> RunFolder:
        return self.trainer.run

    async def initialize(self) -> None:
        """Load everything; a resumed run goes on from its newest checkpoint."""
        await self.trainer.initialize()
        if self._resumes:
            await self.trainer.load_checkpoint()
            self.summary = RunLog.open(self.run.path).summary() if self.run.summary.exists() else {}

    async def before(self) -> dict[str, Any] | None:
        """Measure the untrained agent; a resumed run keeps what it measured."""
        if self.config.evaluation is None:
            return None
        if "before" not in self.summary:
            await self._measure("before")
            self.run.write_summary(self.summary)
        result: dict[str, Any] = self.summary["before"]
        return result

    async def train(self) -> None:
        """Run the steps that are left."""
        await self.trainer.train()
        self.summary |= self.trainer.summary()

    async def after(self) -> dict[str, Any] | None:
        """Measure the trained agent, write the summary and the report."""
        if self.config.evaluation is not None:
            await self._measure("after")
        self.run.write_summary(self.summary)
        write_report(self.run.path)
        result: dict[str, Any] | None = self.summary.get("after")
        return result

    async def _measure(self, stage: Stage) -> None:
        assert self.config.evaluation is not None  # the callers ask first
        trainer = self.trainer
        self.summary[stage], sampled = await measure(
            trainer.agent, trainer.environment, trainer.reward_fn, self.config.evaluation
        )
        with JsonlTracker(self.run) as tracker:
            tracker.log_rollouts(trainer.step_number, sampled.groups, stage=stage)
