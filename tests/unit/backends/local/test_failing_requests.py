"""A turn with NaN logits fails alone: the other turns of its batch sample the same tokens as without it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.backends.base import Session
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.local.batcher import Batcher
from stateset_agents.backends.local.slot_table import GenerationRequest, new_request
from stateset_agents.backends.models.batched import BatchedModel
from stateset_agents.backends.models.fused import FusedModel
from stateset_agents.backends.models.slots import CachedModel, SlotModel
from stateset_agents.backends.models.unbatched import UnbatchedModel
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.messages import Completion, SamplingParams

POISON = 200
"""A token whose embedding is NaN: a prompt that holds it has logits that are no numbers."""
WAYS: list[Callable[[Any], CachedModel]] = [SlotModel, BatchedModel, FusedModel, UnbatchedModel]


@pytest.fixture
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


def damaged_model() -> Any:
    model = tiny_model("llama").eval()
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    return model


def ids(member: int, length: int) -> list[int]:
    return [(7 * member + 3 * index) % 190 for index in range(length)]


def turn(member: int, prompt: list[int], new: int = 12, **options: float) -> GenerationRequest:
    params = SamplingParams(max_new_tokens=new, stream=member, **options)  # type: ignore[arg-type]  # knobs by name
    return new_request((0, 0, member), prompt, params, frozenset(), 256)


def run(work: Batcher, turns: list[GenerationRequest]) -> None:
    for each in turns:
        assert work.admit(each)
    while live := [each for each in turns if each.finish_reason is None and each.error is None]:
        work.step(live)


@pytest.mark.usefixtures("_no_gradients")
@pytest.mark.parametrize("engine", WAYS)
def test_a_turn_with_nan_logits_fails_and_the_others_sample_the_same(engine: Any) -> None:
    def healthy() -> list[GenerationRequest]:
        # Of several lengths, two that share a beginning with the sick one, and knobs that take another path.
        shared = ids(9, 40)
        return [
            turn(1, ids(1, 5)),
            turn(2, ids(2, 70)),
            turn(3, [*shared, 4, 5, 6]),
            turn(4, ids(4, 20), top_p=0.9, top_k=20),
            turn(5, ids(5, 9), temperature=0.0),
            turn(6, [*shared, 8], new=30),
        ]

    alone = healthy()
    run(Batcher(engine(damaged_model()), max_cached_tokens=100_000), alone)

    work = Batcher(engine(damaged_model()), max_cached_tokens=100_000)
    among = healthy()
    sick = [turn(0, [*ids(9, 40), POISON, *ids(0, 30)]), turn(7, [POISON])]
    run(work, [sick[0], *among, sick[1]])
    assert [each.error is not None for each in sick] == [True, True]
    assert "no numbers (NaN)" in str(sick[0].error)
    assert [each.sampled for each in among] == [each.sampled for each in alone]

    # Who gets the slot of a sick turn reads nothing of it; nor does that conversation itself.
    for each in among:
        work.release(each.key)
    after, before = [turn(0, ids(3, 3)), turn(8, ids(8, 66))], [turn(0, ids(3, 3)), turn(8, ids(8, 66))]
    run(work, after)
    run(Batcher(engine(damaged_model()), max_cached_tokens=100_000), before)
    assert [each.sampled for each in after] == [each.sampled for each in before]


@pytest.mark.usefixtures("_no_gradients")
def test_a_text_that_cannot_be_decoded_ends_its_own_turn_only() -> None:
    class Broken:
        def add(self, token: int) -> bool:
            raise KeyError(token)

    work = Batcher(FusedModel(tiny_model("llama").eval()), max_cached_tokens=10_000)
    mute, healthy = turn(0, ids(0, 5)), turn(1, ids(1, 5))
    mute.text = Broken()  # type: ignore[assignment]  # only `add` is called by the worker
    run(work, [mute, healthy])
    assert "cannot decode what was sampled (KeyError" in str(mute.error)
    assert len(healthy.sampled) == 12


async def generate_all(
    backend: HuggingFaceBackend, *prompts: list[int], **options: Any
) -> list[Completion | BaseException]:
    params = [SamplingParams(max_new_tokens=8, stream=n, **options) for n in range(len(prompts))]
    calls = (backend.generate(prompt, each) for prompt, each in zip(prompts, params, strict=True))
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_the_worker_serves_on_after_a_failed_turn() -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), tiny_tokenizer())
    await backend.start()
    try:
        first = (await generate_all(backend, ids(1, 5)))[0]
        await backend.update_weights(damaged_model().state_dict(), 1)
        ill, well = await generate_all(backend, [1, POISON], ids(1, 5))
        assert isinstance(ill, BackendError)
        assert "its weights are damaged" in str(ill)
        await backend.check_health()
        again = (await generate_all(backend, ids(1, 5)))[0]
        assert isinstance(well, Completion)
        assert isinstance(again, Completion)
        assert isinstance(first, Completion)
        assert again.token_ids == first.token_ids
    finally:
        await backend.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 1e-38}, "temperature 1e-38 overflows the logits: give 0"),
        ({"temperature": 1e-320}, "give 0 (greedy) or at least 1e-05"),
        ({"temperature": float("nan")}, "temperature >= 0"),
        ({"top_p": float("nan")}, "0 < top_p <= 1"),
        ({"temperature": 1e300}, None),
        ({"temperature": float("inf")}, None),
        ({"temperature": 1e-5}, None),
        ({"top_p": 1e-320}, None),
        ({"top_p": 1 - 1e-16}, None),
        ({"top_k": 10**400}, None),
        ({"top_k": 10**9, "top_p": 0.5}, None),
    ],
)
async def test_no_sampling_setting_ends_the_worker(options: dict[str, Any], words: str | None) -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), tiny_tokenizer())
    await backend.start()
    try:
        before = (await generate_all(backend, ids(1, 5)))[0]
        (answer,) = await generate_all(backend, ids(2, 5), **options)
        if words is None:
            assert isinstance(answer, Completion)
            assert len(answer.token_ids) > 0
        else:
            assert isinstance(answer, BackendError)
            assert words in str(answer)
        await backend.check_health()
        after = (await generate_all(backend, ids(1, 5)))[0]
        assert isinstance(before, Completion)
        assert isinstance(after, Completion)
        assert after.token_ids == before.token_ids
    finally:
        await backend.close()


async def test_a_token_beyond_the_embedding_is_refused_before_it_reaches_the_worker() -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), tiny_tokenizer())
    await backend.start()
    try:
        for token in (262, 10**6, -1):
            (answer,) = await generate_all(backend, [1, token, 2])
            assert isinstance(answer, ConfigurationError)
            assert f"the tokenizer gave token {token}" in str(answer)
        await backend.check_health()
    finally:
        await backend.close()


async def test_an_agent_answers_people_greedily_where_a_temperature_would_overflow() -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), tiny_tokenizer())
    config = AgentConfig(model_name="tiny", chat_template="plain", max_new_tokens=8, temperature=1e-38)
    async with MultiTurnAgent(config, backend=backend) as agent:
        talk = agent._prompted("hi", None)
        answer = await agent.answer(talk)
        asked_for = await agent.answer(talk, sampling={"temperature": 1e-320})
        greedy = await agent.answer(talk, sampling={"temperature": 0.0})
        assert answer.token_ids == asked_for.token_ids == greedy.token_ids


async def test_health_says_whether_turns_are_served() -> None:
    backend = HuggingFaceBackend(tiny_model("llama"), tiny_tokenizer())
    with pytest.raises(BackendError, match="not started"):
        await backend.check_health()
    await backend.start()
    await backend.check_health()
    session = Session(0, 0)
    await backend.generate([1, 2], SamplingParams(max_new_tokens=2), session=session)

    def breaks(*_: object) -> None:
        raise RuntimeError("out of memory")

    backend._batcher.model.forward = breaks  # type: ignore[method-assign]  # what a full GPU does
    with pytest.raises(BackendError, match="the generation worker broke: RuntimeError: out of memory"):
        await backend.generate([1, 2, 3], SamplingParams(max_new_tokens=2))
    with pytest.raises(BackendError, match="the generation worker broke: RuntimeError: out of memory"):
        await backend.check_health()
    await backend.close()
    with pytest.raises(BackendError, match="closed"):
        await backend.check_health()
