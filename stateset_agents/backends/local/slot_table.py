"""The cache slots of conversations, and their tokens: arrays with a row for each slot; for batcher.py.

The columns of the arrays are those of the model's cache: column p has the token at position p, the uniform
that draws it and its log-prob.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from stateset_agents.backends.base import room_behind
from stateset_agents.backends.grammars import Matcher, Packed, only_token
from stateset_agents.backends.models.slots import COLUMN_MULTIPLE, ROW_MULTIPLE, CachedModel, Ints, round_up
from stateset_agents.backends.sampling import turn_uniforms
from stateset_agents.backends.tokenizers import TurnText
from stateset_agents.types.errors import BackendError
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import FinishReason, SamplingParams, VersionSpan

Key: TypeAlias = tuple[int, int, int]
"""Names and sorts conversations: (0, episode, member), or (1, serial, 0) for a request without a session."""


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationRequest:
    """A turn to sample, and, once it has ended, its result. backend.py makes it, the batcher fills it
    in."""

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
    matcher: Matcher | None = None
    """Where the grammar of a constrained turn stands; None for a free one."""
    allowed: Packed | None = None
    """[W] the tokens that the grammar allows next."""
    forced: set[int] = field(default_factory=set)
    """Places of tokens beside which no other was allowed."""
    kept: dict[int, Sequence[int]] = field(default_factory=dict)
    """By place, the tokens that top-k and top-p kept, where the parameters ask for them."""
    text: TurnText | None = None
    """The decoder of the turn's text, for streaming and stop strings; without it no token is decoded."""
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)
    """(policy version, tokens sampled before it) of each version that sampled a part of the turn."""
    finish_reason: FinishReason | None = None
    """The reason of the turn's end; None while it is live, and after it failed."""
    error: BackendError | None = None
    """The error of a turn that failed; others of its batch go on."""
    admitted_at: float | None = None
    """Time of the admission, by `time.monotonic()`."""

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
    matcher: Matcher | None = None,
) -> GenerationRequest:
    """A request that can be admitted; `marked`: the prompt with its pictures' places marked.

    Raises BackendError if nothing could be sampled.
    """
    room = room_behind(prompt_ids, context_length)
    if not len(prompt_ids):
        raise BackendError("the prompt is empty; generation needs at least one token to go on from")
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
        matcher=matcher,
        allowed=None if matcher is None else matcher.allowed(),
    )


class SlotTable:
    """Slots for conversations, within a limit of cached tokens; the longest idle are evicted."""

    def __init__(self, model: CachedModel, max_cached_tokens: int) -> None:
        self._model = model
        self._max_cached_tokens = max_cached_tokens
        self.slot_of: dict[Key, int] = {}
        self.key_of: list[Key | None] = []
        self.requests: list[GenerationRequest | None] = []
        """The live request of each slot."""
        self.num_evictions = 0
        self._freed_size: tuple[int, int] | None = None
        """(slots, columns) of the cache that `free_store` freed; None while the model has its cache."""
        tokens, slots = np.zeros((0, 0), np.int64), np.zeros(0, np.int64)
        self.ids: Ints = tokens
        """[slots, columns]"""
        self.uniforms = np.zeros((0, 0), np.float64)
        self.logprobs = np.zeros((0, 0), np.float32)
        self.length: Ints = slots
        """[slots] Tokens of the conversation so far."""
        self.cached: Ints = slots
        """[slots] How many of them, from the first, are cached."""
        self.prompt: Ints = slots
        """[slots] Tokens of the live request's prompt."""
        self.end: Ints = slots
        """[slots] Length at which the live request reaches its limit; without one, the cached tokens."""
        self.carried: Ints = slots
        """[slots] 1 until the last token of the turn before is forwarded."""
        self.last_used: Ints = slots
        """[slots] Step in which the conversation last had a live request."""
        self.temperature = np.zeros(0, np.float32)
        self.top_k: Ints = slots
        self.top_p = np.zeros(0, np.float32)
        self.greedy = np.zeros(0, np.bool_)
        self.streams_text = np.zeros(0, np.bool_)
        """[slots] Is each token decoded at once, for streaming or stop strings?"""
        self.constrained = np.zeros(0, np.bool_)
        """[slots] Does the request keep to a grammar?"""
        self.sessionless = np.zeros(0, np.bool_)
        """[slots] Does the request belong to no session?"""
        self.stops: Ints = tokens
        """[slots, most stop ids of one request], padded with -1."""

    # --- conversations ----------------------------------------------------------------------------------

    def occupy(self, key: Key) -> int:
        """Give this conversation the lowest free slot; `make_room` has made sure that there is one."""
        slot = self._lowest_free()
        self.key_of[slot], self.slot_of[key] = key, slot
        return slot

    def release(self, key: Key) -> None:
        """Forget a conversation; unknown keys are ignored."""
        slot = self.slot_of.pop(key, None)
        if slot is not None:
            self.key_of[slot] = self.requests[slot] = None
            self.length[slot] = self.cached[slot] = self.end[slot] = self.carried[slot] = 0
            self.last_used[slot] = 0

    def begin(self, slot: int, request: GenerationRequest) -> None:
        """Write a request into a slot whose `cached` tokens are a prefix of its prompt."""
        num_prompt, params = len(request.prompt), request.params
        self.requests[slot] = request
        self.ids[slot, :num_prompt] = request.prompt
        self.length[slot] = self.prompt[slot] = num_prompt
        self.end[slot] = num_prompt + request.limit
        self.uniforms[slot, num_prompt : num_prompt + request.limit] = request.uniforms
        # A greedy row takes the most likely token of the unchanged distribution: no temperature, no top-k.
        self.greedy[slot] = greedy = params.temperature == 0
        self.temperature[slot] = 1.0 if greedy else min(params.temperature, _MAX_TEMPERATURE)
        self.top_k[slot] = 0 if greedy else min(params.top_k, _MAX_TOP_K)
        self.top_p[slot] = 1.0 if greedy else params.top_p
        self.streams_text[slot] = request.text is not None
        self.constrained[slot] = request.matcher is not None
        self.sessionless[slot] = request.key[0] == 1
        if len(request.stop_ids) > self.stops.shape[1]:
            more = len(request.stop_ids) - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, more)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(request.stop_ids)] = sorted(request.stop_ids)
        self._append_forced(slot, request)

    def pixels(self, slots: Ints) -> Sequence[Sequence[PixelValues]]:
        """The pictures of each slot's live request; empty where none has any."""
        requests = [self.requests[slot] for slot in slots.tolist()]
        pixels = [request.pixels if request is not None else () for request in requests]
        return pixels if any(pixels) else ()

    def hits_stop_string(self, slot: int, token: int) -> bool:
        """Decode and stream a slot's newest token. Does the text hold a stop string now?"""
        request = self.requests[slot]
        return request is not None and request.text is not None and request.text.add(token)

    def advance(self, slot: int) -> None:
        """Take a constrained request's newest token into its grammar, and append what that then forces.

        Raises BackendError where the grammar cannot go on.
        """
        request = self.requests[slot]
        if request is None or request.matcher is None or request.allowed is None:
            return
        newest = int(self.length[slot]) - 1
        if only_token(request.allowed) is not None:
            request.forced.add(newest - int(self.prompt[slot]))
        request.matcher.advance(int(self.ids[slot, newest]))
        request.allowed = request.matcher.allowed()
        self._append_forced(slot, request)

    def raised(self, slot: int) -> tuple[int, float] | None:
        """The token whose logit the next token's draw raises, and by how much before the temperature."""
        request = self.requests[slot]
        constraint = None if request is None else request.params.constraint
        if constraint is None or constraint.raised is None:
            return None
        reply = self.ids[slot, self.prompt[slot] : self.length[slot]]
        token, nats = constraint.raised_behind(tuple(reply.tolist()))
        return token, nats * float(self.temperature[slot])

    def _append_forced(self, slot: int, request: GenerationRequest) -> None:
        """Append the tokens beside which the grammar allows no other; the next forward takes them together.

        A token that ends the reply is left to the sampler, which knows of ends.
        """
        while request.matcher is not None and request.allowed is not None:
            place, token = int(self.length[slot]), only_token(request.allowed)
            if token is None or token in request.stop_ids or place + 1 >= self.end[slot]:
                return
            self.ids[slot, place], self.logprobs[slot, place] = token, 0.0
            self.length[slot] = place + 1
            request.forced.add(place - int(self.prompt[slot]))
            self.hits_stop_string(slot, token)
            request.matcher.advance(token)
            request.allowed = request.matcher.allowed()

    def detach(self, slot: int) -> GenerationRequest:
        """Remove the live request from a slot; the cache stays."""
        request, self.requests[slot] = self.requests[slot], None
        if request is None:
            raise BackendError(f"slot {slot} has no live turn; please report this")
        self.end[slot] = self.cached[slot]
        return request

    def finish(self, slot: int, reason: FinishReason) -> GenerationRequest:
        """Fill in a live request with what was sampled for it; its conversation is idle now."""
        request = self.detach(slot)
        request.finish_reason = reason
        sampled = slice(int(self.prompt[slot]), int(self.length[slot]))
        request.sampled = self.ids[slot, sampled].tolist()
        request.logprobs = self.logprobs[slot, sampled].tolist()
        return request

    # --- memory -----------------------------------------------------------------------------------------

    def make_room(self, key: Key, columns: int, keep: Key | None = None) -> bool:
        """Make sure that a conversation can have a slot of so many columns; evict the longest idle if needed.

        Evictions and slot numbers depend only on the conversations that are there, not on how large the cache
        was before: a resumed run does the same as one that was never stopped.

        False while live conversations, or `keep`, which is not evicted, leave no room. Raises BackendError if
        the conversation can never fit.
        """
        if self._freed_size is not None:
            self._model.resize(*self._freed_size, [])
            self._freed_size = None
        while True:
            occupied = {owner: slot for owner, slot in self.slot_of.items() if owner != key}
            num_columns = self.end[list(occupied.values())].max(initial=columns)
            widest = round_up(int(num_columns), COLUMN_MULTIPLE)
            max_slots = self._max_cached_tokens // widest
            if len(occupied) < max_slots:
                # With more columns the limit allows fewer slots: those above it move into free ones below.
                high = [slot for slot in range(max_slots, len(self.key_of)) if self.key_of[slot] is not None]
                free = [slot for slot in range(min(max_slots, len(self.key_of))) if self.key_of[slot] is None]
                if high:
                    self.swap(free[: len(high)], high)
                slot = self.slot_of.get(key, self._lowest_free())
                self._grow(1 + max([slot, *self.slot_of.values()]), widest)
                return True
            if not occupied:
                raise BackendError(
                    f"one conversation may need {widest} cached tokens{self._in_bytes(widest)} and "
                    f"max_cached_tokens is {self._max_cached_tokens}"
                    f"{self._in_bytes(self._max_cached_tokens)}; raise it or lower max_new_tokens"
                )
            idle = [
                owner for owner, slot in occupied.items() if self.requests[slot] is None and owner != keep
            ]
            if not idle:
                return False
            # One at a time: without a long conversation the slots are narrower, and more of them fit.
            self.release(min(idle, key=lambda owner: (self.last_used[occupied[owner]], owner)))
            self.num_evictions += 1

    def free_store(self) -> None:
        """Free the model's cache until the next `make_room`; there must be no conversation now."""
        if self._freed_size is None:
            self._freed_size = (self._model.num_slots, self._model.num_columns)
            self._model.resize(0, 0, [])

    def _in_bytes(self, tokens: int) -> str:
        size = tokens * self._model.token_bytes
        return f" ({size / 2**20:.3g} MiB)" if size else ""

    def _grow(self, num_slots: int, columns: int) -> None:
        """Grow to at least so many slots and columns. It doubles within the limit, so that it is rare."""
        have_slots, have_columns = self._model.num_slots, self._model.num_columns
        if num_slots <= have_slots and columns <= have_columns:
            return
        slots = round_up(num_slots, ROW_MULTIPLE)
        doubled_slots = have_slots if num_slots <= have_slots else max(slots, 2 * have_slots)
        doubled_columns = have_columns if columns <= have_columns else max(columns, 2 * have_columns)
        if doubled_slots * doubled_columns <= self._max_cached_tokens:
            slots, columns = doubled_slots, doubled_columns
        else:
            slots = min(slots, self._max_cached_tokens // columns)
        self._model.resize(slots, columns, list(range(min(slots, have_slots))))
        for name in _ARRAYS:
            old = getattr(self, name)
            new = np.zeros((slots, *((columns,) if name in _MATRICES else old.shape[1:])), old.dtype)
            common = tuple(map(slice, np.minimum(new.shape, old.shape)))
            new[common] = old[common]
            setattr(self, name, new)
        self.key_of = [*self.key_of, *[None] * slots][:slots]
        self.requests = [*self.requests, *[None] * slots][:slots]

    def _lowest_free(self) -> int:
        return self.key_of.index(None) if None in self.key_of else len(self.key_of)

    def swap(self, low: list[int], high: list[int]) -> None:
        """Swap the conversations of `low[i]` and `high[i]`, for all i."""
        into, out_of = [*low, *high], [*high, *low]
        pairs = [(a, b) for a, b in zip(into, out_of, strict=True) if self.cached[b]]  # not the empty slots
        self._model.permute([a for a, _ in pairs], [b for _, b in pairs], int(self.cached[out_of].max()))
        for name in _ARRAYS:
            array = getattr(self, name)
            array[into] = array[out_of]
        for a, b in zip(low, high, strict=True):
            self.requests[a], self.requests[b] = self.requests[b], self.requests[a]
            self.key_of[a], self.key_of[b] = self.key_of[b], self.key_of[a]
        for slot in into:
            key = self.key_of[slot]
            if key is not None:
                self.slot_of[key] = slot


_MAX_TEMPERATURE = float(np.finfo(np.float32).max)
_MAX_TOP_K = np.iinfo(np.int64).max
_MATRICES = ("ids", "uniforms", "logprobs")
_ARRAYS = (
    *_MATRICES,
    *("length", "cached", "prompt", "end", "carried", "last_used"),
    *("temperature", "top_k", "top_p", "greedy", "streams_text", "constrained", "sessionless", "stops"),
)
