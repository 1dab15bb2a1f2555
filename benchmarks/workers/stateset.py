"""stateset-agents 0.69 from PyPI, by its own MultiTurnGRPOTrainer; runs in an environment of its own.

Driven as its documentation says for loops of one's own: `generate_trajectories`, then `training_step`.
All scenarios are given at once, so that its batched rollouts take every conversation in one batch per turn.
It steps the environments one after the other, so that the waits of tools add up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.training.multi_turn_trainer import MultiTurnGRPOTrainer

from benchmarks.shapes import score
from benchmarks.talks import talks
from benchmarks.worker import Task, serve
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import RewardFunction, RewardResult
from stateset_agents.training.config import TrainingConfig


class Waiting(ConversationEnvironment):
    """Its scripted conversations, with the wait of the tools in every step."""

    waits: Any

    async def reset(self, *args: Any, **kwargs: Any) -> Any:
        """A new conversation with waits of its own."""
        state = await super().reset(*args, **kwargs)
        state.context["waits"] = next(self.waits)
        return state

    async def step(self, *args: Any) -> Any:
        """Wait, then go on."""
        state = args[0]
        seconds = state.context["waits"][state.turn_count]
        if seconds:
            await asyncio.sleep(seconds)
        return await super().step(*args)


class Even(RewardFunction):
    """The score that every side uses."""

    async def compute_reward(self, turns: Sequence[Any], context: Any = None) -> Any:
        """Of a whole conversation."""
        replies = " ".join(turn.content for turn in turns if turn.role == "assistant")
        return RewardResult(score=score(replies), breakdown={})


class Turns:
    """A whole step: rollouts, scores, update."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        logging.disable(logging.WARNING)
        self.talks = talks(job)
        self.loop = asyncio.new_event_loop()
        agent = MultiTurnAgent(
            AgentConfig(
                model_name=job["model"],
                max_new_tokens=self.talks.reply,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                repetition_penalty=1.0,
                torch_dtype="float32",
                device_map=None,
            )
        )
        self.scenarios = [
            {
                "id": f"scenario-{number}",
                "user_turns": [self.talks.opening(number), *self.talks.user_words(number)],
            }
            for number in range(self.talks.scenarios)
        ]
        self.environment = Waiting(scenarios=self.scenarios, max_turns=self.talks.turns)
        config = TrainingConfig(
            num_generations=self.talks.group,
            gradient_accumulation_steps=1,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            entropy_coef=0.0,
            beta=0.0,
            bf16=False,
            use_lora=False,
            report_to="none",
            max_prompt_length=2048,
            max_completion_length=2048,
            **job.get("settings", {}),
        )
        self.trainer = MultiTurnGRPOTrainer(agent, self.environment, Even(), config)
        self.loop.run_until_complete(self.trainer.initialize())

    def run(self, repetition: int) -> Mapping[str, float]:
        waits = [self.talks.waits(row) for row in range(self.talks.rows)]
        self.environment.waits = itertools.cycle(waits)
        return self.loop.run_until_complete(self._step())

    async def _step(self) -> Mapping[str, float]:
        groups = await self.trainer.generate_trajectories(self.scenarios)
        metrics = await self.trainer.training_step(groups)
        if not metrics["optimizer_step"] or not metrics["advantage_std"]:
            raise RuntimeError(f"nothing was trained: {metrics}")
        turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
        spoken = [turn.metadata["token_ids"] for turn in turns if turn.role == "assistant"]
        return {"tokens": sum(len(ids) for ids in spoken)}

    def close(self) -> None:
        pass


def make(job: Mapping[str, Any]) -> Task:
    """There is one task."""
    return Turns(job)


if __name__ == "__main__":
    serve(make)
