"""Models that no slot cache serves: each row over the model's own cache, exact whatever happens to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import VOCAB, odd_model

from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.slot_table import GenerationRequest, new_request
from stateset_agents.backends.models.unbatched import CacheUse, UnbatchedModel
from stateset_agents.types.messages import SamplingParams

CONTEXT = 128


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


def batcher(family: str, cache_use: CacheUse = "always", **bound: int) -> Batcher:
    return Batcher(
        UnbatchedModel(odd_model(family), cache_use=cache_use), **{"max_cached_tokens": 4096, **bound}
    )


def turn(member: int, prompt: list[int], new: int = 4) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=new, stream=100 * member + len(prompt))
    return new_request((0, 0, member), prompt, params, frozenset(), CONTEXT)


def tokens(count: int, seed: int) -> list[int]:
    drawn: list[int] = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def run(work: Batcher, *turns: GenerationRequest) -> None:
    for each in turns:
        assert work.admit(each)
    while live := [each for each in turns if each.finish_reason is None]:
        work.step(live)
    for each in turns:
        ids = torch.tensor(each.ids)
        plain = work.model.full_logits(ids)[len(each.prompt) - 1 : -1].log_softmax(-1)
        expected = plain.gather(-1, ids[len(each.prompt) :, None])[:, 0]
        assert torch.allclose(torch.tensor(each.logprobs), expected, atol=1e-4)


CASES: list[Any] = [
    ("gpt-neo", "always"),
    ("qwen3-next", "always"),
    ("mamba", "decode"),
    ("mamba", "never"),
    ("rwkv", "always"),  # its cache has another name, so none is used
]


@pytest.mark.parametrize(("family", "cache_use"), CASES)
def test_three_turns_forks_and_rewritten_histories_have_the_log_probs_of_full_forwards(
    family: str, cache_use: CacheUse
) -> None:
    work = batcher(family, cache_use)
    histories = {member: tokens(length, member) for member, length in enumerate((3, 20, 1))}
    for lap in range(3):
        turns = [turn(member, ids, new=2 + member) for member, ids in histories.items()]
        run(work, *turns)
        histories = {each.key[2]: [*each.ids, *tokens(3, 10 + lap)] for each in turns}
    rewritten = [*histories[1][:18], 5, 6]
    run(work, turn(1, rewritten))
    work.fork((0, 0, 1), (0, 0, 7))
    run(work, turn(7, [*rewritten, 9, 9]), turn(1, [*rewritten, 8]))


def test_attention_is_cut_where_histories_part_and_a_recurrent_state_is_read_again() -> None:
    counts = {}
    for family in ("gpt-neo", "qwen3-next"):
        work = batcher(family)
        first = turn(0, tokens(30, 0))
        run(work, first)
        before = work.stats.prefilled_tokens
        run(work, turn(0, [*first.ids[:25], 1, 2]))
        counts[family] = work.stats.prefilled_tokens - before
    assert counts == {"gpt-neo": 2, "qwen3-next": 27}


def test_a_grown_conversation_forwards_only_what_is_new() -> None:
    work = batcher("qwen3-next")
    first = turn(0, tokens(30, 0))
    run(work, first)
    run(work, turn(0, [*first.ids, 1, 2]))
    assert (work.stats.prefilled_tokens, work.stats.carried_tokens) == (32, 1)


def test_a_cache_that_was_copied_is_independent() -> None:
    work = batcher("qwen3-next")
    first = turn(0, tokens(30, 0))
    run(work, first)
    work.fork((0, 0, 0), (0, 0, 1))
    run(work, turn(1, [*first.ids, 1, 2], new=10))
    before = work.stats.prefilled_tokens
    run(work, turn(0, [*first.ids, 3]))
    assert work.stats.prefilled_tokens - before == 1


def test_slots_are_moved_and_evicted_like_any_others() -> None:
    work = batcher("gpt-neo", max_cached_tokens=2 * 32)
    firsts = [turn(member, tokens(6, member)) for member in range(3)]
    for each in firsts:
        run(work, each)
    run(work, *(turn(each.key[2], [*each.ids, 9]) for each in firsts[:2]))
    assert work.stats.evictions == 3  # 0 for the third, then 1 for 0, then 2 for 1
