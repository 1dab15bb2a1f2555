"""The engine of vision-language models: pictures reach the forward, and caches are told apart by them."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch
from PIL import Image as pillow
from tiny_vlm import tiny_processor, tiny_vlm

from stateset_agents.backends.base import Session
from stateset_agents.backends.local.backend import HuggingFaceBackend
from stateset_agents.backends.pretrained.pictures import PictureReader, marked, sample_pictures, with_pictures
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.types.errors import BackendError, ConfigurationError, ConversationRefused
from stateset_agents.types.images import Image
from stateset_agents.types.messages import SamplingParams

WORDS = list(range(40, 64))
"""A prompt longer than what neighbours share at least."""


def make_backend(model: Any, **settings: Any) -> HuggingFaceBackend:
    processor = tiny_processor()
    reader = PictureReader(processor, model)
    return HuggingFaceBackend(model, HuggingFaceTokenizer(processor.tokenizer), pictures=reader, **settings)


@pytest.fixture
async def backend() -> AsyncIterator[HuggingFaceBackend]:
    served = make_backend(tiny_vlm())
    await served.start()
    yield served
    await served.close()


def plain_logprobs(model: Any, ids: list[int], pixels: Any) -> torch.Tensor:
    """[T-1] of a forward by transformers alone, without the token that stands for a picture."""
    pictures = torch.cat([item.tensors["pixel_values"] for item in pixels], dim=1)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), pixel_values=pictures).logits[0, :-1]
    logits[:, model.config.image_token_id] = -torch.inf
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


async def test_stored_logprobs_are_those_of_fresh_forwards(backend: HuggingFaceBackend) -> None:
    assert backend.running.name == "plain"
    assert backend.pictures is not None
    first, second = sample_pictures(backend.pictures)
    session = Session(0, 0)
    prompt = [*first.token_ids, *WORDS]
    for turn, pixels in enumerate([(first,), (first, second), (first, second)]):
        params = SamplingParams(max_new_tokens=8, stream=turn)
        reply = await backend.generate(prompt, params, session=session, pixels=pixels)
        ids = [*prompt, *reply.token_ids]
        expected = plain_logprobs(backend.model, ids, pixels)[-len(reply.token_ids) :]
        assert reply.prompt_ids == tuple(prompt)
        assert reply.pixels == pixels
        assert torch.allclose(torch.tensor(reply.logprobs), expected, atol=1e-4)
        scored = await backend.score(ids, pixels=pixels)
        assert torch.allclose(torch.tensor(scored[-len(reply.token_ids) :]), expected, atol=1e-4)
        prompt = [*ids, *second.token_ids, 50, 51] if turn == 0 else [*ids, 52, 53]


async def test_the_reply_depends_on_the_picture_though_all_tokens_are_the_same(
    backend: HuggingFaceBackend,
) -> None:
    assert backend.pictures is not None
    pictures = sample_pictures(backend.pictures)
    params = SamplingParams(max_new_tokens=6)
    replies = {}
    for order in (pictures, pictures[::-1]):  # the second finds the first one's cache
        for picture in order:
            prompt = [*picture.token_ids, *WORDS]
            reply = await backend.generate(prompt, params, pixels=[picture])
            expected = plain_logprobs(backend.model, [*prompt, *reply.token_ids], [picture])[-6:]
            assert torch.allclose(torch.tensor(reply.logprobs), expected, atol=1e-4)
            assert replies.setdefault(picture.digest, reply) == reply
    one, other = replies.values()
    assert one.prompt_ids == other.prompt_ids
    assert one.logprobs != other.logprobs


async def test_conversations_that_begin_alike_share_their_picture(backend: HuggingFaceBackend) -> None:
    assert backend.pictures is not None
    first, second = sample_pictures(backend.pictures)
    one = [*first.token_ids, *WORDS]
    params = SamplingParams(max_new_tokens=3)
    await backend.generate(one, params, session=Session(0, 0), pixels=[first])
    before = backend.stats.shared_tokens
    await backend.generate(one, params, session=Session(0, 1), pixels=[first])
    assert backend.stats.shared_tokens - before >= len(first.token_ids)
    before = backend.stats.shared_tokens
    await backend.generate(one, params, session=Session(0, 2), pixels=[second])
    assert backend.stats.shared_tokens - before < len(first.token_ids)


async def test_no_reply_has_the_token_of_a_picture() -> None:
    model = tiny_vlm()
    place_id = model.config.image_token_id
    with torch.no_grad():  # it would be sampled all the time
        model.lm_head.weight[place_id] = 0
        model.lm_head.weight.div_(100)
    backend = make_backend(model)
    await backend.start()
    try:
        reply = await backend.generate(WORDS, SamplingParams(max_new_tokens=200))
        assert place_id not in reply.token_ids
        assert len(set(reply.token_ids)) > 50  # nearly all others are
    finally:
        await backend.close()


@pytest.mark.parametrize("engine", ["lean", "general"])
async def test_the_other_engines_are_refused_in_one_line(engine: Any) -> None:
    backend = make_backend(tiny_vlm(), engine=engine)
    with pytest.raises(ConfigurationError, match="reads pictures, which only plain passes on") as refused:
        await backend.start()
    assert "\n" not in str(refused.value)


async def test_pictures_and_places_must_agree(backend: HuggingFaceBackend) -> None:
    assert backend.pictures is not None
    first, second = sample_pictures(backend.pictures)
    for pixels in ([], [first, second]):
        with pytest.raises(
            BackendError, match=f"4 places for pictures, and its pictures need {4 * len(pixels)}"
        ):
            await backend.generate(first.token_ids, SamplingParams(), pixels=pixels)


def test_the_places_of_a_picture_hold_its_own_number() -> None:
    reader = PictureReader(tiny_processor(), tiny_vlm())
    first, second = sample_pictures(reader)
    ids = with_pictures([1, reader.place_id, 2, reader.place_id], [first, second], reader.place_id)
    assert ids == [1, *first.token_ids, 2, *second.token_ids]
    numbered = marked(ids, [first, second], reader.place_id)
    own = [number for number in numbered if number < 0]
    assert [own.count(number) for number in dict.fromkeys(own)] == [4, 4]
    assert marked(ids, [first, first], reader.place_id) != numbered
    assert reader.read(Image(data=_png())) is reader.read(Image(data=_png()))


def _png() -> bytes:
    file = io.BytesIO()
    pillow.new("RGB", (32, 32), "white").save(file, "PNG")
    return file.getvalue()


def test_what_is_no_picture_is_refused_in_one_line() -> None:
    reader = PictureReader(tiny_processor(), tiny_vlm())
    with pytest.raises(
        ConversationRefused, match=r"a picture of 4 bytes cannot be read .* give a PNG or JPEG"
    ):
        reader.read(Image(data=b"text"))
