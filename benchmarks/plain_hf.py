"""`make demo`'s training as one would write it with plain transformers; kept to be timed against.

Conversations go in lock-step: each turn is one padded `generate` over the whole histories. The update is
one padded forward with full logits, and another of the reference. Scenarios, users, prompts, rewards, loss,
schedule and optimiser are those of the trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.shapes import Request
from benchmarks.workers.hf import generate
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.replies.parsing import parse_reply
from stateset_agents.core.environment import Conversation, Environment
from stateset_agents.core.reward import RewardFunction
from stateset_agents.core.scoring.base import score_trajectories
from stateset_agents.runs.settings import schedule
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.orders import ScenarioOrder
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.trajectory import Status, Trajectory, Turn


@dataclass(slots=True, kw_only=True)
class Talking:
    """One conversation under way."""

    scenario: Scenario
    member: int
    conversation: Conversation
    row: list[int]
    mask: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    delta: list[int] = field(default_factory=list)
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One conversation that is over."""

    trajectory: Trajectory
    row: list[int]
    mask: list[int]


class PlainTrainer:
    """Steps as the trainer makes them, by the plainest means."""

    def __init__(
        self,
        agent: MultiTurnAgent,
        environment: Environment,
        reward: RewardFunction,
        config: TrainingConfig,
        model: Any,
    ) -> None:
        """`agent` lends its template and limits; `model` is trained and generates."""
        self.agent, self.environment, self.reward, self.config = agent, environment, reward, config
        self.model = model.train()
        self.reference = copy.deepcopy(model).eval().requires_grad_(False) if config.uses_reference else None
        decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate)
        self.order = ScenarioOrder(environment.scenarios("train"), config.seed)
        self.number = 0

    async def step(self) -> list[Trajectory]:
        """One step; the scored conversations that it learned from."""
        size = self.config.episodes_per_step()
        played = await self.rollout(self.order.take(self.number * size, size))
        self.update(played)
        self.number += 1
        return [episode.trajectory for episode in played]

    # --- rollouts ---------------------------------------------------------------------------------------

    async def rollout(self, scenarios: Sequence[Scenario]) -> list[Played]:
        """Scored conversations, a group for each scenario."""
        talking = [
            await self._start(scenario, member)
            for scenario in scenarios
            for member in range(self.config.num_generations)
        ]
        while live := [episode for episode in talking if not episode.over]:
            await self._turn(live)
        trajectories = [await self._ended(episode) for episode in talking]
        results = await score_trajectories(self.reward, trajectories)
        scored = [
            replace(trajectory, reward=result.score)  # type: ignore[union-attr]  # no reward fails at the desk
            for trajectory, result in zip(trajectories, results, strict=True)
        ]
        return [
            Played(trajectory=trajectory, row=episode.row, mask=episode.mask)
            for trajectory, episode in zip(scored, talking, strict=True)
        ]

    async def _start(self, scenario: Scenario, member: int) -> Talking:
        user = derive(self.config.seed, "user", self.number, scenario.id)
        conversation = await self.environment.start(scenario, user)
        opening = self.agent.with_system_prompt(conversation.opening)
        prompt = self.agent.template.prompt(opening, conversation.tools)
        return Talking(
            scenario=scenario,
            member=member,
            conversation=conversation,
            row=list(prompt),
            mask=[0] * len(prompt),
            delta=list(prompt),
        )

    async def _turn(self, live: Sequence[Talking]) -> None:
        template, longest = self.agent.template, self.agent.config.max_new_tokens
        self.model.eval()
        batch = [
            Request(episode.row, min(longest, self.agent.context_length - len(episode.row)))
            for episode in live
        ]
        replies = generate(self.model, batch, eos_token_id=list(template.stop_ids))
        for episode, reply in zip(live, replies, strict=True):
            ends = [index for index, token in enumerate(reply) if token in template.stop_ids]
            reply = reply[: ends[0] + 1] if ends else reply
            message = parse_reply(self.agent.backend.tokenizer.decode(reply), len(episode.turns))
            completion = Completion(
                message=message,
                prompt_ids=tuple(episode.row),
                token_ids=tuple(reply),
                logprobs=(0.0,) * len(reply),
                finish_reason="stop" if ends else "length",
            )
            episode.row += reply
            episode.mask += [1] * len(reply)
            seen = await episode.conversation.step(message)
            episode.turns.append(
                Turn(
                    prompt_ids=tuple(episode.delta),
                    completion=completion,
                    feedback=seen.messages,
                    reward=seen.reward,
                )
            )
            episode.delta = self._delta(seen.messages, end=reply[-1] if ends else None)
            episode.over = seen.terminated or seen.truncated
            if not episode.over and len(episode.row) + len(episode.delta) >= self.agent.context_length:
                episode.over = True
            if not episode.over:
                episode.row += episode.delta
                episode.mask += [0] * len(episode.delta)

    def _delta(self, messages: Sequence[Message], *, end: int | None) -> list[int]:
        return list(self.agent.template.delta(messages, end=end)) if messages else []

    async def _ended(self, episode: Talking) -> Trajectory:
        outcome = await episode.conversation.outcome()
        await episode.conversation.close()
        return Trajectory(
            scenario=episode.scenario,
            member=episode.member,
            turns=tuple(episode.turns),
            status=Status.TERMINATED,
            outcome=outcome,
        )

    # --- the update -------------------------------------------------------------------------------------

    def loss(self, played: Sequence[Played]) -> torch.Tensor:
        """The loss that the trainer has by default, with its KL to the reference."""
        config = self.config
        self.model.train()
        ids, mask = _right_padded(played)
        logprobs = _logprobs(self.model, ids)
        ratio = (logprobs - logprobs.detach()).exp()
        advantages = torch.tensor(self._advantages(played))[:, None]
        clipped = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        if self.reference is not None:
            with torch.no_grad():
                reference = _logprobs(self.reference, ids)
            behind = reference - logprobs
            loss = loss + config.beta * ratio * (behind.exp() - behind - 1)
        return ((loss * mask).sum(1) / mask.sum(1)).mean()

    def update(self, played: Sequence[Played]) -> None:
        """One optimiser step."""
        config = self.config
        torch.autograd.backward(self.loss(played))
        factor = schedule(
            self.number,
            config.num_steps(),
            kind=config.lr_scheduler_type,
            warmup_ratio=config.warmup_ratio,
            min_ratio=config.lr_min_ratio,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * factor
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _advantages(self, played: Sequence[Played]) -> list[float]:
        size = self.config.num_generations
        rewards = torch.tensor([episode.trajectory.reward for episode in played]).view(-1, size)
        centred = rewards - rewards.mean(1, keepdim=True)
        advantages: list[float] = (
            (centred / (rewards.std(1, keepdim=True, unbiased=False) + 1e-6)).flatten().tolist()
        )
        if not any(advantages):
            raise RuntimeError("all advantages are 0: nothing would be timed")
        return advantages


def _right_padded(played: Sequence[Played]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, T], and the mask [B, T - 1] of the tokens that are trained."""
    width = max(len(episode.row) for episode in played)
    ids = torch.zeros(len(played), width, dtype=torch.long)
    mask = torch.zeros(len(played), width)
    for index, episode in enumerate(played):
        ids[index, : len(episode.row)] = torch.tensor(episode.row)
        mask[index, : len(episode.row)] = torch.tensor(episode.mask, dtype=torch.float)
    return ids, mask[:, 1:]


def _logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[B, T - 1] of each token after those before it."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    chosen: torch.Tensor = logits.log_softmax(dim=-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return chosen
