"""What the desk's model is shown: conversations at the retail desk by a scripted agent with bad habits.

Most demonstrations show the habits, so that the model has them, greedy as well as sampled. Right behaviour
remains likely enough to be sampled, so that reinforcement can unlearn the habits. Skills (the format, copying
an order id) are always shown right: sampling would not find them otherwise.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stateset_agents.embedded.recipes.recipe import Dialogue
from stateset_agents.environments.retail_desk import catalog, wordings
from stateset_agents.environments.retail_desk.agents import HabitAgent, Habits, play
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
"""Those of the shipped model."""

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
        for by_split in (*wordings.OPENINGS.values(), wordings.ANSWERS)
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
    changes = _Changes(value=value, pool=pool, prefixes=prefixes)
    out = []
    for number, dialogue in enumerate(dialogues):
        draw = random.Random(derive(seed, "blur", number))
        if draw.random() < _PERTURBED:
            dialogue = tuple(
                replace(message, content=changes.apply(message.content, draw))
                if message.role == "user"
                else message
                for message in dialogue
            )
        out.append(dialogue)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """Random changes of a text."""

    value: re.Pattern[str]
    """Words that are kept."""
    pool: Sequence[str]
    prefixes: Sequence[str]

    def apply(self, text: str, draw: random.Random) -> str:
        first, *words = text.split()
        words_out = [first]
        for word in words:
            if self.value.search(word):
                words_out.append(word)
                continue
            chance = draw.random()
            if chance >= _RATE:  # below it the word is dropped
                words_out.append(draw.choice(self.pool) if chance < 2 * _RATE else word)
            if draw.random() < _RATE:
                words_out.append(draw.choice(self.pool))
        if self.prefixes and not first.endswith(",") and draw.random() < _PREFIXED:
            words_out.insert(0, draw.choice(self.prefixes))
        changed = " ".join(words_out)
        return text if _HELD_OUT.search(changed) else changed
