"""The document's GRPOTrainer: its names over `ControlTrainer`, which plays, learns, logs and saves.

network, environment of dicts, reward -> NetworkPolicy, EnvironmentCopies -> ControlTrainer -> a run folder
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stateset_agents.algorithms.group_arrays import returns_to_go_array
from stateset_agents.numeric.autoscaling.actions import InfrastructureActionSpace
from stateset_agents.numeric.autoscaling.grpo.config import GRPOConfig, GRPOLoss
from stateset_agents.numeric.autoscaling.grpo.environments import (
    PARTS,
    DictEnvironment,
    DictReward,
    EnvironmentCopies,
    MetricsHistory,
    Visit,
)
from stateset_agents.numeric.autoscaling.grpo.network import GRPOPolicyNetwork, NetworkPolicy
from stateset_agents.numeric.credit import StepCredit
from stateset_agents.numeric.environments.base import BatchedEnvironment
from stateset_agents.numeric.evaluation import evaluate, evaluation_seeds
from stateset_agents.numeric.rollout import Rollout, action_keys, collect
from stateset_agents.numeric.trainer import ControlState, ControlTrainer
from stateset_agents.numeric.update import minibatches, update
from stateset_agents.runs.callbacks import Callback
from stateset_agents.runs.optimizer import Optimization
from stateset_agents.runtime.pending_calls import awaitable_or_blocking
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.errors import CheckpointError, ConfigurationError, TrainingStopped
from stateset_agents.types.logs import get_logger
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect, expect_that

Experience = dict[str, Any]
"""One step of one copy, by the names of `_ENTRIES`; `return` is the copy's discounted return from there."""
_ENTRIES = ("state", "action", "log_prob", "reward", "reward_components", "next_state", "done", "return")

_ROLLOUT = 2048
"""Steps of the document's rollout; an episode that ends nowhere is cut after a member's share of it."""
_REMEMBERED = 1000
"""Updates in `metrics_history`."""
_NAMES = {
    "policy_loss": "loss/policy",
    "value_loss": "loss/value",
    "entropy": "policy/entropy",
    "kl_div": "kl/old",
}
"""The document's names of an update's metrics, and those of the logs."""
LEARNING = {
    "advantage_estimator": "step_group",
    "advantage_normalization": "batch",
    "learning_rate": 2e-3,
    "kl_coefficient": 0.0,
    "gamma": 0.95,
    "num_groups": 4,
    "steps_per_rollout": None,
    "num_epochs": 2,
    "batch_size": 960,
}
"""Settings under which the simulated cluster is learned; see docs/evidence/cluster-simulator.md."""


class GRPOTrainer:
    """Group-relative policy optimisation (https://arxiv.org/abs/2402.03300) of numeric actions.

    >>> space = InfrastructureActionSpace(enable_traffic_actions=False)
    >>> network = GRPOPolicyNetwork(action_dim=space.total_actions)
    >>> trainer = GRPOTrainer(network, GRPOConfig(), space, InfrastructureRewardFunction())
    >>> trainer.train(environment, total_steps=100_000)

    A group is copies of one start, where the document takes successive steps of one episode; schedule,
    evaluations and checkpoints go by the environment steps that were taken. `train`, `evaluate`,
    `save_checkpoint` and `load_checkpoint` block in a script; where an event loop runs, await them. The
    other methods always block. The simulation stays on the CPU, the network is on `device`.
    """

    def __init__(
        self,
        policy: GRPOPolicyNetwork,
        config: GRPOConfig | None = None,
        action_space: InfrastructureActionSpace | None = None,
        reward_fn: DictReward | None = None,
        device: str = "auto",
    ) -> None:
        """`action_space` and `reward_fn` may be left out for a `BatchedEnvironment`, which has its own;
        `device`: auto takes a GPU where there is one.

        Raises ConfigurationError for a policy of another number of actions, for a reward without
        `compute_reward`, and for a device that is not there.
        """
        expect("policy", policy, GRPOPolicyNetwork, "for other policies there is ControlTrainer")
        if config is not None:
            expect("config", config, GRPOConfig, "write GRPOConfig(total_steps=100_000, ...)")
        if action_space is not None and action_space.total_actions != policy.action_dim:
            raise ConfigurationError(
                f"the policy has {policy.action_dim} actions and the action space "
                f"{action_space.total_actions}: make the policy with action_space"
            )
        can_score = reward_fn is None or callable(getattr(reward_fn, "compute_reward", None))
        hint = "write InfrastructureRewardFunction()"
        expect_that(can_score, "reward_fn", "have compute_reward", reward_fn, hint, length=60)
        self.device = _device(device)
        self.policy = policy.to(self.device)
        self.config = config or GRPOConfig()
        self.action_space, self.reward_fn = action_space, reward_fn
        self.grpo_loss = GRPOLoss(self.config)
        self.experience_buffer: list[Experience] = []
        """What `collect_experience` gave last."""
        self.group_buffer: list[list[Experience]] = []
        """The same by groups."""
        self.metrics_history: deque[dict[str, float]] = deque(maxlen=_REMEMBERED)
        """step, mean_reward of a step, policy_loss, value_loss (0 without a critic), entropy, kl_div and
        learning_rate of each update of `train`; all metrics are in the run's metrics.jsonl."""
        self.logger = get_logger("stateset_agents.GRPOTrainer")
        self._numeric = NetworkPolicy(policy)
        self._optimization = Optimization(self._numeric, self.config, num_updates=self.config.total_steps)
        self.optimizer = self._optimization.optimizer
        self.scheduler = Progress(self._optimization)
        self._reference: NetworkPolicy | None = None
        self._copies: EnvironmentCopies | None = None
        self._training: ControlTrainer | None = None
        self._work: str | None = None
        self._goes_on = False
        """True from `load_checkpoint` to the end of the next `train`."""

    # ------------------------------------------------------------------------------ step by step

    def collect_experience(self, env: DictEnvironment, num_steps: int = 1024) -> list[Experience]:
        """Groups of `group_size` successive entries: the same step of copies of one start. Blocking.

        A step that not every copy of its group reached is left out, and so is what fills no group at the
        end: `num_steps` rounded down to whole groups is what it gives. Each call goes on with other starts.

        Raises ConfigurationError for a `BatchedEnvironment`, whose rows have no states, and for numbers that
        are not finite.
        """
        batch, config = self._fitted(env), self.config
        size = config.group_size
        groups: list[list[Experience]] = []
        expect_that(num_steps >= size, "num_steps", f"be at least group_size {size}", num_steps)
        if not isinstance(batch, EnvironmentCopies):
            raise ConfigurationError(
                f"{batch.spec.name} has no states to collect: give an environment of dicts, or call train"
            )
        with self._working("collecting"):
            while left := num_steps // size - len(groups):
                batch.visits, number = [], self.scheduler.state.episodes
                keys = action_keys(derive(config.seed, "collect"), number, 1, size)
                seeds = [derive(config.seed, "collect", number)]
                self.policy.train(False)
                rollout = collect(self._numeric, batch, seeds, group_size=size, keys=keys, max_steps=left)
                if rollout.failed.any():
                    raise ConfigurationError(f"{batch.name} gave a number that is not finite: look at step")
                self.scheduler.state = replace(self.scheduler.state, episodes=number + size)
                groups += self._groups(rollout, batch.visits)
            batch.visits = None
        self.group_buffer, self.experience_buffer = groups, list(itertools.chain(*groups))
        return self.experience_buffer

    def _groups(self, rollout: Rollout, visits: Sequence[Visit]) -> Iterator[list[Experience]]:
        returns = returns_to_go_array(rollout.rewards, rollout.alive, gamma=self.config.gamma)
        for step, visit in enumerate(visits):
            if rollout.alive[step].all():
                taken = (rollout.actions, rollout.logprobs, rollout.rewards, returns)
                actions, logprobs, rewards, own = (part[step].tolist() for part in taken)
                done = (rollout.terminated & (rollout.lengths == step + 1)).tolist()
                rows = zip(
                    visit.before, actions, logprobs, rewards, visit.parts, visit.after, done, own, strict=True
                )
                yield [dict(zip(_ENTRIES, row, strict=True)) for row in rows]

    def compute_returns_and_advantages(self, experiences: Sequence[Experience]) -> tuple[Tensor, Tensor]:
        """[N] each entry's own return (its reward where it has no `return`), and [N] the same compared within
        groups of `group_size` successive entries.

        Raises ConfigurationError for entries that fill no whole group.
        """
        size = self._check_groups(experiences)
        returns = torch.tensor([entry.get("return", entry["reward"]) for entry in experiences])
        advantages = self.grpo_loss.compute_group_advantages(returns.reshape(-1, size))
        return returns, advantages.reshape(-1)

    def update_policy(
        self, experiences: Sequence[Experience], returns: Tensor, advantages: Tensor
    ) -> dict[str, float]:
        """`num_epochs` passes in minibatches of whole groups; policy_loss, value_loss (0 without a critic),
        entropy and kl_div of the last pass. Blocking.

        The KL is to the policy as it was at the first update, or in the checkpoint. The learning rate falls
        by the entries learned from. Raises TrainingStopped where nothing could be learned.
        """
        size, state, number = self._check_groups(experiences), self.scheduler.state, len(experiences)
        ended, seen = np.ones(number, dtype=np.bool_), [entry["state"] for entry in experiences]
        names = ("action", "log_prob", "reward")
        actions, logprobs, rewards = (np.array([[entry[name] for entry in experiences]]) for name in names)
        observations = {part: np.array([[state[part] for state in seen]], dtype=np.float32) for part in PARTS}
        rollout = Rollout(  # of single steps: a group is as many rows as it has members
            observations=observations,
            actions=actions,
            logprobs=logprobs.astype(np.float32),
            rewards=rewards,
            alive=ended[None],
            masks=None,
            components={},
            seeds=range(number),
            group_ids=np.arange(number) // size,
            group_size=size,
            terminated=ended,
            truncated=~ended,
            failed=~ended,
            final_observations={part: values[0] for part, values in observations.items()},
        )
        targets, credits = (part.detach().double().cpu().numpy()[None] for part in (returns, advantages))
        with self._working("updating"):
            result = update(
                self._numeric,
                self._optimization,
                rollout,
                self.config,
                reference=self._kept_reference(),
                credited=StepCredit(credits, rollout.alive, targets, {}),
                position=state.step,
            )
        if result.failure is not None:
            raise TrainingStopped(f"the update {result.failure}")
        self.scheduler.state = replace(state, step=state.step + number, updates=state.updates + 1)
        return _named(result.metrics)

    def _check_groups(self, experiences: Sequence[Experience]) -> int:
        """The size of their groups."""
        size, number = self.config.group_size, len(experiences)
        expect_that(number > 0 and number % size == 0, "experiences", f"be whole groups of {size}", number)
        return size

    def _get_shuffled_group_indices(self, batch_size: int) -> Tensor:
        """[N] whole groups of a batch in the order of one pass."""
        size, position = self.config.group_size, self.scheduler.state.step
        slices = [slice(first, first + size) for first in range(0, batch_size - size + 1, size)]
        generator = np.random.default_rng(derive(self.config.seed, "minibatches", position))
        return torch.cat(list(minibatches(slices, size, generator)))

    # ------------------------------------------------------------------------------ a whole training

    @property
    def training(self) -> ControlTrainer:
        """The training under way, or the last one: its run folder, progress, pause and stop.

        Raises ConfigurationError before the first.
        """
        if self._training is None:
            raise ConfigurationError("nothing was trained yet: call train(environment) first")
        return self._training

    @awaitable_or_blocking
    async def train(
        self,
        env: DictEnvironment | BatchedEnvironment,
        total_steps: int | None = None,
        eval_interval: int | None = None,
        save_interval: int | None = None,
        *,
        callbacks: Sequence[object] = (),
    ) -> GRPOPolicyNetwork:
        """Train on `env`, from the weights as they are or from a checkpoint that was loaded; the policy.

        All three are in environment steps, by default the config's, whose defaults are the document's:
        1,000,000, 10,000 and 50,000. Evaluations and checkpoints come after the update that passes a
        multiple. In the run folder are `best_model.pt` and `checkpoint_<steps>.pt`. A call goes on with the
        optimiser of the last one and counts its steps anew; after `load_checkpoint` it makes the steps that
        were left.

        Raises ConfigurationError for an environment of other actions or another width than the policy's, and
        for one whose copies with equal seeds go different ways.
        """
        self._refuse_work()
        environment = self._fitted(env)
        overrides = {"total_steps": total_steps, "eval_steps": eval_interval, "save_steps": save_interval}
        chosen = {name: value for name, value in overrides.items() if value is not None}
        config = GRPOConfig(**{**self.config.model_dump(), **chosen})
        self._optimization.length = config.total_steps
        if not self._goes_on:
            last, self._reference = self.scheduler.state, None
            groups, wanted = config.num_groups, config.steps_per_rollout
            if wanted is not None:  # else the first rollout of long episodes would be far larger
                groups = min(groups, max(1, wanted // (environment.spec.horizon * config.group_size)))
            self.scheduler.state = ControlState(
                updates=last.updates, episodes=last.episodes, num_groups=groups
            )
        self._announce(config)
        with self._working("training"):
            self._training = ControlTrainer(
                self._numeric,
                environment,
                config,
                callbacks=[_Names(self), *callbacks],
                optimization=self._optimization,
                reference=self._kept_reference(),
                progress=self.scheduler.state,
            )
            try:
                async with self._training as training:
                    await training.train()
            finally:
                self.scheduler.state, self._goes_on = self._training.control_state, False
        return self.policy

    def _announce(self, config: GRPOConfig) -> None:
        """The first line."""
        begun = f"Starting GRPO training of {config.total_steps:,} steps"
        if config.advantage_estimator != "group":
            self.logger.info(begun)
            return
        settings = ", ".join(f"{name}={value!r}" for name, value in LEARNING.items())
        self.logger.warning(
            f"{begun} by the document's defaults, with which a simulated cluster was scaled worse than by "
            f"doing nothing: GRPOConfig({settings}) learned it"
        )

    @awaitable_or_blocking
    async def evaluate(
        self,
        env: DictEnvironment | BatchedEnvironment,
        num_episodes: int = 10,
        *,
        seeds: Sequence[int] | None = None,
        deterministic: bool = True,
    ) -> float:
        """The mean return of episodes of the policy as it is, to their ends or the horizon. Dropout is off,
        and the mode is afterwards what it was.

        `seeds`: their starts, by default `num_episodes` that no training of this seed plays;
        `deterministic`: always the likeliest action. Raises ConfigurationError where every episode failed.
        """
        self._refuse_work()
        seed = self.config.seed
        starts = evaluation_seeds(seed, num_episodes) if seeds is None else seeds
        environment = self._fitted(env)
        with self._working("evaluating"):
            result = await in_thread(
                evaluate, self._numeric, environment, starts, deterministic=deterministic, seed=seed
            )
        if result.mean is None:
            raise ConfigurationError(f"every episode of {environment.spec.name} failed: look at its numbers")
        return result.mean

    @contextmanager
    def _working(self, work: str) -> Iterator[None]:
        """Refuse other calls meanwhile; afterwards the policy is in the mode in which it was."""
        self._refuse_work()
        was_training, self._work = self.policy.training, work
        try:
            yield
        finally:
            self._work = None
            self.policy.train(was_training)

    def _kept_reference(self) -> NetworkPolicy | None:
        """What the KL is to; None where it has no weight."""
        if self._reference is None and self.config.beta:
            self._reference = copy.deepcopy(self._numeric).requires_grad_(False).train(False)
        return self._reference

    # ------------------------------------------------------------------------------ checkpoints

    @awaitable_or_blocking
    async def save_checkpoint(self, path: str | Path) -> Path:
        """Write policy_state_dict, optimizer_state_dict, scheduler_state_dict (the progress), the config and
        the KL's reference to one file that `torch.load(path, weights_only=True)` reads.

        Raises CheckpointError where the disk cannot take it.
        """
        if self._work == "training":  # between two updates
            return await self.training.call(lambda: self._write(Path(path)))
        return await in_thread(self._write, Path(path))

    def _write(self, path: Path) -> Path:
        if self._work == "training":
            self.scheduler.state = self.training.control_state
        saved = {
            "policy_state_dict": self.policy.state_dict(),
            "optimizer_state_dict": self.optimizer.state_dict(),
            "scheduler_state_dict": self.scheduler.state_dict(),
            "config": self.config.model_dump(mode="json"),
            "reference_state_dict": self._reference and self._reference.network.state_dict(),
        }
        partial = path.with_name(f".{path.name}.partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(saved, partial)
            partial.replace(path)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"cannot write {path} ({error}): choose another path") from error
        return path

    @awaitable_or_blocking
    async def load_checkpoint(self, path: str | Path) -> None:
        """Take a checkpoint's weights, optimiser and progress; the next `train` makes the steps that were
        left, with the same bits as a training that was never stopped.

        Nothing but tensors and plain values is read. Raises CheckpointError where the file is something else,
        is damaged, or is of another network.
        """
        self._refuse_work()
        saved = await in_thread(_read, Path(path), self.device)
        weights = saved["policy_state_dict"]
        ours = self.policy.state_dict()
        for name in sorted(ours.keys() | weights.keys()):
            if name not in ours or name not in weights or ours[name].shape != weights[name].shape:
                raise CheckpointError(
                    f"{path} is of another network ({name} differs): make the policy with the same widths"
                )
        self.policy.load_state_dict(weights)
        self.optimizer.load_state_dict(saved["optimizer_state_dict"])
        self.scheduler.load_state_dict(saved["scheduler_state_dict"])
        self._reference = None
        if saved.get("reference_state_dict") is not None:
            self._reference = copy.deepcopy(self._numeric).requires_grad_(False).train(False)
            self._reference.network.load_state_dict(saved["reference_state_dict"])
        self._goes_on = True

    def _refuse_work(self) -> None:
        if self._work is not None:
            raise ConfigurationError(
                f"this trainer is {self._work}: await that call, or make another trainer"
            )

    def _fitted(self, env: DictEnvironment | BatchedEnvironment) -> BatchedEnvironment:
        """The environment as a batch of windows. Raises ConfigurationError if it does not fit."""
        network = self.policy
        if isinstance(env, BatchedEnvironment):
            if self.reward_fn is not None:
                raise ConfigurationError(
                    f"{env.spec.name} has rewards of its own and reward_fn would not act: leave reward_fn out"
                )
            is_window = isinstance(env.spec.observation_shape, Mapping)
            batch = env if is_window else MetricsHistory(env, network.state_encoder.history_length)
        else:
            if self.action_space is None or self.reward_fn is None:
                raise ConfigurationError(
                    f"{type(env).__name__} has no reward: make the trainer with action_space and reward_fn"
                )
            if self._copies is None or self._copies.source is not env:
                config = self.config
                limit = config.max_episode_steps or max(1, _ROLLOUT // config.group_size)
                self._copies = EnvironmentCopies(env, self.action_space, self.reward_fn, horizon=limit)
            batch = self._copies
        spec = batch.spec
        if spec.num_actions != network.action_dim:
            raise ConfigurationError(
                f"the policy has {network.action_dim} actions and {spec.name} {spec.num_actions}: make "
                f"it with action_dim={spec.num_actions}"
            )
        shape = spec.observation_shape
        assert isinstance(shape, Mapping)
        missing = set(PARTS) - shape.keys()
        if missing:
            raise ConfigurationError(f"{spec.name}: observations lack {sorted(missing)[0]!r}")
        (steps, width), own = shape["metrics_history"], network.state_encoder
        if steps > own.history_length or width != own.num_metrics:
            raise ConfigurationError(
                f"the policy reads at most {own.history_length} steps of {own.num_metrics} metrics and "
                f"{spec.name} has {steps} of {width}: give it history_length={steps} and num_metrics={width}"
            )
        return batch


class Progress:
    """How far a training is, by which its learning rate falls: a half cosine over its environment steps.

    The document's CosineAnnealingLR counts updates up to 10,000, whatever the length of the training is.
    """

    def __init__(self, optimization: Optimization) -> None:
        self._optimization = optimization
        self.state = ControlState()

    def get_last_lr(self) -> list[float]:
        """The learning rate of the last optimiser step."""
        return [float(group["lr"]) for group in self._optimization.optimizer.param_groups[:1]]

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"length": self._optimization.length, **asdict(self.state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Raises CheckpointError for another version's."""
        values = dict(state_dict)
        self._optimization.length = values.pop("length")
        self.state = ControlState.from_json(values)


class _Names(Callback):
    """Keeps the document's names: of metrics and log lines, and of checkpoints in the run folder."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer

    async def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        reward = metrics.get("reward/mean", math.nan) / metrics.get("episode/length", math.nan)
        line = {"step": float(step), "mean_reward": reward, **_named(metrics)}
        line["learning_rate"] = metrics.get("optimizer/learning_rate", math.nan)
        self._trainer.metrics_history.append(line)
        shown = "reward={mean_reward:.3f}, policy_loss={policy_loss:.4f}, entropy={entropy:.4f}"
        self._trainer.logger.info(f"Step {step}: {shown.format(**line)}")

    async def on_evaluate(self, step: int, evaluation: Any) -> None:
        self._trainer.logger.info(f"Evaluation reward: {evaluation.mean or math.nan:.3f}")

    def on_checkpoint(self, step: int, path: Path) -> None:
        run = self._trainer.training.run.path
        self._trainer._write(run / f"checkpoint_{step}.pt")
        if self._trainer.training.control_state.best.step == step:
            self._trainer._write(run / "best_model.pt")


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """An update's metrics by the document's names; no number where an update had nothing to learn."""
    named = {name: metrics.get(ours, math.nan) for name, ours in _NAMES.items()}
    return named | {"value_loss": metrics.get("loss/value", 0.0)}


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


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint's file."""
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}): give a checkpoint's file"
        ) from error
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path} is damaged, or holds more than tensors and plain values, which could run any program: "
            "give a file that save_checkpoint wrote"
        ) from error
    parts = ("policy_state_dict", "optimizer_state_dict", "scheduler_state_dict")
    if not isinstance(saved, dict) or any(part not in saved for part in parts):
        raise CheckpointError(f"{path} has no {', '.join(parts)}: give a file that save_checkpoint wrote")
    return saved
