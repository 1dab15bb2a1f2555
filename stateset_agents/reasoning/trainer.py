"""`GRPOTrainer`: DeepSeekMath's GRPO over live objects, for who writes the loop himself.

prompts -> groups of replies -> rewards -> advantages -> loss -> step. Each arrow is the package's own: its
engine samples, its rewards score, its estimator credits, its losses and learner update.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NotRequired, Self, TypedDict

import numpy as np
from torch import Tensor

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.algorithms.kl_settings import create_kl_controller
from stateset_agents.backends.base import Session, exclusive, new_weights
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.pretrained.loading import eos_ids_of
from stateset_agents.backends.pretrained.pictures import PictureReader, with_pictures
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.core.reward import RewardFunction, RewardResult, as_reward, score_trajectories
from stateset_agents.core.scoring.base import as_result, with_score
from stateset_agents.runs.settings import changed_settings
from stateset_agents.runtime.named_code import NamedCall
from stateset_agents.runtime.pending_calls import awaitable_or_blocking
from stateset_agents.runtime.tasks import Worker, gather_or_cancel, in_thread
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import Processes
from stateset_agents.training.update.batch import Sample, assign_credit
from stateset_agents.training.update.learner import Learner
from stateset_agents.types.errors import ConfigurationError, RewardFailure
from stateset_agents.types.images import Image, PixelValues
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message, SamplingMask, SamplingParams
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that, is_whole
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup, Turn

# Several replies to each of several prompts, sampled by the package's engine from live objects.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings by which the replies of a training are sampled."""

    group_size: int = 8
    batch_size: int = 32
    """Replies that are sampled at once."""
    max_length: int = 2048
    """Tokens of prompt and reply together; the prompt may have half of them."""
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("group_size", 1), ("batch_size", 1), ("max_length", 2), ("top_k", 0)):
            value = getattr(self, name)
            expect_that(is_whole(value, least), name, f"be a whole number from {least} on", value)
        is_random = self.temperature > 0
        expect_that(is_random, "temperature", "be above 0", self.temperature, "greedy replies are all alike")
        expect_that(0 < self.top_p <= 1, "top_p", "be above 0 and at most 1", self.top_p)


def adapted(tokenizer: Any, model: Any) -> HuggingFaceTokenizer:
    """transformers' tokenizer as the engine reads it, with the model's own ends of turn."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer
    return HuggingFaceTokenizer(tokenizer, extra_eos_ids=eos_ids_of(model))


def encoded_prompts(
    tokenizer: HuggingFaceTokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    pixels: Sequence[Sequence[PixelValues]] = (),
    place_id: int | None = None,
) -> list[list[int]]:
    """[P] ids of each, with the tokens of its `pixels` wherever `place_id` stands for one. A prompt is text
    as the model reads it: a chat template's control tokens in it are control tokens, and a tokenizer that
    begins texts with a token of its own does so once.

    Raises ConfigurationError for an empty one, and for one over half of `max_length`.
    """
    bos = tokenizer.hf.bos_token_id
    begins = bos is not None and tokenizer.hf.encode("")[:1] == [bos]
    encoded = []
    for prompt, pictures in zip(prompts, pixels or [()] * len(prompts), strict=True):
        ids = tokenizer.encode_markup(prompt)
        if place_id is not None:
            ids = with_pictures(ids, pictures, place_id)
        if begins and prompt and ids[:1] != [bos]:
            ids = [bos, *ids]
        if not 0 < len(ids) <= sampling.max_length // 2:
            raise ConfigurationError(
                f"a prompt must have 1 to {sampling.max_length // 2} tokens, got {len(ids)}: {prompt!r:.60}"
            )
        encoded.append(ids)
    return encoded


async def sampled(
    backend: HuggingFaceBackend,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    stream: int,
    pixels: Sequence[Sequence[PixelValues]] = (),
) -> list[list[Completion]]:
    """[prompts][group_size] replies, each with a random stream of its own, derived from `stream`; `pixels`
    [prompts]: the pictures of each."""
    places = asyncio.Semaphore(sampling.batch_size)

    async def one(prompt: int, member: int) -> Completion:
        ids, session = prompts[prompt], Session(prompt, member)
        params = SamplingParams(
            max_new_tokens=min(sampling.max_length, backend.context_length) - len(ids),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_token_ids=backend.tokenizer.eos_ids,
            stream=derive(stream, "reply", prompt, member),
            return_sampling_mask=True,
        )
        async with places:
            try:
                pictures = pixels[prompt] if pixels else ()
                return await backend.generate(ids, params, session=session, pixels=pictures)
            finally:
                await backend.release(session)

    size = sampling.group_size
    slots = [(prompt, member) for prompt in range(len(prompts)) for member in range(size)]
    replies = await gather_or_cancel(one(*slot) for slot in slots)
    return [replies[start : start + size] for start in range(0, len(replies), size)]


@awaitable_or_blocking
async def batch_generate_responses(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    group_size: int = 8,
    batch_size: int = 32,
    *,
    seed: int = 0,
    **settings: Any,
) -> list[list[str]]:
    """GRPO's groups of replies: `group_size` independent samples of each prompt, regrouped by prompt.

    At most `batch_size` are sampled at once, and as one ends the next begins. `settings`: `max_length` (2048
    tokens of prompt and reply), `temperature` (.8), `top_k`, `top_p`, of `Sampling`. Model and tokenizer are
    transformers' own; the model is not changed. Returns [prompts][group_size] texts, without the tokens that
    ended them. Raises ConfigurationError for a prompt over half of `max_length` tokens, or empty.
    """
    sampling = Sampling(group_size=group_size, batch_size=batch_size, **settings)
    tokenizer = adapted(tokenizer, model)
    ids = encoded_prompts(tokenizer, prompts, sampling)
    backend = HuggingFaceBackend(model, tokenizer)
    await backend.start()
    try:
        groups = await sampled(backend, ids, sampling, stream=derive(seed, "responses"))
    finally:
        await backend.close()
    return [[reply.message.content for reply in group] for group in groups]


# Groups as plain values, and back as samples for the learner.


class Group(TypedDict):
    """G replies to one prompt, as `GRPOTrainer.generate_groups` gives them."""

    prompt: str
    prompt_ids: list[int]
    """[P]"""
    responses: list[str]
    """[G] without the token that ended them."""
    response_ids: list[list[int]]
    """[G][T] exactly as sampled, the token that ended them included."""
    old_logprobs: list[list[float]]
    """[G][T] of the distribution that was sampled from, temperature and truncation included."""
    rewards: list[float | None]
    """[G] None where the reward could not be given."""
    advantages: list[float | None]
    """[G] None where the reply does not train: unscored, empty, or all others are unscored."""
    sampling_masks: NotRequired[list[SamplingMask | None]]
    """[G] what top-k and top-p kept of each reply; missing where replies are not truncated."""
    pixels: NotRequired[tuple[PixelValues, ...]]
    """The prompt's pictures, in order; missing where it has none."""


def normalize_rewards_per_group(rewards: Any, *, clip: float | None = 3.0) -> Any:
    """GRPO's advantages: each reward less its group's mean, over its population deviation, within ±clip.

    An array [G] of one group, [1, 0] -> [1, -1]; or groups as lists, [[1, 0]] -> [[1, -1]], of any sizes and
    with None for an unscored member. A group whose rewards are all equal gets 0. Of G rewards none is further
    than sqrt(G - 1) deviations from its own mean, so a clip of 3 acts only in groups of more than 10. Raises
    RewardFailure on a reward that is not finite, ConfigurationError on a clip that is not above 0.
    """
    rows = rewards.tolist() if isinstance(rewards, np.ndarray) else rewards
    is_single = not any(hasattr(row, "__len__") for row in rows)
    advantages = group_advantages([rows] if is_single else rows, clip=clip)
    return np.array(advantages[0], dtype=np.float64) if is_single else advantages


def trajectory_of(
    scenario: Scenario, prompt: str, completion: Completion, *, member: int, reward: float | None = None
) -> Trajectory:
    """One reply as the conversation that rewards and credit read. A thought that the prompt has opened, with
    `<think>` at its end, stands at the beginning of the reply."""
    opened = "<think>" if prompt.rstrip().endswith("<think>") else ""
    reply = Message(role="assistant", content=opened + completion.message.content)
    return Trajectory(
        scenario=scenario,
        member=member,
        opening=(Message(role="user", content=prompt),),
        turns=(Turn(prompt_ids=completion.prompt_ids, completion=replace(completion, message=reply)),),
        reward=reward,
    )


def samples_of(group: Group) -> list[Sample]:
    """The replies that train, with their advantages."""
    samples = []
    for member, advantage in enumerate(group["advantages"]):
        ids = group["response_ids"][member]
        if advantage is None or not ids:
            continue
        completion = Completion(
            message=Message(role="assistant", content=group["responses"][member]),
            prompt_ids=tuple(group["prompt_ids"]),
            token_ids=tuple(ids),
            logprobs=tuple(group["old_logprobs"][member]),
            finish_reason="stop",
            pixels=group.get("pixels", ()),
            sampling_mask=group["sampling_masks"][member] if "sampling_masks" in group else None,
        )
        trajectory = trajectory_of(Scenario(id="group"), group["prompt"], completion, member=member)
        samples.append(Sample(trajectory=trajectory, advantages=(advantage,) * len(ids)))
    return samples


_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PicturePrompt:
    """A scenario whose opening holds the processor's image token for each of some pictures."""

    scenario: Scenario
    images: tuple[Image, ...]


Prompt = str | Scenario | PicturePrompt
"""Text as the model reads it; or a scenario whose `opening` is that, with the truth in its context."""


class GRPOTrainer:
    """Group relative policy optimisation (DeepSeekMath, https://arxiv.org/abs/2402.03300) of a live model.

    >>> async with GRPOTrainer(model, reference, tokenizer, reward) as trainer:
    ...     for batch in batches:
    ...         print(await trainer.train_step(batch))

    A script without an event loop calls the same methods without `await`, and they block:

    >>> trainer = GRPOTrainer(model, reference, tokenizer, reward)
    >>> print(trainer.train_step(batch))

    It differs from the paper where the package does: token ratios are to the policy that sampled, never to
    the reference; the KL has the gradient of the reverse KL (k3 times the live ratio); a group that ties
    has advantages of exactly 0. Without run folder, checkpoints and evaluation: those are
    `MultiTurnGRPOTrainer`'s, which trains agents in conversations.
    """

    def __init__(
        self,
        policy_model: Any,
        ref_model: Any,
        tokenizer: Any,
        reward_fn: RewardFunction | Callable[..., Any],
        group_size: int = 8,
        clip_epsilon: float = 0.2,
        kl_coef: float = 0.04,
        max_length: int = 2048,
        temperature: float = 0.8,
        *,
        learning_rate: float = 5e-6,
        betas: tuple[float, float] = (0.9, 0.95),
        max_grad_norm: float = 1.0,
        num_iterations: int = 1,
        advantage_clip: float | None = None,
        advantage_skip: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        batch_size: int = 32,
        seed: int = 0,
        processes: Processes | None = None,
        processor: Any = None,
        freeze_vision: bool = False,
    ) -> None:
        """Takes over `policy_model`, whose weights it trains in their place, in fp32 (or wider).

        Args:
            policy_model: A causal language model of transformers. The engine samples from a copy of it. With
                its gradient checkpointing enabled before, the update recomputes activations.
            ref_model: What the policy stays near: another one of the same shape, frozen in its place. None
                takes a copy of the policy as it is now; with a `kl_coef` of 0 there must be none.
            tokenizer: transformers' own.
            reward_fn: One of the package's rewards; or a function of `prompt` and `response`, and `truth`
                (the scenario's context) if it names that, that returns a number; or an object with such a
                method `compute_reward`, as `DeepSeekRewardFunction`.
            group_size: Replies to each prompt.
            clip_epsilon: The ratio counts from 1 - clip_epsilon to 1 + clip_epsilon.
            kl_coef: Weight of the KL to the reference.
            max_length: Tokens of prompt and reply together; the prompt may have half of them.
            temperature: Of the replies; the update takes log-probs at it, too.
            learning_rate: Of AdamW, constant.
            betas: AdamW's.
            max_grad_norm: The gradient's norm is clipped to it.
            num_iterations: Optimiser steps on each batch.
            advantage_clip: Advantages are clipped to ±this; 3 acts in groups of more than 10 only.
            advantage_skip: Replies whose advantage is nearer to 0 train nothing; 0 skips none.
            top_k: Replies are sampled from the likeliest tokens alone; 0 from all.
            top_p: The same by their mass. With either, log-probs are of the distribution that was sampled
                from, in the update too: what the others would do is never tried.
            batch_size: Replies that are sampled at once.
            seed: Of all random streams.
            processes: Of `setup_distributed_grpo`.
            processor: transformers' own, of a vision-language model whose prompts have pictures.
            freeze_vision: Leave its vision encoder as it is.

        Raises ConfigurationError for settings that cannot be.
        """
        self._sampling = Sampling(
            group_size=group_size,
            batch_size=batch_size,
            max_length=max_length,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
        )
        self.reward_fn = _as_prompt_reward(reward_fn)
        self.processes = processes or Processes()
        self._config = TrainingConfig(
            num_generations=group_size,
            clip_ratio=clip_epsilon,
            beta=kl_coef,
            temperature=temperature,
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            warmup_ratio=0.0,
            adam_beta1=betas[0],
            adam_beta2=betas[1],
            max_grad_norm=max_grad_norm,
            num_iterations=num_iterations,
            advantage_clip=advantage_clip,
            advantage_skip=advantage_skip,
            seed=seed,
            freeze_vision=freeze_vision,
            gradient_checkpointing=bool(getattr(policy_model, "is_activation_checkpointing", False)),
        )
        self._tokenizer = adapted(tokenizer, policy_model)
        self.pictures = None if processor is None else PictureReader(processor, policy_model)
        """Reads the pictures of prompts; None where these are text alone."""
        self._backend = HuggingFaceBackend(policy_model, self._tokenizer, pictures=self.pictures)
        self.learner = Learner(
            policy_model,
            self.config,
            num_steps=1,  # the rate is constant
            exact_logprobs=self._backend.is_exact,
            processes=self.processes,
            reference_model=ref_model,
            pictures=self.pictures,
        )
        self._worker = Worker()
        self._num_batches = 0
        self._step = 0
        self._is_ahead = False
        """True while the policy has made a step that the engine does not have."""
        self.optimizer.register_step_post_hook(self._note_step)

    async def __aenter__(self) -> Self:
        await self._ensure_engine()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @awaitable_or_blocking
    async def close(self) -> None:
        """End the engine's thread and the update's. The policy model keeps what it learned."""
        await self._backend.close()
        await self._worker.stop()

    @property
    def config(self) -> TrainingConfig:
        """The settings, as they were given."""
        return self._config

    @config.setter
    def config(self, config: TrainingConfig) -> None:
        """Raises ConfigurationError for every setting that differs: the learner was made with them."""
        changed_settings(self._config, config, may_change=())

    # The live objects, and the settings under the names of the paper's readers.
    policy = policy_model = property(attrgetter("learner.base"))
    ref_policy = property(lambda self: self.learner.reference and self.learner.reference.model)
    tokenizer = property(attrgetter("_tokenizer.hf"))
    optimizer = property(attrgetter("learner.optimization.optimizer"))
    group_size = property(attrgetter("_sampling.group_size"))
    max_length = property(attrgetter("_sampling.max_length"))
    clip_epsilon = property(attrgetter("_config.clip_ratio"))

    @property
    def kl_coef(self) -> float:
        """Weight of the KL; it may be set between steps, by an `AdaptiveKLController` for example."""
        return self.learner.kl.beta

    @kl_coef.setter
    def kl_coef(self, value: float) -> None:
        """Raises ConfigurationError for a negative one, and without a reference for any but 0."""
        is_usable = value == 0 or self.learner.reference is not None
        expect_that(is_usable, "kl_coef", "be 0 in a training that began with 0", value)
        self.learner.kl = create_kl_controller("fixed", beta=value)

    @property
    def temperature(self) -> float:
        """Temperature of the next replies and of the update; it may be set between steps, by a
        `TemperatureScheduler` for example."""
        return self._sampling.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        """Raises ConfigurationError for one that is not above 0."""
        self._sampling = replace(self._sampling, temperature=value)
        self.learner.set_temperature(value)

    # ------------------------------------------------------------------------------ rollouts

    @awaitable_or_blocking
    async def generate_groups(self, prompts: Sequence[Prompt]) -> list[Group]:
        """GRPO's rollouts: `group_size` replies to each prompt, with rewards, and advantages in their group.

        Raises ConfigurationError for a prompt over half of `max_length` tokens.
        """
        await self._ensure_engine()
        scenarios = [_as_scenario(prompt, index) for index, prompt in enumerate(prompts)]
        texts = [scenario.opening for scenario in scenarios]
        pixels = await in_thread(self._pixels, prompts)
        place_id = None if self.pictures is None else self.pictures.place_id
        ids = encoded_prompts(self._tokenizer, texts, self._sampling, pixels=pixels, place_id=place_id)
        self._num_batches += 1
        stream = derive(self.config.seed, "groups", self.processes.rank, self._num_batches)
        replies = await sampled(self._backend, ids, self._sampling, stream=stream, pixels=pixels)
        played = [
            [trajectory_of(scenario, scenario.opening, reply, member=i) for i, reply in enumerate(group)]
            for scenario, group in zip(scenarios, replies, strict=True)
        ]
        scores = await gather_or_cancel(score_trajectories(self.reward_fn, group) for group in played)
        scored = [self._scored(*pair) for pair in zip(played, scores, strict=True)]
        groups = [
            TrajectoryGroup(key=str(index), trajectories=members) for index, members in enumerate(scored)
        ]
        credit = assign_credit(groups, self.config).advantages
        return [
            _as_group(text, prompt_ids, completions, group.rewards, advantages)
            for text, prompt_ids, completions, group, advantages in zip(
                texts, ids, replies, groups, credit, strict=True
            )
        ]

    async def _ensure_engine(self) -> None:
        """Start the engine, and give it the weights of a step that the caller made by `optimizer`."""
        self._worker.refuse_stopped()
        await self._backend.start()
        if self._is_ahead:
            await self._push_weights()

    def _note_step(self, *_: object) -> None:
        self._is_ahead = True

    async def _push_weights(self) -> None:
        await self._backend.update_weights(self.learner.weights(), self._step)
        new_weights(self._backend)
        self._is_ahead = False

    def _pixels(self, prompts: Sequence[Prompt]) -> list[tuple[PixelValues, ...]]:
        """The pictures of each prompt, as the processor reads them."""
        images = [prompt.images if isinstance(prompt, PicturePrompt) else () for prompt in prompts]
        reader = self.pictures
        if reader is None and any(images):
            raise ConfigurationError("a prompt has pictures: give GRPOTrainer the model's processor")
        return [() if reader is None else tuple(map(reader.read, each)) for each in images]

    @staticmethod
    def _scored(
        members: Sequence[Trajectory], results: Sequence[RewardResult | RewardFailure]
    ) -> tuple[Trajectory, ...]:
        scored = []
        for member in zip(members, results, strict=True):
            trajectory, failure = with_score(*member)
            scored.append(trajectory)
            if failure is not None:
                _log.warning(f"a reply stays unscored: {failure}")
        return tuple(scored)

    # ------------------------------------------------------------------------------ updates

    def compute_loss(self, group_data: Group) -> tuple[Tensor, dict[str, float]]:
        """GRPO's loss of one group under the weights as they are: clipped surrogate plus `kl_coef` times KL.

        Token ratios are to the stored `old_logprobs`, averaged over each reply's tokens, then over replies.
        Returns the loss, which carries the gradient (zero, still a tensor, where every reply is skipped), and
        `pg_loss`, `kl_penalty` (kl_coef times the KL), `clip_fraction` (0 for replies of these very weights)
        and `mean_reward`. Dropout is off. Nothing steps: `train_step` does, or `loss.backward()` and
        `optimizer.step()`. Raises ConfigurationError for a group in which no reply trains.
        """
        losses = self.learner.losses(samples_of(group_data))
        metrics = {
            "pg_loss": float(losses["policy_loss"]),
            "kl_penalty": float(losses["kl_penalty"]),
            "clip_fraction": float(losses["clip_fraction"]),
            "mean_reward": _mean_reward([group_data]),
        }
        return losses["total_loss"], metrics

    @awaitable_or_blocking
    async def train_step(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """One step of GRPO: groups of replies, `num_iterations` updates on all of them, new weights.

        With several processes all give the same prompts, and each plays its part. Returns `loss`, `pg_loss`,
        `kl_penalty`, `clip_fraction`, `mean_reward`, `grad_norm` (before clipping) and `skipped` (updates
        that moved nothing: no reply with an advantage, or a gradient that is not finite). Raises
        ConfigurationError without a prompt, and while another trainer trains the same engine.
        """
        if not prompts:
            raise ConfigurationError("train_step needs at least one prompt, got none")
        with exclusive(self._backend, self):
            played = await self.generate_groups(prompts[self.processes.slice_of(len(prompts))])
            if not self.processes.is_alone:
                parts = await self._worker.run(self.processes.gather, "the groups", played)
                played = [group for part in parts for group in part]
            samples = [sample for group in played for sample in samples_of(group)]
            metrics = {"optimizer/skipped": 1.0}
            if samples:
                update = partial(self.learner.update, samples, step=self._step)
                metrics = await self._worker.run(update)
            self._step += 1
            await self._push_weights()
        pg_loss, kl_penalty = metrics.get("loss/policy", 0.0), metrics.get("loss/kl", 0.0)
        sides = ("policy/clip_fraction_low", "policy/clip_fraction_high")
        return {
            "loss": pg_loss + kl_penalty,
            "pg_loss": pg_loss,
            "kl_penalty": kl_penalty,
            "clip_fraction": sum(metrics.get(side, 0.0) for side in sides),
            "mean_reward": _mean_reward(played),
            "grad_norm": metrics.get("optimizer/grad_norm", 0.0),
            "skipped": metrics["optimizer/skipped"],
        }


class _PromptReward(RewardFunction):
    """A function of `prompt`, `response` and `truth` as a reward of the package."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = str(getattr(function, "__name__", type(function).__name__))
        self._named = NamedCall(
            f"reward {self.name}",
            function,
            ("prompt", "response", "truth"),
            positional=("prompt", "response"),
        )

    async def score(self, trajectory: Trajectory) -> RewardResult:
        arguments = {
            "prompt": trajectory.opening[-1].content,
            "response": _without_opened(trajectory),
            "truth": trajectory.scenario.context,
        }
        return as_result(await self._named.call(arguments))


def _without_opened(trajectory: Trajectory) -> str:
    """The response behind the prompt: a thought that the prompt opened is the prompt's."""
    text = trajectory.replies[-1].content
    opened = trajectory.opening[-1].content.rstrip().endswith("<think>")
    return text.removeprefix("<think>") if opened else text


def _as_prompt_reward(reward_fn: RewardFunction | Callable[..., Any]) -> RewardFunction:
    if isinstance(reward_fn, RewardFunction | type):
        return as_reward(reward_fn)
    function = getattr(reward_fn, "compute_reward", reward_fn)
    return _PromptReward(function) if callable(function) else as_reward(function)


def _as_scenario(prompt: Prompt, index: int) -> Scenario:
    if isinstance(prompt, str):
        return Scenario(id=f"prompt-{index}", opening=prompt)
    if isinstance(prompt, PicturePrompt):
        prompt = prompt.scenario
    if isinstance(prompt, Scenario):
        return replace(prompt, id=prompt.id or f"prompt-{index}")
    raise ConfigurationError(
        f"a prompt must be text or a Scenario, got {type(prompt).__name__}: {prompt!r:.60}"
    )


def _as_group(
    prompt: str,
    prompt_ids: Sequence[int],
    replies: Sequence[Completion],
    rewards: Sequence[float | None],
    advantages: Sequence[tuple[float, ...] | None],
) -> Group:
    group = Group(
        prompt=prompt,
        prompt_ids=list(prompt_ids),
        responses=[reply.message.content for reply in replies],
        response_ids=[list(reply.token_ids) for reply in replies],
        old_logprobs=[list(reply.logprobs) for reply in replies],
        rewards=list(rewards),
        advantages=[None if not values else values[0] for values in advantages],
    )
    if replies[0].sampling_mask is not None:
        group["sampling_masks"] = [reply.sampling_mask for reply in replies]
    if replies[0].pixels:
        group["pixels"] = replies[0].pixels
    return group


def _mean_reward(groups: Sequence[Group]) -> float:
    """Over the scored replies; NaN where there is none."""
    rewards = [reward for group in groups for reward in group["rewards"] if reward is not None]
    return sum(rewards) / len(rewards) if rewards else float("nan")


def setup_distributed_grpo(world_size: int, local_rank: int) -> Processes:
    """Connects the processes of a data-parallel GRPO; give the result to each one's `GRPOTrainer`.

    Each has the whole model, plays its part of a step's prompts and forwards its part of the rows, and
    gradients are summed, so that all hold the same weights. NCCL on GPUs, gloo without. A launcher's
    environment (torchrun's MASTER_ADDR, MASTER_PORT, RANK) says where they meet; without RANK, on one
    machine, `local_rank` is it. Blocking: it waits for all of them.

    Raises ConfigurationError for a rank that is none of them, and where the launcher says something else.
    """
    expect_that(is_whole(world_size, 1), "world_size", "be a whole number from 1 on", world_size)
    is_rank = is_whole(local_rank, 0) and local_rank < world_size
    expect_that(is_rank, "local_rank", f"be 0 to {world_size - 1}", local_rank)
    if world_size > 1:
        if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ConfigurationError(
                "MASTER_ADDR and MASTER_PORT must say where the processes meet: start them with torchrun, "
                "or set both alike in each, 127.0.0.1 and a free port on one machine"
            )
        launcher_rank = os.environ.setdefault("LOCAL_RANK", str(local_rank))
        if launcher_rank != str(local_rank):
            raise ConfigurationError(
                f"local_rank is {local_rank} and LOCAL_RANK is {launcher_rank}: give the latter"
            )
        os.environ.setdefault("RANK", str(local_rank))
        os.environ.setdefault("WORLD_SIZE", str(world_size))
    return Processes.join(world_size)
