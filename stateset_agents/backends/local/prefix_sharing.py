"""Which conversations begin alike, so that what they share is forwarded once; asked by batcher.py.

A conversation that lacks a long beginning copies it from one that has it, or that is about to have it: the
members of a group share their prompt, all conversations a system prompt, a branch what its parent said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stateset_agents.backends.kv_cache.slots import Ints

__all__ = ["LEAST", "Share", "shared_prefixes"]

LEAST = 16
"""Fewer tokens than this are forwarded again rather than copied."""


class Share(NamedTuple):
    """What one slot takes over from another."""

    slot: int
    source: int
    """The slot to copy from; -1 where nothing long enough is shared."""
    tokens: int
    """How many of the slot's first tokens are copied; 0 without a source."""
    wave: int
    """0 where the source has them now; w + 1 where it gets them in wave w."""


def shared_prefixes(
    ids: Ints, held: Ints, length: Ints, having: Sequence[int], lacking: Sequence[int]
) -> list[Share]:
    """For each slot of `lacking`, in that order, the longest prefix that it can take over from another.

    Slot s stands for the tokens ids[s, :length[s]], of which the first held[s] are cached. A source is a slot
    of `having`, for what it holds, or one that stands earlier in `lacking`, for all its tokens. A slot's last
    token is always left to be forwarded. Of two sources equally good the first is taken.
    """
    sources = np.array([*having, *lacking])
    offered = np.concatenate([held[list(having)], length[list(lacking)]])
    ready = np.full(len(sources), -1)  # the wave after which a source has what it offers
    shares = []
    for place, slot in enumerate(lacking, start=len(having)):
        source, longest = -1, int(held[slot]) + LEAST - 1
        offers = np.minimum(offered[:place], length[slot] - 1)
        begin = 0
        while begin < place:
            # Only who offers more than the longest so far, and has the same token at that place, may win.
            hopeful = begin + np.flatnonzero(offers[begin:] > longest)
            hopeful = (
                hopeful[ids[sources[hopeful], longest] == ids[slot, longest]] if len(hopeful) else hopeful
            )
            if not len(hopeful):
                break
            first = int(hopeful[0])
            shared = common_prefix(ids[sources[first], : offers[first]], ids[slot, : offers[first]])
            if shared > longest:
                source, longest = first, shared
            begin = first + 1
        if source < 0:
            ready[place] = 0
            shares.append(Share(slot, -1, 0, 0))
        else:
            has_it_now = longest <= held[sources[source]]
            ready[place] = 0 if has_it_now else ready[source] + 1
            shares.append(Share(slot, int(sources[source]), longest, int(ready[place])))
    return shares


def common_prefix(some: Ints, others: Ints) -> int:
    """How many tokens two sequences of the same length begin with alike."""
    same = some == others
    first = int(same.argmin()) if len(same) else 0
    return len(same) if len(same) and same[first] else first
