"""Where a deployment stands, and the one table of where it may go from there.

shadow       the baseline answers everybody; what the candidate would have done is checked and recorded
gradual      the candidate answers a share of the new conversations
full         the candidate answers all new conversations
rolled_back  the baseline answers again, also in conversations under way; the end
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import alternatives, nearest

Mode = Literal["shadow", "gradual", "full", "rolled_back"]

NEXT: Mapping[Mode, frozenset[Mode]] = MappingProxyType(
    {
        "shadow": frozenset({"shadow", "gradual", "full", "rolled_back"}),
        "gradual": frozenset({"shadow", "gradual", "full", "rolled_back"}),
        "full": frozenset({"shadow", "gradual", "full", "rolled_back"}),
        "rolled_back": frozenset(),
    }
)
"""From each mode those that may follow. Another try after a rollback is another deployment, with evidence and
errors of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The state: what decides who answers."""

    id: str
    mode: Mode = "shadow"
    share: float = 0.0
    """Of new conversations that go to the candidate."""
    since: float
    """Seconds of the clock: the last move."""
    version: int = 0
    """How many moves there were."""
    why: str = "new"
    outcomes: int = 0
    """How many outcomes the evidence had at the last move: a stage counts its own from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One transition: where to, when, by whom, why, and what was known."""

    mode: Mode
    share: float
    at: float
    who: str
    why: str
    forced: bool = False
    """By hand against the evidence."""
    evidence: Mapping[str, float | int | None] = field(default_factory=dict)
    """What the journal keeps of the evidence at this moment."""


def transition(state: Deployment, move: Move) -> Deployment:
    """The state after a move. Raises ConfigurationError for one that the table does not have.

    >>> move = Move(mode="gradual", share=0.05, at=9.0, who="me", why="go")
    >>> transition(Deployment(id="0001", since=0.0), move).share
    0.05
    """
    if move.mode not in NEXT[state.mode]:
        raise ConfigurationError(
            f"deployment {state.id} is {state.mode} and cannot become {move.mode}: start a new deployment"
        )
    _check_share(move.mode, move.share)
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
    for mode in get_args(Mode):
        if mode == name:
            found: Mode = mode
            return found
    raise ConfigurationError(
        f"mode must be {alternatives(get_args(Mode))}, got {name!r}{nearest(name, get_args(Mode))}"
    )


def _check_share(mode: Mode, share: float) -> None:
    if mode == "gradual":
        if not 0 <= share <= 1:
            raise ConfigurationError(f"the share must be from 0 to 1, got {share!r}")
        return
    fixed = 1.0 if mode == "full" else 0.0
    if share != fixed:
        raise ConfigurationError(f"the share of {mode} is {fixed:g}, got {share!r}: leave it out")
