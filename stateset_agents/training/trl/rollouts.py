"""Our conversations for a GRPOTrainer of your own: a `rollout_func` for TRL.

    rollout = make_trl_rollout(agent, environment)
    trainer = GRPOTrainer(model, rollout.reward_func, train_dataset=Dataset.from_list(rollout.prompts()),
                          rollout_func=rollout, ...)

TRL calls it synchronously, and may do so where an event loop runs, so it has a loop in a thread of its own.
Close it when the training is over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from itertools import groupby
from typing import Any, Self, TypeVar

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Environment, expect_environment
from stateset_agents.core.reward import EnvironmentReward, Reward
from stateset_agents.training.trl.rows import TrlRow, columns, padding_row, trl_rows
from stateset_agents.training.update.factory import refuse_truncated_sampling
from stateset_agents.training.update.lora import merged_weights
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.settings import expect
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

_T = TypeVar("_T")


class TrlRollout:
    """`rollout_func` and `reward_func` of a GRPOTrainer; the agent samples with the trainer's weights.

    Besides ids, log-probs and mask a rollout has the columns `conversation_reward` and `trajectory`, which
    reward functions of your own may ask for. What failed is a row that trains nothing, its reward None.
    """

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment,
        reward_fn: Reward,
        *,
        seed: int,
        **settings: Any,
    ) -> None:
        """`settings` as `ComputationalEngine` takes them, but for `num_generations`, which is TRL's."""
        self._agent, self._environment, self._reward_fn = agent, environment, reward_fn
        self._seed, self._settings = seed, settings
        self._scenarios: dict[str, Scenario] = {}
        for scenario in environment.scenarios("train"):
            if self._scenarios.setdefault(scenario.id, scenario) is not scenario:
                raise ConfigurationError(
                    f"two train scenarios have the id {scenario.id!r}: give each its own"
                )
        self._version: int | None = None
        self._calls = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()

    def prompts(self) -> list[dict[str, str]]:
        """Rows for the trainer's dataset: a prompt is the id of a train scenario."""
        return [{"prompt": id} for id in self._scenarios]

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """Play TRL's prompts, each of which stands as often as its group has members.

        Raises ConfigurationError for a prompt that is no scenario's id and for groups of unequal size.
        """
        groups = [(id, sum(1 for _ in same)) for id, same in groupby(prompts)]
        unknown = [id for id, _ in groups if not isinstance(id, str) or id not in self._scenarios]
        if unknown:
            raise ConfigurationError(
                f"prompt {unknown[0]!r:.60} is no train scenario's id: make the dataset of rollout.prompts()"
            )
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        if any(count % size for _, count in groups):
            raise ConfigurationError(
                f"prompts come in groups of {sorted({count for _, count in groups})} and num_generations is "
                f"{size}: make per_device_train_batch_size * steps_per_generation a multiple of it"
            )
        scenarios = [self._scenarios[id] for id, count in groups for _ in range(count // size)]
        played = self._run(self._play(scenarios, size, trainer))
        members = [trajectory for group in played for trajectory in group.trajectories]
        rows = [_row(member, trainer.processing_class.pad_token_id) for member in members]
        rewards = [member.reward for member in members]
        return {**columns(rows, rewards, with_logprobs=trainer.use_vllm), "trajectory": members}

    async def _play(self, scenarios: Sequence[Scenario], size: int, trainer: Any) -> list[TrajectoryGroup]:
        refuse_truncated_sampling("TRL", self._agent)
        await self._agent.initialize()
        version = trainer.state.global_step
        if version != self._version:
            model = trainer.accelerator.unwrap_model(trainer.model)
            await self._agent.backend.update_weights(merged_weights(model), version)
            self._version = version
        engine = ComputationalEngine(
            self._agent, self._environment, self._reward_fn, num_generations=size, **self._settings
        )
        self._calls += 1
        return await engine.rollout(
            scenarios, seed=self._seed, step=self._calls, temperature=trainer.temperature
        )

    @staticmethod
    def reward_func(conversation_reward: Sequence[float | None], **_: Any) -> list[float | None]:
        """The rewards that `reward_fn` gave, for `GRPOTrainer(reward_funcs=...)`."""
        return list(conversation_reward)

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        if not self._thread.is_alive():
            work.close()
            raise ConfigurationError("this rollout was closed: make another one with make_trl_rollout")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        """Close the agent and end the thread."""
        if self._thread.is_alive():
            self._run(self._agent.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _row(member: Trajectory, pad_id: int) -> TrlRow:
    """Raises ConfigurationError for a conversation of several rows."""
    if not member.num_agent_tokens:
        return padding_row(pad_id, reward=0.0)
    row, *others = trl_rows(member, None if member.reward is None else [0.0] * member.num_agent_tokens)
    if others:
        raise ConfigurationError(
            f"a conversation of scenario {member.scenario.id!r} has {1 + len(others)} rows, and TRL takes "
            "one for each prompt: set AgentConfig.history to keep, or train with TrlGRPOTrainer"
        )
    return row


def make_trl_rollout(
    agent: MultiTurnAgent,
    environment: Environment,
    reward_fn: Reward | None = None,
    *,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> TrlRollout:
    """A `rollout_func` that plays our conversations with the weights of your GRPOTrainer.

    `reward_fn` scores them, by default the environment's own rewards; `settings`: more for the
    `ComputationalEngine`. The agent's model must be the trainer's, and dropout off in it (TRL's
    `disable_dropout=True`), or the ratios see it. Advantages, loss and checkpoints are TRL's.
    """
    expect("agent", agent, MultiTurnAgent, "write MultiTurnAgent(AgentConfig(...))")
    expect_environment(environment)
    return TrlRollout(agent, environment, reward_fn or EnvironmentReward(), seed=seed, **(settings or {}))
