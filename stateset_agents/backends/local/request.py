"""One turn to sample; local/backend.py makes the request, batcher.py fills in the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from stateset_agents.backends.kv_cache.slots import Ints
from stateset_agents.backends.sampling import turn_uniforms
from stateset_agents.backends.text.turn_text import TurnText
from stateset_agents.types.errors import BackendError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import FinishReason, SamplingParams, VersionSpan

Key: TypeAlias = tuple[int, int, int]
"""Names and sorts conversations: (0, episode, member), or (1, serial, 0) for a request without a session."""


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """What to sample, and, once the turn has ended, what was sampled."""

    key: Key
    prompt: Ints
    """[P] as the engine takes it; the places of pictures are marked."""
    prompt_ids: tuple[int, ...]
    """[P] as the caller gave it."""
    pixels: tuple[PixelValues, ...] = ()
    """The prompt's pictures, in order."""
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int
    """Most tokens to sample: `max_new_tokens`, or what the context has room for."""
    uniforms: np.ndarray[tuple[int], np.dtype[np.float64]]  # [limit]
    text: TurnText | None = None
    """Only for streaming and stop strings; otherwise no token is decoded."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, tokens sampled before it) of each version that sampled a part of the turn."""
    finish_reason: FinishReason | None = None
    """None while the turn is live, and after it failed."""
    error: BackendError | None = None
    """Why this turn failed; others of its batch go on."""
    admitted_at: float | None = None
    """By `time.monotonic()`."""

    @property
    def num_prompt(self) -> int:
        """Tokens before the first sampled one."""
        return len(self.prompt)

    @property
    def ids(self) -> list[int]:
        """The prompt, then what was sampled."""
        prompt: list[int] = self.prompt.tolist()
        return prompt + self.sampled

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Runs of equal policy versions over the sampled tokens."""
        ends = [start for _, start in self.versions[1:]] + [len(self.sampled)]
        return tuple(
            VersionSpan(version, start, end)
            for (version, start), end in zip(self.versions, ends, strict=True)
            if start < end
        )


def new_request(
    key: Key,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    stop_ids: frozenset[int],
    context_length: int,
    *,
    marked: Sequence[int] | None = None,
    pixels: Sequence[PixelValues] = (),
) -> GenerationRequest:
    """A request that can be admitted; `marked`: the prompt with its pictures' places marked.

    Raises BackendError if nothing could be sampled.
    """
    room = context_length - len(prompt_ids)
    if not len(prompt_ids):
        raise BackendError("the prompt is empty; generation needs at least one token to go on from")
    if room <= 0:
        raise BackendError(
            f"the prompt has {len(prompt_ids)} tokens and the model's context holds {context_length}; "
            "end the conversation earlier or use a model with a longer context"
        )
    if (
        params.max_new_tokens < 1
        or not params.temperature >= 0
        or not 0 < params.top_p <= 1
        or params.top_k < 0
    ):
        raise BackendError(
            f"sampling needs max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0; got {params}"
        )
    limit = min(params.max_new_tokens, room)
    return GenerationRequest(
        key=key,
        prompt=np.array(prompt_ids if marked is None else marked, np.int64),
        prompt_ids=tuple(prompt_ids),
        pixels=tuple(pixels),
        params=params,
        stop_ids=stop_ids,
        limit=limit,
        uniforms=turn_uniforms(params.stream, limit),
    )
