"""A whole run from one YAML file: evaluate, train, evaluate again, summary and report.

The command line's `train` and `evaluate` call this; in a program, use `MultiTurnGRPOTrainer` itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import RewardFunction
from stateset_agents.core.rollout.limits import RolloutLimits
from stateset_agents.evaluation.evaluator import Divide, Evaluation, OnProgress, evaluate, held_out
from stateset_agents.evaluation.floors import with_floors
from stateset_agents.reporting.report import write_report
from stateset_agents.runtime.user_code import call_user_code
from stateset_agents.runtime.yaml_files import override, read_sections, settings_from
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import Stage
from stateset_agents.training.components import make_environment, make_reward
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.settings.distillation import TraceSettings
from stateset_agents.training.settings.paths import resolve_paths
from stateset_agents.training.sft.settings import SFTConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.trl.settings import TrlSettings
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import Settings


class EvaluationConfig(Settings):
    """The measurement before and after training."""

    split: Literal["validation", "test"] = Field(
        default="test", description="Held-out scenarios; training never sees them."
    )
    episodes: int | None = Field(default=None, ge=1, description="How many of them; all when unset.")
    tries: int = Field(
        default=1, ge=1, description="Of each scenario, sampled: for pass@k, pass^k, and closer intervals."
    )
    seed: int = Field(default=0, ge=0, description="Of users and sampling; not the training seed.")
    max_concurrent: int = Field(default=64, ge=1, description="Conversations at once.")


class ExperimentConfig(Settings):
    """What a YAML file says: agent, environment, reward, training, evaluation."""

    agent: AgentConfig = Field(default=AgentConfig(), description="Which model speaks, and how.")
    environment: Mapping[str, Any] = Field(
        description='`name` (or "package.module:Class") and its arguments.'
    )
    reward: Mapping[str, Any] = Field(
        default={"name": "environment"}, description="A name, or `name` and arguments."
    )
    training: TrainingConfig = Field(
        default=TrainingConfig(), description="How it is trained, for how long, and what the run writes."
    )
    evaluation: EvaluationConfig | None = Field(
        default=None, description="Unset: no measurement around training."
    )
    trl: TrlSettings | None = Field(
        default=None,
        description="Given, if only as `trl: {}`: the updates are TRL's, see docs/trl.md. Unset: ours.",
    )
    traces: TraceSettings | None = Field(
        default=None,
        description="Of `stateset-agents distill`: a teacher whose verified replies the agent imitates, see "
        "docs/distillation.md.",
    )
    sft: SFTConfig | None = Field(
        default=None, description="With `traces`: how they are imitated; its own defaults when unset."
    )

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


def load_experiment(path: str | Path, overrides: Mapping[str, Any] | None = None) -> ExperimentConfig:
    """Read a YAML file, or a run folder's; `overrides` are dotted names, e.g. {"training.seed": 1}.

    `agent.model_name`, `environment.scenarios` and values that start with ./ or ../ are paths from the
    file's folder, and in `overrides` from the working directory; they come back absolute.

    Raises ConfigurationError naming the file and what is wrong in it.
    """
    path = Path(path)
    if path.is_dir():
        path = RunFolder.open(path).config
    data = read_sections(path)
    made_by = data.pop("made_by", None)
    if made_by == "sft":
        raise ConfigurationError(
            f"{path} is of a fine-tuning, which has no environment: go on with stateset-agents sft --resume "
            f"{path.parent}; train or evaluate its model with a YAML file and agent.model_name {path.parent}"
        )
    if made_by == "program":
        raise ConfigurationError(
            f"{path} is of a run that a program made and names only its classes: go on in that program, with "
            f"`await trainer.load_checkpoint({str(path.parent)!r})`; evaluate it with a YAML file of that "
            f"environment and --model {path.parent}"
        )
    data.pop("schema_version", None)
    resolve_paths(data, path.absolute().parent)
    for name, value in (overrides or {}).items():
        override(data, name, value)
    resolve_paths(data, Path.cwd())
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

    def of_both(is_greedy: bool) -> OnProgress | None:
        if on_progress is None:
            return None
        return lambda done, number: on_progress(done + number * is_greedy, 2 * number)  # each twice

    sampled, greedy = [
        await evaluate(
            agent,
            environment,
            reward_fn,
            scenarios,
            tries=config.tries if temperature else 1,  # greedy ones are all alike
            temperature=temperature,
            seed=config.seed,
            limits=replace(limits, max_concurrent=config.max_concurrent),
            divide=divide,
            on_progress=of_both(not temperature),
        )
        for temperature in (1.0, 0.0)
    ]
    sampled = await with_floors(sampled, environment, scenarios, seed=config.seed, limits=limits)
    how = {"greedy": greedy.success, "greedy_interval": greedy.summary()["interval"]}
    return {**sampled.summary(), **how}, sampled


class Experiment:
    """One run folder's life: new from a configuration, or resumed from the folder.

    >>> async with Experiment(load_experiment("examples/demo.yaml")) as experiment:
    ...     await experiment.before()
    ...     await experiment.train()
    ...     await experiment.after()
    """

    def __init__(
        self,
        config: ExperimentConfig,
        *,
        run: RunFolder | None = None,
        checkpoint: Path | None = None,
        callbacks: Sequence[object] = (),
        measures: bool = True,
    ) -> None:
        """`run` is resumed from `checkpoint`, or from its newest one; `measures=False` leaves out what
        `config.evaluation` asks for."""
        self.config = config
        self._evaluation = config.evaluation if measures else None
        self._resumes = run is not None
        self._checkpoint = checkpoint
        trainer: Callable[..., MultiTurnGRPOTrainer] = MultiTurnGRPOTrainer
        if config.trl is not None:
            from stateset_agents.training.trl_grpo_trainer import TrlGRPOTrainer

            trainer = partial(TrlGRPOTrainer, trl=config.trl)
        self.trainer = trainer(
            MultiTurnAgent(config.agent),
            make_environment(config.environment),
            make_reward(config.reward),
            config.training,
            run=run,
            description=config.model_dump(mode="json", exclude={"agent", "training"}),
            callbacks=callbacks,
        )
        self.summary: dict[str, Any] = {}

    @property
    def run(self) -> RunFolder:
        return self.trainer.run

    @property
    def is_over(self) -> bool:
        """A resumed run that has all its steps and its measurements; asked for after `initialize`."""
        trainer = self.trainer
        is_measured = self._evaluation is None or "after" in self.summary
        return self._resumes and trainer.step_number >= trainer.num_steps and is_measured

    async def initialize(self) -> None:
        """Load everything; a resumed run goes on from its checkpoint.

        Raises ConfigurationError for a file with traces of a teacher, which a training would not read.
        """
        if self.config.traces is not None or self.config.sft is not None:
            raise ConfigurationError(
                "traces and sft are for stateset-agents distill, and a training reads neither: use that "
                "verb, or leave them out"
            )
        if self._evaluation is not None:  # before anything slow
            held_out(self.trainer.environment, self._evaluation.split, self._evaluation.episodes)
        await self.trainer.initialize()
        if self._resumes:
            await self.trainer.load_checkpoint(self._checkpoint)
            self.summary = RunLog(self.run).summary()

    async def before(self, on_progress: OnProgress | None = None) -> dict[str, Any] | None:
        """Measure the untrained agent; a resumed run keeps what it measured, or goes without.

        `on_progress`: as of `evaluate`.
        """
        untrained = self.trainer.step_number == 0
        if self._evaluation is not None and "before" not in self.summary and untrained:
            await self._measure("before", self._evaluation, on_progress)
            self._write_summary()
        return self.summary.get("before")

    async def train(self) -> None:
        """Run the steps that are left."""
        is_longer = self.trainer.step_number < self.trainer.num_steps
        if is_longer and self.summary.pop("after", None) is not None:  # of the shorter run
            self._write_summary()
        await self.trainer.train()
        self.summary |= self.trainer.summary()

    async def after(self, on_progress: OnProgress | None = None) -> dict[str, Any] | None:
        """Measure the trained agent (once), write the summary and the report.

        `on_progress`: as of `evaluate`.
        """
        if self._evaluation is not None and "after" not in self.summary:
            await self._measure("after", self._evaluation, on_progress)
            if self.trainer.processes.is_first:  # before the summary says that all is done
                await asyncio.to_thread(self.trainer.describe, self.summary)
        self._write_summary()
        if self.trainer.processes.is_first:
            write_report(self.run.path)
        return self.summary.get("after")

    def _write_summary(self) -> None:
        if self.trainer.processes.is_first:
            self.run.write_summary(self.summary)

    async def _measure(self, stage: Stage, config: EvaluationConfig, on_progress: OnProgress | None) -> None:
        trainer = self.trainer
        self.summary[stage], sampled = await measure(
            trainer.agent,
            trainer.environment,
            trainer.reward_fn,
            config,
            trainer.config.rollout_limits(),
            divide=trainer.divide,
            on_progress=on_progress,
        )
        if not trainer.processes.is_first:
            return
        # a kill between these lines and summary.json leaves them there, and they are played again
        self.run.drop_stage(stage, trainer.step_number)
        trainer.tracker.log_rollouts(trainer.step_number, sampled.groups, stage=stage)

    async def __aenter__(self) -> Self:
        try:
            await self.initialize()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        """The trainer, and an environment that has something to give back."""
        try:
            await self.trainer.close()
        finally:
            close = getattr(self.trainer.environment, "close", None)
            if close is not None:
                await call_user_code(close)
