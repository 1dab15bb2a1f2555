"""Continuous batching of live conversations over cache slots; driven by the worker thread of huggingface.py.

A turn is admitted (it gets a slot), then every `step` gives each live turn one token: those whose slot lacks
more than the newest token are prefilled together, the others decode together. A turn that ends leaves its
cache in its slot for the next one. All of it runs in one thread, in the order the caller gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch

from stateset_agents.backends.sampling import Knobs, sample, turn_uniforms
from stateset_agents.backends.slots import COLUMN_MULTIPLE, ROW_MULTIPLE, CachedModel, Plan, round_up
from stateset_agents.backends.turn_text import TurnText
from stateset_agents.errors import BackendError
from stateset_agents.messages import FinishReason, SamplingParams, VersionSpan

__all__ = ["Batcher", "Key", "Stats", "Turn", "new_turn"]

Key: TypeAlias = tuple[int, int, int]
"""Conversations sort by it: (0, episode, member), or (1, serial, 0) for one without a session."""

_PREFILL_TOKENS = 8192  # most tokens of one prefill forward, padding included, unless one row alone has more


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counts since the start, for tests, tuning and metrics."""

    prefilled_tokens: int = 0
    """Prompt tokens forwarded; a sampled token forwarded along with them counts as carried instead."""
    carried_tokens: int = 0
    """Tokens that ended a turn, so that they were forwarded only with the next turn's prompt."""
    sampled_tokens: int = 0
    prefills: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    """Rows of all decode steps, idle ones included."""
    evictions: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One turn while it is being sampled."""

    key: Key
    ids: list[int]
    """Everything so far: the prompt, then what was sampled."""
    num_prompt: int
    params: SamplingParams
    stop_ids: frozenset[int]
    limit: int
    """Most tokens to sample."""
    uniforms: list[float]  # [limit]
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    text: TurnText | None = None
    """Only where someone listens or there are stop strings: nothing is decoded otherwise."""

    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Runs of equal policy versions over the sampled tokens."""
        spans: list[VersionSpan] = []
        for place, version in enumerate(self.versions):
            if spans and spans[-1].version == version:
                spans[-1] = spans[-1]._replace(end=place + 1)
            else:
                spans.append(VersionSpan(version, place, place + 1))
        return tuple(spans)


def new_turn(
    key: Key, prompt_ids: Sequence[int], params: SamplingParams, stop_ids: frozenset[int], context_length: int
) -> Turn:
    """A turn ready to be admitted. Raises BackendError where nothing could be sampled."""
    room = context_length - len(prompt_ids)
    if not prompt_ids:
        raise BackendError("the prompt is empty; generation needs at least one token to go on from")
    if room <= 0:
        raise BackendError(
            f"the prompt has {len(prompt_ids)} tokens and the model's context holds {context_length}; "
            "end the conversation earlier or use a model with a longer context"
        )
    if params.max_new_tokens < 1 or params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k < 0:
        raise BackendError(
            f"sampling needs max_new_tokens >= 1, temperature >= 0, 0 < top_p <= 1, top_k >= 0; got {params}"
        )
    limit = min(params.max_new_tokens, room)
    return Turn(
        key=key,
        ids=list(prompt_ids),
        num_prompt=len(prompt_ids),
        params=params,
        stop_ids=stop_ids,
        limit=limit,
        uniforms=turn_uniforms(params.stream, limit),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class _Conversation:
    """One occupied slot."""

    key: Key
    slot: int
    ids: list[int]
    """All its ids; while a turn is live, the turn's own list."""
    num_cached: int
    """How many of them, from the first, have keys and values in the slot."""
    last_used: int
    """Step in which it was last live."""
    turn: Turn | None = None
    carried: int = 0
    """1 while the token that ended the turn before is still to be forwarded."""

    @property
    def columns(self) -> int:
        """Columns that its slot may come to need."""
        if self.turn is not None:
            return self.turn.num_prompt + self.turn.limit
        return self.num_cached


class Batcher:
    """The conversations in the cache, and the live turns among them."""

    def __init__(self, model: CachedModel, *, max_cached_tokens: int) -> None:
        """`max_cached_tokens` bounds conversations times columns of the longest (a multiple of 32)."""
        self.model = model
        self.version = 0
        self.stats = Stats()
        self._max_cached_tokens = max_cached_tokens
        self.conversations: dict[Key, _Conversation] = {}
        self._slots: list[_Conversation | None] = []
        self._clock = 0

    # --- what comes and goes ----------------------------------------------------------------------------

    def admit(self, turn: Turn) -> bool:
        """Give a turn its slot, keeping the longest prefix that its conversation has cached.

        False while live conversations leave no room for it. Raises BackendError where it can never fit.
        """
        conversation = self.conversations.get(turn.key)
        if not self._make_room(turn.key, turn.num_prompt + turn.limit):
            return False
        if conversation is None:
            conversation = self._occupy(turn.key)
        shared = min(_common_prefix(conversation.ids, turn.ids, conversation.num_cached), turn.num_prompt - 1)
        shared = self.model.keepable(conversation.slot, shared)
        # The token that ended the last turn was sampled but never forwarded: it comes next, if it was kept.
        conversation.carried = int(
            shared == conversation.num_cached < len(conversation.ids)
            and turn.ids[shared] == conversation.ids[shared]
        )
        conversation.num_cached = shared
        conversation.ids = turn.ids
        conversation.turn = turn
        return True

    def fork(self, source: Key, into: Key) -> None:
        """Copy what `source` has cached into a slot of `into`; nothing where there is no room to spare."""
        held = self.conversations.get(source)
        if held is None or held.num_cached == 0 or source == into:
            return
        self.release(into)
        if not self._make_room(into, held.num_cached, spare=source):
            return
        copy = self._occupy(into)
        copy.ids, copy.num_cached = list(held.ids), held.num_cached
        self.model.permute([copy.slot], [held.slot], held.num_cached)

    def release(self, key: Key) -> None:
        """Forget a conversation and free its slot; unknown keys are ignored."""
        conversation = self.conversations.pop(key, None)
        if conversation is not None:
            self._slots[conversation.slot] = None

    def cancel(self, turn: Turn) -> None:
        """Drop a live turn; its conversation stays cached as far as it came."""
        conversation = self.conversations.get(turn.key)
        if conversation is not None and conversation.turn is turn:
            conversation.turn = None

    def forget_cache(self) -> None:
        """After new weights: idle conversations go, live ones are refilled at their next step."""
        for key, conversation in list(self.conversations.items()):
            conversation.num_cached = conversation.carried = 0
            if conversation.turn is None:
                self.release(key)

    # --- one step ---------------------------------------------------------------------------------------

    def step(self, turns: Sequence[Turn]) -> list[Turn]:
        """Sample one token for each of these admitted turns; returns those that ended by it."""
        self._clock += 1
        live = [self.conversations[turn.key] for turn in turns]
        for conversation in live:
            conversation.last_used = self._clock
        decoding = [c for c in live if len(c.ids) - c.num_cached == 1]
        lacking = [c for c in live if len(c.ids) - c.num_cached > 1]
        ended = self._decode(decoding) if decoding else []
        for group in _prefill_groups(lacking):
            ended += self._prefill(group)
        return ended

    def _decode(self, rows: list[_Conversation]) -> list[Turn]:
        """One token for rows that lack only their newest."""
        self._gather_low(rows)
        slots = [row.slot for row in rows]
        first = min(slots) // ROW_MULTIPLE * ROW_MULTIPLE
        self.stats.decode_steps += 1
        self.stats.decode_rows += round_up(max(slots) + 1 - first, ROW_MULTIPLE)
        return self._forward(rows)

    def _prefill(self, rows: list[_Conversation]) -> list[Turn]:
        """Forward all that each row's slot lacks, and sample one token each."""
        self.stats.prefills += 1
        return self._forward(rows)

    def _forward(self, rows: list[_Conversation]) -> list[Turn]:
        rows = sorted(rows, key=lambda c: c.slot)
        lacking = [row.ids[row.num_cached :] for row in rows]
        plan = Plan(
            slots=np.array([row.slot for row in rows]),
            starts=np.array([row.num_cached for row in rows]),
            lengths=np.array([len(ids) for ids in lacking]),
            tokens=np.array([token for ids in lacking for token in ids]),
        )
        return self._sample(rows, self.model.forward(plan))

    def _sample(self, rows: list[_Conversation], logits: torch.Tensor) -> list[Turn]:
        """Append one sampled token to each row's turn; returns the turns that it ended."""
        turns = [row.turn for row in rows if row.turn is not None]
        uniforms = [turn.uniforms[len(turn.logprobs)] for turn in turns]
        tokens, logprobs = sample(
            logits, torch.tensor(uniforms, dtype=torch.float64, device=self.model.device), self._knobs(turns)
        )
        ended = []
        for row, turn, token, logprob in zip(rows, turns, tokens.tolist(), logprobs.tolist(), strict=True):
            known = 1 if turn.logprobs else row.carried  # the newest sampled token is no prompt
            self.stats.prefilled_tokens += len(turn.ids) - row.num_cached - known
            self.stats.carried_tokens += row.carried
            row.carried = 0
            row.num_cached = len(turn.ids)
            turn.ids.append(token)
            turn.logprobs.append(logprob)
            turn.versions.append(self.version)
            if token in turn.stop_ids or (turn.text is not None and turn.text.add(token)):
                turn.finish_reason = "stop"
            elif len(turn.logprobs) == turn.limit:
                turn.finish_reason = "length"
            if turn.finish_reason is not None:
                row.turn = None
                ended.append(turn)
        self.stats.sampled_tokens += len(turns)
        return ended

    def _knobs(self, turns: list[Turn]) -> Knobs:
        device = self.model.device
        params = [turn.params for turn in turns]
        greedy = [p.temperature == 0 for p in params]
        knobs = Knobs(
            temperature=torch.tensor([p.temperature or 1.0 for p in params], device=device),
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            top_k=None,
            top_p=None,
        )
        if all(p.temperature == 0 or (p.top_k == 0 and p.top_p == 1) for p in params):
            return knobs
        # A greedy row takes the likeliest token of the plain distribution: nothing is cut from it.
        return knobs._replace(
            top_k=torch.tensor([0 if p.temperature == 0 else p.top_k for p in params], device=device),
            top_p=torch.tensor([1.0 if p.temperature == 0 else p.top_p for p in params], device=device),
        )

    # --- slots ------------------------------------------------------------------------------------------

    def _make_room(self, key: Key, columns: int, spare: Key | None = None) -> bool:
        """Grow the store for a conversation of so many columns, evicting the longest idle while it must."""
        while True:
            others = [c for k, c in self.conversations.items() if k != key]
            widest = round_up(max([columns, *(c.columns for c in others)]), COLUMN_MULTIPLE)
            if (len(others) + 1) * widest <= self._max_cached_tokens:
                break
            idle = [c for c in others if c.turn is None and c.key != spare]
            if not idle:
                if spare is None and all(c.turn is None for c in others):
                    raise BackendError(
                        f"one conversation may need {widest} cached tokens and max_cached_tokens is "
                        f"{self._max_cached_tokens}; raise it or lower max_new_tokens"
                    )
                return False
            self.release(min(idle, key=lambda c: (c.last_used, c.key)).key)
            self.stats.evictions += 1
        self._grow(len(others) + 1, widest)
        return True

    def _grow(self, conversations: int, columns: int) -> None:
        """Have at least so many slots and columns; doubling where the bound allows, so that it's rare."""
        slots = round_up(conversations, ROW_MULTIPLE)
        have_slots, have_columns = self.model.num_slots, self.model.num_columns
        if slots <= have_slots and columns <= have_columns:
            return
        roomy_slots = have_slots if slots <= have_slots else max(slots, 2 * have_slots)
        roomy_columns = have_columns if columns <= have_columns else max(columns, 2 * have_columns)
        if roomy_slots * roomy_columns <= self._max_cached_tokens:
            slots, columns = roomy_slots, roomy_columns
        kept = [c for _, c in sorted(self.conversations.items())]
        self.model.resize(slots, columns, [c.slot for c in kept])
        for slot, conversation in enumerate(kept):
            conversation.slot = slot
        self._slots = [*kept, *[None] * (slots - len(kept))]

    def _occupy(self, key: Key) -> _Conversation:
        """A fresh conversation in the lowest free slot (`_make_room` saw to it that there is one)."""
        slot = self._slots.index(None)
        conversation = _Conversation(key=key, slot=slot, ids=[], num_cached=0, last_used=self._clock)
        self._slots[slot] = self.conversations[key] = conversation
        return conversation

    def _gather_low(self, rows: list[_Conversation]) -> None:
        """Swap scattered live rows into the lowest slots when more than half of a decode step would idle."""
        count = round_up(len(rows), ROW_MULTIPLE)
        if round_up(max(row.slot for row in rows) + 1, ROW_MULTIPLE) <= 2 * count:
            return
        live = {row.slot for row in rows}
        high = sorted(slot for slot in live if slot >= count)
        low = [slot for slot in range(count) if slot not in live][: len(high)]
        width = max(c.num_cached for c in self.conversations.values())
        self.model.permute([*low, *high], [*high, *low], width)
        for a, b in zip(low, high, strict=True):
            self._slots[a], self._slots[b] = self._slots[b], self._slots[a]
        for slot in [*low, *high]:
            held = self._slots[slot]
            if held is not None:
                held.slot = slot


def _common_prefix(cached: list[int], ids: list[int], limit: int) -> int:
    """How many of the first `limit` ids of both are the same."""
    limit = min(limit, len(ids))
    if cached[:limit] == ids[:limit]:
        return limit
    return next(place for place, (a, b) in enumerate(zip(cached, ids, strict=False)) if a != b)


def _prefill_groups(rows: list[_Conversation]) -> list[list[_Conversation]]:
    """Rows of like length together, each group within the token budget."""
    groups: list[list[_Conversation]] = []
    shortest = 0
    for row in sorted(rows, key=lambda c: (len(c.ids) - c.num_cached, c.key)):
        lacking = len(row.ids) - row.num_cached
        full = groups and (len(groups[-1]) + 1) * lacking > _PREFILL_TOKENS
        if not groups or full or lacking > 2 * shortest + 32:
            groups.append([])
            shortest = lacking
        groups[-1].append(row)
    return groups
