"""The checkpoints of a run: the last finished step is saved, and restored. The processes do it together.

The functions block; `Checkpointer` calls them in the trainer's worker thread.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stateset_agents.backends.linears import is_usable
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.core.model_card import Origin, model_card, write_card
from stateset_agents.runs.checkpoint_files import Checkpoint, write_texts
from stateset_agents.runs.checkpoints import Checkpoints
from stateset_agents.runs.compatibility import Compatibility
from stateset_agents.runs.settings import CADENCE
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.processes import ProcessGroup
from stateset_agents.training.settings.rollout import FaultSettings
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

_TRAINING_MAY_DIFFER = {
    *CADENCE,
    *FaultSettings.model_fields,
    *("num_episodes", "max_steps", "parallelism", "output_dir", "run_name", "rollout_sleep"),
    *("log_rollouts", "log_learner_logprobs", "progress", "report_to"),
    *("distillation.device", "distillation.teacher"),  # its weights say which teacher it is
}
_AGENT_MAY_DIFFER = {
    *("model_name", "device", "temperature", "seed"),
    "context_window",  # what it says is in agent.history
}
"""Settings that may change when a training resumes from a checkpoint."""


@dataclass(kw_only=True)
class Checkpointer(Checkpoints[RunState]):
    """Saves and restores one run's learner and state."""

    learner: PolicyLearner
    group: ProcessGroup
    is_sharded: bool = False
    """True where each process has a part of the weights."""
    agent: MultiTurnAgent
    """The agent whose tokenizer and chat template are saved beside the weights."""

    @property
    def _is_midway(self) -> bool:
        return self.learner.midway

    @property
    def _compatibility(self) -> Compatibility:
        return training_compatibility()

    async def save(self, state: RunState) -> Path:
        """Write `checkpoints/step-NNNNNN`; older ones beyond the limit are removed, but not the best."""

        async def write() -> Path | None:
            if not self.group.processes.is_first:
                await self.worker.run(self.learner.contribute_shards)
                return None
            return await self.worker.run(self._write, state)

        await self.group.barrier("save_checkpoint")
        path = (await self.group.gather_results("save_checkpoint", write()))[0]
        assert path is not None
        self.saved = state
        return path

    def _tensors(self) -> dict[str, Any]:
        learner = self.learner
        return {
            "weights": learner.weights(),
            "optimizer": learner.state(),
            "critic": learner.critic_state(),
        }

    def _write_model(self, path: Path, state: RunState) -> None:
        run = self.recorder.run.path
        origin = Origin(base=self.learner.base.name_or_path, run=run, step=state.step)
        self.learner.write_model_files(path)
        for part in (path, path.parent / "adapter"):
            if part.is_dir():
                self.agent.save_tokenizer(part)
                write_card(part, origin, adapter=part != path)

    async def _meet(self) -> None:
        await self.group.barrier("load_checkpoint")

    def is_due(self, state: RunState) -> bool:
        lost = self.group.processes.has_lost_others
        if not self._is_midway and lost and self.is_sharded:
            _log.error("the other processes' shards are gone: earlier checkpoints are kept")
            return False
        return super().is_due(state) and (self.group.processes.is_first or not lost)

    def _load(self, checkpoint: Checkpoint) -> RunState:
        state = RunState.from_json(checkpoint.state["progress"])
        self.learner.restore(checkpoint.weights, checkpoint.optimizer, checkpoint.critic)
        return state

    def _machine(self) -> dict[str, Any]:
        device = self.learner.device
        cuda = device.type == "cuda"
        units = " AMX" if is_usable("high", torch.device("cpu")) else ""
        return {
            "torch": torch.__version__,
            "transformers": version("transformers"),
            "threads": torch.get_num_threads(),
            "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}{units}",
            "device": torch.cuda.get_device_name(device) if cuda else device.type,
        }

    def _other_processes(self, training: Mapping[str, Any]) -> list[str]:
        config = self.identity.settings["training"]
        old, new = [(each.get("num_processes"), each.get("parallelism")) for each in (training, config)]
        if old == new:
            return []
        return [
            f"the run of {old[0]} processes ({old[1]}) goes on with {new[0]} ({new[1]}), so not bit-equal"
        ]

    def _other_length(self, training: Mapping[str, Any], state: RunState) -> list[str]:
        old, new = TrainingConfig(**training), TrainingConfig(**self.identity.settings["training"])
        changes = (_other_schedule(old, new, self.learner.num_updates), _other_stages(old, new, state))
        return [change for change in changes if change]

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
    """The settings that may change when a run resumes: those of `agent` and `training` by name."""
    sections = {"agent": AgentConfig(model_name="any"), "training": TrainingConfig()}
    return Compatibility(
        may_differ=frozenset(
            {f"training.{name}" for name in _TRAINING_MAY_DIFFER}
            | {f"agent.{name}" for name in _AGENT_MAY_DIFFER}
        ),
        defaults={name: section.model_dump(mode="json") for name, section in sections.items()},
        step_size=("training.per_device_train_batch_size", "training.gradient_accumulation_steps"),
    )


def _other_schedule(saved: TrainingConfig, config: TrainingConfig, num_updates: int) -> str | None:
    """A line where a run of its present length would have made its updates so far at other learning rates."""
    old, new = saved.num_steps(), config.num_steps()
    old_length, new_length = old * config.num_iterations, new * config.num_iterations
    factor = config.lr_factor
    if all(factor(update, old_length) == factor(update, new_length) for update in range(num_updates)):
        return None
    return (
        f"the run was planned for {old} steps and is for {new} now, and its learning rate "
        f"({config.lr_scheduler_type}, warm-up {config.warmup_ratio:g}) follows the length: the result is "
        f"not that of one run of {new} steps"
    )


def _other_stages(saved: TrainingConfig, config: TrainingConfig, state: RunState) -> str | None:
    """A line where a run of its present length would have been in other stages so far."""
    old, new = saved.num_steps(), config.num_steps()
    for stage in config.stages[:-1]:
        ends = stage.last_step(old), stage.last_step(new)
        if ends[0] != ends[1] and min(end or 0 for end in ends) <= state.step:
            return (
                f"the run was planned for {old} steps and is for {new} now, and a stage of it ends with "
                f"step {ends[1]} instead of {ends[0]}: the result is not that of one run of {new} steps"
            )
    return None
