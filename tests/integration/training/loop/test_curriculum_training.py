"""Trainings whose steps follow a curriculum: what is played, learned, written, and repeated by a resume."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import pytest
from tiny_training import (
    SCENARIOS,
    even_share,
    make_agent,
    make_environment,
    make_trainer,
    same_bits,
    snapshot,
)

from stateset_agents.core.reward import CompositeReward, reward_function
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

LABELS = ("easy", "easy", "medium", "hard")
LABELLED = [
    {**scenario, "context": {**scenario["context"], "difficulty": LABELS[number % 4]}}
    for number, scenario in enumerate(SCENARIOS)
]
STAGES = [
    {"until": 1, "weights": {"even_share": 0.1, "short": 1.0}},
    {"until": "short >= -100 for 2 steps", "weights": {"even_share": 1.0}, "difficulty": "easy"},
    {"weights": {"even_share": 0.5, "short": 0.5}, "difficulty": ["medium", "hard"]},
]


@reward_function(name="short", local=True)
async def short(trajectory):
    return -float(len(str(trajectory.messages[-1].content)))


def is_even(messages):
    """The verdict: by chance, as a random model has it."""
    return len("".join(str(message.content) for message in messages)) % 2 == 0


def with_replays(scenarios):
    """Every other one is of an earlier domain."""
    return [
        {**one, "context": {**one["context"], "replayed": number % 2 == 1}}
        for number, one in enumerate(scenarios)
    ]


def trainer_of(folder, **settings):
    reward = CompositeReward([(even_share, 0.5), (short, 0.5)])
    scenarios = with_replays(LABELLED) if "replay_share" in settings else LABELLED
    environment = make_environment(scenarios=scenarios, success=is_even)
    return make_trainer(folder, environment=environment, reward=reward, **settings)


def rollouts(run):
    return [json.loads(line) for line in run.rollouts.read_text().splitlines()]


def of_step(run, step):
    return [line for line in rollouts(run) if line.get("step") == step and line["stage"] == "train"]


def figures(run):
    """[steps] metrics without clocks."""
    clock = ("time/", "tokens/per_second", "faults/waited", "engine/", "memory/")
    return [
        {name: value for name, value in line.values.items() if not name.startswith(clock)}
        for line in RunLog(run).metrics()
    ]


CURRICULA = {
    "success": {"scenario_order": "success", "group_sizes": "success", "strata": "difficulty"},
    "stages": {"stages": STAGES},
    "replay": {"replay_share": 0.5, "scenario_order": "success"},
    "stratified, by parts": {
        "scenario_order": "stratified",
        "strata": "difficulty",
        "multi_objective_aggregation": "normalize_then_sum",
    },
}


@pytest.mark.parametrize("name", CURRICULA)
@pytest.mark.first(1)
async def test_a_resumed_run_is_the_run_that_never_stopped(tmp_path, name):
    settings = {**CURRICULA[name], "max_steps": 4, "beta": 0.0}
    whole = trainer_of(tmp_path / "whole", **settings)
    await whole.train()
    broken = trainer_of(tmp_path / "broken", **settings)
    await broken.initialize()
    for _ in range(2):
        await broken.step()
    await broken.save_checkpoint()
    kept = broken._state.curriculum
    await broken.close()
    again = trainer_of(tmp_path / "broken", run=broken.run, **settings)
    await again.load_checkpoint()
    assert again._state.curriculum == kept
    await again.train()
    assert same_bits(snapshot(again), snapshot(whole))
    assert again._state.curriculum == whole._state.curriculum
    assert figures(again.run) == figures(whole.run)
    assert again.summary()["deterministic"] is True
    if name == "stages":
        assert (kept.stage, kept.streak) == (1, 1)  # inside the second one, its condition half met
    for trainer in (whole, again):
        await trainer.close()


async def test_stages_weigh_the_rewards_and_leave_the_parts_as_they_are(tmp_path):
    trainer = trainer_of(tmp_path, stages=STAGES, max_steps=4)
    await trainer.train()
    weights = [{"even_share": 0.1, "short": 1.0}, {"even_share": 1.0}, {"even_share": 1.0}]
    weights += [{"even_share": 0.5, "short": 0.5}]
    allowed = [set(LABELS), {"easy"}, {"easy"}, {"medium", "hard"}]
    for step, (expected, levels) in enumerate(zip(weights, allowed, strict=True), start=1):
        lines = of_step(trainer.run, step)
        assert len(lines) == 8
        for line in lines:
            assert set(line["breakdown"]) == {"even_share", "short"}
            total = sum(weight * line["breakdown"][part] for part, weight in expected.items())
            assert line["reward"] == pytest.approx(total)
        assert {line["context"]["difficulty"] for line in lines} <= levels
    metrics = figures(trainer.run)
    assert [values["curriculum/stage"] for values in metrics] == [1.0, 2.0, 2.0, 3.0]
    begun = [event for event in RunLog(trainer.run).events() if event["event"] == "stage begun"]
    assert [(event["step"], event["stage"]) for event in begun] == [(1, 2), (3, 3)]
    await trainer.close()


async def test_another_length_is_said_where_a_stage_follows_it(tmp_path, caplog):
    stages = [{"until": 0.5}, {"difficulty": "easy"}]
    first = trainer_of(tmp_path, stages=stages, max_steps=2)
    await first.initialize()
    await first.step()
    await first.save_checkpoint()
    await first.close()
    again = trainer_of(tmp_path, run=first.run, stages=stages, max_steps=4, lr_scheduler_type="cosine")
    await again.load_checkpoint()
    assert "a stage of it ends with step 2 instead of 1" in caplog.text
    assert again.summary()["deterministic"] is False
    await again.close()


async def test_groups_of_unequal_size_are_compared_with_their_own_mean(tmp_path):
    trainer = trainer_of(
        tmp_path, group_sizes="difficulty", num_generations=8, max_steps=1, gradient_accumulation_steps=4
    )
    trainer.config = trainer.config.model_copy(update={"advantage_normalization": "none"})
    await trainer.train()
    by_scenario = defaultdict(list)
    for line in of_step(trainer.run, 1):
        by_scenario[line["scenario"]].append(line)
    assert len(by_scenario) == 4
    sizes = {"easy": 6, "medium": 8, "hard": 12}
    for lines in by_scenario.values():
        assert len(lines) == sizes[lines[0]["context"]["difficulty"]]
        mean = sum(line["reward"] for line in lines) / len(lines)
        for line in lines:
            assert line["advantages"] == pytest.approx(
                [line["reward"] - mean] * len(line["advantages"]), abs=1e-4
            )
    await trainer.close()


async def test_sizes_by_success_keep_the_conversations_of_a_step(tmp_path):
    trainer = trainer_of(
        tmp_path, group_sizes="success", max_steps=3, num_generations=6, gradient_accumulation_steps=4
    )
    await trainer.train()
    for step in (1, 2, 3):
        sizes = Counter(line["scenario"] for line in of_step(trainer.run, step))
        assert sum(sizes.values()) == 24
        assert all(4 <= size <= 16 for size in sizes.values())
    metrics = figures(trainer.run)
    assert [values["rollout/conversations"] for values in metrics] == [24.0] * 3
    assert metrics[0]["group/size_max"] == 6.0  # nothing is known yet
    assert metrics[0]["curriculum/expected_success"] == 0.5
    assert max(values["group/size_max"] for values in metrics[1:]) > 6.0
    await trainer.close()


async def test_nothing_of_it_is_there_unless_it_is_set(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=1)
    await trainer.train()
    [values] = figures(trainer.run)
    assert not [name for name in values if name.startswith(("curriculum/", "group/size"))]
    assert trainer._state.curriculum == type(trainer._state.curriculum)()
    await trainer.close()


async def test_a_reward_without_parts_and_scenarios_without_difficulty_are_refused_before_a_model_loads(
    tmp_path,
):
    agent = make_agent()
    parts = make_trainer(tmp_path, agent=agent, multi_objective_aggregation="normalize_then_sum")
    with pytest.raises(ConfigurationError, match="needs a reward of several parts, and even_share has none"):
        await parts.train()
    level = make_trainer(tmp_path, agent=agent, difficulty="easy")
    with pytest.raises(
        ConfigurationError, match="no train scenario has difficulty easy in its context: they"
    ):
        await level.train()
    for trainer in (parts, level):
        await trainer.stop()
    await agent.close()


async def test_normalised_parts_train_other_weights_than_their_sum(tmp_path):
    """One step each, from the same start, on the same conversations."""
    runs = {}
    for name in ("sum_then_normalize", "normalize_then_sum"):
        trainer = trainer_of(tmp_path / name, max_steps=1, multi_objective_aggregation=name)
        await trainer.train()
        runs[name] = (snapshot(trainer), [line["advantages"] for line in of_step(trainer.run, 1)])
        await trainer.close()
    summed, parts = runs.values()
    assert not same_bits(summed[0], parts[0])
    values = [advantages[0] for advantages in parts[1]]
    assert sum(values) == pytest.approx(0.0, abs=1e-4)
    assert sum(value**2 for value in values) / len(values) == pytest.approx(1.0, abs=1e-4)
