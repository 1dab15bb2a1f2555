"""A vocabulary of six tokens and a grammar of twenty replies: `from tiny_grammars import ...`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from stateset_agents.backends.grammars import Grammars, library_version, only_token
from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.types.constraint import Constraint
from stateset_agents.types.messages import Completion, Message

PIECES = {"a": 0, "b": 1, "c": 2, "d": 3, "ab": 4}
END = 5
PROMPT = (0, 3)
GRAMMAR = 'start: "a" ("b" | "c") /[cd]{1,2}/ | "d" "ca" "d" | "c"'
"""After `d` three tokens are forced, and the end after `c`; `ab` is one token or two."""


def letters() -> HuggingFaceTokenizer:
    raw = Tokenizer(models.BPE(vocab=PIECES, merges=[("a", "b")]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|end|>", special=True)])
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>"))


def letters_model(seed: int = 7) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=6, max_position_embeddings=32, initializer_range=0.5, **sizes)
    ).eval()


def constraint_of(grammar: str = GRAMMAR, stop_ids: tuple[int, ...] = (END,)) -> Constraint:
    return Constraint(grammar=grammar, kind="text", stop_ids=stop_ids, version=library_version())


def allowed_after(grammars: Grammars, constraint: Constraint, prefix: Sequence[int]) -> list[int]:
    """The tokens that may follow, in order of their ids."""
    matcher = grammars.matcher(constraint)
    for token in prefix:
        matcher.advance(token)
    (word,) = matcher.allowed()
    return [token for token in range(len(PIECES) + 1) if int(word) >> token & 1]


def replies_of(
    grammars: Grammars, constraint: Constraint, prefix: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Every reply of the grammar, its end included."""
    for token in allowed_after(grammars, constraint, prefix):
        reply = (*prefix, token)
        if token == END:
            yield reply
        else:
            yield from replies_of(grammars, constraint, reply)


def masked_logprobs(
    model: Any, grammars: Grammars, constraint: Constraint, reply: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """[T] of a reply's tokens among those that are allowed, by hand; with gradient."""
    ids = torch.tensor([[*PROMPT, *reply]])
    logits = model(input_ids=ids).logits[0, len(PROMPT) - 1 : -1] / temperature
    rows = []
    for place, token in enumerate(reply):
        allowed = allowed_after(grammars, constraint, reply[:place])
        row = logits[place].clone()
        opener, nats = constraint.raised or ((), 0.0)
        if place < len(opener) and tuple(reply[:place]) == opener[:place]:
            row[opener[place]] += nats
        rows.append(torch.log_softmax(row[allowed], 0)[allowed.index(token)])
    return torch.stack(rows)


def completion_of(
    grammars: Grammars, constraint: Constraint, reply: Sequence[int], logprobs: Tensor
) -> Completion:
    """A reply as a sampler under the constraint gives it."""
    masks = grammars.replay(constraint, reply)
    assert all(math.isfinite(value) for value in logprobs.tolist())
    return Completion(
        message=Message(role="assistant", content=""),
        prompt_ids=PROMPT,
        token_ids=tuple(reply),
        logprobs=tuple(logprobs.tolist()),
        finish_reason="stop",
        constraint=constraint,
        forced=tuple(only_token(mask) is not None for mask in masks),
    )
