"""The trainer: scenarios -> episodes -> scored groups -> advantages -> batch -> loss -> step -> metrics."""

from __future__ import annotations

import asyncio
import copy
import platform
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment
from stateset_agents.core.reward import RewardFunction
from stateset_agents.core.scenario import Scenario
from stateset_agents.core.trajectory import Status, TrajectoryGroup
from stateset_agents.errors import CheckpointError, ConfigurationError, TrainingStopped
from stateset_agents.evaluation.evaluator import Evaluation, evaluate, held_out
from stateset_agents.streams import derive
from stateset_agents.tracking.logging import get_logger
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.training.checkpoint import (
    Checkpoint,
    fingerprint,
    latest_checkpoint,
    load_checkpoint,
    machine,
    prune,
    save_checkpoint,
)
from stateset_agents.training.config import TrainingConfig, TrainingProfile
from stateset_agents.training.credit import assign_credit
from stateset_agents.training.curriculum import ScenarioOrder
from stateset_agents.training.learner import Learner
from stateset_agents.training.loop_lag import LoopLag, measure_loop_lag
from stateset_agents.training.step_metrics import rollout_metrics

__all__ = ["MultiTurnGRPOTrainer", "train"]

_log = get_logger(__name__)
_T = TypeVar("_T")

_MAY_DIFFER = frozenset(
    {
        "output_dir",
        "run_name",
        "save_steps",
        "save_total_limit",
        "eval_steps",
        "eval_episodes",
        "log_rollouts",
    }
    | {"max_steps", "num_episodes"}
)
"""Settings that a resume may change without making the checkpoint's weights mean something else."""


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
        reward_fn: RewardFunction,
        config: TrainingConfig | None = None,
        *,
        run: RunFolder | None = None,
        description: Mapping[str, Any] | None = None,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        """`run`: a run folder to use instead of a new one; `description`: more for its config.yaml;
        `on_step`: called in the event loop with each step's number (from 1) and metrics."""
        self.agent = agent
        self.environment = environment
        self.reward_fn = reward_fn
        self.config = config or TrainingConfig()
        self.recommended: dict[str, Any] = {}
        """What the model's card set, where the user set nothing."""
        self.step_number = 0
        """Steps finished."""
        self.train_seconds = 0.0
        self._frontier = 0
        self._failed_steps = 0
        self._run = run
        self._description = dict(description or {})
        self.on_step = on_step
        self._learner: Learner | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="update")

    # ------------------------------------------------------------------------------ set-up

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        if self._run is None:
            raise ConfigurationError("the trainer has no run folder yet: await trainer.initialize() first")
        return self._run

    @property
    def learner(self) -> Learner:
        if self._learner is None:
            raise ConfigurationError("the trainer is not ready: await trainer.initialize() first")
        return self._learner

    @property
    def num_steps(self) -> int:
        """Steps of the whole run."""
        return self.config.num_steps()

    async def initialize(self) -> None:
        """Load the model, make the trainable copy and the reference, open the run folder.

        Raises ConfigurationError for settings that cannot work together.
        """
        if self._learner is not None:
            return
        self._refuse_truncated_sampling()
        self._order = ScenarioOrder(self.environment.scenarios("train"), self.config.seed)
        await self.agent.initialize()
        model = getattr(self.agent.backend, "model", None)
        if model is None:
            raise ConfigurationError(
                f"a {type(self.agent.backend).__name__} has no weights to train: use an in-process model"
            )
        self.config, self.recommended = self.config.with_recommended(
            getattr(self.agent.backend, "recommended", {})
        )
        exact = next(model.parameters()).dtype is torch.float32
        copied = copy.deepcopy(model).requires_grad_(True)
        build = partial(Learner, copied, self.config, num_steps=self.num_steps, exact_logprobs=exact)
        self._learner = await self._in_worker(build)
        self._base = await self._in_worker(fingerprint, self._learner.weights())
        self.engine = ComputationalEngine(
            self.agent,
            self.environment,
            self.reward_fn,
            num_generations=self.config.num_generations,
            max_concurrent=self.config.max_concurrent,
            episode_retries=self.config.episode_retries,
            deterministic=self.deterministic,
        )
        if self._run is None:
            self._run = RunFolder.create(self.config.output_dir, name=self.config.run_name)
        self._tracker = JsonlTracker(self._run)
        self._run.write_config(
            {
                "agent": self.agent.config.model_dump(mode="json"),
                "environment": {"name": type(self.environment).__name__},
                "reward": type(self.reward_fn).__name__,
                **self._description,
                "training": self.config.model_dump(mode="json"),
            }
        )

    def _refuse_truncated_sampling(self) -> None:
        for name, neutral in (("top_k", 0), ("top_p", 1.0)):
            value = getattr(self.agent.config, name)
            if value != neutral:
                raise ConfigurationError(
                    f"AgentConfig.{name} must be {neutral} for training, which samples from the full "
                    f"distribution, got {value}"
                )

    @property
    def deterministic(self) -> bool:
        """Does the run wait for every local reply, so that it can be repeated bit by bit?"""
        if self.config.scheduling == "auto":
            return self.environment.local
        return self.config.scheduling == "deterministic"

    # ------------------------------------------------------------------------------ training

    async def train(self) -> MultiTurnAgent:
        """Run the steps that are left, then return the trained agent.

        Cancelled (Ctrl-C), it writes a checkpoint of the last finished step first. Raises TrainingStopped
        when `max_failed_steps` steps in a row (or the first one) have no usable group.
        """
        await self.initialize()
        try:
            while self.step_number < self.num_steps:
                await self.step()
                await self._between_steps()
        except (asyncio.CancelledError, TrainingStopped):
            await self._save_last()
            raise
        await self._save_last()
        self.run.write_summary(self.summary())
        return self.agent

    async def step(self) -> dict[str, float]:
        """One step: roll out, credit, update, hand the new weights to the agent; returns its metrics.

        Cancelled during the rollout it leaves nothing behind; from the update on it finishes first.
        """
        started = time.perf_counter()
        scenarios = self._order.take(self._frontier, self._step_episodes())
        async with measure_loop_lag() as lag:
            groups = await self.generate_trajectories(scenarios)
            return await _whole(self._learn_from(groups, len(scenarios), started, lag))

    async def generate_trajectories(self, scenarios: Sequence[Scenario]) -> list[TrajectoryGroup]:
        """One scored group per scenario, sampled from the current policy."""
        return await self.engine.rollout(
            scenarios, seed=self.config.seed, step=self.step_number, temperature=self.config.temperature
        )

    async def _learn_from(
        self, groups: Sequence[TrajectoryGroup], episodes: int, started: float, lag: LoopLag
    ) -> dict[str, float]:
        number, rolled_out = self.step_number + 1, time.perf_counter()
        credited = assign_credit(groups, self.config)
        metrics = rollout_metrics(groups) | {"group/dropped": float(credited.num_dropped_groups)}
        if credited.samples:
            metrics |= await self._in_worker(partial(self.learner.update, credited.samples, step=number))
            await self.agent.backend.update_weights(self.learner.weights(), number)
        else:
            metrics["optimizer/skipped"] = 1.0
        now = time.perf_counter()
        self.step_number, self._frontier = number, self._frontier + episodes
        self._failed_steps = 0 if credited.samples else self._failed_steps + 1
        self.train_seconds += now - started
        metrics |= {
            "time/rollout": rolled_out - started,
            "time/update": now - rolled_out,
            "time/step": now - started,
            "time/loop_lag": lag.worst,
            "tokens/per_second": metrics.get("tokens/agent", 0.0) / (now - started),
            "policy/version": float(self.agent.backend.version),
        }
        self._tracker.log_metrics(number, metrics)
        if self.config.log_rollouts:
            self._tracker.log_rollouts(number, groups, stage="train", advantages=credited.advantages)
        if self.on_step is not None:
            self.on_step(number, metrics)
        self._stop_if_nothing_trains(groups)
        return metrics

    def _step_episodes(self) -> int:
        full = self.config.episodes_per_step()
        if self.config.max_steps is not None:
            return full
        return min(full, self.config.num_episodes - self._frontier)

    def _stop_if_nothing_trains(self, groups: Sequence[TrajectoryGroup]) -> None:
        """The first step without a usable group stops the run, later `max_failed_steps` in a row do."""
        if self._failed_steps == 0 or (
            self.step_number > 1 and self._failed_steps < self.config.max_failed_steps
        ):
            return
        members = [trajectory for group in groups for trajectory in group.trajectories]
        failed = sum(trajectory.status is Status.FAILED for trajectory in members)
        why = next((trajectory.error for trajectory in members if trajectory.error), "every reward is None")
        raise TrainingStopped(
            f"step {self.step_number} has no group with {self.config.min_group_size} scored members "
            f"({failed} of {len(members)} conversations failed); first cause: {why}"
        )

    async def _between_steps(self) -> None:
        done = self.step_number >= self.num_steps
        if self.config.save_steps and self.step_number % self.config.save_steps == 0 and not done:
            await self.save_checkpoint()
        if self.config.eval_steps and self.step_number % self.config.eval_steps == 0:
            result = await self.evaluate()
            interval = {"eval/success_low": result.interval[0], "eval/success_high": result.interval[1]}
            reward = {} if result.mean_reward is None else {"eval/reward": result.mean_reward}
            self._tracker.log_metrics(self.step_number, {"eval/success": result.success} | interval | reward)

    async def evaluate(
        self, split: str = "validation", *, episodes: int | None = None, temperature: float = 1.0
    ) -> Evaluation:
        """The current policy on held-out scenarios (`eval_episodes` of them), with users of its own seed."""
        scenarios = held_out(self.environment, split, episodes or self.config.eval_episodes)
        return await evaluate(
            self.agent,
            self.environment,
            self.reward_fn,
            scenarios,
            temperature=temperature,
            seed=derive(self.config.seed, "evaluate", split),
            max_concurrent=self.config.max_concurrent,
            deterministic=self.deterministic,
        )

    # ------------------------------------------------------------------------------ checkpoints

    async def save_checkpoint(self) -> Path:
        """Write `checkpoints/step-NNNNNN` of the last finished step; older ones beyond the limit go."""
        checkpoint = Checkpoint(
            step=self.step_number,
            weights=self.learner.weights(),
            optimizer=self.learner.state(),
            state={
                "version": self.agent.backend.version,
                "frontier": self._frontier,
                "failed_steps": self._failed_steps,
                "train_seconds": self.train_seconds,
                "base": self._base,
                "settings": self.config.model_dump(mode="json"),
                "machine": machine(),
            },
        )
        folder = self.run.checkpoints
        path = await self._in_worker(
            partial(save_checkpoint, folder, checkpoint, write_model=self.learner.write_model_files)
        )
        await self._in_worker(partial(prune, folder, self.config.save_total_limit))
        self._tracker.log_event("checkpoint", step=self.step_number, path=path.name)
        return path

    async def _save_last(self) -> None:
        if not (self.run.checkpoints / f"step-{self.step_number:06d}").exists():
            await _whole(self.save_checkpoint())

    async def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint (the run folder's newest when no path is given; with none, from the start).

        Log lines of later steps are dropped. Raises CheckpointError when it is damaged, of another base
        model, or of other settings; another machine or thread count is allowed and said: not bit-equal.
        """
        await self.initialize()
        found = latest_checkpoint(self.run.checkpoints) if path is None else Path(path)
        if found is None:  # killed before its first checkpoint: begin again
            self.run.truncate_after(0)
            return
        checkpoint = await self._in_worker(partial(load_checkpoint, found))
        state = checkpoint.state
        self._refuse_other_settings(found, state["settings"])
        if state["base"] != self._base:
            raise CheckpointError(
                f"{found} was trained from other weights than {self.agent.config.model_name!r} holds now: "
                "resume with the model it started from"
            )
        if state["machine"] != machine():
            _log.warning("resumed on another set-up: not bit-equal", then=state["machine"], now=machine())
        await self._in_worker(partial(self.learner.restore, checkpoint.weights, checkpoint.optimizer))
        self.step_number, self._frontier = checkpoint.step, state["frontier"]
        self._failed_steps, self.train_seconds = state["failed_steps"], state["train_seconds"]
        await self.agent.backend.update_weights(self.learner.weights(), state["version"])
        self.run.truncate_after(self.step_number)
        self._tracker.log_event("resumed", step=self.step_number, path=found.name)

    def _refuse_other_settings(self, path: Path, settings: Mapping[str, Any]) -> None:
        own = self.config.model_dump(mode="json")
        names = sorted(name for name in own if name not in _MAY_DIFFER and own[name] != settings.get(name))
        if names:
            said = ", ".join(f"{name} was {settings.get(name)!r} and is {own[name]!r}" for name in names)
            raise CheckpointError(f"{path} is from other settings ({said}): resume with the same ones")

    # ------------------------------------------------------------------------------ the rest

    def summary(self) -> dict[str, Any]:
        """What `summary.json` says about the training itself."""
        return {
            "seed": self.config.seed,
            "steps": self.step_number,
            "train_seconds": round(self.train_seconds, 3),
            "platform": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads",
            "deterministic": self.deterministic and self.engine.num_retries == 0,
        }

    async def close(self) -> None:
        """Stop the update thread and the agent."""
        self._worker.shutdown()
        await self.agent.close()

    async def __aenter__(self) -> Self:
        await self.initialize()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _in_worker(self, work: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work, *arguments)


async def _whole(work: Coroutine[Any, Any, _T]) -> _T:
    """Run to the end even when cancelled meanwhile; the cancellation follows then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def train(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: RewardFunction,
    *,
    profile: TrainingProfile | str = TrainingProfile.BALANCED,
    **overrides: Any,
) -> MultiTurnAgent:
    """Train in one call: `await train(agent, environment, reward_fn, profile="balanced", num_episodes=9)`."""
    config = TrainingConfig.from_profile(profile, **overrides)
    trainer = MultiTurnGRPOTrainer(agent, environment, reward_fn, config)
    await trainer.initialize()
    return await trainer.train()
