"""The document's GRPOTrainer: its names over `ControlTrainer`, which plays, learns, logs and saves.

network, environment -> MetricsHistory, NetworkPolicy -> ControlTrainer -> a run folder with checkpoints
"""

from __future__ import annotations

import copy
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from stateset_agents.numeric.autoscaling.actions import InfrastructureActionSpace
from stateset_agents.numeric.autoscaling.grpo.config import GRPOConfig
from stateset_agents.numeric.autoscaling.grpo.network import GRPOPolicyNetwork, NetworkPolicy
from stateset_agents.numeric.environments.base import (
    BatchedEnvironment,
    BoolArray,
    FloatArray,
    IntArray,
    Observations,
    Transition,
)
from stateset_agents.numeric.evaluation import ControlEvaluation, evaluate, evaluation_seeds
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.runs.callbacks import Callback
from stateset_agents.runs.checkpoint_files import latest_checkpoint, load_checkpoint
from stateset_agents.runs.checkpoints import checkpoint_at
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import CheckpointError, ConfigurationError
from stateset_agents.types.settings import expect, expect_that

# ------------------------------------------------------------------------------------------ windows


class MetricsHistory:
    """An environment whose observations are the last ones, and the one of now.

    metrics_history [B, T, M], oldest first and the one of now last, and current_metrics [B, M]. Before the
    start the first observation is taken to have stood for ever. Starts, noise, rewards and forks are those of
    the environment inside.
    """

    def __init__(self, environment: BatchedEnvironment, history_length: int = 60) -> None:
        """Raises ConfigurationError for observations that are not one array [B, M]."""
        shape = environment.spec.observation_shape
        if not isinstance(shape, tuple) or len(shape) != 1:
            raise ConfigurationError(
                f"{environment.spec.name}: observations must be one array [rows, metrics] to be remembered, "
                f"got the shape {shape!r}"
            )
        expect_that(history_length >= 1, "history_length", "be at least 1", history_length)
        self.environment, self.history_length = environment, history_length
        shapes = {"metrics_history": (history_length, *shape), "current_metrics": shape}
        self.spec = replace(environment.spec, observation_shape=shapes)

    def reset(self, seeds: Sequence[int]) -> Observations:
        """One episode per seed; see `BatchedEnvironment`."""
        first = self.environment.reset(seeds)
        assert isinstance(first, np.ndarray)  # as its spec says
        self._window: FloatArray = np.repeat(first[:, None], self.history_length, axis=1)
        return self._observations()

    def step(self, actions: IntArray) -> Transition:
        """One action per row; see `BatchedEnvironment`."""
        transition = self.environment.step(actions)
        now = transition.observations
        assert isinstance(now, np.ndarray)
        self._window = np.concatenate([self._window[:, 1:], now[:, None]], axis=1)  # earlier ones are kept
        return replace(transition, observations=self._observations())

    def fork(self, rows: IntArray) -> Self:
        """A new batch with copies of these episodes and their history; see `BatchedEnvironment`."""
        fork = copy.copy(self)
        fork.environment, fork._window = self.environment.fork(rows), self._window[rows]
        return fork

    def action_mask(self) -> BoolArray | None:
        """The mask of the environment inside."""
        return self.environment.action_mask()

    def _observations(self) -> Observations:
        return {"metrics_history": self._window, "current_metrics": self._window[:, -1]}


_REMEMBERED = 1000
"""Updates in `metrics_history`."""
_NAMES = {
    "mean_reward": "reward/mean",
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "entropy": "policy/entropy",
    "kl_div": "kl/old",
    "learning_rate": "optimizer/learning_rate",
}
"""The document's names of an update's metrics, and those of the logs."""
_ALIAS = ".pt"


class GRPOTrainer:
    """Group-relative policy optimisation (https://arxiv.org/abs/2402.03300) of numeric actions.

    >>> network = GRPOPolicyNetwork(action_dim=environment.spec.num_actions, num_metrics=13)
    >>> trainer = GRPOTrainer(network, GRPOConfig(total_steps=100_000))
    >>> await trainer.train(environment)
    >>> print((await trainer.evaluate(environment, 100)).mean)

    A group is episodes from one start, where the document takes successive steps of one episode; rewards are
    the environment's own; schedule, evaluations and checkpoints go by the environment steps that were taken.
    The simulation stays on the CPU, the network is on `device`.
    """

    def __init__(
        self,
        policy: GRPOPolicyNetwork,
        config: GRPOConfig | None = None,
        action_space: InfrastructureActionSpace | None = None,
        *,
        device: str = "auto",
    ) -> None:
        """`action_space`: what the policy's actions must be, where it is given; `device`: auto takes a GPU
        where there is one.

        Raises ConfigurationError for a policy of another number of actions, and for a device that is not
        there.
        """
        expect("policy", policy, GRPOPolicyNetwork, "for other policies there is ControlTrainer")
        if config is not None:
            expect("config", config, GRPOConfig, "write GRPOConfig(total_steps=100_000, ...)")
        if action_space is not None and action_space.total_actions != policy.action_dim:
            raise ConfigurationError(
                f"the policy has {policy.action_dim} actions and the action space "
                f"{action_space.total_actions}: make the policy with action_space"
            )
        self.device = _device(device)
        self.policy = policy.to(self.device)
        self.config = config or GRPOConfig()
        self.metrics_history: deque[dict[str, float]] = deque(maxlen=_REMEMBERED)
        """step, mean_reward, policy_loss, value_loss with a critic, entropy, kl_div and learning_rate of each
        update; all metrics are in the run's metrics.jsonl."""
        self._numeric = NetworkPolicy(policy)
        self._training: ControlTrainer | None = None
        self._work: str | None = None
        self._first = _copied(policy)
        self._resumed: Path | None = None

    @property
    def training(self) -> ControlTrainer:
        """The training under way, or the last one: its run folder, progress, pause and stop.

        Raises ConfigurationError before the first.
        """
        if self._training is None:
            raise ConfigurationError("nothing was trained yet: call train(environment) first")
        return self._training

    async def train(
        self,
        env: BatchedEnvironment,
        total_steps: int | None = None,
        eval_interval: int | None = None,
        save_interval: int | None = None,
        *,
        run: RunFolder | None = None,
        callbacks: Sequence[object] = (),
    ) -> GRPOPolicyNetwork:
        """Train on `env`, from the weights as they are or from a checkpoint that was loaded; the policy.

        All three are in environment steps, by default the config's; evaluations and checkpoints come after
        the update that passes a multiple. `run`: a folder to go on in. In the run folder `best_model.pt` and
        `checkpoint_<steps>.pt` lead to the checkpoints. Each call is a training of its own, with an optimiser
        of its own.

        Raises ConfigurationError for an environment of other actions or another width than the policy's.
        """
        self._refuse_work()
        environment = self._fitted(env)
        overrides = {"total_steps": total_steps, "eval_steps": eval_interval, "save_steps": save_interval}
        chosen = {name: value for name, value in overrides.items() if value is not None}
        config = GRPOConfig(**{**self.config.model_dump(), **chosen})
        if self._resumed is None:
            self._first = _copied(self.policy)
        else:
            self.policy.load_state_dict(self._first)  # a run is known by the weights that it began with
        with self._working("training"):
            try:
                self._training = ControlTrainer(
                    self._numeric, environment, config, run=run, callbacks=[_Names(self), *callbacks]
                )
                async with self._training as training:
                    if self._resumed is not None:
                        await training.load_checkpoint(self._resumed)
                    await training.train()
            finally:
                self._resumed = None
        return self.policy

    async def evaluate(
        self,
        env: BatchedEnvironment,
        num_episodes: int = 10,
        *,
        seeds: Sequence[int] | None = None,
        deterministic: bool = True,
    ) -> ControlEvaluation:
        """Episodes of the policy as it is, to their ends or the environment's horizon; dropout is off, and
        the mode is afterwards what it was.

        `seeds`: their starts, by default `num_episodes` that no training of this seed plays;
        `deterministic`: always the likeliest action.
        """
        self._refuse_work()
        starts = evaluation_seeds(self.config.seed, num_episodes) if seeds is None else seeds
        with self._working("evaluating"):
            return await in_thread(
                evaluate,
                self._numeric,
                self._fitted(env),
                starts,
                deterministic=deterministic,
                seed=self.config.seed,
            )

    @contextmanager
    def _working(self, work: str) -> Iterator[None]:
        """Refuse other calls meanwhile; afterwards the policy is in the mode in which it was."""
        was_training, self._work = self.policy.training, work
        try:
            yield
        finally:
            self._work = None
            self.policy.train(was_training)

    async def save_checkpoint(self, path: str | Path) -> Path:
        """Write the last finished update to a folder of safetensors: weights, optimiser, progress, settings.

        A name that ends in `.pt` becomes a link to the folder without that ending. Returns the folder. Raises
        ConfigurationError before the first training, CheckpointError where the disk cannot take it.
        """
        training, path = self.training, Path(path)
        newest = (
            await training.save_checkpoint()
            if self._work == "training"
            else latest_checkpoint(training.run.checkpoints)
        )
        if newest is None:
            raise CheckpointError(f"{training.run.path} has no checkpoint: train first")
        return await in_thread(_copy_checkpoint, newest, path)

    async def load_checkpoint(self, path: str | Path) -> None:
        """Take a checkpoint's weights; the next `train` goes on from it, with the same bits as a training
        that was never stopped.

        `path`: what `save_checkpoint` wrote, or a run folder. A pickled file is refused unread. Raises
        CheckpointError where it is damaged or of another network.
        """
        self._refuse_work()
        folder = checkpoint_at(_folder_of(Path(path)))
        weights = (await in_thread(load_checkpoint, folder)).weights
        ours = {f"network.{name}": value for name, value in self.policy.state_dict().items()}
        differing = [
            name
            for name in sorted(ours.keys() | weights.keys())
            if name not in ours or name not in weights or ours[name].shape != weights[name].shape
        ]
        if differing:
            raise CheckpointError(
                f"{folder} is of another network ({differing[0].removeprefix('network.')} differs): make the "
                "policy with the same widths"
            )
        self._numeric.load_state_dict(dict(weights))
        self._resumed = folder

    def _refuse_work(self) -> None:
        if self._work is not None:
            raise ConfigurationError(
                f"this trainer is {self._work}: await that call, or make another trainer"
            )

    def _fitted(self, env: BatchedEnvironment) -> BatchedEnvironment:
        """The environment, with windows where it has plain metrics. Raises ConfigurationError if it does not
        fit."""
        encoder, spec = self.policy.encoder, env.spec
        if spec.num_actions != self.policy.action_dim:
            raise ConfigurationError(
                f"the policy has {self.policy.action_dim} actions and {spec.name} {spec.num_actions}: make "
                f"it with action_dim={spec.num_actions}"
            )
        if not isinstance(spec.observation_shape, Mapping):
            env = MetricsHistory(env, encoder.history_length)
        shape = env.spec.observation_shape
        assert isinstance(shape, Mapping)
        missing = {"metrics_history", "current_metrics"} - shape.keys()
        if missing:
            raise ConfigurationError(f"{spec.name}: observations lack {sorted(missing)[0]!r}")
        width = shape["current_metrics"][-1]
        if width != encoder.num_metrics:
            raise ConfigurationError(
                f"the policy reads {encoder.num_metrics} metrics and {spec.name} has {width}: make it with "
                f"num_metrics={width}"
            )
        return env


class _Names(Callback):
    """Keeps the document's names: of metrics, and of checkpoints in the run folder."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    async def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        line = {name: metrics[ours] for name, ours in _NAMES.items() if ours in metrics}
        self._trainer.metrics_history.append({"step": float(step), **line})

    def on_checkpoint(self, step: int, path: Path) -> None:
        run = self._trainer.training.run.path
        for link in [*run.glob(f"checkpoint_*{_ALIAS}"), run / f"best_model{_ALIAS}"]:
            link.unlink(missing_ok=True)
        for kept in path.parent.glob("step-*"):
            steps = int(kept.name.removeprefix("step-"))
            (run / f"checkpoint_{steps}{_ALIAS}").symlink_to(kept.relative_to(run))
        if (path.parent / "best").is_dir():
            (run / f"best_model{_ALIAS}").symlink_to((path.parent / "best").relative_to(run))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigurationError(f"device must be auto, cpu or cuda, got {name!r}") from None
    expect_that(device.type in ("cpu", "cuda"), "device", "be auto, cpu or cuda", name)
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise ConfigurationError(
            f"device is {name!r} and torch sees {torch.cuda.device_count()} GPUs: take device 'auto' or 'cpu'"
        )
    return device


def _copied(policy: GRPOPolicyNetwork) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in policy.state_dict().items()}


def _copy_checkpoint(source: Path, path: Path) -> Path:
    """A copy under the name without `.pt`, and the link."""
    folder = path.with_suffix("") if path.suffix == _ALIAS else path
    partial = folder.with_name(f".{folder.name}.partial")
    if folder.exists() and not (folder / "manifest.json").is_file():
        raise CheckpointError(f"{folder} is there and is no checkpoint: choose another path")
    if path.is_file() and not path.is_symlink():
        raise CheckpointError(f"{path} is a file and is not replaced: choose another path")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        if path != folder:
            path.unlink(missing_ok=True)
            path.symlink_to(folder.name, target_is_directory=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder} ({error.strerror}): choose another path") from error
    return folder


def _folder_of(path: Path) -> Path:
    """The folder of a checkpoint's name with or without `.pt`."""
    if path.suffix == _ALIAS and not path.exists():
        return path.with_suffix("")
    if path.is_file():
        raise CheckpointError(
            f"{path} is one file, maybe pickled, and to read such a file can run any program: give the "
            "folder that save_checkpoint wrote"
        )
    return path
