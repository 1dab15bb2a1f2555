"""A trial of a few seconds for `doctor`: the embedded model generates, repeats, learns a step, is saved."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from stateset_agents.runtime import event_loop
from stateset_agents.tracking.monitors import Finding
from stateset_agents.types.errors import StatesetError

_REPORT = "report this, with the lines above"


def trial_findings() -> Iterator[Finding]:
    """One finding per stage; the first failure ends the trial, since each stage needs the one before."""
    with tempfile.TemporaryDirectory(prefix="stateset-doctor-") as folder, event_loop.runner() as loop:
        trial = _Trial(folder)
        try:
            for name, stage in trial.stages():
                finding = loop.run(_run_stage(name, stage))
                yield finding
                if finding.verdict == "fail":
                    return
        finally:
            loop.run(trial.close())


async def _run_stage(name: str, stage: Callable[[], Awaitable[str]]) -> Finding:
    started = time.perf_counter()
    try:
        seen = await stage()
    except StatesetError as error:  # it says itself what to do
        return Finding(name, "fail", " ".join(str(error).split()), _REPORT)
    except Exception as error:  # a broken installation can raise anything, and that is the finding
        return Finding(name, "fail", " ".join(f"{type(error).__name__}: {error}".split()), _REPORT)
    return Finding(name, "ok", f"{seen} ({time.perf_counter() - started:.1f} s)")


class _StageFailed(StatesetError):
    """A stage ran with a wrong result."""


@dataclass
class _Trial:
    """The stages, and what they share."""

    folder: str
    trainer: Any = None

    def stages(self) -> list[tuple[str, Callable[[], Awaitable[str]]]]:
        return [
            ("generation", self.generation),
            ("determinism", self.determinism),
            ("training step", self.training_step),
            ("checkpoint", self.checkpoint),
        ]

    def make_trainer(self) -> Any:
        from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
        from stateset_agents.core.reward import EnvironmentReward
        from stateset_agents.environments.retail_desk import RetailDesk
        from stateset_agents.training.config import TrainingConfig
        from stateset_agents.training.trainer import MultiTurnGRPOTrainer

        return MultiTurnGRPOTrainer(
            MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48)),
            RetailDesk(),
            EnvironmentReward(),
            TrainingConfig(
                output_dir=self.folder,
                max_steps=1,
                num_generations=4,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=1,
                progress=False,
            ),
        )

    async def generation(self) -> str:
        """Load the model, which compares cached with uncached log-probs, and generate a reply."""
        self.trainer = self.make_trainer()
        await self.trainer.initialize()
        reply = await self.trainer.agent.generate_response(
            [{"role": "user", "content": "where is order K27"}]
        )
        if not reply.strip():
            raise _StageFailed("the embedded model said nothing")
        running, rows = self.trainer.agent.backend.running, self.trainer.learner.layout["rows"]
        return (
            f"embedded:desk answers on the {running.name} path, with the log-probs of a plain forward; "
            f"linears {running.linears}; updates take {rows} rows"
        )

    async def determinism(self) -> str:
        first, second = [await self._rollout() for _ in range(2)]
        if first != second:
            raise _StageFailed("the same seed gave other tokens the second time")
        return f"{sum(map(len, first))} tokens came out the same twice"

    async def _rollout(self) -> list[list[int]]:
        scenarios = self.trainer.environment.scenarios("train")[:2]
        groups = await self.trainer.generate_trajectories(scenarios)
        return [member.token_ids for group in groups for member in group.trajectories]

    async def training_step(self) -> str:
        before = {name: weight.clone() for name, weight in self.trainer.learner.weights().items()}
        metrics = await self.trainer.step()
        norm = metrics.get("optimizer/grad_norm", math.nan)
        after = self.trainer.learner.weights()
        if not math.isfinite(norm) or all(after[name].equal(weight) for name, weight in before.items()):
            raise _StageFailed(f"a step on the desk changed no weight (gradient norm {norm})")
        return f"gradient norm {norm:.2f}, {metrics['tokens/per_second']:,.0f} sampled tokens/s"

    async def checkpoint(self) -> str:
        path = await self.trainer.save_checkpoint()
        second_trainer = self.make_trainer()
        try:
            await second_trainer.load_checkpoint(path)
            restored, current = second_trainer.learner.weights(), self.trainer.learner.weights()
            is_equal = all(restored[name].equal(current[name]) for name in current)
            if second_trainer.step_number != 1 or not is_equal:
                raise _StageFailed("a checkpoint came back with other weights")
        finally:
            await second_trainer.close()
        return "written, read back, equal in every bit"

    async def close(self) -> None:
        if self.trainer is not None:
            await self.trainer.close()
