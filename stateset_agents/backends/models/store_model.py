"""What the models over a slot store share; fused.py and general.py stand on it."""

from __future__ import annotations

from stateset_agents.backends.kv_cache.slot_store import SlotStore
from stateset_agents.backends.kv_cache.slots import ROW_MULTIPLE, FullForward, Ints, round_up

__all__ = ["StoreModel"]


class StoreModel(FullForward):
    """What models over a slot store share (fused.py, general.py)."""

    num_slots = 0
    num_columns = 0
    reads_in_pieces = True
    _store: SlotStore

    @property
    def token_bytes(self) -> int:
        """Memory that one token of one slot takes in all layers."""
        return self._store.token_bytes

    def decode_rows(self, slots: Ints) -> int:
        """Slots may lie anywhere: only the padding to eights idles."""
        return round_up(len(slots), ROW_MULTIPLE)

    def keepable(self, slot: int, shared: int) -> int:
        """All of them: attention forgets any columns from the right."""
        return shared

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """Move to a store of another size; the slots in `keep` become slots 0, 1, ... of it."""
        self.num_slots, self.num_columns = num_slots, num_columns
        self._store.resize(num_slots, num_columns, keep)

    def permute(self, into: list[int], out_of: list[int], width: int) -> None:
        """Slot `into[i]` becomes what slot `out_of[i]` was, for the first `width` columns."""
        self._store.permute(into, out_of, width)

    def clear(self, slot: int) -> None:
        """Zeros in all of a slot's columns."""
        self._store.clear(slot)
