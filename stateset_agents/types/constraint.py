"""What a reply keeps to while it is sampled: a grammar, as plain text, which travels with the reply."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np

Packed: TypeAlias = "np.ndarray[Any, np.dtype[np.int32]]"
"""[..., W] a bit for each token of the vocabulary, 32 in a word, the lowest first."""
ConstraintKind = Literal["call", "call_or_words", "json", "format", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """Before each token, only those are sampled with which the reply can still become one of the grammar's.

    Which these are follows from the grammar and the tokens before, so no mask is kept: the update finds them
    again, and learns the policy that acted.
    """

    grammar: str
    """In llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""
    kind: ConstraintKind
    """What it asks for, for messages and metrics."""
    stop_ids: tuple[int, ...]
    """Tokens that end the reply; they are allowed where the grammar may end."""
    version: str
    """Of llguidance, which reads the grammar: another version may allow other tokens."""

    opener: str = ""
    """The fixed text that begins a call; empty where there is none."""
    limit: int | None = None
    """Most tokens of the reply, for it ends before; None: it may be cut. Where the tokenizer has a
    joiner, as those of embedded models have, it may be cut all the same."""

    raised: tuple[tuple[int, ...], float] | None = None
    """The tokens that open a call, and what the logit of the next one is raised by while the reply is
    those before it, in nats of the policy's distribution; None: nothing. See `TrainingConfig.call_bias`."""

    def raised_behind(self, token_ids: tuple[int, ...]) -> tuple[int, float]:
        """The token that is raised behind a reply's first tokens, and by how much: 0.0 where none is."""
        opener, nats = self.raised or ((), 0.0)
        place = len(token_ids)
        return (opener[place], nats) if place < len(opener) and token_ids == opener[:place] else (0, 0.0)

    @property
    def digest(self) -> str:
        """A name for the grammar and the version, for records."""
        return hashlib.sha256(f"{self.version}\n{self.grammar}".encode()).hexdigest()[:16]
