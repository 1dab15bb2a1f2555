"""Prefix sharing: tokens with which several conversations begin are forwarded only once; for batcher.py.

A conversation that lacks a long prefix copies it from one that has it cached, or that is about to cache it.
The members of a group share their prompt, all conversations the system prompt, a branch its parent's turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stateset_agents.backends.kv_cache.slots import Ints

MIN_SHARED_TOKENS = 16
"""A shorter shared prefix is forwarded again instead of copied."""


class PrefixCopy(NamedTuple):
    """The prefix that one slot copies from another."""

    slot: int
    source: int
    """The slot to copy from; -1 if no shared prefix is long enough."""
    tokens: int
    """How many of the slot's first tokens are copied; 0 without a source."""
    wave: int
    """0 if the source has these tokens now; w + 1 if it gets them in wave w."""


def shared_prefixes(
    ids: Ints, cached: Ints, length: Ints, occupied: Sequence[int], lacking: Sequence[int]
) -> list[PrefixCopy]:
    """For each slot of `lacking`, in that order, the longest prefix that it can copy from another slot.

    Slot s has the tokens ids[s, :length[s]], of which the first cached[s] are cached. A source is a slot of
    `occupied`, with its cached tokens, or an earlier slot of `lacking`, with all its tokens. A slot's last
    token is never copied: it is forwarded. Of two equally good sources the first is taken.
    """
    sources = np.array([*occupied, *lacking])
    offered = np.concatenate([cached[list(occupied)], length[list(lacking)]])
    ready = np.full(len(sources), -1)  # the wave after which a source has the tokens that it offers
    copies = []
    for index, slot in enumerate(lacking, start=len(occupied)):
        source, longest = -1, int(cached[slot]) + MIN_SHARED_TOKENS - 1
        offers = np.minimum(offered[:index], length[slot] - 1)
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
