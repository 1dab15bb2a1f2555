"""The checkpoints of a training: written between steps, and gone on from. The trainer's steps stand on it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stateset_agents.core.model_card import model_card
from stateset_agents.runs.checkpoint_files import put_texts
from stateset_agents.runtime.tasks import uninterrupted
from stateset_agents.training.loop.resume import (
    checkpoint_at,
    drop_later,
    keep,
    mend,
    newest,
    take_up,
)
from stateset_agents.training.loop.training_lock import at_work
from stateset_agents.training.loop.weight_sync import Speaking
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

__all__ = ["RunCheckpoints"]

_log = get_logger(__name__)


class RunCheckpoints(Speaking):
    """Keeps the last finished step, and goes on from one that was kept."""

    async def save_checkpoint(self) -> Path:
        """Write `checkpoints/step-NNNNNN` of the last finished step; older ones beyond the limit go."""
        self._refuse_in_callback("save_checkpoint")
        path = await uninterrupted(self._write_checkpoint())
        await self._notify("on_checkpoint", self.step_number, path)
        return path

    async def _write_checkpoint(self) -> Path:
        async with self._boundary:
            state = self._state
            tokenizer = getattr(self.agent.backend.tokenizer, "hf", None)
            write = partial(keep, limit=self.config.save_total_limit, tokenizer=tokenizer)
            where, who = self.run.checkpoints, self._identity()

            async def kept() -> Path | None:
                if not self.processes.is_first:
                    await self._worker.run(self.learner.help_keep)
                    return None
                await self._worker.run(self.tracker.sync)
                return await self._worker.run(write, where, self.learner, state, who)

            await self._all("save_checkpoint")
            path = (await self._together("save_checkpoint", kept()))[0]
            assert path is not None
            self._saved = state
        self.tracker.log_event("checkpoint", step=state.step, path=path.name)
        return path

    def describe(self, summary: Mapping[str, Any]) -> None:
        """Put what was measured of the agent into the model card of its checkpoint. Blocking.

        `summary`: as `summary.json` is to have it. Raises CheckpointError when the disk cannot take it.
        """
        origin = self.agent.origin
        path = None if origin is None else self.run.checkpoints / f"step-{origin.step:06d}"
        if origin is None or path is None or not path.is_dir():
            return
        cards = {
            f"{part}/README.md": model_card(origin, adapter=part == "adapter", summary=summary)
            for part in ("model", "adapter")
            if (path / part).is_dir()
        }
        if any((path / name).read_text(encoding="utf-8") != card for name, card in cards.items()):
            put_texts(path, cards)

    async def load_checkpoint(self, path: str | Path | None = None) -> None:
        """Go on from a checkpoint, or a run's newest: this run's when no path is given (warns where
        that has none yet).

        Log lines and checkpoints of later steps are dropped. Raises CheckpointError when it is damaged, was
        taken away, or is of another base model or other settings, ConfigurationError during a step. Another
        machine, thread count or length of the schedule is allowed and said: not bit-equal. Cancelled midway
        it finishes first.
        """
        self._refuse_in_callback("load_checkpoint")
        await self.initialize()
        if self._is_stepping:
            raise ConfigurationError(
                "a step of this trainer is under way: await it, then load the checkpoint"
            )
        with at_work(self.agent.backend, self):
            try:
                await uninterrupted(self._go_on_from(path))
            except (Exception, asyncio.CancelledError) as error:
                await self._part(error)
                raise

    async def _go_on_from(self, path: str | Path | None) -> None:
        async with self._boundary:
            if self.processes.is_first:
                await self._worker.run(mend, self.run)
            await self._all("load_checkpoint")
            find = partial(newest, self.run) if path is None else partial(checkpoint_at, Path(path))
            found = await self._worker.run(find)
            if found is not None:
                self._state = await self._worker.run(take_up, found, self.learner, self._identity())
                await self._hand_over()
                self.reward_fn.restore(self._state.reward)
                self._saved = self._state if found.parent == self.run.checkpoints else None
            if self.processes.is_first:
                await self._worker.run(drop_later, self.run, self._state, self._settings())
            await self._all("load_checkpoint")
        if found is None:
            _log.warning(
                f"{self.run.path} has no checkpoint yet: starting at step {self.step_number}; to go on with "
                "another run, give its folder"
            )
        else:
            self.tracker.log_event("resumed", step=self.step_number, path=found.name)

    async def _save_last(self) -> None:
        lost = self.processes.has_lost_others
        if self.learner.midway:
            _log.error("the last update broke off midway: its step is not kept, earlier checkpoints are")
        elif lost and self.config.parallelism == "fsdp2":
            _log.error("the other processes' shards are gone: earlier checkpoints are kept")
        elif lost and not self.processes.is_first:
            return
        elif self._saved != self._state:
            await self.save_checkpoint()
