"""The base of the trainers of an agent: what fine-tuning and reinforcement do alike."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.runs.compatibility import Identity, check_identical
from stateset_agents.runs.recorder import ready
from stateset_agents.runs.session import Session
from stateset_agents.runs.settings import RunSettings
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.checkpointer import Checkpointer
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.training.loop.weight_sync import WeightSync
from stateset_agents.training.processes import ProcessGroup
from stateset_agents.training.update.protocol import PolicyLearner

_Config = TypeVar("_Config", bound=RunSettings)


class AgentSession(Session[_Config]):
    """A `Session` that trains an agent, alone or together with other processes.

    `_parts` has at least `learner`, `weights` and `checkpoints`.
    """

    _state: RunState

    def __init__(
        self, agent: MultiTurnAgent, config: _Config, run: RunFolder | None, callbacks: Sequence[object]
    ) -> None:
        """`run`: a folder to use instead of a new one."""
        super().__init__(config, run, callbacks)
        self.agent = agent
        self._group = ProcessGroup(self._worker)
        self._state = RunState()

    def _exclusive(self) -> contextlib.AbstractContextManager[None]:
        weights: WeightSync = ready(self._parts).weights
        return weights.exclusive()

    def _note_date(self) -> None:
        """Keep the day that the agent's template tells, so that a resumed run tells the same."""
        date = self.agent.template.date
        self._state = replace(self._state, template_date=None if date is None else date.isoformat())

    async def train(self) -> MultiTurnAgent:
        """Run the steps that are left, then return the agent.

        However it ends, by a cancellation or an error too, it keeps a checkpoint of the last finished step,
        `summary.json` and `report.html`. After `request_stop` another call goes on.
        """
        await self._train()
        return self.agent

    async def train_and_stop(self) -> MultiTurnAgent:
        """`train`, and `stop` however it ends: the whole life of a trainer in one call."""
        try:
            return await self.train()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the update thread and close the logs; the agent goes on speaking.

        A `train` under way is asked to stop and waited for, so its last step is kept; a callback that is
        still running after a minute is cancelled.
        """
        await super().stop()
        if self._parts is not None:
            self._parts.learner.close()

    async def close(self) -> None:
        """Stop, and close the agent too."""
        await self.stop()
        await self.agent.close()

    async def _open_run(
        self,
        learner: PolicyLearner,
        training: TrainingConfig,
        identity: Identity,
        settings: Mapping[str, Any],
        *,
        tokens: tuple[object, object],
    ) -> tuple[WeightSync, Checkpointer]:
        """Open the run folder; returns what pushes the learner's weights, and what saves them there.

        The first process makes the folder and writes in it, the others learn where it is, and its day.
        `settings`: the content of config.yaml; `tokens`: of `initial_tokens`.
        """
        agent, group, recorder = self.agent, self._group, self._recorder

        def make() -> RunFolder:
            return RunFolder.create(self.config.output_dir, name=self.config.run_name)

        async def open_folder() -> tuple[str | None, datetime.date | None]:
            if group.processes.is_first:
                await self._worker.run(recorder.open, make, settings, agent.backend.tokenizer.piece)
            return None if recorder.folder is None else str(recorder.folder.path), agent.template.date

        check_identical(await group.barrier("initialize", identity))
        path, date = (await group.gather_results("the run folder", open_folder()))[0]
        assert path is not None
        if date is not None:
            agent.pin_date(date)
        if not recorder.is_open:
            recorder.follow(Path(path))
        is_sharded = training.parallelism == "fsdp2"
        weights = WeightSync(
            agent,
            learner,
            group,
            self._worker,
            recorder.run.path,
            is_sharded=is_sharded,
            owner=self._lifecycle,
            token=tokens[0],
            base=tokens[1],
        )
        checkpoints = Checkpointer(
            learner=learner,
            group=group,
            worker=self._worker,
            recorder=recorder,
            identity=identity,
            settings=settings,
            limit=self.config.save_total_limit,
            is_sharded=is_sharded,
            agent=agent,
        )
        return weights, checkpoints
