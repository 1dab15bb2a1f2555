"""A numeric task by stable-baselines3's PPO: train from a seed, then play a hundred starts greedily."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from benchmarks.worker import Clock, Task, serve


class Ppo:
    """The job: `id`, `rows` stepped together, `steps`, `settings` of PPO, and which of them `fall` to 0 in a
    line."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        self.job = job

    def run(self, repetition: int) -> Mapping[str, float]:
        settings = {
            name: _falling(value) if name in self.job["fall"] else value
            for name, value in self.job["settings"].items()
        }
        clock = Clock()
        with clock:
            rows = make_vec_env(self.job["id"], n_envs=self.job["rows"], seed=repetition)
            model = PPO("MlpPolicy", rows, seed=repetition, device="cpu", **settings)
            model.learn(self.job["steps"])
        rows.close()
        returns = [_played(model, self.job["id"], 10**6 + index) for index in range(100)]
        return {
            "wall": clock.wall,
            "cpu": clock.cpu,
            "steps": model.num_timesteps,
            "return": sum(returns) / len(returns),
            "lowest": min(returns),
        }

    def close(self) -> None:
        """Nothing is held."""


def _falling(first: float) -> Any:
    return lambda left: left * first


def _played(model: PPO, name: str, seed: int) -> float:
    environment = gymnasium.make(name)
    observation, _ = environment.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over:
        action, _ = model.predict(observation, deterministic=True)
        observation, reward, terminated, truncated, _ = environment.step(int(action))
        total, is_over = total + float(reward), terminated or truncated
    environment.close()
    return total


def make(job: Mapping[str, Any]) -> Task:
    """There is one task."""
    return Ppo(job)


if __name__ == "__main__":
    serve(make)
