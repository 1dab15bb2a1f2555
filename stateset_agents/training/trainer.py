"""The trainer: scenarios -> episodes -> scored groups -> advantages -> batch -> loss -> step -> metrics."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.context_window import refuse_sliding_window
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import Reward, as_reward
from stateset_agents.core.scenario import Scenario
from stateset_agents.core.trajectory import TrajectoryGroup
from stateset_agents.errors import ConfigurationError, TrainingStopped
from stateset_agents.evaluation.evaluator import (
    Evaluation,
    evaluate,
    held_out,
    refuse_truncated_sampling,
)
from stateset_agents.rewards.shaping import refuse_unfit_shaping
from stateset_agents.streams import derive
from stateset_agents.tracking.logging import get_logger
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.training.checkpoint import fingerprint, remove_later
from stateset_agents.training.config import TrainingConfig, TrainingProfile
from stateset_agents.training.curriculum import ScenarioOrder
from stateset_agents.training.learner import Learner
from stateset_agents.training.loop_lag import LoopLag, measure_loop_lag
from stateset_agents.training.resume import Identity, Progress, checkpoint_at, keep, newest, take_up
from stateset_agents.training.step_metrics import evaluation_metrics, rollout_metrics, why_nothing_trained
from stateset_agents.training.uninterrupted import uninterrupted
from stateset_agents.training.worker import Worker

__all__ = ["MultiTurnGRPOTrainer", "train"]

_log = get_logger(__name__)
_T = TypeVar("_T")


class MultiTurnGRPOTrainer:
    """Trains an agent by group-relative policy optimisation, inside the caller's event loop.

    Generation runs in the backend's worker thread and the update in the trainer's own, so the loop goes
    on answering. With `scheduling: deterministic` a run is a function of settings, seed, versions, CPU
    type and thread count.

    >>> trainer = MultiTurnGRPOTrainer(agent, environment, reward_fn, config)
    >>> await trainer.initialize()
    >>> agent = await trainer.train()
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment,
        reward_fn: Reward,
        config: TrainingConfig | None = None,
        *,
        run: RunFolder | None = None,
        description: Mapping[str, Any] | None = None,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        """`run`: a folder to use instead of a new one; `description`: more for its config.yaml; `on_step`:
        called in the event loop with each step's number (from 1) and metrics."""
        self.agent = agent
        self.environment = environment
        self.reward_fn = as_reward(reward_fn)
        self.config = config or TrainingConfig()
        self.recommended: dict[str, Any] = {}
        """What the model's card set, where the user set nothing."""
        self.progress = Progress()
        self.on_step = on_step
        self._stepping = False
        self._saved_step: int | None = None
        self._description = dict(description or {})
        self._run = run
        self._tracker: JsonlTracker | None = None
        self._learner: Learner | None = None
        self._boundary = asyncio.Lock()
        self._worker = Worker()

    # ------------------------------------------------------------------------------ set-up

    @property
    def is_ready(self) -> bool:
        """Has `initialize` been through?"""
        return self._tracker is not None

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return _ready(self._run)

    @property
    def tracker(self) -> JsonlTracker:
        """Writes the run folder's logs."""
        return _ready(self._tracker)

    @property
    def learner(self) -> Learner:
        """Holds the master weights."""
        return _ready(self._learner)

    @property
    def step_number(self) -> int:
        """Steps finished."""
        return self.progress.step

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.num_steps()

    async def initialize(self) -> None:
        """Load the model, make the trainable copy and the reference, open the run folder.

        Raises ConfigurationError for settings that cannot work together, a trainer that was stopped, and a
        run folder that another trainer is writing.
        """
        self._worker.refuse_stopped()
        if self.is_ready:
            return
        refuse_truncated_sampling(self.agent)
        refuse_sliding_window(self.agent.config)
        refuse_unfit_shaping(self.reward_fn, per_turn=False, gamma=1.0, bootstrapped=False)
        self._order = ScenarioOrder(self.environment.scenarios("train"), self.config.seed)
        await self.agent.initialize()
        if not hasattr(self.agent.backend, "master_model"):
            raise ConfigurationError(
                f"a {type(self.agent.backend).__name__} has no weights to train: use an in-process model"
            )
        card = getattr(self.agent.backend, "recommended", {})
        self.config, self.recommended = self.config.with_recommended(card)
        if self.recommended:
            said = ", ".join(f"{name} {value}" for name, value in self.recommended.items())
            _log.warning(f"the model's card sets what you did not: {said}")
        if self.config.eval_steps:
            held_out(self.environment, "validation", None)
        self._learner, self._base = await self._worker.run(self._make_learner, self.agent.backend)
        self.engine = ComputationalEngine(
            self.agent,
            self.environment,
            self.reward_fn,
            num_generations=self.config.num_generations,
            num_branches=self.config.branches_per_turn,
            max_concurrent=self.config.max_concurrent,
            episode_retries=self.config.episode_retries,
            deterministic=self.deterministic,
            turn_timeout=self.config.turn_timeout,
            reward_timeout=self.config.reward_timeout,
        )
        if self._run is None:
            self._run = RunFolder.create(self.config.output_dir, name=self.config.run_name)
        if not self._run.config.exists():  # a resumed run's stays until its checkpoint agrees
            self._run.write_config(self._settings())
        self._tracker = JsonlTracker(self._run)

    def _make_learner(self, backend: Any) -> tuple[Learner, str]:
        exact = backend.model.dtype is torch.float32
        learner = Learner(backend.master_model(), self.config, num_steps=self.num_steps, exact_logprobs=exact)
        return learner, fingerprint(learner.weights())

    def _settings(self) -> dict[str, Any]:
        return {
            "agent": self.agent.config.model_dump(mode="json"),
            "environment": {"name": type(self.environment).__name__},
            "reward": self.reward_fn.name,
            **self._description,
            "training": self.config.model_dump(mode="json"),
        }

    @property
    def deterministic(self) -> bool:
        """Does the run wait for every local reply, so that it can be repeated bit by bit?"""
        if self.config.scheduling == "auto":
            return self.environment.local
        return self.config.scheduling == "deterministic"

    # ------------------------------------------------------------------------------ training

    async def train(self) -> MultiTurnAgent:
        """Run the steps that are left, then return the trained agent.

        However it ends, by Ctrl-C or an error too, it keeps a checkpoint of the last finished step.
        Raises TrainingStopped when `max_failed_steps` steps in a row (or the first) could not train.
        """
        await self.initialize()
        try:
            while self.step_number < self.num_steps:
                await self.step()
                await self._between_steps()
        except (Exception, asyncio.CancelledError):
            await self._save_last()
            raise
        await self._save_last()
        self.run.write_summary({**RunLog(self.run).summary(), **self.summary()})
        return self.agent

    async def step(self) -> dict[str, float]:
        """One step: roll out, credit, update, hand the new weights to the agent; returns its metrics.

        Cancelled during the rollout it leaves nothing behind; from the update on it finishes first.
        """
        if self.step_number >= self.num_steps:
            raise ConfigurationError(f"all {self.num_steps} steps are done: raise max_steps or num_episodes")
        self._worker.refuse_stopped()
        if self._stepping:
            raise ConfigurationError("a step of this trainer is under way: await it before the next")
        self._stepping = True
        try:
            started = time.perf_counter()
            scenarios = self._order.take(self.progress.frontier, self._step_episodes())
            async with measure_loop_lag() as lag:
                groups = await self.generate_trajectories(scenarios)
                return await uninterrupted(self._learn_from(groups, started, lag))
        finally:
            self._stepping = False

    async def generate_trajectories(self, scenarios: Sequence[Scenario]) -> list[TrajectoryGroup]:
        """One scored group per scenario, sampled from the current policy."""
        return await self.engine.rollout(
            scenarios, seed=self.config.seed, step=self.step_number, temperature=self.config.temperature
        )

    async def _learn_from(
        self, groups: Sequence[TrajectoryGroup], started: float, lag: LoopLag
    ) -> dict[str, float]:
        number, rolled_out = self.step_number + 1, time.perf_counter()
        async with self._boundary:
            lesson = await self._worker.run(partial(self.learner.credit, groups))
            credited = lesson.credited
            metrics = rollout_metrics(groups) | {"group/dropped": float(credited.num_dropped_groups)}
            metrics |= await self._worker.run(partial(self.learner.learn, lesson, step=number))
            scaled = self.learner.optimization.scaler.is_enabled()
            cause = why_nothing_trained(groups, metrics, self.config, scaled=scaled)
            self.progress = self.progress.after_step(
                episodes=len(groups),
                new_policy=bool(credited.samples),
                failed=cause is not None,
                repeatable=self.engine.repeatable,
            )
            self.reward_fn.observe([trajectory for group in groups for trajectory in group.scored])
            self.progress = replace(self.progress, reward=self.reward_fn.state())
            if credited.samples:
                await self.agent.backend.update_weights(self.learner.weights(), number)
            sampled = metrics.get("tokens/agent", 0.0) + metrics.get("tokens/branches", 0.0)
            now = time.perf_counter()
            self.progress = replace(self.progress, train_seconds=self.progress.train_seconds + now - started)
        metrics |= {
            "time/rollout": rolled_out - started,
            "time/update": now - rolled_out,
            "time/step": now - started,
            "time/loop_lag": lag.worst,
            "tokens/per_second": sampled / (now - started),
            "policy/version": float(self.progress.version),
        }
        self.tracker.log_metrics(number, metrics)
        if self.config.log_rollouts:
            write = partial(self.tracker.log_rollouts, number, groups, credited.advantages, stage="train")
            await self._worker.run(write)
        if self.on_step is not None:
            self.on_step(number, metrics)
        if cause and (number == 1 or self.progress.failed_steps >= self.config.max_failed_steps):
            raise TrainingStopped(f"step {number} {cause}")
        return metrics

    def _step_episodes(self) -> int:
        full = self.config.episodes_per_step()
        if self.config.max_steps is not None:
            return full
        return min(full, self.config.num_episodes - self.progress.frontier)

    async def _between_steps(self) -> None:
        if self.config.eval_steps and self.step_number % self.config.eval_steps == 0:
            result = await self.evaluate()
            self.tracker.log_metrics(self.step_number, evaluation_metrics(result))
            if self.config.log_rollouts:
                write = partial(self.tracker.log_rollouts, self.step_number, result.groups)
                await self._worker.run(partial(write, stage="validation"))
        if self.config.save_steps and self.step_number % self.config.save_steps == 0:
            await self._save_last()

    async def evaluate(
        self, split: str = "validation", *, episodes: int | None = None, temperature: float = 1.0
    ) -> Evaluation:
        """The current policy on held-out scenarios (at most `eval_episodes`, or `episodes` of them), with
        users of its own seed."""
        scenarios = held_out(self.environment, split, episodes)
        if episodes is None:
            scenarios = scenarios[: self.config.eval_episodes]
        return await evaluate(
            self.agent,
            self.environment,
            self.reward_fn,
            scenarios,
            temperature=temperature,
            seed=derive(self.config.seed, "evaluate", split),
            max_concurrent=self.config.max_concurrent,
            deterministic=self.deterministic,
            turn_timeout=self.config.turn_timeout,
            reward_timeout=self.config.reward_timeout,
        )

    # ------------------------------------------------------------------------------ checkpoints

    async def save_checkpoint(self) -> Path:
        """Write `checkpoints/step-NNNNNN` of the last finished step; older ones beyond the limit go."""
        async with self._boundary:
            step = self.step_number
            tokenizer = getattr(self.agent.backend.tokenizer, "hf", None)
            write = partial(keep, limit=self.config.save_total_limit, tokenizer=tokenizer)
            where, who = self.run.checkpoints, self._identity()
            path = await self._worker.run(write, where, self.learner, self.progress, who)
        self._saved_step = step
        self.tracker.log_event("checkpoint", step=step, path=path.name)
        return path

    async def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint, or a run's newest: this run's when no path is given.

        Log lines and checkpoints of later steps are dropped. Raises CheckpointError when it is damaged, was
        taken away, or is of another base model or other settings. Another machine, thread count or length
        of the schedule is allowed and said: not bit-equal.
        """
        await self.initialize()
        found = newest(self.run) if path is None else checkpoint_at(Path(path))
        if found is not None:
            async with self._boundary:
                progress = await self._worker.run(take_up, found, self.learner, self._identity())
                await self.agent.backend.update_weights(self.learner.weights(), progress.version)
                self.progress = progress
                self.reward_fn.restore(progress.reward)
            self._saved_step = progress.step if found.parent == self.run.checkpoints else None
        self.run.truncate_after(self.step_number)
        remove_later(self.run.checkpoints, self.step_number)
        self.run.write_config(self._settings())
        if found is not None:
            self.tracker.log_event("resumed", step=self.step_number, path=found.name)

    def _identity(self) -> Identity:
        settings = {name: value for name, value in self._settings().items() if name != "evaluation"}
        return Identity(base=self._base, scenarios=self._order.fingerprint(), settings=settings)

    async def _save_last(self) -> None:
        if self.learner.midway:
            _log.error("the last update broke off midway: its step is not kept, earlier checkpoints are")
        elif self._saved_step != self.step_number:
            await uninterrupted(self.save_checkpoint())

    # ------------------------------------------------------------------------------ the rest

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says about the training itself."""
        local = self.environment.local and self.reward_fn.local
        return {
            "seed": self.config.seed,
            "steps": self.step_number,
            "train_seconds": round(self.progress.train_seconds, 3),
            "platform": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
            "deterministic": self.deterministic and local and self.progress.repeatable,
        }

    async def stop(self) -> None:
        """End the update thread and close the logs; the agent goes on speaking."""
        await self._worker.stop()
        if self._tracker is not None:
            self._tracker.close()

    async def close(self) -> None:
        """Stop, and close the agent too."""
        await self.stop()
        await self.agent.close()

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


def _ready(part: _T | None) -> _T:
    if part is None:
        raise ConfigurationError("the trainer is not ready: await trainer.initialize() first")
    return part


async def train(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: Reward,
    *,
    profile: TrainingProfile | str = TrainingProfile.BALANCED,
    **overrides: Any,
) -> MultiTurnAgent:
    """Train in one call: `await train(agent, environment, reward_fn, profile="balanced", num_episodes=9)`."""
    config = TrainingConfig.from_profile(profile, **overrides)
    trainer = MultiTurnGRPOTrainer(agent, environment, reward_fn, config)
    try:
        return await trainer.train()
    finally:
        await trainer.stop()
