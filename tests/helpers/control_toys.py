"""Numeric environments whose best policy is known."""

from __future__ import annotations

import numpy as np

from stateset_agents.numeric.environments.base import Spec, Transition
from stateset_agents.tracking.windows import Panel, Trace

__all__ = ["RuledSignals", "Signals"]


class Signals:
    """A row sees one of three signals in each step, and naming it earns 1; each step costs a quarter."""

    def __init__(self, horizon=6, *, stop=None, forks=True, masked=False):
        """`stop`: the episode ends after so many steps, for odd seeds; `masked`: the last of four actions is
        forbidden."""
        actions = 4 if masked else 3
        self.spec = Spec(
            name="signals",
            observation_shape=(3,),
            num_actions=actions,
            horizon=horizon,
            components=("named", "cost"),
        )
        self.stop, self.forks, self.masked = stop, forks, masked

    def reset(self, seeds):
        draws = {
            seed: np.random.default_rng(seed).integers(3, size=self.spec.horizon + 1) for seed in set(seeds)
        }
        self.signals = np.stack([draws[seed] for seed in seeds], axis=1)
        self.ends = np.array([self.stop if self.stop and seed % 2 else 10**9 for seed in seeds])
        self.time = 0
        return self._observations()

    def step(self, actions):
        named = (actions == self.signals[self.time]).astype(np.float32)
        cost = np.full(len(actions), -0.25, dtype=np.float32)
        self.time += 1
        return Transition(
            observations=self._observations(),
            rewards=named + cost,
            terminated=self.time >= self.ends,
            truncated=np.full(len(actions), self.time >= self.spec.horizon),
            components={"named": named, "cost": cost},
        )

    def fork(self, rows):
        if not self.forks:
            raise NotImplementedError("these signals are drawn as they come")
        copy = type(self).__new__(type(self))
        vars(copy).update(vars(self))
        copy.signals, copy.ends = self.signals[:, rows].copy(), self.ends[rows].copy()
        return copy

    def action_mask(self):
        if not self.masked:
            return None
        allowed = np.ones((self.signals.shape[1], 4), dtype=bool)
        allowed[:, 3] = False
        return allowed

    def _observations(self):
        return np.eye(3, dtype=np.float32)[self.signals[self.time]]


class RuledSignals(Signals):
    """With two rules, and a trace: what is named always, or never, right."""

    def rules(self):
        return {"seer": lambda env: lambda: env.signals[env.time], "blind": self._first}

    def trace(self, row):
        signals = self.signals[: self.time, row].tolist()
        panels = [
            Panel(title="Signal", series={"signal": signals}),
            Panel(title="Earned", unit="points", series={"named": self.named[row]}),
        ]
        return Trace(panels=panels, seconds_per_step=15)

    def reset(self, seeds):
        self.named = [[] for _ in seeds]
        return super().reset(seeds)

    def step(self, actions):
        transition = super().step(actions)
        for row, value in enumerate(transition.components["named"]):
            self.named[row].append(float(value))
        return transition

    @staticmethod
    def _first(env):
        return lambda: np.zeros(env.signals.shape[1], dtype=np.int64)
