"""The base of models with a slot store: fused.py and batched.py."""

from __future__ import annotations

from stateset_agents.backends.kv_cache.slot_store import SlotStore
from stateset_agents.backends.kv_cache.slots import ROW_MULTIPLE, FullForward, Ints, round_up

__all__ = ["StoreModel"]


class StoreModel(FullForward):
    """Slots, kept in a `SlotStore`."""

    num_slots = 0
    num_columns = 0
    supports_chunked_prefill = True
    _store: SlotStore

    @property
    def token_bytes(self) -> int:
        """Bytes that one token of one slot takes in all layers."""
        return self._store.token_bytes

    def decode_rows(self, slots: Ints) -> int:
        """Rounded up to ROW_MULTIPLE; gaps between slots cause no padding."""
        return round_up(len(slots), ROW_MULTIPLE)

    def reusable_tokens(self, slot: int, shared: int) -> int:
        """All: attention can drop any columns on the right."""
        return shared

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """Change the size of the cache; the slots in `keep` become slots 0, 1, ..."""
        self.num_slots, self.num_columns = num_slots, num_columns
        self._store.resize(num_slots, num_columns, keep)

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` gets the former content of slot `out_of[i]`, in the first `width` columns."""
        self._store.permute(into, out_of, width)

    def clear(self, slot: int) -> None:
        """Fill a slot with zeros."""
        self._store.clear(slot)
