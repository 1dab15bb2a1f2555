"""embedded:desk, the retail desk's agent with bad habits: how much is shown, and what weighs more."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from stateset_agents.embedded.recipes.desk_dialogues import BAD_HABITS, VALUE, demonstrations, perturbed
from stateset_agents.embedded.recipes.recipe import Phase, Recipe, written
from stateset_agents.environments.retail_desk.agents import Habits

DIALOGUES = 8000
STEPS = 1200
_CONTEXT_LENGTH = 1024
"""Tokens; the longest conversation of six replies of 48 tokens needs about half."""
_WARM_UP: Mapping[str, object] = {
    "per_device_train_batch_size": 16,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "lr_min_ratio": 0.1,
    "warmup_ratio": 0.02,
    "adam_beta2": 0.98,
    "weight_decay": 0.0,
    "precision": "fp32",
}
"""Settings of the fine-tuning."""
RECOMMENDED: Mapping[str, object] = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.03,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_generations": 8,
    "beta": 0.01,
    "max_steps": 110,
}
"""Training settings that suit a network this small; written to `recommended.yaml` beside the weights."""

_VALUE_WEIGHT = 4.0
"""Weight of the tokens of ids, numbers, items, cities and days: copying is hardest to learn."""
_INVENTED_WEIGHT = 0.2
"""Weight of a value without an earlier occurrence (a guess, a lie): it looks like a wrong copy, so there is
little to learn from it."""
_VALUE = re.compile(rf" ?(?:[A-Z]|{VALUE})")
"""Tokens that the agent copies; an order id is a letter and a pair of digits."""


def recipe(
    *, seed: int, steps: int = STEPS, dialogues: int = DIALOGUES, habits: Habits = BAD_HABITS
) -> Recipe:
    """The shipped model's for seed 0; `Habits()` makes one that was shown honest work only."""
    shown = demonstrations(dialogues, seed=seed, habits=habits)
    phase = Phase(
        dialogues=perturbed(shown, seed=seed), steps=steps, settings=_WARM_UP, weights=copying_weights
    )
    return Recipe(
        vocabulary=shown,
        phases=[phase],
        context_length=_CONTEXT_LENGTH,
        max_new_tokens=48,
        chat_template=written("desk.jinja"),
        card=written("desk.md"),
        recommended=RECOMMENDED,
        facts={"steps": steps, "dialogues": dialogues},
    )


def copying_weights(pieces: Iterable[str]) -> Iterator[float]:
    """The weight in the loss of each token of a conversation, were the agent to say it.

    `pieces`: what each token says.
    """
    earlier = set()
    for piece in pieces:
        if _VALUE.fullmatch(piece):
            yield _VALUE_WEIGHT if piece in earlier else _INVENTED_WEIGHT
        else:
            yield 1.0
        earlier.add(piece)
