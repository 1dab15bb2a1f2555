"""The embedded desk's training with parts that fail and hang at random: `from faulty_desk import train`."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chat_server import ChatServer, hang, status

from stateset_agents.backends.openai.client import ChatClient
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Conversation, Observation
from stateset_agents.core.reward import (
    CompositeReward,
    EnvironmentReward,
    RewardFunction,
    RewardResult,
    score_trajectories,
)
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.evaluation.evaluator import Evaluation, evaluate
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.rewards.judge import JudgeReward
from stateset_agents.tracking.run_log import RecordedRollout, RunLog
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory

__all__ = ["Faults", "Trained", "evaluated", "opinion", "reward_of", "train", "true_reward"]

FAILS, HANGS = 0.2, 0.05
"""Shares of the calls."""


class Faults:
    """Decides for each call whether it fails, hangs or works, and counts."""

    def __init__(self, seed: int, *, fails: float = FAILS, hangs: float = HANGS) -> None:
        self._draw = random.Random(seed)
        self._fails, self._hangs = fails, hangs
        self.calls: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.hung: dict[str, int] = {}

    def draw(self, what: str) -> str:
        self.calls[what] = self.calls.get(what, 0) + 1
        where = self._draw.random()
        if where < self._fails:
            self.failed[what] = self.failed.get(what, 0) + 1
            return "fails"
        if where < self._fails + self._hangs:
            self.hung[what] = self.hung.get(what, 0) + 1
            return "hangs"
        return "works"

    async def strike(self, what: str) -> None:
        """Raise, or take for ever, as drawn."""
        fate = self.draw(what)
        if fate == "fails":
            raise ConnectionError(f"the {what} is away")
        if fate == "hangs":
            await asyncio.Event().wait()


class FaultyDesk:
    """The desk; what fails has done its work half: the reply was heard, the answer is lost."""

    local = True

    def __init__(self, faults: Faults) -> None:
        self._desk = RetailDesk()
        self._faults = faults

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return self._desk.scenarios(split)

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        await self._faults.strike("environment")
        return _Faulty(await self._desk.start(scenario, seed), self._faults)


class _Faulty:
    def __init__(self, inner: Conversation, faults: Faults) -> None:
        self.opening, self.tools = inner.opening, inner.tools
        self._inner, self._faults = inner, faults

    async def step(self, reply: Message) -> Observation:
        observation = await self._inner.step(reply)  # a second try on the same conversation would show
        await self._faults.strike("tool" if reply.tool_calls else "environment")
        return observation

    async def outcome(self) -> Outcome:
        await self._faults.strike("environment")
        return await self._inner.outcome()

    def fork(self) -> Conversation:
        return _Faulty(self._inner.fork(), self._faults)

    async def close(self) -> None:
        await self._inner.close()


class FaultyReward(RewardFunction):
    """What the environment gave, when it comes through."""

    name = "environment"
    local = True

    def __init__(self, faults: Faults | None = None) -> None:
        self._inner = EnvironmentReward()
        self._faults = faults

    async def score(self, trajectory: Trajectory) -> RewardResult:
        if self._faults is not None:
            await self._faults.strike("reward")
        return await self._inner.score(trajectory)


def opinion(prompt: str) -> str:
    """The judge's: a point less for each tool message that tells of an error, down to 0."""
    spoken = [json.loads(line) for line in prompt.splitlines() if line.startswith("{")]
    errors = sum(message["role"] == "tool" and "error" in message["content"] for message in spoken)
    return f"I counted.\nScore: {max(0, 10 - errors)}"


def reward_of(url: str, faults: Faults | None = None) -> RewardFunction:
    """Nine parts the environment's, one part the judge's."""
    client = ChatClient(
        url,
        "judge",
        api_key_env=None,
        timeout=30.0 if faults is None else 0.4,  # a busy machine is no fault
        max_attempts=12,
        backoff=0.02,
        max_concurrent=64,
    )
    judge = JudgeReward(client, "Did every call of a tool work?", max_concurrent=64)
    return CompositeReward([(FaultyReward(faults), 0.9), (judge, 0.1)])


@dataclass(slots=True)
class Trained:
    """What a training left."""

    trainer: MultiTurnGRPOTrainer
    faults: Faults | None
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums over all steps."""
    rollouts: list[RecordedRollout] = field(default_factory=list)


async def train(folder: Path, faults: Faults | None, **settings: Any) -> Trained:
    """The embedded model with its own recommended settings, but for `settings`."""
    patient = {
        "turn_retries": 10,
        "reward_retries": 10,
        "episode_retries": 3,
        "retry_backoff": 0.02,
        "turn_timeout": 0.4,
        "reward_timeout": 2.0,
        "breaker_failures": 20,
        "breaker_pause": 0.5,
        "outage_patience": 20.0,
    }
    config = TrainingConfig(**{"output_dir": str(folder), "save_steps": 0, **patient, **settings})
    kinds = {"fails": status(500), "hangs": hang, "works": None}
    plan = [kinds[faults.draw("judge")] for _ in range(60_000)] if faults is not None else []
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(ChatServer(*plan, speak=opinion))
        agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48))
        desk: Any = RetailDesk() if faults is None else FaultyDesk(faults)
        trainer = MultiTurnGRPOTrainer(agent, desk, reward_of(server.url, faults), config)
        await trainer.train()
        if faults is not None:
            asked = len(server.bodies)
            drawn = plan[:asked]
            faults.calls["judge"] = asked
            faults.failed["judge"] = sum(one is kinds["fails"] for one in drawn)
            faults.hung["judge"] = sum(one is hang for one in drawn)
    log = RunLog(trainer.run)
    sums: dict[str, float] = {}
    for line in log.metrics():
        for name, value in line.values.items():
            sums[name] = sums.get(name, 0.0) + value
    return Trained(trainer, faults, sums, list(log.rollouts("train")))


async def evaluated(agent: MultiTurnAgent, *, tries: int) -> Evaluation:
    """On the desk's held-out scenarios, where nothing fails."""
    desk = RetailDesk()
    return await evaluate(agent, desk, EnvironmentReward(), desk.scenarios("test"), tries=tries, seed=1)


async def true_reward(rollout: RecordedRollout, rewards: RewardFunction) -> float | None:
    """What the conversation is worth where nothing fails: its replies said again at a sound desk, and scored.

    Raises AssertionError where the desk answers otherwise than was recorded.
    """
    recorded = trajectory_of(rollout)
    conversation = await RetailDesk().start(recorded.scenario, recorded.seed)
    assert conversation.opening == recorded.opening
    turns = []
    for turn in recorded.turns:
        seen = await conversation.step(turn.completion.message)
        assert seen.messages == turn.feedback
        turns.append(replace(turn, reward=seen.reward))
    outcome = await conversation.outcome()
    await conversation.close()
    assert outcome.changes == recorded.outcome.changes
    sound = replace(recorded, turns=tuple(turns), outcome=outcome)
    [result] = await score_trajectories(rewards, [sound])
    return result.score if isinstance(result, RewardResult) else None
