"""`make demo`'s training by `benchmarks.plain_hf`, one step a repetition."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from typing import Any

from benchmarks.plain_hf import PlainTrainer
from benchmarks.worker import Task, serve
from benchmarks.workers.hf import load
from stateset_agents.backends.pretrained.loading import model_folder, recommended_settings
from stateset_agents.training.experiment import Experiment, load_experiment


class Demo:
    """From the embedded model on, with the settings of the demo's file and the model's card."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory()
        experiment = load_experiment(job["file"], {"training.output_dir": self._folder.name})
        parts = Experiment(experiment, measures=False).trainer
        self.agent = parts.agent
        self.loop.run_until_complete(self.agent.initialize())
        folder = model_folder(experiment.agent.model_name)
        config, _ = experiment.training.with_recommended(recommended_settings(folder))
        self.trainer = PlainTrainer(self.agent, parts.environment, parts.reward_fn, config, load(folder))

    def run(self, repetition: int) -> Mapping[str, float]:
        played = self.loop.run_until_complete(self.trainer.step())
        return {
            "tokens": sum(trajectory.num_agent_tokens for trajectory in played),
            "conversations": len(played),
            "successes": sum(trajectory.success is True for trajectory in played),
        }

    def close(self) -> None:
        self.loop.run_until_complete(self.agent.close())
        self._folder.cleanup()


def make(job: Mapping[str, Any]) -> Task:
    """There is one task."""
    return Demo(job)


if __name__ == "__main__":
    serve(make)
