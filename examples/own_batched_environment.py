"""An environment of your own, stepped as arrays: heat a room or not. The file is the whole of it.

python examples/own_batched_environment.py
stateset-agents train examples/own_batched_environment.yaml    # the same from settings, with a report
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stateset_agents.numeric.environments.base import Rule, Spec, Transition
from stateset_agents.numeric.evaluation import paired_difference
from stateset_agents.numeric.policy import MlpPolicy
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.numeric.trainer import ControlTrainer
from stateset_agents.tracking.windows import Panel, Trace

STEPS = 50


class Thermostat:
    """Heat or not, a minute a step; the weather is the same for all rows of one seed."""

    spec = Spec(
        name="thermostat",
        observation_shape=(2,),
        num_actions=2,
        horizon=STEPS,
        components=("comfort", "heat"),
        action_names=("wait", "heat"),
    )

    def reset(self, seeds: Sequence[int]) -> Any:
        """Draw all weather of an episode at once: a row is a function of its seed."""
        weather = {seed: np.random.default_rng(seed).normal(0, 3, STEPS + 1) for seed in set(seeds)}
        self.outside = np.stack([weather[seed] for seed in seeds])  # [B, 51] degrees
        self.inside, self.time = np.full(len(seeds), 15.0), 0
        self.history: list[Any] = []
        return self._observations()

    def step(self, actions: Any) -> Transition:
        """One minute of all rows."""
        self.inside = self.inside + 2.0 * actions + 0.1 * (self.outside[:, self.time] - self.inside)
        self.history.append(self.inside)
        self.time += 1
        comfort, heat = -np.abs(self.inside - 20.0) / 10, -0.1 * actions
        return Transition(
            observations=self._observations(),
            rewards=comfort + heat,
            components={"comfort": comfort, "heat": heat},
            terminated=np.zeros(len(actions), dtype=bool),
            truncated=np.full(len(actions), self.time >= STEPS),
        )

    def fork(self, rows: Any) -> Thermostat:
        """Copies of these rows, with the weather to come."""
        copy = Thermostat()
        copy.outside, copy.inside, copy.time = self.outside[rows], self.inside[rows], self.time
        copy.history = [degrees[rows] for degrees in self.history]
        return copy

    def action_mask(self) -> None:
        """Every action is always allowed."""
        return

    def rules(self) -> Mapping[str, Rule]:
        """Optional: what a policy is compared with; each is begun anew with every reset."""
        return {"below 20": lambda environment: lambda: (environment.inside < 20).astype(np.int64)}

    def trace(self, row: int) -> Trace:
        """Optional: what the report draws of an episode."""
        degrees = {
            "outside": self.outside[row, : self.time],  # nobody decides it: drawn once
            "inside": [inside[row] for inside in self.history],
        }
        return Trace(panels=[Panel(title="Temperature", unit="degrees", series=degrees)], seconds_per_step=60)

    def _observations(self) -> Any:
        return np.stack([self.inside - 20.0, self.outside[:, self.time]], axis=1).astype(np.float32) / 10


async def main() -> None:
    """Measure, train, measure again, from the same starts."""
    config = ControlConfig(total_steps=50_000, gamma=0.95, minibatch_size=2048, run_name="thermostat")
    async with ControlTrainer(MlpPolicy(Thermostat.spec), Thermostat(), config) as trainer:
        before = await trainer.evaluate()
        await trainer.train()
        after = await trainer.evaluate()
    mean, interval = paired_difference(after, before)
    low, high = interval or (mean, mean)
    print(f"return before {before.mean:.1f}, after {after.mean:.1f}: {mean:+.1f} [{low:+.1f}, {high:+.1f}]")


if __name__ == "__main__":
    asyncio.run(main())
