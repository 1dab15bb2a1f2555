"""Continuous batching of live conversations over cache slots; driven by the worker thread of backend.py.

A turn is admitted (it gets a slot), then every `step` gives each live turn one token. Those whose slot lacks
more than the newest token first copy what another slot has of it (prefix_sharing.py) and forward the rest
together; the others decode together. A turn that ends leaves its cache in its slot for the next one. All of
it runs in one thread, in an order that follows from the turns alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stateset_agents.backends.kv_cache.memory import hand_back
from stateset_agents.backends.kv_cache.slots import ROW_MULTIPLE, CachedModel, Ints, Plan, round_up
from stateset_agents.backends.local.prefix_sharing import LEAST, Share, common_prefix, shared_prefixes
from stateset_agents.backends.local.request import Key, Turn, new_turn
from stateset_agents.backends.local.slot_table import SlotTable
from stateset_agents.backends.sampling import Knobs, sample
from stateset_agents.types.errors import BackendError
from stateset_agents.types.messages import GREEDY_BELOW

__all__ = ["Batcher", "Key", "Stats", "Turn", "new_turn"]

_LONG = 256
"""Tokens from which on a stranger's prompt is read in pieces."""
_PIECES_BESIDE_DECODING, _PIECES_ALONE, _LEAST_PIECE = 64, 1024, 32
"""Tokens of long prompts that one step reads in all, and of one of them at the least."""
_SHORT_TOKENS = 512
"""Tokens of short prompts that one step reads, give or take the last of them."""
_PREFILL_TOKENS = 8192  # most tokens of one prefill forward, padding included, unless one row alone has more


@dataclass(slots=True, kw_only=True)
class Stats:
    """Counts since the start, for tests, tuning and metrics."""

    prefilled_tokens: int = 0
    """Prompt tokens forwarded; a sampled token forwarded along with them counts as carried instead."""
    shared_tokens: int = 0
    """Prompt tokens copied from another conversation instead."""
    carried_tokens: int = 0
    """Tokens that ended a turn, so that they were forwarded only with the next turn's prompt."""
    sampled_tokens: int = 0
    prefills: int = 0
    decode_steps: int = 0
    decode_rows: int = 0
    """Rows of all decode steps, idle ones included."""
    idle_rows: int = 0
    evictions: int = 0


class Batcher:
    """The conversations in the cache, and the live turns among them."""

    def __init__(self, model: CachedModel, *, max_cached_tokens: int) -> None:
        """`max_cached_tokens` bounds slots times columns of the cache."""
        self.model = model
        self.version = 0
        self.stats = Stats()
        self._table = SlotTable(model, max_cached_tokens)
        self._clock = 0

    @property
    def num_conversations(self) -> int:
        """How many hold a slot."""
        return len(self._table.slot_of)

    # --- what comes and goes ----------------------------------------------------------------------------

    def admit(self, turn: Turn) -> bool:
        """Give a turn its slot, keeping the longest prefix that its conversation has cached.

        False while live conversations leave no room for it. Raises BackendError where it can never fit.
        """
        table = self._table
        if not self._make_room(turn.key, turn.num_prompt + turn.limit):
            return False
        slot = table.slot_of.get(turn.key)
        if slot is None:
            slot = table.occupy(turn.key)
        held, length = int(table.held[slot]), int(table.length[slot])
        known = min(length, turn.num_prompt)
        shared = common_prefix(table.ids[slot, :known], turn.prompt[:known])
        kept = self.model.keepable(slot, min(shared, held, turn.num_prompt - 1))
        # The token that ended the last turn was sampled but never forwarded: it comes next, if it was kept.
        table.carried[slot] = kept == held == length - 1 and shared == length
        table.held[slot] = kept
        table.begin(slot, turn)
        turn.begun = time.monotonic()
        turn.versions.append((self.version, 0))
        return True

    def fork(self, source: Key, into: Key) -> None:
        """Copy what `source` has cached into a slot of `into`; nothing where there is no room to spare."""
        table = self._table
        held = int(table.held[table.slot_of[source]]) if source in table.slot_of else 0
        if held == 0 or source == into:
            return
        table.release(into)
        if not self._make_room(into, held, spare=source):
            return
        copy, original = table.occupy(into), table.slot_of[source]
        length = min(int(table.length[original]), held + 1)
        table.ids[copy, :length] = table.ids[original, :length]
        table.length[copy], table.last_used[copy] = length, self._clock
        table.held[copy] = table.end[copy] = held
        self.model.permute([copy], [original], held)

    def release(self, key: Key) -> None:
        """Forget a conversation and free its slot; unknown keys are ignored."""
        self._table.release(key)

    def cancel(self, turn: Turn) -> None:
        """Drop a live turn; its conversation stays cached as far as it came."""
        slot = self._table.slot_of.get(turn.key)
        if slot is not None and self._table.turns[slot] is turn:
            self._table.drop(slot)

    def renew(self, version: int) -> None:
        """New weights are in: idle conversations go, live ones are refilled at their next step."""
        self.version = version
        table = self._table
        table.held[:] = table.carried[:] = 0
        for key, slot in list(table.slot_of.items()):
            turn = table.turns[slot]
            if turn is None:
                table.release(key)
            else:
                turn.versions.append((version, int(table.length[slot] - table.prompt[slot])))

    def rest(self) -> None:
        """Free what only generation needs, the cache and packed weights, unless a conversation is cached."""
        if not self._table.slot_of:
            self._table.put_away()
            self.model.refresh()
        hand_back()

    def _make_room(self, key: Key, columns: int, spare: Key | None = None) -> bool:
        made = self._table.make_room(key, columns, spare)
        self.stats.evictions = self._table.num_evictions
        return made

    # --- one step ---------------------------------------------------------------------------------------

    def step(self, turns: Sequence[Turn]) -> list[Turn]:
        """Sample one token for each of these admitted turns; returns those that ended by it.

        A turn that cannot go on ends with its `error` set, and its conversation is forgotten; the others of
        its batch sample what they would have sampled without it.
        """
        self._clock += 1
        table = self._table
        slots = np.array(sorted([table.slot_of[turn.key] for turn in turns]))
        table.last_used[slots] = self._clock
        lacking = table.length[slots] - table.held[slots]
        decoding = slots[lacking == 1]
        ended: list[Turn] = []
        if len(decoding) < len(slots):
            pieces = self._pieces(slots[lacking > 1], len(decoding))
            for wave in self._waves(slots[lacking > 1]):
                filling = pieces.next(self._copy(wave))
                left = table.length[filling] - table.held[filling]
                long = table.alone[filling] & (left > max(pieces.length, _LONG))
                for group in _prefill_groups(filling[long], np.full(long.sum(), pieces.length)):
                    self._read(group, pieces.length)
                whole = (left > 1) & ~long
                for group in _prefill_groups(filling[whole], left[whole]):
                    self.stats.prefills += 1
                    ended += self._forward(group)
                decoding = np.concatenate([decoding, filling[left == 1]])
        if len(decoding):
            decoding = self._low(np.sort(decoding))
            self.stats.decode_steps += 1
            rows = self.model.decode_rows(decoding)
            self.stats.decode_rows += rows
            self.stats.idle_rows += rows - len(decoding)
            ended += self._forward(decoding)
        return ended

    def _pieces(self, lacking: Ints, num_decoding: int) -> _Pieces:
        """How this step shares out what it prefills for strangers (turns without a session)."""
        table = self._table
        left = (table.length - table.held)[lacking]
        num_long = int((table.alone[lacking] & (left > _LONG)).sum())
        if not num_long or not self.model.reads_in_pieces:
            length, most = self.model.num_columns, len(lacking)
        else:
            budget = _PIECES_BESIDE_DECODING if num_decoding else _PIECES_ALONE
            most = min(num_long, budget // _LEAST_PIECE)
            length = budget // most
        return _Pieces(table, length, most)

    def _waves(self, lacking: Ints) -> Iterator[list[Share]]:
        """Who copies from whom, in an order in which it can be done; the longest go first."""
        table = self._table
        ranked = sorted(lacking.tolist(), key=lambda slot: (-table.length[slot], table.key_of[slot]))
        if (table.length[lacking] - table.held[lacking] <= LEAST).all():
            yield [Share(slot, -1, 0, 0) for slot in ranked]
            return
        having = [slot for _, slot in sorted(table.slot_of.items())]
        shares = shared_prefixes(table.ids, table.held, table.length, having, ranked)
        for wave in range(1 + max(share.wave for share in shares)):
            yield [share for share in shares if share.wave == wave]

    def _copy(self, wave: list[Share]) -> Ints:
        """Take over what the slots of a wave share with others, as far as the model can cut it off there.

        Returns the slots of the wave that go on now; those whose source is itself read in pieces wait for it.
        """
        table = self._table
        into, out_of, kept = [], [], []
        for share in wave:
            if share.source >= 0:
                tokens = self.model.keepable(share.source, min(share.tokens, int(table.held[share.source])))
                if tokens > table.held[share.slot]:
                    into.append(share.slot)
                    out_of.append(share.source)
                    kept.append(tokens)
        if into:
            self.model.permute(into, out_of, max(kept))
            self.stats.shared_tokens += int((kept - table.held[into] - table.carried[into]).sum())
            table.held[into] = kept
            table.carried[into] = 0
        ready = [share.slot for share in wave if share.wave == 0 or share.tokens <= table.held[share.source]]
        return np.array(ready, np.int64)

    def _read(self, slots: Ints, length: int) -> None:
        """Forward the next `length` tokens that each of these slots (ascending) lacks, and sample nothing."""
        table = self._table
        starts = table.held[slots]
        tokens = np.concatenate(
            [table.ids[slot, start : start + length] for slot, start in zip(slots, starts, strict=True)]
        )
        self.stats.prefills += 1
        self.stats.prefilled_tokens += len(tokens)
        self.model.forward(
            Plan(slots=slots, starts=starts, lengths=np.full(len(slots), length), tokens=tokens)
        )
        table.held[slots] = starts + length

    def _forward(self, slots: Ints) -> list[Turn]:
        """Forward all that these slots (ascending) lack, and sample one token for each."""
        table = self._table
        starts = table.held[slots]
        lengths = table.length[slots] - starts
        if lengths.max() == 1:
            tokens = table.ids[slots, starts]
        else:
            pieces = zip(slots, starts, starts + lengths, strict=True)
            tokens = np.concatenate([table.ids[slot, start:end] for slot, start, end in pieces])
        sampled_before = table.length[slots] > table.prompt[slots]
        known = np.where(sampled_before, 1, table.carried[slots])  # the newest sampled token is no prompt
        self.stats.prefilled_tokens += int((lengths - known).sum())
        self.stats.carried_tokens += int(table.carried[slots].sum())
        table.carried[slots] = 0
        logits = self.model.forward(Plan(slots=slots, starts=starts, lengths=lengths, tokens=tokens))
        return self._sample(slots, logits)

    def _sample(self, slots: Ints, logits: torch.Tensor) -> list[Turn]:
        """Append one sampled token to each slot's turn; returns the turns that it ended."""
        table = self._table
        places = table.length[slots]
        uniforms = self._tensor(table.uniforms[slots, places])
        drawn, drawn_logprobs = sample(logits, uniforms, self._knobs(slots))
        tokens, logprobs = drawn.cpu().numpy(), drawn_logprobs.cpu().numpy()
        ended: list[Turn] = []
        failed = np.isnan(logprobs)
        if failed.any():
            ended += [self._fail(int(slot)) for slot in slots[failed]]
            slots, places = slots[~failed], places[~failed]
            tokens, logprobs = tokens[~failed], logprobs[~failed]
        table.ids[slots, places], table.logprobs[slots, places] = tokens, logprobs
        table.held[slots] = places
        table.length[slots] = places + 1
        self.stats.sampled_tokens += len(slots)
        stopped = (table.stops[slots] == tokens[:, None]).any(1)
        full = places + 1 == table.end[slots]
        for row in np.flatnonzero(stopped | full | table.heard[slots]).tolist():
            slot = int(slots[row])
            try:
                stops = bool(stopped[row]) or table.says_stop(slot, int(tokens[row]))
            except Exception as error:  # whatever a tokenizer's decoder raises ends this turn only
                ended.append(self._fail(slot, error))
                continue
            if stops:
                ended.append(table.finish(slot, "stop"))
            elif full[row]:
                ended.append(table.finish(slot, "length"))
        return ended

    def _fail(self, slot: int, cause: Exception | None = None) -> Turn:
        """End a live turn with an error, and forget its conversation; without a cause its logits are NaN.

        What it stored may be NaN. Whoever has the slot next would read that even from columns that its mask
        hides, for NaN plus minus infinity is NaN; so the slot is cleared.
        """
        table = self._table
        key = table.key_of[slot]
        turn = table.drop(slot)
        turn.error = BackendError(_why_not(turn, cause))
        turn.error.__cause__ = cause
        self.model.clear(slot)
        if key is not None:
            table.release(key)
        return turn

    def _knobs(self, slots: Ints) -> Knobs:
        table = self._table
        temperature, greedy, top_k, top_p = (
            array[slots] for array in (table.temperature, table.greedy, table.top_k, table.top_p)
        )
        truncates = top_k.any() or (top_p < 1).any()
        return Knobs(
            temperature=None if (temperature == 1).all() else self._tensor(temperature),
            greedy=self._tensor(greedy) if greedy.any() else None,
            top_k=self._tensor(top_k) if truncates else None,
            top_p=self._tensor(top_p) if truncates else None,
        )

    def _tensor(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.model.device)

    def _low(self, slots: Ints) -> Ints:
        """Swap scattered live slots into the lowest ones when more than a quarter of the rows would idle."""
        count = round_up(len(slots), ROW_MULTIPLE)
        if 3 * self.model.decode_rows(slots) <= 4 * count:
            return slots
        high = [slot for slot in slots.tolist() if slot >= count]
        low = sorted(set(range(count)) - set(slots.tolist()))[: len(high)]
        self._table.swap(low, high)
        return np.sort(np.concatenate([slots[slots < count], low]))


class _Pieces:
    """What one step prefills for strangers, the clients of a server: whoever decodes waits for every step.

    Long prompts are read in pieces, those first of which least was read; and always the oldest, which
    newcomers would else keep waiting. Short prompts are read whole, the oldest first, up to a number of
    tokens. So a short request is through soon, however many long ones there are. Members of a group, which
    have a session, wait for their slowest anyway, and are all read whole at once.
    """

    def __init__(self, table: SlotTable, length: int, most: int) -> None:
        """`length`: tokens of one piece; `most`: how many long prompts get one."""
        self.length = length
        self._most = most
        self._tokens = _SHORT_TOKENS
        self._table = table

    def next(self, slots: Ints) -> Ints:
        """Those of a wave's slots that go on in this step."""
        table = self._table
        left = table.length - table.held
        by_age = sorted((slot for slot in slots.tolist() if table.alone[slot]), key=self._age)
        long = [slot for slot in by_age if left[slot] > _LONG]
        chosen = long[:1] + sorted(long[1:], key=lambda slot: int(table.held[slot]))
        waiting = set(chosen[self._most :])
        self._most -= len(chosen) - len(waiting)
        for slot in by_age:
            if left[slot] <= _LONG:
                if self._tokens <= 0:
                    waiting.add(slot)
                self._tokens -= int(left[slot])
        return np.array([slot for slot in slots.tolist() if slot not in waiting], np.int64)

    def _age(self, slot: int) -> Key:
        return self._table.key_of[slot] or _NOBODY


_NOBODY: Key = (2, 0, 0)


def _why_not(turn: Turn, cause: Exception | None) -> str:
    if cause is not None:
        return f"the tokenizer cannot decode what was sampled ({type(cause).__name__}: {cause})"
    temperature = turn.params.temperature
    if 0 < temperature < GREEDY_BELOW:
        return (
            f"temperature {temperature:g} makes the model's logits overflow: give 0 for greedy sampling, or "
            f"at least {GREEDY_BELOW:g}"
        )
    return (
        "the model's logits for this conversation are no numbers (NaN): its weights are damaged or its dtype "
        "overflows"
    )


def _prefill_groups(slots: Ints, lacking: Ints) -> list[Ints]:
    """Slots of like length together, ascending, each group within the token budget."""
    groups: list[list[int]] = []
    shortest = 0
    for place in np.argsort(lacking, kind="stable").tolist():
        longest = int(lacking[place])
        full = groups and (len(groups[-1]) + 1) * longest > _PREFILL_TOKENS
        if not groups or full or longest > 2 * shortest + 32:
            groups.append([])
            shortest = longest
        groups[-1].append(int(slots[place]))
    return [np.sort(np.array(group)) for group in groups]
