"""Who sits in which slot and what was said there, as arrays with a row for each slot; kept by batcher.py.

The columns of the arrays are those of the model's cache: the token at position p, the uniform that draws it
and its log-prob all stand in column p.
"""

from __future__ import annotations

import numpy as np

from stateset_agents.backends.kv_cache.slots import COLUMN_MULTIPLE, ROW_MULTIPLE, CachedModel, Ints, round_up
from stateset_agents.backends.local.request import Key, Turn
from stateset_agents.types.errors import BackendError
from stateset_agents.types.messages import FinishReason

__all__ = ["SlotTable"]


class SlotTable:
    """Slots for conversations, within a bound on cached tokens; the longest idle make room."""

    def __init__(self, model: CachedModel, max_cached_tokens: int) -> None:
        self._model = model
        self._max_cached_tokens = max_cached_tokens
        self.slot_of: dict[Key, int] = {}
        self.key_of: list[Key | None] = []
        self.turns: list[Turn | None] = []
        """The live turn of each slot."""
        self.num_evictions = 0
        self._put_away: tuple[int, int] | None = None
        """Slots and columns of the store, while the model has none."""
        tokens, slots = np.zeros((0, 0), np.int64), np.zeros(0, np.int64)
        self.ids: Ints = tokens
        """[slots, columns]"""
        self.uniforms = np.zeros((0, 0), np.float64)
        self.logprobs = np.zeros((0, 0), np.float32)
        self.length: Ints = slots
        """[slots] tokens of the conversation so far."""
        self.held: Ints = slots
        """[slots] how many of them, from the first, are cached."""
        self.prompt: Ints = slots
        """[slots] tokens of the live turn's prompt."""
        self.end: Ints = slots
        """[slots] length at which the live turn is full; without one, what is held."""
        self.carried: Ints = slots
        """[slots] 1 while the token that ended the turn before is still to be forwarded."""
        self.last_used: Ints = slots
        """[slots] step in which it was last live."""
        self.temperature = np.zeros(0, np.float32)
        self.top_k: Ints = slots
        self.top_p = np.zeros(0, np.float32)
        self.greedy = np.zeros(0, np.bool_)
        self.heard = np.zeros(0, np.bool_)
        """[slots] whether each token's text matters at once."""
        self.alone = np.zeros(0, np.bool_)
        """[slots] whether the turn belongs to no session."""
        self.stops: Ints = tokens
        """[slots, most stop ids of one turn], filled up with -1."""

    # --- conversations ----------------------------------------------------------------------------------

    def occupy(self, key: Key) -> int:
        """The lowest free slot, now this conversation's; `make_room` sees to it that there is one."""
        slot = self._lowest_free()
        self.key_of[slot], self.slot_of[key] = key, slot
        return slot

    def release(self, key: Key) -> None:
        """Forget a conversation; unknown keys are ignored."""
        slot = self.slot_of.pop(key, None)
        if slot is not None:
            self.key_of[slot] = self.turns[slot] = None
            self.length[slot] = self.held[slot] = self.end[slot] = self.carried[slot] = 0
            self.last_used[slot] = 0

    def begin(self, slot: int, turn: Turn) -> None:
        """Lay a turn down in a slot whose `held` tokens are a prefix of its prompt."""
        num_prompt, params = turn.num_prompt, turn.params
        self.turns[slot] = turn
        self.ids[slot, :num_prompt] = turn.prompt
        self.length[slot] = self.prompt[slot] = num_prompt
        self.end[slot] = num_prompt + turn.limit
        self.uniforms[slot, num_prompt : num_prompt + turn.limit] = turn.uniforms
        # A greedy row takes the likeliest token of the plain distribution: nothing is cut from it.
        self.greedy[slot] = greedy = params.temperature == 0
        self.temperature[slot] = 1.0 if greedy else min(params.temperature, _MOST_HEAT)
        self.top_k[slot] = 0 if greedy else min(params.top_k, _MOST_K)
        self.top_p[slot] = 1.0 if greedy else params.top_p
        self.heard[slot] = turn.text is not None
        self.alone[slot] = turn.key[0] == 1
        if len(turn.stop_ids) > self.stops.shape[1]:
            more = len(turn.stop_ids) - self.stops.shape[1]
            self.stops = np.pad(self.stops, ((0, 0), (0, more)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(turn.stop_ids)] = sorted(turn.stop_ids)

    def says_stop(self, slot: int, token: int) -> bool:
        """Let whoever listens to a slot's turn hear its newest token; is there a stop string now?"""
        turn = self.turns[slot]
        return turn is not None and turn.text is not None and turn.text.add(token)

    def drop(self, slot: int) -> Turn:
        """Take the live turn off a slot, which keeps what is cached."""
        turn, self.turns[slot] = self.turns[slot], None
        if turn is None:
            raise BackendError(f"slot {slot} has no live turn; please report this")
        self.end[slot] = self.held[slot]
        return turn

    def finish(self, slot: int, reason: FinishReason) -> Turn:
        """Hand a live turn what was sampled for it; its conversation is idle now."""
        turn = self.drop(slot)
        turn.finish_reason = reason
        sampled = slice(int(self.prompt[slot]), int(self.length[slot]))
        turn.sampled = self.ids[slot, sampled].tolist()
        turn.logprobs = self.logprobs[slot, sampled].tolist()
        return turn

    # --- room -------------------------------------------------------------------------------------------

    def make_room(self, key: Key, columns: int, spare: Key | None = None) -> bool:
        """See to a slot of so many columns for a conversation, evicting the longest idle while it must.

        Who goes, and who sits where, follows from the conversations that are there, not from what the store
        has grown to before: a resumed run does as one that was never stopped.

        False while live conversations leave no room, or `spare` does, which is not evicted. Raises
        BackendError where the conversation can never fit.
        """
        if self._put_away is not None:
            self._model.resize(*self._put_away, [])
            self._put_away = None
        while True:
            others = {other: slot for other, slot in self.slot_of.items() if other != key}
            needed = self.end[list(others.values())].max(initial=columns)
            widest = round_up(int(needed), COLUMN_MULTIPLE)
            most = self._max_cached_tokens // widest
            if len(others) < most:
                self._move_below(most)
                here = self.slot_of.get(key, self._lowest_free())
                self._grow(1 + max([here, *self.slot_of.values()]), widest)
                return True
            if not others:
                raise BackendError(
                    f"one conversation may need {widest} cached tokens{self._in_bytes(widest)} and "
                    f"max_cached_tokens is {self._max_cached_tokens}"
                    f"{self._in_bytes(self._max_cached_tokens)}; raise it or lower max_new_tokens"
                )
            idle = [other for other, slot in others.items() if self.turns[slot] is None and other != spare]
            if not idle:
                return False
            self.release(min(idle, key=lambda other: (self.last_used[others[other]], other)))
            self.num_evictions += 1

    def put_away(self) -> None:
        """Free the store until the next conversation; there must be none now."""
        if self._put_away is None:
            self._put_away = (self._model.num_slots, self._model.num_columns)
            self._model.resize(0, 0, [])

    def _in_bytes(self, tokens: int) -> str:
        size = tokens * self._model.token_bytes
        return f" ({size / 2**20:.3g} MiB)" if size else ""

    def _move_below(self, most: int) -> None:
        """Bring conversations down into free slots where wider columns leave room for fewer slots."""
        high = [slot for slot in range(most, len(self.key_of)) if self.key_of[slot] is not None]
        free = [slot for slot in range(min(most, len(self.key_of))) if self.key_of[slot] is None]
        if high:
            self.swap(free[: len(high)], high)

    def _grow(self, needed: int, columns: int) -> None:
        """Have at least so many slots and columns; doubling within the bound, so that it's rare."""
        have_slots, have_columns = self._model.num_slots, self._model.num_columns
        if needed <= have_slots and columns <= have_columns:
            return
        slots = round_up(needed, ROW_MULTIPLE)
        roomy_slots = have_slots if needed <= have_slots else max(slots, 2 * have_slots)
        roomy_columns = have_columns if columns <= have_columns else max(columns, 2 * have_columns)
        if roomy_slots * roomy_columns <= self._max_cached_tokens:
            slots, columns = roomy_slots, roomy_columns
        else:
            slots = min(slots, self._max_cached_tokens // columns)
        self._model.resize(slots, columns, list(range(min(slots, have_slots))))
        for name in _ARRAYS:
            held = getattr(self, name)
            fresh = np.zeros((slots, *((columns,) if name in _MATRICES else held.shape[1:])), held.dtype)
            part = tuple(map(slice, np.minimum(fresh.shape, held.shape)))
            fresh[part] = held[part]
            setattr(self, name, fresh)
        self.key_of = [*self.key_of, *[None] * slots][:slots]
        self.turns = [*self.turns, *[None] * slots][:slots]

    def _lowest_free(self) -> int:
        return self.key_of.index(None) if None in self.key_of else len(self.key_of)

    def swap(self, low: list[int], high: list[int]) -> None:
        """Let what stands in the i-th slot of `low` and of `high` change places."""
        into, out_of = [*low, *high], [*high, *low]
        needed = [(a, b) for a, b in zip(into, out_of, strict=True) if self.held[b]]  # some are empty
        self._model.permute([a for a, _ in needed], [b for _, b in needed], int(self.held[out_of].max()))
        for name in _ARRAYS:
            array = getattr(self, name)
            array[into] = array[out_of]
        for a, b in zip(low, high, strict=True):
            self.turns[a], self.turns[b] = self.turns[b], self.turns[a]
            self.key_of[a], self.key_of[b] = self.key_of[b], self.key_of[a]
        for slot in into:
            key = self.key_of[slot]
            if key is not None:
                self.slot_of[key] = slot


_MOST_HEAT = float(np.finfo(np.float32).max)
_MOST_K = np.iinfo(np.int64).max
_MATRICES = ("ids", "uniforms", "logprobs")
_ARRAYS = (
    *_MATRICES,
    *("length", "held", "prompt", "end", "carried", "last_used"),
    *("temperature", "top_k", "top_p", "greedy", "heard", "alone", "stops"),
)
