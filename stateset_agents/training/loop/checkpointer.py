"""The checkpoints of a run: the last finished step is saved, and restored. The processes do it together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stateset_agents.core.model_card import Origin, model_card
from stateset_agents.runs.checkpoint_files import put_texts
from stateset_agents.runs.compatibility import Identity
from stateset_agents.runs.recorder import RunRecorder
from stateset_agents.runtime.worker_thread import Worker
from stateset_agents.training.distributed.process_group import ProcessGroup
from stateset_agents.training.loop.resume import (
    checkpoint_at,
    drop_later,
    keep,
    mend,
    newest,
    take_up,
)
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.update.protocol import PolicyLearner
from stateset_agents.types.logs import get_logger

__all__ = ["Checkpointer", "Restored"]

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Restored:
    """A checkpoint that the learner goes on from."""

    path: Path
    state: RunState


class Checkpointer:
    """Saves and restores one run's learner and state."""

    def __init__(
        self,
        learner: PolicyLearner,
        group: ProcessGroup,
        worker: Worker,
        recorder: RunRecorder,
        identity: Identity,
        settings: Mapping[str, Any],
        *,
        limit: int,
        is_sharded: bool = False,
        tokenizer: Any = None,
    ) -> None:
        """`settings`: as config.yaml has them; `limit`: of checkpoints that are kept, beside the best;
        `is_sharded`: has each process a part of the weights?; `tokenizer`: transformers' own, saved beside
        the weights."""
        self.identity = identity
        self.saved: RunState | None = None
        """What the newest checkpoint of this run has."""
        self._learner = learner
        self._group = group
        self._worker = worker
        self._recorder = recorder
        self._settings = settings
        self._limit = limit
        self._is_sharded = is_sharded
        self._tokenizer = tokenizer

    async def save(self, state: RunState) -> Path:
        """Write `checkpoints/step-NNNNNN`; older ones beyond the limit go."""

        async def write() -> Path | None:
            if not self._group.is_first:
                await self._worker.run(self._learner.help_keep)
                return None
            await self._worker.run(self._recorder.tracker.sync)
            written = partial(keep, limit=self._limit, tokenizer=self._tokenizer)
            folder = self._recorder.run.checkpoints
            return await self._worker.run(written, folder, self._learner, state, self.identity)

        await self._group.barrier("save_checkpoint")
        path = (await self._group.gather_results("save_checkpoint", write()))[0]
        assert path is not None
        self.saved = state
        return path

    async def restore(self, path: str | Path | None) -> Restored | None:
        """Put the learner where a checkpoint left it, or a run's newest: this run's when no path is given,
        None where that has none yet. `truncate_after` its state follows.

        Raises CheckpointError as `resume.take_up` does, with nothing changed.
        """
        run = self._recorder.run
        if self._group.is_first:
            await self._worker.run(mend, run)
        await self._group.barrier("load_checkpoint")
        find = partial(newest, run) if path is None else partial(checkpoint_at, Path(path))
        found = await self._worker.run(find)
        if found is None:
            return None
        state = await self._worker.run(take_up, found, self._learner, self.identity)
        self.saved = state if found.parent == run.checkpoints else None
        return Restored(found, state)

    async def truncate_after(self, state: RunState) -> None:
        """Drop what the run folder has of later steps."""
        if self._group.is_first:
            await self._worker.run(drop_later, self._recorder.run, state, self._settings)
        await self._group.barrier("load_checkpoint")

    def is_due(self, state: RunState) -> bool:
        """Is there a finished step that is not saved, and a whole one that can be? What is lost is logged."""
        lost = self._group.processes.has_lost_others
        if self._learner.midway:
            _log.error("the last update broke off midway: its step is not kept, earlier checkpoints are")
            return False
        if lost and self._is_sharded:
            _log.error("the other processes' shards are gone: earlier checkpoints are kept")
            return False
        if lost and not self._group.is_first:
            return False
        return self.saved != state

    def describe(self, origin: Origin | None, summary: Mapping[str, Any]) -> None:
        """Put what was measured of the agent into the model card of the checkpoint that it comes from.
        Blocking.

        `summary`: as `summary.json` is to have it. Raises CheckpointError when the disk cannot take it.
        """
        path = None if origin is None else self._recorder.run.checkpoints / f"step-{origin.step:06d}"
        if origin is None or path is None or not path.is_dir():
            return
        cards = {
            f"{part}/README.md": model_card(origin, adapter=part == "adapter", summary=summary)
            for part in ("model", "adapter")
            if (path / part).is_dir()
        }
        if any((path / name).read_text(encoding="utf-8") != card for name, card in cards.items()):
            put_texts(path, cards)
