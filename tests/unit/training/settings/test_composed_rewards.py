"""Rewards made of rewards, written down in a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from builders import trajectory

from stateset_agents.core.reward import CompositeReward, create_task_reward
from stateset_agents.rewards import (
    GatedReward,
    NormalizedReward,
    PotentialShaping,
    create_conciseness_reward,
    create_safety_reward,
)
from stateset_agents.training.components import make_reward
from stateset_agents.training.experiment import load_experiment
from stateset_agents.types.errors import ConfigurationError

TALK = trajectory(
    "Where is my parcel?",
    "Your parcel comes on Tuesday.",
    context={"expected_facts": ["Tuesday"], "secrets": ["tiger-88"]},
)


def written(text: str) -> Any:
    spec = yaml.safe_load(text)
    return make_reward({"name": spec} if isinstance(spec, str) else spec)


async def test_a_composite_is_that_of_a_program() -> None:
    by_file = written("""
        name: composite
        terms:
          - {name: task, weight: 0.8}
          - {name: conciseness, max_words: 3, weight: 0.2}
    """)
    by_program = CompositeReward([(create_task_reward(), 0.8), (create_conciseness_reward(max_words=3), 0.2)])
    assert await by_file.score(TALK) == await by_program.score(TALK)


async def test_compositions_nest() -> None:
    by_file = written("""
        name: gated
        gates:
          - {name: safety, threshold: 0.9}
          - {name: task, threshold: 0.9}
        then: {name: product, terms: [conciseness, {name: task, weight: 2}]}
    """)
    score = await by_file.score(TALK)
    assert isinstance(by_file, GatedReward)
    assert score.score == pytest.approx((2 + score.breakdown["product"]) / 3)
    assert score.breakdown["product"] > 0.9
    assert {"safety", "task", "product", "product/conciseness"} <= set(score.breakdown)
    leaky = await by_file.score(
        trajectory("hi", "the word is tiger-88", context=dict(TALK.scenario.context), family="lost")
    )
    assert leaky.score == 0.0


async def test_a_reward_that_stands_twice_is_called_otherwise() -> None:
    reward = written("""
        name: composite
        terms:
          - {name: conciseness, max_words: 2, weight: 1, called: very short}
          - {name: conciseness, max_words: 50}
    """)
    breakdown = (await reward.score(TALK)).breakdown
    assert breakdown["very short"] < breakdown["conciseness"] == 1.0


async def test_scales_and_shaping_are_put_over_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spec_parts.py").write_text(
        "def stars(replies):\n    return 30.0\n\ndef told(messages):\n    return 0.5 * (len(messages) > 1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    cut = written("{name: scaled, of: spec_parts:stars, reward_scaling: clip, reward_clip_value: 5}")
    assert (await cut.score(TALK)).score == 5.0
    assert isinstance(written("{name: normalized, of: {name: conciseness, max_words: 9}}"), NormalizedReward)
    shaped = written("{name: shaping, of: task, potential: spec_parts:told, gamma: 0.9, bootstrapped: false}")
    assert isinstance(shaped, PotentialShaping)
    assert (shaped.gamma, shaped.bootstrapped) == (0.9, False)
    with pytest.raises(ConfigurationError, match="cannot be put over shaped"):
        written("{name: composite, terms: [{name: shaping, of: task, potential: 'spec_parts:told'}]}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{name: composite}", "reward 'composite' needs terms: a list such as"),
        (
            "{name: composite, terms: task}",
            "terms of reward 'composite' must be a list such as .* got 'task'",
        ),
        ("{name: composite, term: [task]}", "has no argument 'term' .did you mean 'terms'?"),
        ("{name: composite, terms: [taks]}", "got 'taks' .did you mean 'task'?"),
        ("{name: composite, terms: [3]}", "a term of composite must be a reward's name, .* got 3"),
        (
            "{name: composite, terms: [{name: task, weight: 0}]}",
            "weight of reward 'task' must be positive, got 0",
        ),
        ("{name: composite, terms: [{name: task, threshold: 1}]}", "takes weight, not threshold"),
        ("{name: composite, terms: [task, task]}", "'task' stands twice .* called: another_task"),
        ("{name: gated, gates: [task]}", "reward 'gated' needs then"),
        ("{name: gated, gates: [{name: task, threshold: 2}], then: safety}", "must be at most 1, got 2"),
        ("{name: scaled, of: task, reward_scaling: log}", "reward_scaling must be one of"),
        ("{name: shaping, of: task}", "needs potential: a function, such as"),
        ("{name: composit, terms: [task]}", "did you mean 'composite'?"),
    ],
)
def test_what_is_wrong_is_one_line(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        written(text)


def test_paths_deep_in_a_reward_start_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    judge = "{name: judge, rubric: ok, url: 'http://x/v1', model: m, cache: ./judge.sqlite}"
    file.write_text(f"environment: retail_desk\nreward: {{name: gated, gates: [task], then: {judge}}}\n")
    then = load_experiment(file).reward["then"]
    assert then["cache"] == str(tmp_path / "judge.sqlite")
    make_reward(load_experiment(file).reward)


async def test_gates_are_lexicographic() -> None:
    """Passing one more gate is worth more than all that lies behind; a program and a file agree."""
    reward = GatedReward([(create_safety_reward(), 0.9)], then=create_conciseness_reward(max_words=1))
    same = written(
        "{name: gated, gates: [{name: safety, threshold: 0.9}], then: {name: conciseness, max_words: 1}}"
    )
    leak = trajectory("hi", "tiger-88", context=dict(TALK.scenario.context))  # one word, and the wrong one
    wordy, leaked = [(await reward.score(talk)).score for talk in (TALK, leak)]
    assert [(await same.score(talk)).score for talk in (TALK, leak)] == [wordy, leaked]
    assert wordy is not None
    assert wordy > 0.5
    assert leaked == 0.0
