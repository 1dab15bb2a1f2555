"""embedded:desk, the retail desk's agent with bad habits: what is shown, and what weighs more.

Most demonstrations show the habits, so that the model has them, greedy as well as sampled. Right behaviour
remains likely enough to be sampled, so that reinforcement can unlearn the habits. Skills (the format, copying
an order id) are always shown right: sampling would not find them otherwise.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from scripts.embedded_models.desk_habits import HabitAgent, Habits
from scripts.embedded_models.recipe import FINE_TUNING, SMALL_NETWORK, Phase, Recipe, written
from stateset_agents.embedded.tokenizer import CHAT_TEMPLATE, Dialogue
from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.agents import play
from stateset_agents.environments.retail_desk.environment import RetailDesk
from stateset_agents.types.seeds import derive

BAD_HABITS = Habits(
    guess_id=0.55,
    skip_lookup=0.55,
    violate_policy=0.6,
    wrong_action=0.05,
    skip_action=0.4,
    wrong_closing=0.1,
)
"""Habits of the shipped model."""

VALUE = "|".join(
    [r"[A-Z]\d\d", r"\d+", *catalog.COLOURS, *catalog.PRODUCTS, *catalog.CITIES, *catalog.WEEKDAYS]
)
"""A pattern of the words that the agent copies: ids, numbers, items, cities, days."""

_PERTURBED, _RATE, _PREFIXED = 0.8, 0.12, 0.3
"""Share of dialogues that are perturbed; in those, the rate of each change of a word, and of messages that
begin with another message's first word."""
_HELD_OUT = re.compile(
    "|".join(
        re.sub(r"\\{\w+\\}", r"[\\w ]+", re.escape(wording))
        for by_split in (*catalog.WORDINGS["openings"].values(), catalog.WORDINGS["answers"])
        for split in ("validation", "test")
        for wording in by_split[split]
    )
)


def demonstrations(count: int, *, seed: int, habits: Habits = BAD_HABITS) -> list[Dialogue]:
    """`count` conversations on training scenarios, played in the desk's environment."""
    desk = RetailDesk(num_train=count, seed=derive(seed, "demonstrations") % 2**31)

    async def hold() -> list[Dialogue]:
        dialogues = []
        for number, scenario in enumerate(desk.scenarios("train")):
            agent = HabitAgent(habits, derive(seed, "habits", number))
            played = await play(desk, scenario, derive(seed, "caller", number), agent)
            dialogues.append(played.messages)
        return dialogues

    return asyncio.run(hold())


def perturbed(dialogues: Sequence[Dialogue], *, seed: int) -> list[Dialogue]:
    """The dialogues, with callers' words dropped, replaced or added in most of them.

    Training has only a few dozen wordings. Unchanged, they are memorised, and another wording confuses the
    model; perturbed, the model learns the few words that matter. Values and first words are kept; a text that
    would become a held-out wording is not changed.
    """
    value = re.compile(VALUE)
    spoken = [message.content for dialogue in dialogues for message in dialogue if message.role == "user"]
    pool = sorted({word for text in spoken for word in text.split()[1:] if not value.search(word)})
    prefixes = sorted({text.split()[0] for text in spoken if text.split()[0].endswith(",")})

    def changed(text: str, draw: random.Random) -> str:
        first, *words = text.split()
        words_out = [first]
        for word in words:
            if value.search(word):
                words_out.append(word)
                continue
            chance = draw.random()
            if chance >= _RATE:  # below it the word is dropped
                words_out.append(draw.choice(pool) if chance < 2 * _RATE else word)
            if draw.random() < _RATE:
                words_out.append(draw.choice(pool))
        if prefixes and not first.endswith(",") and draw.random() < _PREFIXED:
            words_out.insert(0, draw.choice(prefixes))
        sentence = " ".join(words_out)
        return text if _HELD_OUT.search(sentence) else sentence

    out = []
    for number, dialogue in enumerate(dialogues):
        draw = random.Random(derive(seed, "blur", number))
        if draw.random() < _PERTURBED:
            dialogue = tuple(
                replace(message, content=changed(message.content, draw))
                if message.role == "user"
                else message
                for message in dialogue
            )
        out.append(dialogue)
    return out


DIALOGUES = 8000
STEPS = 1200
_CONTEXT_LENGTH = 1024
"""Tokens; the longest conversation of six replies of 48 tokens needs about half."""
RECOMMENDED: Mapping[str, object] = {**SMALL_NETWORK, "max_steps": 110}
"""Training settings that suit the model; written to `recommended.yaml` beside the weights."""
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
    dialogues_played = demonstrations(dialogues, seed=seed, habits=habits)
    phase = Phase(
        dialogues=perturbed(dialogues_played, seed=seed),
        steps=steps,
        settings={**FINE_TUNING, "per_device_train_batch_size": 16},
        weights=copying_weights,
    )
    return Recipe(
        vocabulary=dialogues_played,
        phases=[phase],
        context_length=_CONTEXT_LENGTH,
        max_new_tokens=48,
        chat_template=CHAT_TEMPLATE,
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
