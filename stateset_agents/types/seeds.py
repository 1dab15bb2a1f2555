"""Random streams by name: every random choice of a run comes from (seed, what it is for), never from a
shared generator, so the order in which things finish cannot change them."""

from __future__ import annotations

import hashlib


def derive(seed: int, *path: int | str) -> int:
    """A 63-bit key for one stream, e.g. `derive(seed, "turn", step, scenario.id, member, turn)`."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
