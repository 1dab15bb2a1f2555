"""Replayed prompts: how often they come, which are remembered, and how many of each domain."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.orders import is_replayed
from stateset_agents.training.loop.curriculum.plan import Curriculum
from stateset_agents.training.loop.curriculum.prompt_memory import PromptMemory, shares
from stateset_agents.training.loop.curriculum.state import CurriculumState, SuccessTable
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario

FRESH = CurriculumState()


def scenarios(name: str, number: int, **context: object) -> list[Scenario]:
    return [Scenario(id=f"{name}{n}", family=name, context=context) for n in range(number)]


NEW = scenarios("new", 40)
OLD = [
    *scenarios("sums", 30, replayed=True, domain="sums"),
    *scenarios("words", 10, replayed=True, domain="words"),
]


@pytest.mark.parametrize("order", ["shuffled", "success"])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.1])
def test_every_stretch_has_its_share_of_replays(order: str, share: float) -> None:
    config = TrainingConfig(replay_share=share, scenario_order=order)
    curriculum = Curriculum([*NEW, *OLD], config, {})
    for first in (0, 3, 160):
        played = curriculum.plan(first, FRESH).order.take(first, 20)
        assert abs(sum(map(is_replayed, played)) - 20 * share) < 1


def test_both_orders_go_through_all_their_scenarios_and_a_resume_goes_on_in_them() -> None:
    curriculum = Curriculum([*NEW, *OLD], TrainingConfig(replay_share=0.5), {})
    whole = curriculum.plan(0, FRESH).order.take(0, 80)
    assert Counter(one.id for one in whole) == Counter(one.id for one in [*NEW, *OLD])
    again = Curriculum([*NEW, *OLD], TrainingConfig(replay_share=0.5), {})
    assert again.plan(33, FRESH).order.take(33, 47) == whole[33:]
    replays = [one.family for one in whole if is_replayed(one)]
    assert all(2 <= Counter(replays[n : n + 12])["words"] <= 4 for n in range(0, 36, 12))  # 3 of 12


def test_a_share_needs_scenarios_of_both_kinds() -> None:
    for only in (NEW, OLD):
        with pytest.raises(ConfigurationError, match="give both kinds"):
            Curriculum(only, TrainingConfig(replay_share=0.5), {})


def test_without_a_share_replays_are_scenarios_like_any_other() -> None:
    played = Curriculum([*NEW, *OLD], TrainingConfig(), {}).plan(0, FRESH).order.take(0, 80)
    assert Counter(map(is_replayed, played)) == {False: 40, True: 40}


def table(**rates: float) -> SuccessTable:
    """So much measured that the prior counts little."""
    return SuccessTable({name: (rate * 1e6, 1e6) for name, rate in rates.items()})


def test_a_domain_keeps_what_succeeds_half_of_the_time() -> None:
    played = scenarios("a", 5)
    memory = PromptMemory(capacity=2).with_domain("a", played, table(a0=0.0, a1=0.4, a2=1.0, a3=0.55))
    assert [prompt.scenario.id for prompt in memory.prompts] == ["a3", "a1"]  # a4 was never played


def test_every_domain_has_an_equal_share_and_none_is_exceeded() -> None:
    assert shares(10, [20, 20]) == [5, 5]
    assert shares(10, [2, 20]) == [2, 8]
    assert shares(3, [5, 5]) == [2, 1]
    assert shares(10, [0, 4]) == [0, 4]
    memory = PromptMemory(capacity=10)
    for name in ("a", "b", "c"):
        rates = table(**{f"{name}{n}": 0.5 for n in range(20)})
        memory = memory.with_domain(name, scenarios(name, 20), rates)
        assert len(memory) == 10
    assert {name: len(prompts) for name, prompts in memory.by_domain.items()} == {"a": 4, "b": 3, "c": 3}


def test_a_replay_s_success_is_remembered() -> None:
    memory = PromptMemory().with_domain("a", scenarios("a", 2), table(a0=0.9, a1=0.9))
    after = memory.with_successes("a", table(a1=0.2))
    assert [round(prompt.success, 3) for prompt in after.prompts if prompt.scenario.id == "a1"] == [0.2]
    assert memory.with_successes("b", table(a1=0.2)) == memory


def test_a_memory_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    memory = PromptMemory(capacity=7).with_domain("a", scenarios("a", 3, answer=4), table(a0=0.5, a2=0.1))
    memory.save(tmp_path / "memory.jsonl")
    assert PromptMemory.load(tmp_path / "memory.jsonl") == memory
    for text in ('{"id": 3}\n', "[" * 100_000):
        (tmp_path / "other.jsonl").write_text(text)
        with pytest.raises(ConfigurationError, match="no memory of prompts"):
            PromptMemory.load(tmp_path / "other.jsonl")


@pytest.mark.parametrize("capacity", [0, True, 1.5])
def test_a_memory_holds_at_least_one_prompt(capacity: object) -> None:
    with pytest.raises(ConfigurationError, match="capacity must be a whole number"):
        PromptMemory(capacity=capacity)  # type: ignore[arg-type]  # the mistake under test
