"""A whole run from one YAML file: evaluate, train, evaluate again, summary and report.

The command line's `train` and `evaluate` call this; in a program, use `MultiTurnGRPOTrainer` itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import RewardFunction
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.evaluation.audit import with_floors
from stateset_agents.evaluation.evaluator import Divide, Evaluation, OnProgress, evaluate, held_out
from stateset_agents.runs.experiment import BaseExperiment, read_experiment
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.runtime.yaml_files import settings_from
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import Stage
from stateset_agents.training.components import make_environment, make_reward
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.settings.paths import resolve_paths
from stateset_agents.training.settings.update import TraceSettings
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.trl.settings import TrlSettings
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings


class EvaluationConfig(Settings):
    """The measurement before and after training."""

    split: Literal["validation", "test"] = "test"
    """Held-out scenarios; training never sees them."""
    episodes: int | None = Field(default=None, ge=1)
    """Number of scenarios; all when unset."""
    tries: int = Field(default=1, ge=1)
    """Sampled tries of each scenario: for pass@k, pass^k, and closer intervals."""
    seed: int = Field(default=0, ge=0)
    """Seed of users and sampling; not the training seed."""
    max_concurrent: int = Field(default=64, ge=1)
    """Conversations at once."""


class ExperimentConfig(Settings):
    """The content of a YAML file: agent, environment, reward, training, evaluation."""

    agent: AgentConfig = AgentConfig()
    """The model that speaks, and how it is run."""
    environment: Mapping[str, Any]
    """`name` (or "package.module:Class") and its arguments."""
    reward: Mapping[str, Any] = Field(default={"name": "environment"})
    """A name, or `name` and arguments."""
    training: TrainingConfig = TrainingConfig()
    """The training: how, for how long, and what the run writes."""
    evaluation: EvaluationConfig | None = None
    """Unset: no measurement around training."""
    trl: TrlSettings | None = None
    """Updates by TRL, if it is given, if only as `trl: {}`, see docs/trl.md. Unset: ours."""
    traces: TraceSettings | None = None
    """Settings of `stateset-agents distill`: a teacher whose verified replies the agent imitates, see
    docs/distillation.md."""
    sft: SFTConfig | None = None
    """Fine-tuning on the `traces`; its own defaults when unset."""

    @field_validator("reward", mode="before")
    @classmethod
    def _not_several(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError(f"several are {{name: composite, terms: [...]}}, got the list {value!r:.60}")
        return value

    @field_validator("environment", "reward", mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


_SECTIONS: Mapping[str, type[Settings]] = {
    "training": TrainingConfig,
    "agent": AgentConfig,
    "evaluation": EvaluationConfig,
    "traces": TraceSettings,
}


_OTHERS = {
    "sft": "{path} is of a fine-tuning, which has no environment: go on with stateset-agents sft --resume "
    "{run}; train or evaluate its model with a YAML file and agent.model_name {run}",
    "program": "{path} is of a run that a program made and names only its classes: go on in that "
    "program, with `await trainer.load_checkpoint({run!r})`; evaluate it with a YAML file of that "
    "environment and --model {run}",
}
"""Maker of a run that no YAML file describes -> how to go on with such a run."""


def load_experiment(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Read a YAML file, or a run folder's; `overrides` are dotted names, e.g. {"training.seed": 1}.

    `agent.model_name`, `environment.scenarios` and values that start with ./ or ../ are paths from the
    file's folder, and in `overrides` from the working directory; they come back absolute.

    Raises ConfigurationError naming the file and what is wrong in it.
    """
    path, data = read_experiment(path, overrides, resolve=resolve_paths, others=_OTHERS)
    return settings_from(
        data,
        ExperimentConfig,
        of=path,
        sections=_SECTIONS,
        required={
            "environment": "add a line such as `environment: retail_desk`, or `environment: module:name` of "
            "your own"
        },
    )


async def measure(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: RewardFunction,
    config: EvaluationConfig,
    limits: RolloutLimits,
    *,
    divide: Divide | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[dict[str, Any], Evaluation]:
    """Success sampled at temperature 1 (with interval and families) and greedy, as `summary.json` has it.

    `config` says how many conversations at once. `divide` and `on_progress` as of `evaluate`.
    """
    scenarios = held_out(environment, config.split, config.episodes)

    def greedy_progress(done: int, number: int) -> None:
        assert on_progress is not None
        on_progress(number + done, 2 * number)

    def sampled_progress(done: int, number: int) -> None:
        assert on_progress is not None
        on_progress(done, 2 * number)  # each scenario is played twice

    play = partial(
        evaluate,
        agent,
        environment,
        reward_fn,
        scenarios,
        seed=config.seed,
        limits=replace(limits, max_concurrent=config.max_concurrent),
        divide=divide,
    )
    sampled = await play(tries=config.tries, on_progress=on_progress and sampled_progress)
    greedy = await play(temperature=0.0, on_progress=on_progress and greedy_progress)
    sampled = await with_floors(sampled, environment, scenarios, seed=config.seed, limits=limits)
    how = {"greedy": greedy.success, "greedy_interval": greedy.summary()["interval"]}
    return {**sampled.summary(), **how}, sampled


class Experiment(BaseExperiment[ExperimentConfig, MultiTurnGRPOTrainer]):
    """One run folder's life: new from a configuration, or resumed from the folder."""

    def _make_trainer(self, run: RunFolder | None, callbacks: Sequence[object]) -> MultiTurnGRPOTrainer:
        config = self.config
        trainer: Callable[..., MultiTurnGRPOTrainer] = MultiTurnGRPOTrainer
        if config.trl is not None:
            from stateset_agents.training.trl_grpo_trainer import TrlGRPOTrainer

            trainer = partial(TrlGRPOTrainer, trl=config.trl)
        return trainer(
            MultiTurnAgent(config.agent),
            make_environment(config.environment),
            make_reward(config.reward),
            config.training,
            run=run,
            description=config.model_dump(mode="json", exclude={"agent", "training"}),
            callbacks=callbacks,
        )

    async def initialize(self) -> None:
        """Load everything; a resumed run goes on from its checkpoint.

        Raises ConfigurationError for a file with traces of a teacher, which a training would not read.
        """
        if self.config.traces is not None or self.config.sft is not None:
            raise ConfigurationError(
                "traces and sft are for stateset-agents distill: use that verb, or leave them out"
            )
        if self._evaluation is not None:  # before anything slow
            held_out(self.trainer.environment, self._evaluation.split, self._evaluation.episodes)
        await super().initialize()

    async def _measure(self, stage: Stage, on_progress: OnProgress | None) -> dict[str, Any]:
        trainer = self.trainer
        result, sampled = await measure(
            trainer.agent,
            trainer.environment,
            trainer.reward_fn,
            self._evaluation,
            trainer.config.rollout_limits(),
            divide=trainer.divide,
            on_progress=on_progress,
        )
        if trainer.is_first:
            # a kill between these lines and summary.json leaves them there, and they are played again
            self.run.drop_stage(stage, trainer.step_number)
            trainer.tracker.log_rollouts(trainer.step_number, sampled.groups, stage=stage)
            if stage == "after":  # before the summary says that all is done
                await in_thread(trainer.describe, {**self.summary, stage: result})
        return {stage: result}
