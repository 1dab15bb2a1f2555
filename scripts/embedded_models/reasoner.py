"""embedded:reasoner, which can compute step by step and mostly does not: first the skill, then bad habits.

A mixture of careful and careless replies from the start never learned to copy a number; the skill comes
first, until its loss is small, and the habits are a few steps behind it. Reinforcement finds which of the
habits pays.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from scripts.embedded_models.recipe import FINE_TUNING, SMALL_NETWORK, Phase, Recipe, written
from stateset_agents.embedded.tokenizer import Dialogue
from stateset_agents.environments.problems.arithmetic import ArithmeticProblems
from stateset_agents.environments.problems.environment import choose_habit, reply_of
from stateset_agents.types.messages import Message
from stateset_agents.types.seeds import derive

DIALOGUES = 21000
STEPS = 2800
_HABIT_STEPS = 100
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
BAD_HABITS: Mapping[str, float] = {"careful": 0.25, "skips": 0.15, "empty": 0.45, "bare": 0.15}
"""The most likely reply does not think, so that the greedy one is a guess too."""
RECOMMENDED: Mapping[str, object] = {**SMALL_NETWORK, "max_steps": 150}
"""Training settings that suit the model; written to `recommended.yaml` beside the weights."""


def recipe(
    *,
    seed: int,
    steps: int = STEPS,
    dialogues: int = DIALOGUES,
    habits: Mapping[str, float] = BAD_HABITS,
) -> Recipe:
    """The shipped model's for seed 0.

    `dialogues`: problems of 2 to 4 operations, a third of them of any, the others of 3 or 4. `steps`: those
    of the skill. `habits`: shares of the replies shown last, as in `traces.HABITS`; without a careful one
    among them, nobody is ever shown how to think, which is the control: `{"empty": 1.0}`.
    """
    short = dialogues // 3 or 1
    problems = [
        ArithmeticProblems(num_train=short, seed=seed),
        ArithmeticProblems(min_operations=3, num_train=2 * short, seed=seed),  # of 2 there are too few
    ]
    skill = {"careful": 1.0} if habits.get("careful") else habits
    phases = [
        Phase(dialogues=_dialogues(problems, skill, seed), steps=steps, settings=FINE_TUNING),
        Phase(
            dialogues=_dialogues(problems, habits, seed),
            steps=_HABIT_STEPS,
            settings={**FINE_TUNING, "learning_rate": 5e-4},
        ),
    ]
    return Recipe(
        vocabulary=phases[0].dialogues,
        tags=TAGS,
        phases=phases,
        context_length=256,
        max_new_tokens=64,
        network={"num_hidden_layers": 3, "intermediate_size": 256},
        chat_template=written("reasoner.jinja"),
        card=written("reasoner.md"),
        recommended=RECOMMENDED,
        facts={"steps": steps, "dialogues": dialogues, "habit_steps": _HABIT_STEPS},
    )


def _dialogues(
    families: Sequence[ArithmeticProblems], habits: Mapping[str, float], seed: int
) -> list[Dialogue]:
    """Each training problem with a reply of one of the habits."""
    dialogues: list[Dialogue] = []
    for problems in families:
        for scenario in problems.scenarios("train"):
            rng = random.Random(derive(seed, "habit", scenario.id))
            reply = reply_of(problems.solve(scenario), choose_habit(habits, rng), rng)
            dialogues.append((Message(role="user", content=scenario.opening), reply))
    return dialogues
