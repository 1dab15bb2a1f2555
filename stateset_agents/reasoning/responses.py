"""Several replies to each of several prompts, sampled by the package's engine from live objects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stateset_agents.backends.base import Session
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.pretrained.loading import eos_ids_of
from stateset_agents.backends.pretrained.pictures import with_pictures
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.runtime.tasks import gather_or_cancel
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import Completion, SamplingParams
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that


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
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(f"{name} must be a whole number from {least} on, got {value!r}")
        if not self.temperature > 0:
            raise ConfigurationError(
                f"temperature must be above 0, got {self.temperature!r}: greedy replies are all alike"
            )
        expect_that(0 < self.top_p <= 1, "top_p", "be above 0 and at most 1", self.top_p)

    @property
    def truncates(self) -> bool:
        """True where the sampled distribution is another than the policy's at this temperature."""
        return self.top_k > 0 or self.top_p < 1


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
                f"a prompt must have 1 to {sampling.max_length // 2} tokens (max_length // 2), got {len(ids)}"
                f": {prompt!r:.60}"
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


async def batch_generate_responses(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    group_size: int = 8,
    batch_size: int = 32,
    *,
    max_length: int = 2048,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[str]]:
    """GRPO's groups of replies: `group_size` independent samples of each prompt, regrouped by prompt.

    At most `batch_size` are sampled at once, and as one ends the next begins. Model and tokenizer are
    transformers' own; the model is not changed. Returns [prompts][group_size] texts, without the tokens that
    ended them. Raises ConfigurationError for a prompt over half of `max_length` tokens, or empty.
    """
    sampling = Sampling(
        group_size=group_size,
        batch_size=batch_size,
        max_length=max_length,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )
    tokenizer = adapted(tokenizer, model)
    ids = encoded_prompts(tokenizer, prompts, sampling)
    backend = HuggingFaceBackend(model, tokenizer)
    await backend.start()
    try:
        groups = await sampled(backend, ids, sampling, stream=derive(seed, "responses"))
    finally:
        await backend.close()
    return [[reply.message.content for reply in group] for group in groups]
