"""A recipe: all that makes a small model from nothing. `scripts/build_embedded.py` follows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stateset_agents.embedded.tokenizer import Dialogue

TokenWeights = Callable[[Iterable[str]], Iterator[float]]
"""Texts of a conversation's tokens -> the weight of each in the loss, were the agent to say it."""

FINE_TUNING: Mapping[str, object] = {
    "per_device_train_batch_size": 32,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "lr_min_ratio": 0.1,
    "warmup_ratio": 0.02,
    "adam_beta2": 0.98,
    "weight_decay": 0.0,
    "precision": "fp32",
}
"""Settings of `SFTConfig` from which the recipes' phases start."""
SMALL_NETWORK: Mapping[str, object] = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "beta": 0.01,
}
"""Training settings that suit networks this small; each recipe adds its number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A fine-tuning; a recipe's phases follow one another, each with an optimiser of its own."""

    dialogues: Sequence[Dialogue]
    steps: int
    settings: Mapping[str, object]
    """Settings of `SFTConfig`."""
    weights: TokenWeights | None = None
    """Unset, every token of the agent counts as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The recipe from which `build_recipe` makes a model."""

    vocabulary: Sequence[Dialogue]
    """Dialogues whose words become tokens."""
    phases: Sequence[Phase]
    context_length: int
    """Tokens."""
    max_new_tokens: int
    """Tokens that plain transformers generates unless told otherwise."""
    chat_template: str
    card: str
    """Markdown, in which `[seed]`, `[parameters]` and the names of `facts` stand for the build's."""
    recommended: Mapping[str, object]
    """Training settings that suit the model; written to `recommended.yaml` beside the weights."""
    network: Mapping[str, int] = field(default_factory=dict)
    """Arguments of `new_model` that are not the defaults."""
    tags: Sequence[str] = ()
    """One token each."""
    facts: Mapping[str, object]


def written(file: str) -> str:
    """The text of a file that stands beside the recipes."""
    return (Path(__file__).parent / file).read_text(encoding="utf-8")
