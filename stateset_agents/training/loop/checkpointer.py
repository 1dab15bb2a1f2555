"""The checkpoints of a run: the last finished step is saved, and restored. The processes do it together.

The functions block; `Checkpointer` calls them in the trainer's worker thread.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stateset_agents.backends.linears.matmul_precision import is_usable
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.core.model_card import Origin, model_card, write_card
from stateset_agents.runs.checkpoint_files import (
    Checkpoint,
    load_checkpoint,
    mark_best,
    prune,
    save_checkpoint,
    write_texts,
)
from stateset_agents.runs.compatibility import Compatibility, Identity, as_json
from stateset_agents.runs.learning_rate import schedule
from stateset_agents.runs.recorder import RunRecorder
from stateset_agents.runs.resuming import (
    checkpoint_at,
    newest_checkpoint,
    other_machine,
    repair,
    truncate_run,
)
from stateset_agents.runtime.worker_thread import Worker
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.distributed.process_group import ProcessGroup
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.types.errors import CheckpointError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

_MAY_DIFFER = frozenset(
    {
        "agent.model_name",
        "agent.context_window",  # what it says is in agent.history
        "agent.device",
        "agent.temperature",
        "agent.seed",
        "training.distillation.device",
        "training.distillation.teacher",  # its weights say which it is
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
        "training.log_learner_logprobs",
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
"""Settings that may change when a training resumes from a checkpoint."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that the learner goes on from."""

    path: Path
    state: RunState


@dataclass(slots=True)
class Checkpointer:
    """Saves and restores one run's learner and state."""

    learner: PolicyLearner
    group: ProcessGroup
    worker: Worker
    recorder: RunRecorder
    identity: Identity
    settings: Mapping[str, Any]
    """As config.yaml has them."""
    _: KW_ONLY
    limit: int
    """Of checkpoints that are kept, beside the best."""
    is_sharded: bool = False
    """Has each process a part of the weights?"""
    agent: MultiTurnAgent
    """Its tokenizer and chat template are saved beside the weights."""
    saved: RunState | None = field(default=None, init=False)
    """What the newest checkpoint of this run has."""

    async def save(self, state: RunState) -> Path:
        """Write `checkpoints/step-NNNNNN`; older ones beyond the limit are removed, but not the best."""

        async def write() -> Path | None:
            if not self.group.is_first:
                await self.worker.run(self.learner.contribute_shards)
                return None
            await self.worker.run(self.recorder.tracker.sync)
            return await self.worker.run(self._write, state)

        await self.group.barrier("save_checkpoint")
        path = (await self.group.gather_results("save_checkpoint", write()))[0]
        assert path is not None
        self.saved = state
        return path

    def _write(self, state: RunState) -> Path:
        """Raises CheckpointError when the disk cannot take it, or after an update that broke off midway."""
        learner, folder = self.learner, self.recorder.run.checkpoints
        if learner.midway:
            raise CheckpointError("the last update broke off midway: load a checkpoint first")
        origin = Origin(base=learner.base.name_or_path, run=folder.parent, step=state.step)

        def write_model(path: Path) -> None:
            learner.write_model_files(path)
            for part in (path, path.parent / "adapter"):
                if part.is_dir():
                    self.agent.save_tokenizer(part)
                    write_card(part, origin, adapter=part != path)

        checkpoint = Checkpoint(
            step=state.step,
            weights=learner.weights(),
            optimizer=learner.state(),
            critic=learner.critic_state(),
            state={
                "progress": asdict(state),
                "identity": as_json(asdict(self.identity)),
                "machine": _machine(learner.device),
            },
        )
        path = save_checkpoint(folder, checkpoint, write_model=write_model)
        mark_best(folder, state.best.step)
        prune(folder, self.limit)
        return path

    async def restore(self, path: str | Path | None) -> Restored | None:
        """Load a checkpoint into the learner, of a run folder the newest; without `path` this run's newest,
        None where it has none yet. `truncate_after` its state follows.

        Raises CheckpointError, with nothing changed, for a damaged checkpoint or one of another run. Another
        machine or thread count is allowed and logged, and so is a length under which the learning rates so
        far differ: the result is then not bit-equal.
        """
        run = self.recorder.run
        if self.group.is_first:
            await self.worker.run(repair, run)
        await self.group.barrier("load_checkpoint")
        find = partial(newest_checkpoint, run) if path is None else partial(checkpoint_at, Path(path))
        checkpoint = await self.worker.run(find)
        if checkpoint is None:
            return None
        state = await self.worker.run(_restore, checkpoint, self.learner, self.identity)
        self.saved = state if checkpoint.parent == run.checkpoints else None
        return Restored(checkpoint, state)

    async def truncate_after(self, state: RunState) -> None:
        """Drop what the run folder has of later steps."""
        if self.group.is_first:
            await self.worker.run(truncate_after, self.recorder.run, state, self.settings)
        await self.group.barrier("load_checkpoint")

    def is_due(self, state: RunState) -> bool:
        """Is there a finished step that is not saved and can be? Logs what cannot be saved any more."""
        lost = self.group.processes.has_lost_others
        if self.learner.midway:
            _log.error("the last update broke off midway: its step is not kept, earlier checkpoints are")
            return False
        if lost and self.is_sharded:
            _log.error("the other processes' shards are gone: earlier checkpoints are kept")
            return False
        if lost and not self.group.is_first:
            return False
        return self.saved != state

    def change_settings(
        self, training: TrainingConfig, settings: Mapping[str, Any], state: RunState
    ) -> RunState:
        """Save from now on with these settings; `settings`: as config.yaml has them. The state, not
        repeatable where a run of this length would have come to another one. Says so."""
        old = TrainingConfig(**self.identity.settings["training"])
        self.settings = settings
        named = {**self.identity.settings, "training": training.model_dump(mode="json")}
        self.identity = replace(self.identity, settings=named)
        changes = _other_length(old, training, self.learner.num_updates, state)
        for change in changes:
            _log.warning(change)
        return replace(state, repeatable=state.repeatable and not changes)

    def describe(self, origin: Origin | None, summary: Mapping[str, Any]) -> None:
        """Write what was measured of the agent into the model card of its checkpoint. Blocking.

        `summary`: as `summary.json` is to have it. Raises CheckpointError when the disk cannot take it.
        """
        path = None if origin is None else self.recorder.run.checkpoints / f"step-{origin.step:06d}"
        if origin is None or path is None or not path.is_dir():
            return
        cards = {
            f"{folder}/README.md": model_card(origin, adapter=folder == "adapter", summary=summary)
            for folder in ("model", "adapter")
            if (path / folder).is_dir()
        }
        if any((path / name).read_text(encoding="utf-8") != card for name, card in cards.items()):
            write_texts(path, cards)


def training_compatibility() -> Compatibility:
    """Which of a run's settings may change when it resumes: those of `agent` and `training` by name."""
    sections = {"agent": AgentConfig(model_name="any"), "training": TrainingConfig()}
    return Compatibility(
        may_differ=_MAY_DIFFER,
        defaults={name: section.model_dump(mode="json") for name, section in sections.items()},
        step_size=("training.per_device_train_batch_size", "training.gradient_accumulation_steps"),
    )


def truncate_after(run: RunFolder, state: RunState, settings: Mapping[str, Any]) -> None:
    """Remove from the run folder what is of steps after this state, and write its settings anew."""
    evaluated, best = state.evaluated_step, state.best.step
    truncate_run(run, settings, step=state.step, evaluated_step=evaluated, best_step=best)


def _restore(path: Path, learner: PolicyLearner, identity: Identity) -> RunState:
    checkpoint = load_checkpoint(path)
    training_compatibility().check(path, checkpoint.state["identity"], identity)
    state = RunState.from_json(checkpoint.state["progress"])
    learner.restore(checkpoint.weights, checkpoint.optimizer, checkpoint.critic)
    training = checkpoint.state["identity"]["settings"]["training"]
    config = TrainingConfig(**identity.settings["training"])
    changes = (
        other_machine(checkpoint.state["machine"], _machine(learner.device)),
        _other_processes(training, config),
        *_other_length(TrainingConfig(**training), config, learner.num_updates, state),
    )
    for change in filter(None, changes):
        _log.warning(change)
    return replace(state, repeatable=state.repeatable and not any(changes))


def _machine(device: torch.device) -> dict[str, Any]:
    """What bit-equality depends on beside seed and settings: versions, threads, kind of processor."""
    cuda = device.type == "cuda"
    units = " AMX" if is_usable("high", torch.device("cpu")) else ""
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{units}",
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
    }


def _other_processes(saved: Mapping[str, Any], config: TrainingConfig) -> str | None:
    old = saved.get("num_processes"), saved.get("parallelism")
    new = config.num_processes, config.parallelism
    if old == new:
        return None
    return (
        f"the run was made by {old[0]} processes ({old[1]}) and goes on with {new[0]} ({new[1]}), so not "
        "bit-equal"
    )


def _other_length(old: TrainingConfig, new: TrainingConfig, num_updates: int, state: RunState) -> list[str]:
    """How a run planned as `new` would have come to another state, in one line each."""
    return [
        change
        for change in (_other_schedule(old, new, num_updates), _other_stages(old, new, state))
        if change
    ]


def _other_schedule(saved: TrainingConfig, config: TrainingConfig, num_updates: int) -> str | None:
    """Would a run of its present length have made its updates so far at other learning rates?"""
    factor = partial(
        schedule,
        kind=config.lr_scheduler_type,
        warmup_ratio=config.warmup_ratio,
        min_ratio=config.lr_min_ratio,
    )
    old, new = saved.num_steps(), config.num_steps()
    old_length, new_length = old * config.num_iterations, new * config.num_iterations
    if all(factor(update, old_length) == factor(update, new_length) for update in range(num_updates)):
        return None
    return (
        f"the run was planned for {old} steps and is for {new} now, and its learning rate "
        f"({config.lr_scheduler_type}, warm-up {config.warmup_ratio:g}) follows the length: the result is "
        f"not that of one run of {new} steps"
    )


def _other_stages(saved: TrainingConfig, config: TrainingConfig, state: RunState) -> str | None:
    """Would a run of its present length have been in other stages so far?"""
    old, new = saved.num_steps(), config.num_steps()
    for stage in config.stages[:-1]:
        ends = stage.last_step(old), stage.last_step(new)
        if ends[0] != ends[1] and min(end or 0 for end in ends) <= state.step:
            return (
                f"the run was planned for {old} steps and is for {new} now, and a stage of it ends with "
                f"step {ends[1]} instead of {ends[0]}: the result is not that of one run of {new} steps"
            )
    return None
