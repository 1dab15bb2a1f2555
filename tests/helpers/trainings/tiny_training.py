"""Tiny trainings for tests: `from tiny_training import talk, make_trainer`. Seconds become milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_model, tiny_tokenizer
from torch import Tensor

from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import Conversation, ConversationEnvironment, Environment
from stateset_agents.core.reward import Reward, reward_function
from stateset_agents.runs.callbacks import Callback
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer
from stateset_agents.training.update.batch import Sample
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Row, Trajectory, TrajectoryGroup, Turn

__all__ = [
    "SCENARIOS",
    "Watched",
    "even_share",
    "group_of",
    "make_agent",
    "make_environment",
    "make_trainer",
    "plain_logits",
    "plain_logprobs",
    "reward_curve",
    "same_bits",
    "sample",
    "snapshot",
    "talk",
]


def talk(
    *turns: tuple[Sequence[int], Sequence[int]],
    logprobs: Sequence[float] | None = None,
    follows: Sequence[int | None] = (),
    scenario: str = "s",
    **fields: Any,
) -> Trajectory:
    """A trajectory from (prompt or delta ids, reply ids) pairs; log-probs are -1 unless given.

    `follows` of the first turns: None opens a row with the whole prompt; the others follow the turn before.
    """
    seen: list[list[int]] = []
    made: list[Turn] = []
    values = iter(logprobs if logprobs is not None else [-1.0] * sum(len(reply) for _, reply in turns))
    for index, (delta, reply) in enumerate(turns):
        before = follows[index] if index < len(follows) else -1
        row = [*(seen[before] if seen and before is not None else []), *delta]
        completion = Completion(
            message=Message(role="assistant", content=""),
            prompt_ids=tuple(row),
            token_ids=tuple(reply),
            logprobs=tuple(next(values) for _ in reply),
            finish_reason="stop",
        )
        made.append(Turn(prompt_ids=tuple(delta), completion=completion, follows=before))
        seen.append([*row, *reply])
    return Trajectory(scenario=Scenario(id=scenario), turns=tuple(made), **fields)


def sample(trajectory: Trajectory, advantage: float = 1.0) -> Sample:
    """The trajectory with one advantage on all its agent tokens."""
    return Sample(trajectory=trajectory, advantages=(advantage,) * trajectory.num_agent_tokens)


def group_of(*rewards: float | None, key: str = "g") -> TrajectoryGroup:
    """A group of one-turn trajectories with these rewards; member i says i + 1 tokens."""
    members = tuple(
        talk(([9], [member + 1] * (member + 1)), reward=reward, member=member)
        for member, reward in enumerate(rewards)
    )
    return TrajectoryGroup(key=key, trajectories=members)


SCENARIOS: list[dict[str, Any]] = [
    {"id": f"{split}{number}", "opening": word, "context": {"script": ["go on"]}, "split": split}
    for split in ("train", "validation", "test")
    for number, word in enumerate(("hi", "hello", "ok", "yes"))
]
"""Four per split; the user opens, says "go on" once, and leaves."""


@reward_function(local=True)
async def even_share(trajectory: Trajectory) -> float:
    """Share of even tokens among the agent's: it differs between members, and any policy can learn it."""
    ids = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    return sum(token % 2 == 0 for token in ids) / len(ids)


def make_agent(
    family: str = "llama",
    *,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> MultiTurnAgent:
    """An agent over a tiny random model; `dropout` stands in the model's config (llama: attention)."""
    model = tiny_model(family).to(dtype)
    if dropout:
        model.config.attention_dropout = dropout
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = dropout
    config = AgentConfig(**{"model_name": "tiny", "chat_template": "plain", "max_new_tokens": 3, **settings})
    return MultiTurnAgent(config, backend=HuggingFaceBackend(model, tiny_tokenizer(), copy_model=False))


def make_environment(**options: Any) -> ConversationEnvironment:
    """Four short conversations per split."""
    return ConversationEnvironment(**{"scenarios": SCENARIOS, "max_turns": 2, **options})


class Watched:
    """`make_environment` that counts its conversations, and lets some break off with an error."""

    def __init__(
        self,
        breaks: Callable[[int], bool] | None = None,
        *,
        slow: Callable[[int], bool] | None = None,
        **options: Any,
    ) -> None:
        """`breaks`: does the conversation of this number (from 1, in the order of starting) fail? `slow`:
        does it take two seconds to start?"""
        self.inner = make_environment(**options)
        self.local = self.inner.local
        self.breaks = breaks or (lambda call: False)
        self.slow = slow or (lambda call: False)
        self.calls = self.live = self.peak = 0

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return self.inner.scenarios(split)

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        self.calls += 1
        if self.breaks(self.calls):
            raise OSError("the database is away")
        if self.slow(self.calls):
            await asyncio.sleep(2.0)
        conversation = await self.inner.start(scenario, seed)
        self.live += 1
        self.peak = max(self.peak, self.live)
        close = conversation.close

        async def closing() -> None:
            self.live -= 1
            await close()

        conversation.close = closing  # type: ignore[method-assign]  # only this one conversation
        return conversation


def make_trainer(
    folder: Path,
    *,
    agent: MultiTurnAgent | None = None,
    environment: Environment | None = None,
    reward: Reward = even_share,
    run: RunFolder | None = None,
    **settings: Any,
) -> MultiTurnGRPOTrainer:
    """Two episodes of four members a step; three steps unless `settings` say otherwise."""
    config = {
        "max_steps": 3,
        "num_generations": 4,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "output_dir": str(folder / "runs"),
    }
    return MultiTurnGRPOTrainer(
        agent or make_agent(),
        environment or make_environment(),
        reward,
        TrainingConfig(**{**config, **settings}),
        run=run,
    )


class _Curve(Callback):
    def __init__(self) -> None:
        self.rewards: list[float] = []

    async def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rewards.append(metrics["reward/mean"])


def reward_curve(trainer: MultiTurnGRPOTrainer) -> list[float]:
    """Filled with each step's mean reward while it trains."""
    curve = _Curve()
    trainer.callbacks.append(curve)
    return curve.rewards


def snapshot(trainer: MultiTurnGRPOTrainer) -> dict[str, Tensor]:
    """Copies of the master weights and the optimiser's moments, the critic's too."""
    tensors = {name: tensor.clone() for name, tensor in trainer.learner.weights().items()}
    for index, state in trainer.learner.state()["optimizer"]["state"].items():
        tensors |= {f"optimizer {index} {name}": value.clone() for name, value in state.items()}
    critic = trainer.learner.critic_state()
    return tensors | {f"critic {name}": value.clone() for name, value in critic.items()}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal names, and equal in every bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def plain_logits(model: Any, trajectory: Trajectory | Row, temperature: float = 1.0) -> Tensor:
    """[N, V] that predict the tokens that train, in order of turns, each turn in its own context."""
    chosen = []
    for completion in _completions(trajectory):
        ids = torch.tensor([*completion.prompt_ids, *completion.token_ids])
        logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0] / temperature
        chosen.append(logits[len(completion.prompt_ids) - 1 : -1])
    return torch.cat(chosen)


def plain_logprobs(model: Any, trajectory: Trajectory | Row, temperature: float = 1.0) -> Tensor:
    """[N] log-probs of the tokens that train."""
    said = torch.tensor([token for completion in _completions(trajectory) for token in completion.token_ids])
    logprobs = plain_logits(model, trajectory, temperature).log_softmax(-1)
    return logprobs.gather(-1, said[:, None])[:, 0]


def _completions(trajectory: Trajectory | Row) -> list[Completion]:
    first = trajectory.trains_from if isinstance(trajectory, Row) else 0
    return [turn.completion for turn in trajectory.turns[first:]]
