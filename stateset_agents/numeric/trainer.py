"""The trainer of numeric policies: groups of episodes -> credit -> update -> metrics, in an async program."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from stateset_agents.numeric.credit import ESTIMATORS
from stateset_agents.numeric.environments.base import BatchedEnvironment, Tasked, TaskRows, check_environment
from stateset_agents.numeric.evaluation import ControlEvaluation, evaluate, evaluation_seeds
from stateset_agents.numeric.policy import MlpPolicy, ObservingPolicy, as_tensors
from stateset_agents.numeric.rollout import Rollout, action_keys, collect, collect_branches, largest_rms
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.update import UpdateResult, critic_of, update
from stateset_agents.runs.checkpoint_files import Checkpoint, best_checkpoint, fingerprint, load_checkpoint
from stateset_agents.runs.checkpoints import Checkpoints
from stateset_agents.runs.compatibility import Compatibility, Identity
from stateset_agents.runs.early_stopping import Best
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.runs.recorder import ready
from stateset_agents.runs.session import Session, platform_line
from stateset_agents.runs.trackers import check_installed
from stateset_agents.runtime.event_loop import measure_loop_lag
from stateset_agents.runtime.tasks import shielded
from stateset_agents.tracking.diagnostics import part_name
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.processes import Processes
from stateset_agents.types.errors import CheckpointError, ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect

# ------------------------------------------------------------------------------ what is saved

_MAY_DIFFER = frozenset(
    f"training.{name}"
    for name in (
        *("output_dir", "run_name", "save_steps", "save_total_limit", "eval_steps", "eval_episodes"),
        *("early_stopping_patience", "early_stopping_threshold", "load_best_at_end", "progress"),
        *("report_to", "log_episodes", "gradient_cosines_every", "total_steps"),
    )
)
"""Settings that may change when a training resumes."""


_DEFAULTS: Mapping[str, Any] = {
    "training": {"group_strategy": "none", "n_groups": 4, "group_weight_method": "balanced"}
}
"""Values by which an older version acted that had no such settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlState:
    """The progress of a numeric training; the trainer alone replaces it."""

    step: int = 0
    """Environment steps taken."""
    updates: int = 0
    """Rollouts learned from; every random choice of the next one follows from the seed and this."""
    episodes: int = 0
    num_groups: int = 0
    """Number of groups of the next rollout; 0 before the first is as the settings say."""
    failed_updates: int = 0
    """Updates in a row, up to the last one, from which nothing could be learned."""
    train_seconds: float = 0.0
    evaluated_step: int = 0
    partition: Mapping[str, Any] = field(default_factory=dict)
    """State of the partitioner before the next update, see `Partitioner.state`."""
    best: Best = field(default_factory=lambda: Best(metric="eval/reward"))
    repeatable: bool = True
    """False once the training went on with another machine or length."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ControlState:
        """The state from what `asdict` gave. Raises CheckpointError for a state of another version of this
        program."""
        try:
            return cls(**{**values, "best": Best(**values["best"])})
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint keeps unknown progress ({error}): use the stateset-agents that wrote it"
            ) from error


@dataclass(kw_only=True)
class ControlCheckpoints(Checkpoints[ControlState]):
    """Saves and restores one run's policy, optimiser and state."""

    policy: nn.Module
    optimization: Optimization
    midway: bool = field(default=False, init=False)
    """True from an update's begin to its end."""

    @property
    def _is_midway(self) -> bool:
        return self.midway

    @property
    def _compatibility(self) -> Compatibility:
        return Compatibility(may_differ=_MAY_DIFFER, defaults=_DEFAULTS)

    def _tensors(self) -> dict[str, Any]:
        return {"weights": self.policy.state_dict(), "optimizer": self.optimization.state()}

    def _write_model(self, path: Path, state: ControlState) -> None:
        """The network is the program's own: its weights are all there is."""

    def _load(self, checkpoint: Checkpoint) -> ControlState:
        state = ControlState.from_json(checkpoint.state["progress"])
        self.policy.load_state_dict(dict(checkpoint.weights))
        self.optimization.load(dict(checkpoint.optimizer))
        self.midway = False
        return state

    def _machine(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "threads": torch.get_num_threads(),
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        }

    def _other_length(self, training: Mapping[str, Any], state: ControlState) -> list[str]:
        """The learning rate falls towards the end, so another end is another course."""
        new = self.identity.settings["training"]
        length, kind = new["total_steps"], new["lr_scheduler_type"]
        if not state.step or training["total_steps"] == length or kind == "constant":
            return []
        return [
            f"the run was planned for {training['total_steps']} steps and is for {length} now; the "
            f"learning rate ({kind}) follows the length: the result is another"
        ]


_log = get_logger(__name__)

_T = TypeVar("_T")

_MAX_FAILED = 3
"""Updates in a row that could not learn, after which a training ends; the first one ends it at once."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """The collaborators that `initialize` makes."""

    optimization: Optimization
    reference: nn.Module | None
    checkpoints: ControlCheckpoints


class ControlTrainer(Session[ControlConfig]):
    """Trains a numeric policy on a batched environment by group-relative policy optimisation.

    Rollouts and updates run in a thread of the trainer's own, so the event loop goes on answering. A run is
    a function of settings, seed, the policy's first weights, versions, CPU type and thread count. A policy
    takes and gives tensors of the CPU; where it computes is its own matter.

    >>> environment = BatchedCartPole()
    >>> trainer = ControlTrainer(MlpPolicy(environment.spec), environment, ControlConfig(total_steps=100_000))
    >>> policy = await trainer.train()
    """

    _MAY_CHANGE = frozenset({"total_steps", "log_episodes"})
    _LENGTH = "total_steps"
    _parts: _Parts | None
    _state: ControlState

    def __init__(
        self,
        policy: nn.Module,
        environment: BatchedEnvironment,
        config: ControlConfig | None = None,
        *,
        validation: BatchedEnvironment | None = None,
        run: RunFolder | None = None,
        description: Mapping[str, Any] | None = None,
        callbacks: Sequence[object] = (),
        optimization: Optimization | None = None,
        reference: nn.Module | None = None,
        progress: ControlState | None = None,
    ) -> None:
        """`policy`: a `NumericPolicy`; `validation`: the environment of evaluations, the same when absent;
        `run`: a folder to use instead of a new one; `description`: more for its config.yaml; `callbacks`: who
        hears of steps, evaluations and checkpoints, see `Callback`; `optimization`: an optimiser to go on
        with; `reference`: what the KL of beta is to, the policy as it is when absent; `progress`: where to go
        on, see `control_state`."""
        expect("policy", policy, nn.Module, "write MlpPolicy(environment.spec)")
        for name, value in (("environment", environment), ("validation", validation or environment)):
            if not isinstance(value, BatchedEnvironment):
                raise ConfigurationError(
                    f"{name} must be a BatchedEnvironment, got {type(value).__name__}: see GymnasiumBatch"
                )
        if config is not None:
            expect("config", config, ControlConfig, "write ControlConfig(total_steps=100_000, ...)")
        super().__init__(config or ControlConfig(), run, callbacks)
        self.policy = policy
        self.environment = environment
        self.validation = environment if validation is None else validation
        self._description = dict(description or {})
        self._optimization, self._reference = optimization, reference
        self._state = progress or ControlState()
        self.processes = Processes()
        """It trains alone."""

    # ------------------------------------------------------------------------------ how it stands

    def _adopt_settings(self, config: ControlConfig, settings: Mapping[str, Any]) -> None:
        checkpoints = ready(self._parts).checkpoints
        checkpoints.optimization.length = config.total_steps
        self._state = checkpoints.change_settings(config, settings, self._state)

    @property
    def control_state(self) -> ControlState:
        """The progress from which every later choice follows, beside the weights and the optimiser."""
        return self._state

    @property
    def _planned_steps(self) -> int:
        """Environment steps of the whole run; its last rollout may go beyond."""
        return self.config.total_steps

    def summary(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return {
            **self._outcome(updates=self._state.updates, episodes=self._state.episodes),
            "platform": platform_line(),
            "deterministic": self._state.repeatable,
        }

    # ------------------------------------------------------------------------------ begin and end

    async def initialize(self) -> None:
        """Check the environment with the policy, make the optimiser and the reference, open the run folder.

        Raises ConfigurationError for an environment whose equal seeds give unequal episodes, and for a policy
        whose logits do not fit its actions.
        """
        self._worker.refuse_stopped()
        if self._parts is None:
            self._parts = await self._worker.run(self._set_up)
            if not self._state.num_groups:
                self._state = replace(self._state, num_groups=self.config.num_groups)

    def _set_up(self) -> _Parts:
        check_installed(self.callbacks)
        config, spec = self.config, self.environment.spec
        if self.validation.spec.to_json() != spec.to_json():
            raise ConfigurationError(
                f"validation has the spec {self.validation.spec.to_json()} and environment {spec.to_json()}: "
                "give two of one kind"
            )
        can_fork = check_environment(self.environment, seed=config.seed)
        if ESTIMATORS[config.advantage_estimator].branches and not can_fork:
            raise ConfigurationError(
                f"{spec.name} cannot fork: set advantage_estimator to step_group, which needs no branches"
            )
        if config.gradient_cosines_every and not isinstance(self.environment, Tasked):
            raise ConfigurationError(
                f"gradient_cosines_every {config.gradient_cosines_every} compares tasks, and {spec.name} is "
                "one: leave it out, or make a TaskMix"
            )
        _check_policy(self.policy, self.environment, config)
        if not self._recorder.is_open:
            self._recorder.open(self._make_folder, self._settings())
        optimization = self._optimization or Optimization(self.policy, config, num_updates=config.total_steps)
        reference = self._reference
        if config.beta and reference is None:
            reference = copy.deepcopy(self.policy).requires_grad_(False)
        return _Parts(
            optimization=optimization,
            reference=reference,
            checkpoints=ControlCheckpoints(
                policy=self.policy,
                optimization=optimization,
                recorder=self._recorder,
                worker=self._worker,
                identity=Identity(
                    base=fingerprint(self.policy.state_dict()),
                    scenarios=self.environment.spec.name,
                    settings={"environment": spec.to_json(), "training": config.model_dump(mode="json")},
                ),
                settings=self._settings(),
                limit=config.save_total_limit,
            ),
        )

    def _make_folder(self) -> RunFolder:
        return RunFolder.create(self.config.output_dir, self.config.run_name, conversations=False)

    def _settings(self) -> dict[str, Any]:
        """The content of config.yaml."""
        is_named = "environment" in self._description  # by what a YAML file can name
        return {
            "kind": "control",
            **({} if is_named else {"made_by": "program"}),
            "environment": self.environment.spec.to_json(),
            "policy": type(self.policy).__name__,
            **self._description,
            "training": self.config.model_dump(mode="json"),
        }

    # ------------------------------------------------------------------------------ training

    async def train(self) -> nn.Module:
        """Run the updates that are left, then return the policy: the last one's weights, or with
        load_best_at_end the best evaluation's.

        However it ends, by a cancellation or an error too, it keeps a checkpoint of the last finished update,
        `summary.json` and `report.html`. After `request_stop` another call goes on. Raises TrainingStopped
        where the first update, or three in a row, could not learn.
        """
        await self._train()
        return self.policy

    async def _next_step(self) -> None:
        """Play and learn, in the worker's thread; an update that has begun is finished."""
        async with measure_loop_lag() as lag:
            metrics, failure = await shielded(self._worker.run(self._play_and_learn))
        metrics["time/loop_lag"] = lag.longest
        findings = self._recorder.step(self.step_number, metrics, self.config.model_dump(), lag.place)
        is_fatal = self._state.updates == 1 or self._state.failed_updates >= _MAX_FAILED
        fatal = f"update {self._state.updates} {failure}" if failure is not None and is_fatal else None
        await self._announce_step(metrics, findings, fatal)

    def _play_and_learn(self) -> tuple[dict[str, float], str | None]:
        parts, config, state = ready(self._parts), self.config, self._state
        started = time.perf_counter()
        rollout = self._rollout(state)
        played = time.perf_counter()
        parts.checkpoints.midway = True
        result = update(
            self.policy,
            parts.optimization,
            rollout,
            config,
            reference=parts.reference,
            position=state.step,
            partition=state.partition,
            updates_before=state.updates,
        )
        observations = rollout.seen()
        if isinstance(self.policy, ObservingPolicy):  # after the update, which scores what it sampled with
            self.policy.follow_observations(observations)
        parts.checkpoints.midway = False
        ended = time.perf_counter()
        self._state = replace(
            state,
            step=state.step + max(rollout.num_steps, 1),  # a rollout that failed as a whole is a step, too
            updates=state.updates + 1,
            episodes=state.episodes + len(rollout.failed),
            num_groups=self._next_num_groups(rollout),
            failed_updates=state.failed_updates + 1 if result.failure else 0,
            partition=result.partition,
            train_seconds=state.train_seconds + ended - started,
        )
        if config.log_episodes:
            self._recorder.tracker.log_episodes(self._state.step, rollout.episodes())
            names, totals = self.environment.spec.action_names, rollout.action_counts().tolist()
            counts = {names[at] if names else str(at): count for at, count in enumerate(totals) if count}
            self._recorder.tracker.log_event("actions", step=self._state.step, counts=counts)
        times = {"time/rollout": played - started, "time/update": ended - played}
        metrics = _metrics(rollout, result, times)
        if not (isinstance(self.policy, MlpPolicy) and self.policy.normalizer is not None):
            metrics["observation/rms"] = largest_rms(observations)
        return metrics, result.failure

    def _rollout(self, state: ControlState) -> Rollout:
        config, update_number = self.config, state.updates
        seeds = [derive(config.seed, "start", update_number, group) for group in range(state.num_groups)]
        keys = action_keys(config.seed, update_number, state.num_groups, config.group_size)
        play: Callable[..., Rollout] = collect
        if ESTIMATORS[config.advantage_estimator].branches:
            number, every = config.num_branches, config.branch_every
            play = partial(collect_branches, gamma=config.gamma, num_branches=number, every=every)
        self.policy.train(False)
        size, limit = config.group_size, config.max_episode_steps
        return play(self.policy, self.environment, seeds, group_size=size, keys=keys, max_steps=limit)

    def _next_num_groups(self, rollout: Rollout) -> int:
        num_steps = self.config.steps_per_rollout
        if num_steps is None:
            return self.config.num_groups
        steps_of_a_group = max(1.0, rollout.num_steps / rollout.num_groups)
        return min(self.config.num_groups, max(1, round(num_steps / steps_of_a_group)))

    # ------------------------------------------------------------------------------ between updates

    async def _validate(self) -> bool:
        result = await self.evaluate()
        is_best = await self._worker.run(self._note_evaluation, result)
        await self._notify("on_evaluate", self.step_number, result)
        return is_best

    async def evaluate(
        self, seeds: Sequence[int] | None = None, *, deterministic: bool = True
    ) -> ControlEvaluation:
        """One episode of the current policy from each of `seeds`, by default `eval_episodes` starts that the
        training does not play; `deterministic`: always the likeliest action."""
        starts = (
            evaluation_seeds(self.config.seed, self.config.eval_episodes) if seeds is None else list(seeds)
        )
        play = partial(evaluate, deterministic=deterministic, seed=self.config.seed)
        return await self._worker.run(play, self.policy, self.validation, starts)

    async def call(self, work: Callable[[], _T]) -> _T:
        """The result of blocking work, done in the trainer's thread between two updates."""
        return await self._worker.run(work)

    def _note_evaluation(self, result: ControlEvaluation) -> bool:
        """Log an evaluation; is it the best so far?"""
        config, state = self.config, self._state
        best = state.best.after(state.step, result.mean, threshold=config.early_stopping_threshold)
        if config.log_episodes:
            self._recorder.tracker.log_episodes(state.step, result.rollout.episodes(), stage="validation")
        self._recorder.measured(state.step, result.metrics())
        self._state = replace(state, evaluated_step=state.step, best=best)
        return best.step == state.step

    async def _finish(self, *, is_done: bool) -> None:
        if not is_done or not self.config.load_best_at_end:
            return
        path = best_checkpoint(self.run.checkpoints)
        if path is None:
            _log.warning("the run folder has no best checkpoint: the policy keeps the last update's weights")
        elif self._state.best.step != self.step_number:
            await ready(self._parts).checkpoints.save(self._state)  # before the weights are replaced
            checkpoint = await self._worker.run(load_checkpoint, path)
            self.policy.load_state_dict(dict(checkpoint.weights))

    # ------------------------------------------------------------------------------ checkpoints

    async def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint, or a run's newest: this run's when no path is given (warns where that has
        none yet).

        Log lines and checkpoints of later steps are dropped. Raises CheckpointError when it is damaged, or is
        of other settings, another environment or other first weights.
        """
        if self._lifecycle.is_training:
            raise ConfigurationError("this trainer is training: stop it, then load the checkpoint")
        await self.initialize()
        await shielded(self._restore(path))

    async def _restore(self, path: str | Path | None) -> None:
        checkpoints = ready(self._parts).checkpoints
        restored = await checkpoints.restore(path)
        if restored is not None:
            self._state = restored[1]
        await checkpoints.truncate_after(self._state)
        if restored is None:
            _log.warning(f"{self.run.path} has no checkpoint yet: starting at step {self.step_number}")
        else:
            self.tracker.log_event("resumed", step=self.step_number, path=restored[0].name)


def _check_policy(policy: nn.Module, environment: BatchedEnvironment, config: ControlConfig) -> None:
    """Ask it for the first actions. Raises ConfigurationError for logits of a wrong shape, a policy that
    does not take and give tensors of the CPU, and one without values where the estimator needs them."""
    device = next(policy.parameters()).device
    if ESTIMATORS[config.advantage_estimator].credit is None:
        critic_of(policy)
    observations = environment.reset([derive(config.seed, "check", index) for index in range(2)])
    expected = (2, environment.spec.num_actions)
    misplaced = f"the policy must take and give tensors of the CPU, got one on {device}: call policy.cpu()"
    try:
        with torch.inference_mode():
            logits = policy.train(False)(as_tensors(observations))
    except RuntimeError as error:
        if device.type == "cpu":
            raise
        raise ConfigurationError(misplaced) from error
    if isinstance(logits, torch.Tensor) and logits.device.type != "cpu":
        raise ConfigurationError(misplaced)
    if not isinstance(logits, torch.Tensor) or logits.shape != expected:
        received = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ConfigurationError(
            f"{type(policy).__name__} must give logits of shape {expected} for 2 rows, got {received}: "
            f"{environment.spec.name} has {environment.spec.num_actions} actions"
        )


def _by_task(tasks: TaskRows, returns: NDArray[np.float64], whole: NDArray[np.bool_]) -> dict[str, float]:
    """The tasks' mean normalised returns, of those that had an episode."""
    scores = tasks.scores(returns)
    rows = {name: whole & (tasks.ids == task) for task, name in enumerate(tasks.names)}
    return {f"score/{name}": float(scores[row].mean()) for name, row in rows.items() if row.any()}


def _metrics(rollout: Rollout, result: UpdateResult, times: Mapping[str, float]) -> dict[str, float]:
    """The metrics of one update; rewards are undiscounted returns of the episodes that did not fail."""
    whole = ~rollout.failed
    metrics: dict[str, float] = {}
    if whole.any():
        returns = rollout.returns[whole]
        metrics |= {"reward/mean": float(returns.mean()), "reward/std": float(returns.std())}
        for name, part in rollout.components.items():
            named = part_name(f"reward/{name}", metrics)
            metrics[named] = float(np.where(rollout.alive, part, 0.0).sum(axis=0)[whole].mean())
        if rollout.tasks is not None:
            metrics |= _by_task(rollout.tasks, rollout.returns, whole)
        metrics["episode/length"] = float(rollout.lengths[whole].mean())
        metrics["episode/truncated"] = float(rollout.truncated[whole].mean())
    spent = sum(times.values())
    return {
        **metrics,
        "episode/failed": float(rollout.failed.sum()),
        "rollout/episodes": float(len(whole)),
        "rollout/steps": float(rollout.num_steps),
        **result.metrics,
        **times,
        "time/step": spent,
        "rollout/steps_per_second": rollout.num_steps / spent,
    }
