"""Continuous batching of live conversations over cache slots; driven by the worker thread of backend.py.

A request is admitted: it gets a slot. Then each `step` samples one token for every live request. A slot that
lacks more than its newest token is prefilled: it copies the prefix that another slot has cached
and forwards the remaining tokens. All other slots decode together. When a turn ends, its
cache stays in the slot for the next turn. Everything runs in one thread, in an order that follows from the
requests alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from stateset_agents.backends.local.slot_table import GenerationRequest, Key, SlotTable
from stateset_agents.backends.models.slots import ROW_MULTIPLE, CachedModel, Ints, Plan, round_up
from stateset_agents.backends.sampling import SamplingMetadata, forbid, sample
from stateset_agents.runtime.machine import trim_memory
from stateset_agents.types.errors import BackendError
from stateset_agents.types.messages import GREEDY_BELOW

# --- prefix sharing
#
# Tokens with which several conversations begin are forwarded only once. A conversation that lacks a long
# prefix copies it from one that has it cached, or that is about to cache it. The members of a group share
# their prompt, all conversations the system prompt, a branch its parent's turns.

MIN_SHARED_TOKENS = 16
"""A shorter shared prefix is forwarded again instead of copied."""


class PrefixCopy(NamedTuple):
    """The prefix that one slot copies from another."""

    slot: int
    source: int
    """The slot to copy from; -1 if no shared prefix is long enough."""
    tokens: int
    """Number of the slot's first tokens that are copied; 0 without a source."""
    wave: int
    """0 if the source has these tokens now; w + 1 if it gets them in wave w."""


def shared_prefixes(
    ids: Ints, cached: Ints, length: Ints, occupied: Sequence[int], lacking: Sequence[int]
) -> list[PrefixCopy]:
    """The longest prefix, for each slot of `lacking` in that order, that it can copy from another slot.

    Slot s has the tokens ids[s, :length[s]], of which the first cached[s] are cached. A source is a slot of
    `occupied`, with its cached tokens, or an earlier slot of `lacking`, with all its tokens. A slot's last
    token is never copied: it is forwarded. Of two equally good sources the first is taken.
    """
    sources = np.array([*occupied, *lacking])
    source_lengths = np.concatenate([cached[list(occupied)], length[list(lacking)]])
    ready = np.full(len(sources), -1)  # the wave after which a source has the tokens that it offers
    copies = []
    for index, slot in enumerate(lacking, start=len(occupied)):
        source, longest = -1, int(cached[slot]) + MIN_SHARED_TOKENS - 1
        offers = np.minimum(source_lengths[:index], length[slot] - 1)
        begin = 0
        while begin < index:
            # A better source offers more than the longest so far and has the same token at that position.
            better = begin + np.flatnonzero(offers[begin:] > longest)
            better = better[ids[sources[better], longest] == ids[slot, longest]] if len(better) else better
            if not len(better):
                break
            first = int(better[0])
            shared = common_prefix(ids[sources[first], : offers[first]], ids[slot, : offers[first]])
            if shared > longest:
                source, longest = first, shared
            begin = first + 1
        if source < 0:
            ready[index] = 0
            copies.append(PrefixCopy(slot, -1, 0, 0))
        else:
            is_cached = longest <= cached[sources[source]]
            ready[index] = 0 if is_cached else ready[source] + 1
            copies.append(PrefixCopy(slot, int(sources[source]), longest, int(ready[index])))
    return copies


def common_prefix(left: Ints, right: Ints) -> int:
    """Number of equal tokens at the beginning of two sequences of the same length."""
    same = left == right
    first = int(same.argmin()) if len(same) else 0
    return len(same) if len(same) and same[first] else first


_LONG_PROMPT = 256
"""Tokens. A longer prompt of a request without a session is prefilled in chunks."""
_CHUNK_BUDGET_WITH_DECODES, _CHUNK_BUDGET, _MIN_CHUNK = 64, 1024, 32
"""Tokens that the chunks of one step have together (beside decoding rows; without any), and of one chunk."""
_SHORT_PROMPT_BUDGET = 512
"""Tokens of short prompts that one step prefills; the last of them may exceed it."""
_MAX_PREFILL_TOKENS = 8192
"""Tokens of one prefill forward, padding included; a single longer row is still forwarded in one."""


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counts since the start; the names are those of metrics."""

    prefilled_tokens: int = 0
    """Prompt tokens forwarded, without the carried ones, and tokens that a grammar forced."""
    shared_tokens: int = 0
    """Prompt tokens copied from another conversation's cache."""
    carried_tokens: int = 0
    """Last tokens of turns. They are sampled in one turn and forwarded with the prompt of the next."""
    sampled_tokens: int = 0
    prefills: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    """Rows of all decode steps, padding included."""
    idle_rows: int = 0
    """Rows of decode steps that only pad."""
    evictions: int = 0


class Batcher:
    """The conversations in the cache, and their live requests."""

    def __init__(self, model: CachedModel, *, max_cached_tokens: int) -> None:
        """`max_cached_tokens` limits slots times columns of the cache."""
        self.model = model
        self.version = 0
        self.stats = Stats()
        self._table = SlotTable(model, max_cached_tokens)
        self._num_steps = 0

    @property
    def num_conversations(self) -> int:
        """Conversations that occupy a slot."""
        return len(self._table.slot_of)

    # --- requests and conversations ---------------------------------------------------------------------

    def admit(self, request: GenerationRequest) -> bool:
        """Give a request its slot, and keep the longest prefix that its conversation has cached.

        False while live conversations leave no room for it. Raises BackendError if it can never fit.
        """
        table = self._table
        num_prompt = len(request.prompt)
        has_room = table.make_room(request.key, num_prompt + request.limit)
        self.stats.evictions = table.num_evictions
        if not has_room:
            return False
        slot = table.slot_of.get(request.key)
        if slot is None:
            slot = table.occupy(request.key)
        cached, length = int(table.cached[slot]), int(table.length[slot])
        overlap = min(length, num_prompt)
        shared = common_prefix(table.ids[slot, :overlap], request.prompt[:overlap])
        num_kept = self.model.reusable_tokens(slot, min(shared, cached, num_prompt - 1))
        # The last token of the turn before was sampled but never forwarded. If it stays, it comes next.
        table.carried[slot] = num_kept == cached == length - 1 and shared == length
        table.cached[slot] = num_kept
        table.begin(slot, request)
        request.admitted_at = time.monotonic()
        request.versions.append((self.version, 0))
        return True

    def fork(self, source: Key, into: Key) -> None:
        """Copy the cache of `source` into a slot of `into`; does nothing if no slot can be freed."""
        table = self._table
        cached = int(table.cached[table.slot_of[source]]) if source in table.slot_of else 0
        if cached == 0 or source == into:
            return
        table.release(into)
        has_room = table.make_room(into, cached, keep=source)
        self.stats.evictions = table.num_evictions
        if not has_room:
            return
        copy, original = table.occupy(into), table.slot_of[source]
        length = min(int(table.length[original]), cached + 1)
        table.ids[copy, :length] = table.ids[original, :length]
        table.length[copy], table.last_used[copy] = length, self._num_steps
        table.cached[copy] = table.end[copy] = cached
        self.model.permute([copy], [original], cached)

    def release(self, key: Key) -> None:
        """Forget a conversation and free its slot; unknown keys are ignored."""
        self._table.release(key)

    def cancel(self, request: GenerationRequest) -> None:
        """Drop a live request; the tokens so far stay cached."""
        slot = self._table.slot_of.get(request.key)
        if slot is not None and self._table.requests[slot] is request:
            self._table.detach(slot)

    def set_version(self, version: int) -> None:
        """The weights changed: drop idle conversations; live ones are prefilled again at their next step."""
        self.version = version
        table = self._table
        table.cached[:] = table.carried[:] = 0
        for key, slot in list(table.slot_of.items()):
            request = table.requests[slot]
            if request is None:
                table.release(key)
            else:
                request.versions.append((version, int(table.length[slot] - table.prompt[slot])))

    def sleep(self) -> None:
        """Free the cache and packed weights, unless a conversation is cached. The next request makes them."""
        if not self._table.slot_of:
            self._table.free_store()
            self.model.refresh()
        trim_memory()

    # --- one step ---------------------------------------------------------------------------------------

    def step(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """Sample one token for each of these admitted requests; returns those that ended with it.

        A request that fails ends with its `error` set, and its conversation leaves the cache. The others of
        its batch sample the same tokens as without it.
        """
        self._num_steps += 1
        table = self._table
        slots = np.array(sorted([table.slot_of[request.key] for request in requests]))
        table.last_used[slots] = self._num_steps
        lacking = table.length[slots] - table.cached[slots]
        decoding = slots[lacking == 1]  # all but the newest token is cached
        ended: list[GenerationRequest] = []
        if len(decoding) < len(slots):
            chunks = _ChunkedPrefill(self.model, table, slots[lacking > 1], len(decoding))
            for wave in self._waves(slots[lacking > 1]):
                filling = chunks.select(self._copy(wave))
                left = table.length[filling] - table.cached[filling]
                long = table.sessionless[filling] & (left > max(chunks.length, _LONG_PROMPT))
                for group in _prefill_groups(filling[long], np.full(long.sum(), chunks.length)):
                    self._prefill_chunk(group, chunks.length)
                complete = (left > 1) & ~long
                for group in _prefill_groups(filling[complete], left[complete]):
                    self.stats.prefills += 1
                    ended += self._forward(group)
                decoding = np.concatenate([decoding, filling[left == 1]])
        if len(decoding):
            decoding = self._compact(np.sort(decoding))
            self.stats.decode_steps += 1
            rows = self.model.decode_rows(decoding)
            self.stats.decode_rows += rows
            self.stats.idle_rows += rows - len(decoding)
            ended += self._forward(decoding)
        return ended

    def _waves(self, lacking: Ints) -> Iterator[list[PrefixCopy]]:
        """The prefixes that slots copy from one another, in waves that can be done one after the other.

        Longer conversations come first.
        """
        table = self._table
        ranked = sorted(lacking.tolist(), key=lambda slot: (-table.length[slot], table.key_of[slot]))
        if (table.length[lacking] - table.cached[lacking] <= MIN_SHARED_TOKENS).all():
            yield [PrefixCopy(slot, -1, 0, 0) for slot in ranked]
            return
        occupied = [slot for _, slot in sorted(table.slot_of.items())]
        copies = shared_prefixes(table.ids, table.cached, table.length, occupied, ranked)
        for wave in range(1 + max(copy.wave for copy in copies)):
            yield [copy for copy in copies if copy.wave == wave]

    def _copy(self, wave: list[PrefixCopy]) -> Ints:
        """Copy the shared prefixes of a wave, as far as the model can cut its cache there.

        Returns the slots of the wave that can be prefilled now. A slot whose source is itself prefilled in
        chunks waits for it.
        """
        table = self._table
        into, out_of, lengths = [], [], []
        for copy in wave:
            if copy.source >= 0:
                shared = min(copy.tokens, int(table.cached[copy.source]))
                tokens = self.model.reusable_tokens(copy.source, shared)
                if tokens > table.cached[copy.slot]:
                    into.append(copy.slot)
                    out_of.append(copy.source)
                    lengths.append(tokens)
        if into:
            self.model.permute(into, out_of, max(lengths))
            self.stats.shared_tokens += int((lengths - table.cached[into] - table.carried[into]).sum())
            table.cached[into] = lengths
            table.carried[into] = 0
        ready = [copy.slot for copy in wave if copy.wave == 0 or copy.tokens <= table.cached[copy.source]]
        return np.array(ready, np.int64)

    def _prefill_chunk(self, slots: Ints, length: int) -> None:
        """Forward the next `length` tokens that each of these slots (ascending) lacks, without sampling."""
        table = self._table
        starts = table.cached[slots]
        tokens = np.concatenate(
            [table.ids[slot, start : start + length] for slot, start in zip(slots, starts, strict=True)]
        )
        self.stats.prefills += 1
        self.stats.prefilled_tokens += len(tokens)
        lengths, pixels = np.full(len(slots), length), table.pixels(slots)
        self.model.forward(Plan(slots=slots, starts=starts, lengths=lengths, tokens=tokens, pixels=pixels))
        table.cached[slots] = starts + length

    def _forward(self, slots: Ints) -> list[GenerationRequest]:
        """Forward all tokens that these slots (ascending) lack, and sample one token for each."""
        table = self._table
        starts = table.cached[slots]
        lengths = table.length[slots] - starts
        if lengths.max() == 1:
            tokens = table.ids[slots, starts]
        else:
            spans = zip(slots, starts, starts + lengths, strict=True)
            tokens = np.concatenate([table.ids[slot, start:end] for slot, start, end in spans])
        has_sampled = table.length[slots] > table.prompt[slots]
        not_prompt = np.where(has_sampled, 1, table.carried[slots])  # the newest token was sampled
        self.stats.prefilled_tokens += int((lengths - not_prompt).sum())
        self.stats.carried_tokens += int(table.carried[slots].sum())
        table.carried[slots] = 0
        pixels = table.pixels(slots)
        logits = self.model.forward(
            Plan(slots=slots, starts=starts, lengths=lengths, tokens=tokens, pixels=pixels)
        )
        return self._sample(slots, logits)

    def _sample(self, slots: Ints, logits: torch.Tensor) -> list[GenerationRequest]:
        """Append one sampled token to each slot's request; returns the requests that ended with it."""
        table = self._table
        columns = table.length[slots]
        temperature, greedy, top_k, top_p = (
            array[slots] for array in (table.temperature, table.greedy, table.top_k, table.top_p)
        )
        truncates = top_k.any() or (top_p < 1).any()
        metadata = SamplingMetadata(  # None where sampling can leave the step out
            temperature=None if (temperature == 1).all() else self._tensor(temperature),
            greedy=self._tensor(greedy) if greedy.any() else None,
            top_k=self._tensor(top_k) if truncates else None,
            top_p=self._tensor(top_p) if truncates else None,
        )
        # Each turn has its own row of random numbers, so a token depends on no other row of the batch.
        uniforms = self._tensor(table.uniforms[slots, columns])
        logits = self._constrained(slots, logits)
        draw = sample(logits, uniforms, metadata)
        tokens, logprobs = draw.tokens.cpu().numpy(), draw.logprobs.cpu().numpy()
        self._keep_sets(slots, draw.kept)
        ended: list[GenerationRequest] = []
        failed = np.isnan(logprobs)
        if failed.any():
            ended += [self._fail(int(slot)) for slot in slots[failed]]
            slots, columns = slots[~failed], columns[~failed]
            tokens, logprobs = tokens[~failed], logprobs[~failed]
        table.ids[slots, columns], table.logprobs[slots, columns] = tokens, logprobs
        table.cached[slots] = columns
        table.length[slots] = columns + 1
        self.stats.sampled_tokens += len(slots)
        stopped = (table.stops[slots] == tokens[:, None]).any(1)
        full = columns + 1 == table.end[slots]
        looks = stopped | full | table.streams_text[slots] | table.constrained[slots]
        for row in np.flatnonzero(looks).tolist():
            slot = int(slots[row])
            try:
                stops = bool(stopped[row]) or table.hits_stop_string(slot, int(tokens[row]))
                table.advance(slot)
            except Exception as error:  # whatever a tokenizer's decoder raises, only this turn fails
                ended.append(self._fail(slot, error))
                continue
            if stops:
                ended.append(table.finish(slot, "stop"))
            elif full[row]:
                ended.append(table.finish(slot, "length"))
        return ended

    def _constrained(self, slots: Ints, logits: torch.Tensor) -> torch.Tensor:
        """The logits with what the grammars of their requests forbid at NEVER, and what they raise raised."""
        table = self._table
        rows = np.flatnonzero(table.constrained[slots]).tolist()
        masks = [request.allowed for row in rows if (request := table.requests[slots[row]]) is not None]
        packed = [mask for mask in masks if mask is not None]
        if not packed:
            return logits
        logits = logits.float()
        part = logits[rows]
        forbid(part, self._tensor(np.stack(packed)))
        for row, slot in enumerate(slots[rows].tolist()):
            if (raised := table.raised(slot)) is not None:
                part[row, raised[0]] += raised[1]
        logits[rows] = part
        return logits

    def _keep_sets(self, slots: Ints, mask: torch.Tensor | None) -> None:
        """Note what top-k and top-p kept of [B, V] tokens, for the requests that carry it."""
        table = self._table
        for row, slot in enumerate(slots.tolist() if mask is not None else ()):
            request = table.requests[slot]
            if mask is not None and request is not None and request.params.carries_mask:
                place = int(table.length[slot] - table.prompt[slot])
                request.kept[place] = mask[row].nonzero()[:, 0].tolist()

    def _fail(self, slot: int, cause: Exception | None = None) -> GenerationRequest:
        """End a live request with an error, and drop its conversation; without a cause its logits are NaN.

        Its keys and values may be NaN, too. The next conversation in the slot would read them even from
        masked columns, since NaN plus minus infinity is NaN. So the slot is cleared.
        """
        table = self._table
        key = table.key_of[slot]
        request = table.detach(slot)
        request.error = BackendError(_why_not(request, cause))
        request.error.__cause__ = cause
        self.model.clear(slot)
        if key is not None:
            table.release(key)
        return request

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device)

    def _compact(self, slots: Ints) -> Ints:
        """Swap live slots into the lowest ones when more than a quarter of the decode rows would be idle.

        Copying a conversation's cache takes longer than a few idle rows of many steps.
        """
        count = round_up(len(slots), ROW_MULTIPLE)
        if 3 * self.model.decode_rows(slots) <= 4 * count:
            return slots
        high = [slot for slot in slots.tolist() if slot >= count]
        low = sorted(set(range(count)) - set(slots.tolist()))[: len(high)]
        self._table.swap(low, high)
        return np.sort(np.concatenate([slots[slots < count], low]))


class _ChunkedPrefill:
    """Chooses what one step prefills of requests without a session, which are those of a server's clients.

    Every request that decodes waits until the step ends, so one step must not prefill too much. Long prompts
    are prefilled in chunks: first the oldest, which newer ones would else delay for ever, then those of which
    least is cached. Short prompts are prefilled at once, the oldest first, up to a number of tokens. So a
    short request is answered soon, however many long ones there are. Requests with a session are members of a
    group, which waits for its slowest member anyway: they are all prefilled at once.
    """

    def __init__(self, model: CachedModel, table: SlotTable, lacking: Ints, num_decoding: int) -> None:
        """`lacking`: all slots that this step may prefill; `num_decoding`: how many slots decode in it."""
        left = (table.length - table.cached)[lacking]
        num_long = int((table.sessionless[lacking] & (left > _LONG_PROMPT)).sum())
        self._num_chunks_left = len(lacking)
        """Number of long prompts that still get a chunk."""
        self.length = model.num_columns
        """Tokens of one chunk."""
        if num_long and model.supports_chunked_prefill:
            budget = _CHUNK_BUDGET_WITH_DECODES if num_decoding else _CHUNK_BUDGET
            self._num_chunks_left = min(num_long, budget // _MIN_CHUNK)
            self.length = budget // self._num_chunks_left
        self._short_tokens_left = _SHORT_PROMPT_BUDGET
        self._table = table

    def select(self, slots: Ints) -> Ints:
        """The slots of a wave that are prefilled in this step."""
        table = self._table
        left = table.length - table.cached
        by_age = sorted(
            (slot for slot in slots.tolist() if table.sessionless[slot]),
            key=lambda slot: table.key_of[slot] or _FREE_SLOT,
        )
        long = [slot for slot in by_age if left[slot] > _LONG_PROMPT]
        ranked = long[:1] + sorted(long[1:], key=lambda slot: int(table.cached[slot]))
        waiting = set(ranked[self._num_chunks_left :])
        self._num_chunks_left -= len(ranked) - len(waiting)
        for slot in by_age:
            if left[slot] <= _LONG_PROMPT:
                if self._short_tokens_left <= 0:
                    waiting.add(slot)
                self._short_tokens_left -= int(left[slot])
        return np.array([slot for slot in slots.tolist() if slot not in waiting], np.int64)


_FREE_SLOT: Key = (2, 0, 0)
"""Sorts after every conversation."""


def _why_not(request: GenerationRequest, cause: Exception | None) -> str:
    if cause is not None:
        return f"the tokenizer cannot decode what was sampled ({type(cause).__name__}: {cause})"
    temperature = request.params.temperature
    if 0 < temperature < GREEDY_BELOW:
        return (
            f"temperature {temperature:g} overflows the logits: give 0 (greedy) or at least {GREEDY_BELOW:g}"
        )
    return "the model's logits are no numbers (NaN): its weights are damaged or its dtype overflows"


def _prefill_groups(slots: Ints, lacking: Ints) -> list[Ints]:
    """Groups of slots that lack a similar number of tokens, each within the token budget."""
    groups: list[list[int]] = []
    shortest = 0
    for index in np.argsort(lacking, kind="stable").tolist():
        longest = int(lacking[index])
        full = groups and (len(groups[-1]) + 1) * longest > _MAX_PREFILL_TOKENS
        if not groups or full or longest > 2 * shortest + 32:
            groups.append([])
            shortest = longest
        groups[-1].append(int(slots[index]))
    return [np.sort(np.array(group)) for group in groups]
