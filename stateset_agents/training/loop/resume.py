"""A run at a step boundary: how far it has come, kept in a checkpoint and taken up again.

Blocking; the trainer calls it in its worker thread.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from stateset_agents.backends.text.tokenizers import save_tokenizer
from stateset_agents.core.model_card import Origin, write_card
from stateset_agents.runs.checkpoint_files import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    prune,
    put_back,
    remove_later,
    save_checkpoint,
)
from stateset_agents.runs.compatibility import Identity, plain
from stateset_agents.runs.learning_rate import schedule
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.resumable import training_compatibility
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.types.errors import CheckpointError
from stateset_agents.types.logs import get_logger

__all__ = [
    "checkpoint_at",
    "drop_later",
    "keep",
    "mend",
    "newest",
    "take_up",
]

_log = get_logger(__name__)


def keep(
    folder: Path,
    learner: PolicyLearner,
    state: RunState,
    identity: Identity,
    *,
    limit: int,
    tokenizer: Any = None,
) -> Path:
    """Write the checkpoint of a finished step; older ones beyond `limit` go, but for the best.

    `tokenizer` is transformers' own, saved beside the weights.

    Raises CheckpointError when the disk cannot take it, or after an update that broke off midway.
    """
    if learner.midway:
        raise CheckpointError("the last update broke off midway: load a checkpoint first")

    def write_model(path: Path) -> None:
        learner.write_model_files(path)
        if tokenizer is not None:
            save_tokenizer(tokenizer, path)
        write_card(path, origin)
        if (path.parent / "adapter").is_dir():
            write_card(path.parent / "adapter", origin, adapter=True)

    origin = Origin(base=learner.base.name_or_path, run=folder.parent, step=state.step)
    checkpoint = Checkpoint(
        step=state.step,
        weights=learner.weights(),
        optimizer=learner.state(),
        critic=learner.critic_state(),
        state={
            "progress": asdict(state),
            "identity": plain(asdict(identity)),
            "machine": _machine(learner.device),
        },
    )
    path = save_checkpoint(folder, checkpoint, write_model=write_model)
    mark_best(folder, state.best.step)
    prune(folder, limit)
    return path


def newest(run: RunFolder) -> Path | None:
    """The checkpoint a run goes on from; None for one that was stopped before it wrote any.

    Raises CheckpointError where the run wrote some and they are gone: starting anew would drop its logs.
    """
    found = latest_checkpoint(run.checkpoints)
    if found is None and any(event["event"] == "checkpoint" for event in RunLog(run).events()):
        raise CheckpointError(
            f"{run.checkpoints} is empty and the run did write checkpoints: put them back, or train anew "
            "in another run folder"
        )
    return found


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that a path names; of a run folder its newest.

    Raises CheckpointError where there is nothing.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a checkpoint or a run folder")
    if (path / "checkpoints").is_dir():
        found = newest(RunFolder(path))
        if found is None:
            raise CheckpointError(f"{path} has no checkpoint yet: give another run folder")
        return found
    return path


def mend(run: RunFolder) -> None:
    """Finish the replacement of a checkpoint that a kill cut; for the one process that writes the run.

    Raises CheckpointError when the folder cannot be written.
    """
    try:
        put_back(run.checkpoints)
    except OSError as error:
        raise CheckpointError(
            f"cannot write in {run.checkpoints} ({error.strerror}): mend its rights"
        ) from error


def take_up(path: Path, learner: PolicyLearner, identity: Identity) -> RunState:
    """Put the learner where the checkpoint left it.

    Raises CheckpointError, with nothing changed, for a damaged one or one of another run. Another machine
    or thread count is allowed and said, and so is a length under which the learning rates so far differ: the
    result is then not bit-equal.
    """
    checkpoint = load_checkpoint(path)
    training_compatibility().check(path, checkpoint.state["identity"], identity)
    state = RunState.from_json(checkpoint.state["progress"])
    learner.restore(checkpoint.weights, checkpoint.optimizer, checkpoint.critic)
    changes = _other_machine(checkpoint.state["machine"], _machine(learner.device))
    changes += _other_processes(checkpoint.state["identity"]["settings"]["training"], learner)
    changes += _other_schedule(checkpoint.state["identity"]["settings"]["training"], learner)
    for change in changes:
        _log.warning(change)
    return replace(state, repeatable=state.repeatable and not changes)


def drop_later(run: RunFolder, state: RunState, settings: Mapping[str, Any]) -> None:
    """Leave in the run folder what belongs to the run up to this state, and write its settings anew.

    Checkpoints go before logs: after a kill on the way no checkpoint stands without its logs.
    """
    remove_later(run.checkpoints, state.step)
    run.truncate_after(state.step)
    if state.evaluated_step < state.step:
        run.drop_evaluation(state.step)
    mark_best(run.checkpoints, state.best.step)
    run.write_config(settings)


def _machine(device: torch.device) -> dict[str, Any]:
    """What bit-equality depends on beside seed and settings: versions, threads, kind of processor."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
    }


def _other_machine(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    differing = [
        f"{name} was {then.get(name)} and is {now[name]}" for name in now if then.get(name) != now[name]
    ]
    return [f"resumed on another set-up, so not bit-equal: {', '.join(differing)}"] if differing else []


def _other_processes(then: Mapping[str, Any], learner: PolicyLearner) -> list[str]:
    names = ("num_processes", "parallelism")
    was, now = ([settings.get(name) for name in names] for settings in (then, learner.config.model_dump()))
    if was == now:
        return []
    return [
        f"the run was made by {was[0]} processes ({was[1]}) and goes on with {now[0]} ({now[1]}), so not "
        "bit-equal"
    ]


def _other_schedule(then: Mapping[str, Any], learner: PolicyLearner) -> list[str]:
    """Would a run of the length it has now have made its updates so far at other learning rates?"""
    now = learner.config
    rates = partial(
        schedule, kind=now.lr_scheduler_type, warmup_ratio=now.warmup_ratio, min_ratio=now.lr_min_ratio
    )
    was, is_now = TrainingConfig(**then).num_steps(), now.num_steps()
    lengths = was * now.num_iterations, is_now * now.num_iterations
    done = range(learner.num_updates)
    if all(rates(update, lengths[0]) == rates(update, lengths[1]) for update in done):
        return []
    return [
        f"the run was planned for {was} steps and is for {is_now} now, and its learning rate "
        f"({now.lr_scheduler_type}, warm-up {now.warmup_ratio:g}) follows the length: the result is not that "
        f"of one run of {is_now} steps"
    ]
