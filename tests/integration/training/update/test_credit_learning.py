"""Every advantage estimator learns a task with a known answer from five seeds, through the whole trainer."""

from __future__ import annotations

from itertools import product
from statistics import fmean

import pytest
from tiny_training import make_agent, make_environment, make_trainer, reward_curve

from stateset_agents.core.reward import RewardResult, reward_function
from stateset_agents.training.estimators import ESTIMATORS

TEMPLATE = (
    "{% for m in messages %}"
    "{{ m.content + '<|end|>' if m.role == 'assistant' else '<|user|>' + m.content }}"
    "{% endfor %}"
)
"""The user's letter is the last token before the reply."""
CALLS = [
    {"id": letters, "opening": letters[0], "context": {"script": [letters[1]]}} for letters in ("ab", "ba")
]


@reward_function(local=True)
async def answers_in_kind(trajectory):
    """1 for a reply that begins with an even token after "a", with an odd one after "b".

    The first turn earns it itself, for the second the conversation earns it as a whole.
    """
    right = [
        float((turn.completion.token_ids[0] % 2 == 0) == (letter == "a"))
        for turn, letter in zip(trajectory.turns, trajectory.scenario.id, strict=False)
    ]
    own = [right[0], *[0.0] * (len(trajectory.turns) - 1)]
    return RewardResult(score=sum(right), turn_rewards=tuple(own))


async def learned(folder, estimator, seed, **settings):
    """Mean rewards of the first and the last steps; who does not listen gets 1, who does 2."""
    trainer = make_trainer(
        folder,
        agent=make_agent(max_new_tokens=2 if estimator == "token_gae" else 1, chat_template=TEMPLATE),
        environment=make_environment(scenarios=CALLS, max_turns=3),
        reward=answers_in_kind,
        advantage_estimator=estimator,
        seed=seed,
        max_steps=18,
        num_generations=12,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        lr_scheduler_type="constant",
        warmup_ratio=0.0,
        beta=0.0,
        save_steps=0,
        log_rollouts=False,
        **{"learning_rate": 7e-3, **settings},
    )
    curve = reward_curve(trainer)
    await trainer.train()
    await trainer.close()
    return fmean(curve[:2]), fmean(curve[-3:])


IN_SUITE = [("group", 0), ("turn_gae", 0)]
OTHERS = [pair for pair in product(sorted(ESTIMATORS), range(5)) if pair not in IN_SUITE]


@pytest.mark.parametrize(
    ("estimator", "seed"), [*IN_SUITE, *(pytest.param(*pair, marks=pytest.mark.long) for pair in OTHERS)]
)
@pytest.mark.first(1)
async def test_every_estimator_learns_to_answer_in_kind(tmp_path, estimator, seed):
    first, last = await learned(tmp_path, estimator, seed)
    assert first < 1.4
    assert last > 1.5


@pytest.mark.long
async def test_at_learning_rate_zero_nothing_is_learned(tmp_path):
    _, last = await learned(tmp_path, "turn_gae", 0, learning_rate=0.0)
    assert last < 1.3
