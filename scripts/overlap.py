"""What overlapping rollouts and updates buys: with slow tools and judges, and on the way to 65 % success.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/overlap.py tools
    OMP_NUM_THREADS=1 .venv/bin/python scripts/overlap.py slow-desk --seeds 0 1 2
    OMP_NUM_THREADS=1 .venv/bin/python scripts/overlap.py desk --seeds 0 1 2

`tools`: the retail desk with an environment that takes 200 ms for each answer and a reward that takes 200 ms
for each conversation; trainings with `max_staleness` 0 and 1 take turns, a few steps each. `desk`: the
settings of examples/demo.yaml until the mean success of five steps' rollouts reaches 65 %, with both, seed by
seed; `slow-desk`: the same with those 200 ms. Each training prints a line of JSON; `tools` ends with what
they come to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward, Reward, RewardFunction, RewardResult
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.runs.callbacks import Callback
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory

WAIT = 0.2
"""Seconds of each answer and each judgement."""
GOAL = 0.65
STEPS = 5
"""Whose mean success counts."""


class SlowDesk(RetailDesk):
    """The desk, with tools and users that take their time."""

    local = False

    async def start(self, scenario: Scenario, seed: int) -> Any:
        """A conversation whose every answer takes `WAIT` longer."""
        conversation: Any = await super().start(scenario, seed)
        step = conversation.step

        async def later(reply: Any) -> Any:
            await asyncio.sleep(WAIT)
            return await step(reply)

        conversation.step = later
        return conversation


class SlowJudge(RewardFunction):
    """The environment's reward, `WAIT` later."""

    name = "slow judge"

    async def score(self, trajectory: Trajectory) -> RewardResult:
        """As EnvironmentReward has it."""
        await asyncio.sleep(WAIT)
        return await EnvironmentReward().score(trajectory)


class Steps(Callback):
    """Keeps the metrics of every step, with wall and CPU seconds, and may stop at the goal."""

    def __init__(self, *, until_goal: bool = False) -> None:
        self.lines: list[Mapping[str, float]] = []
        self.until_goal = until_goal
        self.reached: dict[str, float] | None = None
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def on_train_begin(self, trainer: MultiTurnGRPOTrainer) -> None:
        """The clocks begin."""
        self.trainer = trainer
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    async def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note it."""
        self.lines.append(dict(metrics))
        last = [line["success/rate"] for line in self.lines[-STEPS:]]
        if self.until_goal and len(last) == STEPS and statistics.fmean(last) >= GOAL:
            self.reached = {"steps": step, **self.seconds()}
            self.trainer.request_stop()

    def seconds(self) -> dict[str, float]:
        """Since the training began."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {"wall_seconds": round(wall, 2), "cpu_seconds": round(cpu, 2)}


async def train(steps: Steps, folder: str, *, slow: bool, **settings: Any) -> None:
    """One training of the embedded agent, from its warm-up's weights."""
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48))
    environment = SlowDesk(families="learnable") if slow else RetailDesk(families="learnable")
    reward: Reward = SlowJudge() if slow else EnvironmentReward()
    config = TrainingConfig(output_dir=folder, save_steps=0, log_rollouts=False, progress=False, **settings)
    trainer = MultiTurnGRPOTrainer(agent, environment, reward, config, callbacks=[steps])
    try:
        await trainer.initialize()
        await trainer.train()
    finally:
        await trainer.close()


async def tools(rounds: int, num_steps: int, folder: str) -> None:
    """Trainings with and without overlap by turns; the first two steps of each are left out."""
    per_second: dict[int, list[float]] = {0: [], 1: []}
    share: list[float] = []
    for number in range(rounds):
        for staleness in (0, 1):
            steps = Steps()
            settings = {"max_staleness": staleness, "scheduling": "throughput", "max_steps": num_steps + 2}
            await train(steps, folder, slow=True, seed=number, **settings)
            lines = steps.lines[2:]
            seconds = sum(line["time/step"] for line in lines)
            per_second[staleness].append(sum(line["rollout/conversations"] for line in lines) / seconds)
            result = {
                "round": number,
                "max_staleness": staleness,
                "conversations_per_second": round(per_second[staleness][-1], 3),
                "update_share": round(sum(line["time/update"] for line in lines) / seconds, 3),
                "wait_share": round(sum(line["time/rollout"] for line in lines) / seconds, 3),
            }
            if staleness:
                updating = sum(line["time/update"] for line in lines)
                share.append(sum(line["overlap/share"] * line["time/update"] for line in lines) / updating)
                result["overlap_share"] = round(share[-1], 3)
                result["staleness_max"] = max(line["staleness/max"] for line in lines)
            print(json.dumps(result), flush=True)
    ratios = [
        with_overlap / without for without, with_overlap in zip(per_second[0], per_second[1], strict=True)
    ]
    print(
        json.dumps(
            {
                "throughput_ratio": [round(ratio, 3) for ratio in ratios],
                "median": round(statistics.median(ratios), 3),
                "overlap_share": round(statistics.fmean(share), 3),
            }
        )
    )


async def desk(seeds: Sequence[int], num_steps: int, folder: str, *, slow: bool) -> None:
    """To 65 % success, with and without overlap."""
    for seed in seeds:
        for staleness in (0, 1):
            steps = Steps(until_goal=True)
            await train(steps, folder, slow=slow, seed=seed, max_staleness=staleness, max_steps=num_steps)
            result: dict[str, Any] = {"seed": seed, "max_staleness": staleness, "reached": steps.reached}
            if staleness:
                result["overlap_share"] = round(
                    statistics.fmean(line["overlap/share"] for line in steps.lines), 3
                )
                result["weight_truncated"] = round(
                    statistics.fmean(line["policy/weight_truncated"] for line in steps.lines), 5
                )
            print(json.dumps(result), flush=True)


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=("tools", "desk", "slow-desk"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None, help="of each training, 8 or at most 110")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "tools":
            asyncio.run(tools(options.rounds, options.steps or 8, folder))
        else:
            asyncio.run(desk(options.seeds, options.steps or 110, folder, slow=options.what == "slow-desk"))


if __name__ == "__main__":
    main()
