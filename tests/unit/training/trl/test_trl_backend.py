"""TRL's generation samples turns of one length: shorter ones are cut."""

from __future__ import annotations

from typing import Any

import pytest

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.backends.tokenizers import ByteTokenizer
from stateset_agents.training.trl.backend import TrlBackend
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, SamplingParams

TOKENIZER = ByteTokenizer()
SAID = "one two three"


async def reply(*, context_length: int = 1000, **params: Any) -> Completion:
    """What comes of SAID, of which TRL samples up to 20 tokens."""

    async def sample(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        ids = [*TOKENIZER.encode(SAID), *TOKENIZER.eos_ids[:1]]
        return [(ids, [-0.5] * len(ids)) for _ in prompts]

    inner = ScriptedBackend([], context_length=context_length)
    backend = TrlBackend(inner, sample, temperature=1.0, max_new_tokens=20)
    return await backend.generate([1, 2], SamplingParams(**{"max_new_tokens": 20, **params}))


@pytest.mark.parametrize(
    ("settings", "text", "num_tokens", "finish"),
    [
        ({}, SAID, 14, "stop"),
        ({"max_new_tokens": 3}, "one", 3, "length"),
        ({"context_length": 9}, "one two", 7, "length"),
        ({"stop": ("two",)}, "one ", 7, "stop"),
        ({"stop": ("two",), "max_new_tokens": 6}, "one tw", 6, "length"),
        ({"max_new_tokens": 13}, SAID, 13, "length"),
    ],
)
async def test_a_turn_may_be_shorter_than_trl_samples(
    settings: dict[str, Any], text: str, num_tokens: int, finish: str
) -> None:
    completion = await reply(**settings)
    assert completion.message.content == text
    assert (len(completion.token_ids), len(completion.logprobs)) == (num_tokens, num_tokens)
    assert completion.finish_reason == finish


async def test_a_longer_turn_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="up to 20 tokens, got 1 and 21"):
        await reply(max_new_tokens=21)
