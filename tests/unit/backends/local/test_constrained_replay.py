"""What is replayed is what was sampled: over drawn schemas, in a cache that evicts, as weights change."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from chat_templates import trl_template
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from stateset_agents.backends.grammars import Grammars, only_token
from stateset_agents.backends.local.batcher import MIN_SHARED_TOKENS, Batcher
from stateset_agents.backends.local.slot_table import GenerationRequest, new_request
from stateset_agents.backends.models.slots import SlotModel
from stateset_agents.core.chat.reply_grammar import AnswerFormat, ReplyGrammar
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.messages import SamplingParams

CONTEXT = 384

scalars = st.sampled_from(
    [
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[A-Z][0-9]{2}$"},
        {"type": "string"},
        {"enum": ["a", "ab", "é", 3, None]},
        {"type": "boolean"},
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
    ]
)
values = scalars | st.builds(
    lambda items, most: {"type": "array", "items": items, "maxItems": most}, scalars, st.integers(1, 3)
)
schemas = st.builds(
    lambda properties, required: {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name in required],
        "additionalProperties": False,
    },
    st.dictionaries(st.sampled_from(["x", "name", "n", "über"]), values, min_size=1, max_size=3),
    st.sets(st.sampled_from(["x", "name", "n", "über"])),
)


@cache
def weights(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    size = len(trl_template("chatml").tokenizer.hf)  # type: ignore[attr-defined]  # a Hugging Face one
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=size, max_position_embeddings=CONTEXT, initializer_range=0.1, **sizes)
    ).eval()


def constraint_of(family: str, schema: dict[str, Any], kind: str) -> Constraint:
    grammar = ReplyGrammar.of(trl_template(family))
    if kind == "json":
        return grammar.of_words(AnswerFormat(schema=schema))
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in ("ask", "asked")
    ]
    return grammar.of_calls(tools, kind)


def assert_replayed(request: GenerationRequest, constraint: Constraint) -> None:
    """By Grammars that have seen nothing, and transformers' own forward of the weights of each part."""
    tokenizer = trl_template("chatml").tokenizer
    masks = Grammars(tokenizer).replay(constraint, request.sampled)
    assert request.forced == {place for place, mask in enumerate(masks) if only_token(mask) is not None}
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").astype(np.bool_)
    ids = torch.tensor([request.ids])
    spans = request.version_spans()
    assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
    for span in spans:
        logits = weights(span.version)(input_ids=ids).logits[0, len(request.prompt) - 1 : -1]
        logits = (logits / request.params.temperature).masked_fill(
            ~torch.from_numpy(bits[:, : logits.shape[1]]), -torch.inf
        )
        replayed = logits.log_softmax(-1).gather(-1, torch.tensor(request.sampled)[:, None])[:, 0]
        stored = torch.tensor(request.logprobs)
        part = slice(span.start, span.end)
        torch.testing.assert_close(stored[part], replayed[part], atol=1e-6, rtol=1e-6)


def check(schema: dict[str, Any], kind: str, seed: int) -> Batcher:
    """Several turns of more conversations than the cache has room for, and new weights in the middle."""
    dice, grammars = random.Random(seed), Grammars(trl_template("chatml").tokenizer)
    constraint = constraint_of("chatml", schema, kind)
    model = SlotModel(LlamaForCausalLM(weights(0).config).eval())
    model.model.load_state_dict(weights(0).state_dict())
    work = Batcher(model, max_cached_tokens=3 * 192)
    system = [dice.randrange(200) for _ in range(MIN_SHARED_TOKENS + 4)]
    histories = [[*system, *(dice.randrange(200) for _ in range(member % 3))] for member in range(6)]
    for _ in range(2):
        waiting, live = [], []
        for member, history in enumerate(histories):
            limit = dice.choice([24, 60, 90])
            params = SamplingParams(
                max_new_tokens=limit,
                temperature=dice.choice([1.0, 0.7]),
                stream=seed + member,
                constraint=replace(constraint, limit=dice.choice([None, limit])),
            )
            assert params.constraint is not None
            matcher = grammars.matcher(params.constraint)
            stops = frozenset(constraint.stop_ids)
            waiting.append(new_request((0, 0, member), history, params, stops, CONTEXT, matcher=matcher))
        turns, num_steps, change = list(waiting), 0, dice.randint(3, 40)
        while waiting or live:
            live += [request for request in waiting if work.admit(request)]
            waiting = [request for request in waiting if request not in live]
            work.step(live)
            num_steps += 1
            assert all(request.error is None for request in turns)
            live = [request for request in live if request.finish_reason is None]
            if num_steps == change:
                version = work.version + 1
                model.model.load_state_dict(weights(version).state_dict())
                work.set_version(version)
        for request in turns:
            assert request.params.constraint is not None
            assert_replayed(request, request.params.constraint)
            histories[request.key[2]] = [*request.ids, 10][: CONTEXT - 150]
    return work


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


KINDS = st.sampled_from(["json", "required", "auto"])


@settings(max_examples=5)
@given(schemas, KINDS, st.integers(0, 999))
def test_every_token_is_allowed_and_weighs_the_same_when_replayed(
    schema: dict[str, Any], kind: str, seed: int
) -> None:
    work = check(schema, kind, seed)
    assert work.stats.evictions > 0
    assert work.stats.shared_tokens > 0


@pytest.mark.long
@settings(max_examples=60)
@given(schemas, KINDS, st.integers(0, 10**9))
def test_so_it_is_over_many_schemas(schema: dict[str, Any], kind: str, seed: int) -> None:
    check(schema, kind, seed)
