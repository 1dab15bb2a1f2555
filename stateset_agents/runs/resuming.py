"""Where a training goes on from: a run's newest checkpoint, and its folder without what came later.

The functions block; trainers call them in their worker thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stateset_agents.runs.checkpoint_files import (
    latest_checkpoint,
    mark_best,
    remove_after,
    restore_replaced,
)
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import CheckpointError


def repair(run: RunFolder) -> None:
    """Finish the replacement of a checkpoint that a kill interrupted."""
    try:
        restore_replaced(run.checkpoints)
    except OSError as error:
        raise CheckpointError(
            f"cannot write in {run.checkpoints} ({error.strerror}): mend its rights"
        ) from error


def newest_checkpoint(run: RunFolder) -> Path | None:
    """None for a run that was stopped before it wrote any.

    Raises CheckpointError where the run wrote some and they are gone: starting anew would drop its logs.
    """
    path = latest_checkpoint(run.checkpoints)
    if path is None and any(event["event"] == "checkpoint" for event in RunLog(run).events()):
        raise CheckpointError(
            f"{run.checkpoints} is empty and the run did write checkpoints: put them back, or train anew "
            "in another run folder"
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


def truncate_run(
    run: RunFolder, settings: Mapping[str, Any], *, step: int, evaluated_step: int, best_step: int | None
) -> None:
    """Remove from the run folder what is of steps after `step`, and write its settings anew.

    Checkpoints go before logs: after a kill on the way no checkpoint is without its logs. An evaluation of
    `step` itself goes, too, unless `evaluated_step` says that the state knows it.
    """
    remove_after(run.checkpoints, step)
    run.truncate_after(step)
    if evaluated_step < step:
        run.drop_evaluation(step)
    mark_best(run.checkpoints, best_step)
    run.write_config(settings)


def other_machine(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str | None:
    """One line on what differs of what bit-equality depends on; None where nothing does."""
    differing = [
        f"{name} was {saved.get(name)} and is {value}"
        for name, value in current.items()
        if saved.get(name) != value
    ]
    return f"resumed on another set-up, so not bit-equal: {', '.join(differing)}" if differing else None
