"""A generator whose numbers JavaScript draws, too, bit for bit, so that a page shows Python's parts."""

from __future__ import annotations

from collections.abc import Iterator

_WORD = 0xFFFFFFFF


def mulberry32(seed: int) -> Iterator[float]:
    """Numbers in [0, 1), each a multiple of 2**-32; `seed`: its lowest 32 bits count.

    Tommy Ettinger's mulberry32 (public domain). Seed 1 begins .62707394058816, .002735721180215478.
    """
    state = seed & _WORD
    while True:
        state = (state + 0x6D2B79F5) & _WORD
        mixed = ((state ^ (state >> 15)) * (state | 1)) & _WORD
        mixed ^= (mixed + ((mixed ^ (mixed >> 7)) * (mixed | 61) & _WORD)) & _WORD
        yield ((mixed ^ (mixed >> 14)) & _WORD) / 4294967296
