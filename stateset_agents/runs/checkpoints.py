"""The checkpoints of a run: the last finished step is saved, and a run goes on from one.

A training adds what its weights are, and which changes of its settings make another result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from stateset_agents.runs.checkpoint_files import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    prune,
    remove_after,
    restore_replaced,
    save_checkpoint,
)
from stateset_agents.runs.compatibility import Compatibility, Identity, as_json
from stateset_agents.runs.recorder import RunRecorder
from stateset_agents.runs.settings import RunSettings
from stateset_agents.runtime.tasks import Worker
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import CheckpointError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

_State = TypeVar("_State", bound=Any)
"""A frozen dataclass with `step`, `evaluated_step`, `best` and `repeatable`."""


@dataclass(kw_only=True)
class Checkpoints(ABC, Generic[_State]):
    """Saves and restores one run's weights, optimiser and state; its private methods block."""

    recorder: RunRecorder
    worker: Worker
    identity: Identity
    settings: Mapping[str, Any]
    """The content of config.yaml."""
    limit: int
    """Number of checkpoints that are kept, beside the best."""
    saved: _State | None = field(default=None, init=False)
    """The state in the newest checkpoint of this run."""

    # ------------------------------------------------------------------------------ what a training adds

    @property
    @abstractmethod
    def _is_midway(self) -> bool:
        """True from an update's begin to its end: weights and optimiser are of no step."""

    @property
    @abstractmethod
    def _compatibility(self) -> Compatibility:
        """The settings that may differ in a run that goes on."""

    @abstractmethod
    def _tensors(self) -> dict[str, Any]:
        """The fields of `Checkpoint` that hold weights and optimiser."""

    @abstractmethod
    def _write_model(self, path: Path, state: _State) -> None:
        """Add the files that a reader of the weights needs."""

    @abstractmethod
    def _load(self, checkpoint: Checkpoint) -> _State:
        """Take over weights and optimiser, and return the state."""

    @abstractmethod
    def _machine(self) -> dict[str, Any]:
        """Versions, threads and processor: what bit-equality depends on beside seed and settings."""

    @abstractmethod
    def _other_length(self, training: Mapping[str, Any], state: _State) -> list[str]:
        """The reasons why a run planned by the present settings would have come to another state than one
        planned by `training`, in one line each."""

    def _other_processes(self, training: Mapping[str, Any]) -> list[str]:
        """The differences between the processes, in one line each."""
        return []

    # ------------------------------------------------------------------------------ saving

    async def save(self, state: _State) -> Path:
        """Write `checkpoints/step-NNNNNN`; older ones beyond the limit are removed, but not the best.

        Raises CheckpointError when the disk cannot take it, or after an update that broke off midway.
        """
        path = await self.worker.run(self._write, state)
        self.saved = state
        return path

    def _write(self, state: _State) -> Path:
        if self._is_midway:
            raise CheckpointError("the last update broke off midway: load a checkpoint first")
        self.recorder.tracker.sync()  # no checkpoint is without its logs
        folder = self.recorder.run.checkpoints
        checkpoint = Checkpoint(
            step=state.step,
            state={
                "progress": asdict(state),
                "identity": as_json(asdict(self.identity)),
                "machine": self._machine(),
            },
            **self._tensors(),
        )
        path = save_checkpoint(folder, checkpoint, write_model=partial(self._write_model, state=state))
        mark_best(folder, state.best.step)
        prune(folder, self.limit)
        return path

    def is_due(self, state: _State) -> bool:
        """True for a finished step that is not saved and can be. Logs what cannot be saved any more."""
        if self._is_midway:
            _log.error("the last update broke off midway: its step is not kept, earlier checkpoints are")
            return False
        return self.saved != state

    def change_settings(self, training: RunSettings, settings: Mapping[str, Any], state: _State) -> _State:
        """Save from now on with these settings; `settings`: the content of config.yaml.

        Returns the state, not repeatable where a run of this length would have come to another one. Logs why.
        """
        old = self.identity.settings["training"]
        named = {**self.identity.settings, "training": training.model_dump(mode="json")}
        self.identity = replace(self.identity, settings=named)
        self.settings = settings
        return self._after_changes(self._other_length(old, state), state)

    # ------------------------------------------------------------------------------ restoring

    async def restore(self, path: str | Path | None) -> tuple[Path, _State] | None:
        """Load a checkpoint, of a run folder the newest; without `path` this run's newest, None where it has
        none yet. `truncate_after` its state follows.

        Raises CheckpointError, with nothing changed, for a damaged checkpoint or one of another run. Another
        machine or thread count is allowed and logged, and so is a length under which the learning rates so
        far differ: the result is then not bit-equal.
        """
        run = self.recorder.run
        if self.recorder.is_first:
            await self.worker.run(repair, run)
        await self._meet()
        if path is None:
            checkpoint = await self.worker.run(newest_checkpoint, run)
        else:
            checkpoint = await self.worker.run(checkpoint_at, Path(path))
        if checkpoint is None:
            return None
        state = await self.worker.run(self._restore, checkpoint)
        self.saved = state if checkpoint.parent == run.checkpoints else None
        return checkpoint, state

    async def _meet(self) -> None:
        """Wait until all processes are here, where there are several."""

    def _restore(self, path: Path) -> _State:
        checkpoint = load_checkpoint(path)
        self._compatibility.check(path, checkpoint.state["identity"], self.identity)
        training = checkpoint.state["identity"]["settings"]["training"]
        state = self._load(checkpoint)
        changes = [
            *other_machine(checkpoint.state["machine"], self._machine()),
            *self._other_processes(training),
            *self._other_length(training, state),
        ]
        return self._after_changes(changes, state)

    def _after_changes(self, changes: Iterable[str], state: _State) -> _State:
        for change in changes:
            _log.warning(change)
            state = replace(state, repeatable=False)
        return state

    async def truncate_after(self, state: _State) -> None:
        """Remove from the run folder what is of later steps, and write its settings anew."""
        if self.recorder.is_first:
            await self.worker.run(truncate_run, self.recorder.run, self.settings, state)
        await self._meet()


def repair(run: RunFolder) -> None:
    """Finish the replacement of a checkpoint that a kill interrupted."""
    try:
        restore_replaced(run.checkpoints)
    except OSError as error:
        raise CheckpointError(
            f"cannot write in {run.checkpoints} ({error.strerror}): mend its rights"
        ) from error


def newest_checkpoint(run: RunFolder) -> Path | None:
    """The newest checkpoint; None for a run that was stopped before it wrote any.

    Raises CheckpointError where the run wrote some and they are gone: starting anew would drop its logs.
    """
    path = latest_checkpoint(run.checkpoints)
    if path is None and any(event["event"] == "checkpoint" for event in RunLog(run).events()):
        raise CheckpointError(
            f"{run.checkpoints} is empty and the run did write checkpoints: put them back, or train anew"
        )
    return path


def checkpoint_at(path: Path) -> Path:
    """A checkpoint, or of a run folder the newest. Raises CheckpointError where there is none."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist: give a checkpoint or a run folder")
    if not (path / "checkpoints").is_dir():
        return path
    checkpoint = newest_checkpoint(RunFolder(path))
    if checkpoint is None:
        raise CheckpointError(f"{path} has no checkpoint yet: give another run folder")
    return checkpoint


def truncate_run(run: RunFolder, settings: Mapping[str, Any], state: Any) -> None:
    """Remove from the run folder what is of steps after this state, and write its settings anew.

    Checkpoints go before logs: after a kill on the way no checkpoint is without its logs. An evaluation after
    the step itself goes, too, unless the state knows it.
    """
    remove_after(run.checkpoints, state.step)
    run.truncate_after(state.step)
    if state.evaluated_step < state.step:
        run.drop_evaluation(state.step)
    mark_best(run.checkpoints, state.best.step)
    run.write_config(settings)


def other_machine(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line on what differs of what bit-equality depends on; none where nothing does."""
    differing = [
        f"{name} was {saved.get(name)} and is {value}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    return [f"resumed on another set-up, so not bit-equal: {', '.join(differing)}"] if differing else []
