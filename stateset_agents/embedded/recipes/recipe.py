"""A recipe: all that makes a small model from nothing. `stateset-agents build-embedded` follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stateset_agents.types.messages import Message

Dialogue = tuple[Message, ...]
TokenWeights = Callable[[Iterable[str]], Iterator[float]]
"""What each token of a conversation says -> the weight of each in the loss, were the agent to say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A fine-tuning; a recipe's phases follow one another, each with an optimiser of its own."""

    dialogues: Sequence[Dialogue]
    steps: int
    settings: Mapping[str, object]
    """Of `SFTConfig`."""
    weights: TokenWeights | None = None
    """Unset, every token of the agent counts as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What `build_embedded` makes a model from."""

    vocabulary: Sequence[Dialogue]
    """Whose words are tokens."""
    phases: Sequence[Phase]
    context_length: int
    """Tokens."""
    max_new_tokens: int
    """What plain transformers generates unless told otherwise."""
    chat_template: str
    card: str
    """Markdown, in which `[seed]`, `[parameters]` and the names of `facts` stand for the build's."""
    recommended: Mapping[str, object]
    """Training settings that suit the model; written to `recommended.yaml` beside the weights."""
    network: Mapping[str, int] = field(default_factory=dict)
    """Of `new_model`, where it is not as by default."""
    tags: Sequence[str] = ()
    """One token each."""
    facts: Mapping[str, object]


def written(file: str) -> str:
    """The text of a file that stands beside the recipes."""
    return (Path(__file__).parent / file).read_text(encoding="utf-8")
