"""A numeric task by our trainer: train from a seed, then play a hundred starts greedily."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.worker import Clock, Task, serve
from stateset_agents.numeric.evaluation import evaluate
from stateset_agents.numeric.experiment import ControlFile, make_environment
from stateset_agents.numeric.trainer import ControlTrainer


class Numeric:
    """The job is a file of `kind: control`, section by section; each repetition is a seed of its own."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self.job = job

    def run(self, repetition: int) -> Mapping[str, float]:
        with tempfile.TemporaryDirectory() as folder:
            of_run = {"seed": repetition, "output_dir": folder, "progress": False, "save_steps": 0}
            config = ControlFile(**{**self.job, "training": {**self.job["training"], **of_run}})
            environment = make_environment(config.environment)
            trainer = ControlTrainer(config.new_policy(environment), environment, config.training)
            clock = Clock()
            with clock:
                policy = asyncio.run(_trained(trainer))
            found = evaluate(policy, make_environment(config.environment), range(10**6, 10**6 + 100))
            return {
                "wall": clock.wall,
                "cpu": clock.cpu,
                "steps": trainer.step_number,
                "return": found.mean or 0.0,
                "lowest": min(found.scored),
            }

    def close(self) -> None:
        """Nothing is held."""


async def _trained(trainer: ControlTrainer) -> Any:
    async with trainer:
        return await trainer.train()


def make(job: Mapping[str, Any]) -> Task:
    """There is one task."""
    return Numeric(job)


if __name__ == "__main__":
    serve(make)
