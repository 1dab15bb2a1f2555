"""The in-process backend: what it stores is what the model says, whatever else shares its batches."""

from __future__ import annotations

import asyncio

import pytest
from tiny_models import CONFIGS, tiny_model, tiny_tokenizer

from stateset_agents.backends.base import Session
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.types.messages import SamplingParams


@pytest.mark.first(3)
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("family", sorted(CONFIGS))
async def test_stored_logprobs_equal_a_fresh_forward_after_four_turns(family: str, bos: bool) -> None:
    tokenizer = tiny_tokenizer(bos=bos)
    backend = HuggingFaceBackend(tiny_model(family), tokenizer, scheduling="throughput")
    await backend.start()

    async def converse(member: int) -> tuple[float, int, int]:
        temperature = (1.0, 0.7, 1.3)[member % 3]
        ids = tokenizer.encode_markup("<|bos|>" * bos + "<|user|>" + "hello " * (1 + member))
        prompt_tokens, carried, worst = len(ids), 0, 0.0
        for turn in range(4):
            params = SamplingParams(
                max_new_tokens=4 + member, temperature=temperature, stream=10 * member + turn
            )
            completion = await backend.generate(ids, params, session=Session(0, member))
            ids = [*completion.prompt_ids, *completion.token_ids]
            fresh = await backend.score(ids, temperature=temperature)
            sampled = fresh[len(completion.prompt_ids) - 1 :]
            worst = max(worst, *(abs(a - b) for a, b in zip(completion.logprobs, sampled, strict=True)))
            if turn < 3:
                delta = tokenizer.encode("more" * (turn + 1))
                ids, prompt_tokens, carried = ids + delta, prompt_tokens + len(delta), carried + 1
        return worst, prompt_tokens, carried

    results = await asyncio.gather(*(converse(member) for member in range(9)))
    assert max(worst for worst, _, _ in results) < 1e-4
    # The prompts begin alike; how much of that is forwarded once depends on who comes first.
    fed = backend.stats.prefilled_tokens + backend.stats.shared_tokens
    assert fed == sum(tokens for _, tokens, _ in results)
    assert backend.stats.carried_tokens == sum(carried for _, _, carried in results)
    await backend.close()


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(CONFIGS))
async def test_the_same_holds_on_a_gpu(family: str) -> None:
    backend = HuggingFaceBackend(tiny_model(family), tiny_tokenizer(), device="cuda")
    await backend.start()
    params = SamplingParams(max_new_tokens=8)
    turns = [backend.generate([1, 2, m], params, session=Session(0, m)) for m in range(9)]
    for completion in await asyncio.gather(*turns):
        fresh = await backend.score([*completion.prompt_ids, *completion.token_ids])
        assert completion.logprobs == pytest.approx(fresh[2:], abs=1e-3)
    await backend.close()
