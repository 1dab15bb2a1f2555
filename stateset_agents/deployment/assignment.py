"""Which arm a conversation gets: by a keyed hash of its id, so that the same id always gets the same arm."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Arm = Literal["baseline", "candidate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What was decided when a conversation was first seen; it stays."""

    number: int
    """In the order of admission, from 1."""
    conversation: str
    arm: Arm
    probability: float
    """Of the candidate: the share at that moment."""
    at: float
    """Seconds of the clock."""
    is_moved: bool = False
    """It was the candidate's, and a rollback gave it to the baseline."""


def new_salt() -> str:
    """32 random hexadecimal digits."""
    return secrets.token_hex(16)


def bucket(salt: str, conversation: str) -> float:
    """A number in [0, 1) that looks uniform to those who do not know the salt.

    53 bits of BLAKE2b (RFC 7693), keyed: whoever chooses conversation ids cannot choose an arm.
    """
    digest = hashlib.blake2b(conversation.encode(errors="surrogatepass"), digest_size=8, key=_key(salt))
    return (int.from_bytes(digest.digest(), "big") >> 11) / 2**53


@lru_cache
def _key(salt: str) -> bytes:
    """Of any length that BLAKE2b takes."""
    return hashlib.blake2b(salt.encode(), digest_size=32).digest()


def arm_of(place: float, share: float) -> Arm:
    """The candidate's below the share: while the share grows, no conversation leaves the candidate.

    >>> arm_of(0.04, 0.05), arm_of(0.05, 0.05), arm_of(0.99, 1.0)
    ('candidate', 'baseline', 'candidate')
    """
    return "candidate" if place < share else "baseline"
