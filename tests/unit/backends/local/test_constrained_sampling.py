"""Constrained turns: what the grammar allows, as often as it should be, whatever else is in the batch."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_grammars import END, PROMPT, constraint_of, letters, letters_model, masked_logprobs, replies_of

from stateset_agents.backends.grammars import Grammars
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.slot_table import GenerationRequest, new_request
from stateset_agents.backends.models.slots import SlotModel
from stateset_agents.backends.models.unbatched import UnbatchedModel
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import SamplingParams

GRAMMARS = Grammars(letters())
CONSTRAINT = constraint_of()
REPLIES = list(replies_of(GRAMMARS, CONSTRAINT))
STOPS = frozenset({END})


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


def turn(member: int, *, constrained: bool = True, new: int = 8, **options: Any) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=new, stream=member, **options)
    matcher = GRAMMARS.matcher(CONSTRAINT) if constrained else None
    return new_request((0, 0, member), list(PROMPT), params, STOPS, 32, matcher=matcher)


def play(work: Batcher, *turns: GenerationRequest) -> None:
    for request in turns:
        assert work.admit(request)
    live = list(turns)
    while live:
        work.step(live)
        assert all(request.error is None for request in live)
        live = [request for request in live if request.finish_reason is None]
    for request in turns:
        work.release(request.key)


def batcher(model: Any = SlotModel) -> Batcher:
    return Batcher(model(letters_model()), max_cached_tokens=100_000)


def logprobs_of(request: GenerationRequest, temperature: float = 1.0) -> list[float]:
    model = letters_model()
    return masked_logprobs(model, GRAMMARS, CONSTRAINT, request.sampled, temperature).tolist()


@pytest.mark.parametrize("count", [2_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_replies_come_as_often_as_their_probability_says(count: int) -> None:
    model, work, counts = letters_model(), batcher(), Counter[tuple[int, ...]]()
    for start in range(0, count, 500):
        turns = [turn(number) for number in range(start, start + 500)]
        play(work, *turns)
        counts.update(tuple(request.sampled) for request in turns)
    assert set(counts) <= set(REPLIES)
    for reply in REPLIES:
        p = math.exp(masked_logprobs(model, GRAMMARS, CONSTRAINT, reply).sum().item())
        assert abs(counts[reply] - count * p) <= 5 * math.sqrt(count * p * (1 - p)) + 1


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_a_raised_token_is_drawn_as_often_as_its_log_prob_says(temperature: float) -> None:
    """Nats of the policy that acts, whatever the temperature: behind `a` its `c` is raised, too."""
    raised = replace(CONSTRAINT, raised=((0, 2), 2.0))
    turns = [turn(number, temperature=temperature, constraint=raised) for number in range(1000)]
    play(batcher(), *turns)
    for request in turns[:50]:
        by_hand = masked_logprobs(letters_model(), GRAMMARS, raised, request.sampled, temperature or 1.0)
        assert request.logprobs == pytest.approx(by_hand.tolist(), abs=2e-6)
    free = masked_logprobs(letters_model(), GRAMMARS, CONSTRAINT, [0], temperature or 1.0)[0].exp().item()
    p = free * math.exp(2) / (1 - free + free * math.exp(2))
    opened = sum(request.sampled[0] == 0 for request in turns)
    if temperature:
        assert abs(opened - 1000 * p) <= 5 * math.sqrt(1000 * p * (1 - p))
    else:
        assert opened in (0, 1000)


@pytest.mark.parametrize("model", [SlotModel, UnbatchedModel])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_among_what_was_allowed_and_forced_tokens_take_no_step(
    model: Any, temperature: float
) -> None:
    work = batcher(model)
    turns = [turn(number, temperature=temperature) for number in range(100)]
    play(work, *turns)
    for request in turns:
        assert request.logprobs == pytest.approx(logprobs_of(request, temperature), abs=1e-5)
        forced = [place in request.forced for place in range(len(request.sampled))]
        assert all(
            value == 0.0 for value, is_forced in zip(request.logprobs, forced, strict=True) if is_forced
        )
    spelled = [request for request in turns if request.sampled == [3, 2, 0, 3, END]]
    assert spelled
    assert all(request.forced == {1, 2, 3, 4} for request in spelled)
    sampled = sum(len(request.sampled) for request in turns)
    assert work.stats.sampled_tokens <= sampled - 3 * len(spelled)


def test_greedy_takes_the_best_of_what_is_allowed() -> None:
    request = turn(0, temperature=0.0)
    play(batcher(), request)
    reply: list[int] = []
    while not reply or reply[-1] != END:
        options = {tuple(other[: len(reply) + 1]) for other in REPLIES if list(other[: len(reply)]) == reply}
        model = letters_model()
        logits = model(input_ids=torch.tensor([[*PROMPT, *reply]])).logits[0, -1]
        reply.append(max((option[-1] for option in options), key=lambda token: float(logits[token])))
    assert request.sampled == reply
    assert request.logprobs == pytest.approx(logprobs_of(request), abs=2e-6)


def test_free_rows_sample_what_they_sample_alone() -> None:
    alone = [turn(number, constrained=False) for number in range(6)]
    play(batcher(), *alone)
    together = [turn(number, constrained=number % 2 == 1) for number in range(6)]
    play(batcher(), *together)
    for number in (0, 2, 4):
        assert together[number].sampled == alone[number].sampled
        assert together[number].logprobs == pytest.approx(alone[number].logprobs, abs=1e-6)
    by_themselves = [turn(number) for number in (1, 3, 5)]
    for request in by_themselves:
        play(batcher(), request)
    assert [together[number].sampled for number in (1, 3, 5)] == [each.sampled for each in by_themselves]


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_a_limit_cuts_a_reply_where_a_forced_run_would_pass_it(most: int) -> None:
    turns = [turn(number, new=most) for number in range(30)]
    play(batcher(), *turns)
    for request in turns:
        whole = turn(request.params.stream)
        play(batcher(), whole)
        assert request.sampled == whole.sampled[:most]
        assert request.finish_reason == ("stop" if len(whole.sampled) <= most else "length")


def test_new_weights_in_the_middle_of_a_reply_leave_the_grammar_where_it_stands() -> None:
    work = batcher()
    turns = [turn(number) for number in range(20)]
    for request in turns:
        assert work.admit(request)
    work.step(turns)
    work.model.model.load_state_dict(letters_model(seed=3).state_dict())  # type: ignore[attr-defined]  # a SlotModel's
    work.set_version(1)
    live = [request for request in turns if request.finish_reason is None]
    assert live
    while live:
        work.step(live)
        live = [request for request in live if request.finish_reason is None]
    assert {tuple(request.sampled) for request in turns} <= set(REPLIES)
    spans = [request.version_spans() for request in turns]
    assert any(len(span) == 2 for span in spans)


async def test_a_backend_s_completion_says_what_it_kept_to_and_streams_forced_text() -> None:
    backend = HuggingFaceBackend(letters_model(), letters())
    await backend.start()
    try:
        pieces: list[str] = []
        params = SamplingParams(max_new_tokens=8, stream=2, constraint=constraint_of('start: "d" "ca" "d"'))
        completion = await backend.generate(PROMPT, params, on_text=pieces.append)
        assert completion.token_ids == (3, 2, 0, 3, END)
        assert completion.forced == (True,) * 5
        assert completion.num_trained == 0
        assert completion.logprobs == (0.0,) * 5
        assert completion.constraint == replace(params.constraint, limit=8)
        await asyncio.sleep(0)  # the last piece comes with the next round of the loop
        assert "".join(pieces) == completion.message.content == "dcad"
        with pytest.raises(ConfigurationError, match="stop strings"):
            await backend.generate(
                PROMPT, SamplingParams(max_new_tokens=8, stop=("c",), constraint=CONSTRAINT)
            )
        free = await backend.generate(PROMPT, SamplingParams(max_new_tokens=8))
        assert (free.constraint, free.forced) == (None, ())
    finally:
        await backend.close()
