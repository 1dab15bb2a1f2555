"""The state of a deployment, the moves from it, and the arms of conversations.

shadow       the baseline answers everybody; what the candidate would have done is checked and recorded
gradual      the candidate answers a share of the new conversations
full         the candidate answers all new conversations
rolled_back  the baseline answers again, also in conversations under way; the end
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, cast, get_args

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives, expect_that, nearest

Mode = Literal["shadow", "gradual", "full", "rolled_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The state: what decides who answers."""

    id: str
    mode: Mode = "shadow"
    share: float = 0.0
    """Share of new conversations that go to the candidate."""
    since: float
    """Seconds of the clock: the last move."""
    version: int = 0
    """Number of moves so far."""
    why: str = "new"
    outcomes: int = 0
    """Number of outcomes in the evidence at the last move: a stage counts its own from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One transition: where to, when, by whom, why, and what was known."""

    mode: Mode
    share: float
    at: float
    who: str
    why: str
    forced: bool = False
    """True if it was made by hand against the evidence."""
    evidence: Mapping[str, float | int | None] = field(default_factory=dict)
    """The evidence at this moment, as the journal keeps it."""


def transition(state: Deployment, move: Move) -> Deployment:
    """The state after a move. Raises ConfigurationError for one after a rollback: another try is another
    deployment, with evidence and errors of its own.

    >>> move = Move(mode="gradual", share=0.05, at=9.0, who="me", why="go")
    >>> transition(Deployment(id="0001", since=0.0), move).share
    0.05
    """
    if state.mode == "rolled_back":
        raise ConfigurationError(
            f"deployment {state.id} is {state.mode} and cannot become {move.mode}: start a new deployment"
        )
    fixed = {"shadow": 0.0, "full": 1.0, "rolled_back": 0.0}.get(move.mode)
    if fixed is None:
        expect_that(0 <= move.share <= 1, "the share", "be from 0 to 1", move.share)
    elif move.share != fixed:
        raise ConfigurationError(f"the share of {move.mode} is {fixed:g}, got {move.share!r}: leave it out")
    return Deployment(
        id=state.id,
        mode=move.mode,
        share=move.share,
        since=move.at,
        version=state.version + 1,
        why=move.why,
        outcomes=int(move.evidence.get("outcomes") or 0),
    )


def checked_mode(name: str) -> Mode:
    """The mode of this name; raises ConfigurationError for another."""
    if name in get_args(Mode):
        return cast(Mode, name)
    raise ConfigurationError(
        f"mode must be {alternatives(get_args(Mode))}, got {name!r}{nearest(name, get_args(Mode))}"
    )


# --- arms, by a keyed hash of a conversation's id, so that the same id always gets the same arm ---

Arm = Literal["baseline", "candidate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The arm that a conversation got when it was first seen; it stays."""

    number: int
    """Number in the order of admission, from 1."""
    conversation: str
    arm: Arm
    probability: float
    """The candidate's share at that moment."""
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
    """The salt as a key of a length that BLAKE2b takes."""
    return hashlib.blake2b(salt.encode(), digest_size=32).digest()


def arm_of(place: float, share: float) -> Arm:
    """The candidate's below the share: while the share grows, no conversation leaves the candidate.

    >>> arm_of(0.04, 0.05), arm_of(0.05, 0.05), arm_of(0.99, 1.0)
    ('candidate', 'baseline', 'candidate')
    """
    return "candidate" if place < share else "baseline"
