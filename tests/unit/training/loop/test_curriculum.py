"""Which scenarios a step plays, in what groups, by what weights, and what it changes for the next."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from dataclasses import asdict
from statistics import fmean

import pytest
from tiny_training import talk

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.loop.curriculum.orders import (
    UNIFORM_SHARE,
    ScenarioOrder,
    SuccessOrder,
    stratified,
)
from stateset_agents.training.loop.curriculum.plan import Curriculum
from stateset_agents.training.loop.curriculum.state import CurriculumState, SuccessTable
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Status, TrajectoryGroup

FRESH = CurriculumState()


def scenario(number, difficulty=None, family="default"):
    return Scenario(
        id=f"s{number}", family=family, context={} if difficulty is None else {"difficulty": difficulty}
    )


LABELLED = [scenario(n, label) for n, label in enumerate(["easy"] * 6 + ["medium"] * 3 + ["hard"] * 3)]


def by_label(one):
    return str(one.context.get("difficulty"))


def ids(scenarios):
    return [one.id for one in scenarios]


def group_with(name, *successes, failed=0):
    """A group of one-turn conversations of this scenario."""
    members = [
        talk(([9], [1]), scenario=name, reward=float(done or 0), outcome=Outcome(success=done))
        for done in successes
    ]
    members += [talk(([9], [1]), scenario=name, status=Status.FAILED)] * failed
    return TrajectoryGroup(key=name, trajectories=tuple(members))


def curriculum(scenarios=LABELLED, parts=None, **settings):
    return Curriculum(scenarios, TrainingConfig(**settings), parts or {})


# ------------------------------------------------------------------------------ orders


def test_without_settings_it_is_the_shuffled_order_and_one_size():
    plan = curriculum(seed=3).plan(5, FRESH)
    assert plan.order.take(5, 9) == ScenarioOrder(LABELLED, 3).take(5, 9)
    assert plan.sizes(LABELLED) is None
    assert plan.weights == {}
    assert plan.metrics([group_with("s0", True)]) == {}


@pytest.mark.parametrize("seed", range(3))
def test_each_step_of_a_stratified_order_has_the_strata_in_proportion(seed):
    plan = curriculum(seed=seed, scenario_order="stratified", strata="difficulty").plan(0, FRESH)
    for step in range(9):  # three epochs of three steps
        played = Counter(map(by_label, plan.order.take(4 * step, 4)))
        assert played == {"easy": 2, "medium": 1, "hard": 1}


def test_strata_of_several_keys_are_of_scenarios_that_are_alike_in_all():
    some = [
        Scenario(id=f"s{number}", family="ab"[number % 2], context={"side": "xy"[number // 2 % 2]})
        for number in range(24)
    ]
    plan = curriculum(some, scenario_order="stratified", strata=["family", "side"]).plan(0, FRESH)
    by_both = {(one.family, one.context["side"]): 1 for one in some}
    for step in range(12):  # two epochs of six steps
        played = plan.order.take(4 * step, 4)
        assert Counter((one.family, one.context["side"]) for one in played) == by_both
    with pytest.raises(ConfigurationError, match="no scenario has 'topic' in its context"):
        curriculum(some, scenario_order="stratified", strata=["family", "topic"])


def test_values_of_several_keys_are_not_run_together():
    some = [
        Scenario(id=f"s{number}", family=family, context={"side": side})
        for number, (family, side) in enumerate([("a b", "c"), ("a", "b c")])
    ]
    curriculum(some, scenario_order="stratified", strata=["family", "side"])  # two strata, or it is refused


def test_strata_of_one_name_are_that_name():
    assert TrainingConfig(scenario_order="stratified", strata=["side"]).strata == "side"
    assert TrainingConfig(strata=["family"]) == TrainingConfig()  # the default, in whatever order


@pytest.mark.parametrize("strata", [[], "", ["family", " "], 3, None, ["family", 3]])
def test_strata_that_name_nothing_are_refused(strata):
    with pytest.raises(ValueError, match=r"name family or a key .* or several: \[family, side\]"):
        TrainingConfig(scenario_order="stratified", strata=strata)


def test_strata_that_do_not_divide_evenly_are_off_by_one_at_most():
    names = ["a"] * 17 + ["b"] * 11 + ["c"] * 5 + ["d"]
    scenarios = [scenario(number, family=name) for number, name in enumerate(names)]

    def deviation(arrange, seed):
        order = arrange(scenarios, random.Random(seed))
        worst = 0.0
        for first in range(0, 30, 5):
            counts = Counter(scenarios[index].family for index in order[first : first + 5])
            worst = max(worst, *(abs(counts[n] - 5 * names.count(n) / 34) for n in set(names)))
        return worst

    def shuffled(some, generator):
        order = list(range(len(some)))
        generator.shuffle(order)
        return order

    even = [deviation(stratified(lambda one: one.family), seed) for seed in range(20)]
    assert max(even) < 1.3
    assert fmean(even) < fmean(deviation(shuffled, seed) for seed in range(20)) / 1.5


def test_a_stratified_order_has_every_scenario_once_per_epoch_and_epochs_differ():
    order = curriculum(scenario_order="stratified", strata="difficulty").order
    epochs = [ids(order.take(12 * epoch, 12)) for epoch in range(3)]
    assert all(sorted(epoch) == sorted(ids(LABELLED)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert ids(curriculum(scenario_order="stratified", strata="difficulty").order.take(7, 9)) == [
        *epochs[0][7:],
        *epochs[1][:4],
    ]


def test_a_stratified_order_needs_two_strata():
    with pytest.raises(ConfigurationError, match="nothing to tell apart: every train scenario has family 'd"):
        curriculum(scenario_order="stratified")
    for order in ("stratified", "success"):
        with pytest.raises(ConfigurationError, match="no scenario has 'topic' in its context: set strata"):
            curriculum(scenario_order=order, strata="topic")


def test_a_draw_by_success_is_in_proportion_to_its_variance():
    rates = [0.5, 0.9, 0.99]
    scenarios = [scenario(number) for number in range(3)]
    drawn = Counter(
        SuccessOrder(scenarios, rates, seed=0, frontier=step).take(step, 1)[0].id for step in range(20_000)
    )
    worth = [0.25, 0.09, 0.0099]
    for number, value in enumerate(worth):
        chance = (1 - UNIFORM_SHARE) * value / sum(worth) + UNIFORM_SHARE / 3
        assert drawn[f"s{number}"] / 20_000 == pytest.approx(chance, abs=0.01)


def test_a_step_by_success_draws_none_twice_before_all_came():
    order = SuccessOrder(LABELLED, [0.5] * 12, seed=1, frontier=7)
    assert sorted(ids(order.take(7, 12))) == sorted(ids(LABELLED))
    assert sorted(ids(order.take(19, 12))) == sorted(ids(LABELLED))
    assert ids(order.take(7, 3)) + ids(order.take(10, 3)) == ids(order.take(7, 6))  # as resampling asks


def test_a_step_by_success_is_a_function_of_seed_frontier_and_table():
    table = SuccessTable({"s0": (0.0, 16.0), "s1": (8.0, 16.0)})
    state = CurriculumState(successes=SuccessTable.from_json(json.loads(json.dumps(asdict(table)))))
    first = curriculum(scenario_order="success", seed=4).plan(8, CurriculumState(successes=table))
    again = curriculum(scenario_order="success", seed=4).plan(8, state)
    assert ids(first.order.take(8, 6)) == ids(again.order.take(8, 6))
    others = [
        curriculum(scenario_order="success", seed=5).plan(8, state),
        curriculum(scenario_order="success", seed=4).plan(9, state),
    ]
    assert all(ids(first.order.take(9, 6)) != ids(other.order.take(9, 6)) for other in others)


def test_what_is_always_solved_comes_less_often():
    table = SuccessTable({"s0": (16.0, 16.0)})
    plain = Counter()
    for step in range(400):
        plan = curriculum(scenario_order="success").plan(step, CurriculumState(successes=table))
        plain.update(ids(plan.order.take(step, 2)))
    assert plain["s0"] < 0.6 * fmean(plain[f"s{number}"] for number in range(1, 12))


# ------------------------------------------------------------------------------ measured success


def test_successes_are_counted_by_scenario_and_stratum_and_older_ones_fade():
    def stratum(one):
        return "even" if int(one.id[1]) % 2 == 0 else "odd"

    table = SuccessTable().after([group_with("s0", True, False), group_with("s2", True)], stratum, 0.5)
    assert table == SuccessTable({"s0": (1.0, 2.0), "s2": (1.0, 1.0)}, {"even": (2.0, 3.0)})
    table = table.after([group_with("s0", False, False), group_with("s1", True)], stratum, 0.5)
    assert table.scenarios == {"s0": (0.5, 3.0), "s2": (1.0, 1.0), "s1": (1.0, 1.0)}
    assert table.strata == {"even": (1.0, 3.5), "odd": (1.0, 1.0)}


def test_failed_conversations_and_those_without_a_verdict_count_nothing():
    group = group_with("s0", True, None, failed=2)
    assert SuccessTable().after([group], by_label, 0.5).scenarios == {"s0": (1.0, 1.0)}


def test_rates_lean_on_the_stratum_and_that_on_a_half():
    table = SuccessTable({"s0": (0.0, 8.0)}, {"easy": (7.0, 8.0)})
    assert table.rate("s9", "hard") == 0.5
    assert table.rate("s9", "easy") == pytest.approx(0.8)  # (7 + 1) / (8 + 2)
    assert table.rate("s0", "easy") == pytest.approx(0.16)  # (0 + 2 * .8) / (8 + 2)


def test_a_training_that_does_not_follow_success_keeps_none():
    groups = [group_with("s0", True, False)]
    assert curriculum().after(FRESH, 1, groups, {}) == FRESH
    kept = curriculum(scenario_order="success", strata="difficulty", success_memory=0.0)
    state = kept.after(kept.after(FRESH, 1, groups, {}), 2, groups, {})
    assert state.successes.scenarios == {"s0": (1.0, 2.0)}


def test_an_environment_without_verdicts_is_refused():
    for setting in ("scenario_order", "group_sizes"):
        asked = curriculum(**{setting: "success"})
        with pytest.raises(ConfigurationError, match=f"{setting} success needs an environment that says"):
            asked.put_together([group_with("s0", None, None)], asked.plan(0, FRESH))
        asked.put_together([group_with("s0", None, True)], asked.plan(0, FRESH))


def test_the_state_survives_json_and_an_older_one_has_none():
    table = SuccessTable({"s0": (0.1 + 0.2, 3.0)}, {"easy": (1 / 3, 8.0)})
    state = RunState(step=3, curriculum=CurriculumState(stage=1, streak=2, successes=table))
    assert RunState.from_json(json.loads(json.dumps(asdict(state)))) == state
    assert RunState.from_json({"step": 3}) == RunState(step=3)


# ------------------------------------------------------------------------------ difficulty and sizes


@pytest.mark.parametrize(
    ("difficulty", "played"),
    [
        ("easy", {"easy"}),
        (["easy", "medium"], {"easy", "medium"}),
        (["medium", "hard"], {"medium", "hard"}),
        ("Hard", {"hard"}),
        (None, {"easy", "medium", "hard"}),
    ],
)
@pytest.mark.parametrize("order", ["shuffled", "success"])
def test_only_difficulties_between_the_bounds_are_played(difficulty, played, order):
    plan = curriculum(difficulty=difficulty, scenario_order=order).plan(3, FRESH)
    assert set(map(by_label, plan.order.take(3, 12))) == played


def test_difficulties_may_be_numbers_and_words_are_none_of_them():
    scenarios = [scenario(0, 1), scenario(1, 2.5), scenario(2, 4), scenario(3, "easy"), scenario(4)]
    plan = curriculum(scenarios, difficulty=[2, 4]).plan(0, FRESH)
    assert set(ids(plan.order.take(0, 10))) == {"s1", "s2"}
    with pytest.raises(ConfigurationError, match=r"no train scenario has difficulty 7 in its context: they"):
        curriculum(scenarios, difficulty=7)


@pytest.mark.parametrize("value", ["simple", ["hard", "easy"], ["easy", 3], [1, 2, 3], True, [], {"a": 1}])
def test_what_is_no_difficulty_is_refused(value):
    with pytest.raises(ConfigurationError, match="a difficulty is easy, medium, hard, a number, or two"):
        TrainingConfig(difficulty=value)


def test_sizes_by_label():
    plan = curriculum(group_sizes="difficulty").plan(0, FRESH)
    assert plan.sizes([*LABELLED[::3], scenario(9)]) == [6, 6, 8, 12, 8]
    groups = [group_with("s0", *[True] * 6), group_with("s9", *[True] * 12)]
    assert plan.metrics(groups) == {"group/size_min": 6.0, "group/size_max": 12.0}
    with pytest.raises(ConfigurationError, match="and no train scenario has it: add it, or set group_sizes"):
        curriculum([scenario(0, 3)], group_sizes="difficulty")


def test_sizes_by_success_keep_the_step_s_conversations():
    table = SuccessTable({"s0": (14.0, 16.0), "s1": (8.0, 16.0)})
    state = CurriculumState(successes=table)
    plan = curriculum(group_sizes="success").plan(0, state)
    assert plan.sizes(LABELLED[:2]) == [10, 6]
    assert plan.sizes(LABELLED[2:6]) == [8, 8, 8, 8]  # nothing is known of them
    assert plan.metrics([group_with("s0", True), group_with("s1", True)]) == pytest.approx(
        # (14 + 2 * .5) / 18 and (8 + 1) / 18
        {"curriculum/expected_success": (15 / 18 + 0.5) / 2, "group/size_min": 1.0, "group/size_max": 1.0}
    )


# ------------------------------------------------------------------------------ stages

STAGES = [
    {"until": 0.2, "weights": {"format": 0.5, "answer": 0.1}},
    {"until": 5, "weights": {"format": 0.2, "answer": 0.8}, "difficulty": "easy"},
    {"until": "format >= .95 for 3 steps", "difficulty": ["medium", "hard"]},
    {"weights": {"answer": 1.0}},
]


def after_steps(staged, *metrics, state=FRESH, first=1):
    """The state after steps with these metrics."""
    for step, values in enumerate(metrics, start=first):
        state = staged.after(state, step, [], values)
    return state


def test_stages_end_with_their_step_their_share_or_their_condition():
    staged = curriculum(stages=STAGES, max_steps=10, reward_weights={"format": 1.0})
    good, bad = {"reward/mean": 1.0, "reward/format": 0.95}, {"reward/mean": 1.0, "reward/format": 0.94}
    stages = []
    state = FRESH
    for step, values in enumerate([bad, bad, bad, good, good, good, good, bad, good, good, good], start=1):
        stages.append(state.stage)
        state = staged.after(state, step, [], values)
    # two steps, three steps, then three in a row: 9 to 11, since the eighth broke the first two
    assert stages == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert state == CurriculumState(stage=3)


def test_each_stage_has_its_weights_and_its_difficulty():
    staged = curriculum(stages=STAGES, max_steps=10, reward_weights={"format": 1.0})
    plans = [staged.plan(0, CurriculumState(stage=stage)) for stage in range(4)]
    assert [dict(plan.weights) for plan in plans] == [
        {"format": 0.5, "answer": 0.1},
        {"format": 0.2, "answer": 0.8},
        {"format": 1.0},  # reward_weights, as it has none
        {"answer": 1.0},
    ]
    played = [set(map(by_label, plan.order.take(0, 12))) for plan in plans]
    everything = {"easy", "medium", "hard"}
    assert played == [everything, {"easy"}, {"medium", "hard"}, everything]
    assert [plan.metrics([]) for plan in plans] == [{"curriculum/stage": n} for n in (1.0, 2.0, 3.0, 4.0)]


def test_a_step_that_says_nothing_of_the_condition_changes_nothing_and_is_told_once(caplog):
    stages = [{"until": "fromat > 0 for 2 steps"}, {}]
    staged = curriculum(stages=stages, max_steps=9)
    with caplog.at_level(logging.WARNING, logger="stateset_agents"):
        state = after_steps(staged, {"reward/mean": 1.0, "reward/format": 1.0}, {"reward/mean": 1.0}, {})
    assert state == FRESH
    assert caplog.text.count("stage 1 waits for fromat > 0, but the step has") == 1
    state = after_steps(staged, {"fromat": 1.0}, {}, {"fromat": 1.0})
    assert state == CurriculumState(stage=1)


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [("x >= 1", 1.0, True), ("x > 1", 1.0, False), ("x<=-0.5", -0.5, True), ("a/b < .5", 0.4, True)],
)
def test_conditions(text, value, holds):
    condition = curriculum(stages=[{"until": text}, {}]).config.stages[0].condition
    assert condition.holds(value) is holds
    assert condition.steps == 1


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([{"until": 1.5}, {}], "a share of the run lies between 0 and 1, got 1.5: write steps without a dot"),
        ([{"until": 0}, {}], "a stage ends after a step from 1 on, got 0"),
        ([{"until": True}, {}], "a stage ends after a step from 1 on, got True"),
        ([{"until": "format"}, {}], "a condition is such as 'format >= 0.95 for 3 steps', got 'format'"),
        ([{"until": "format >= 1.2.3"}, {}], "a condition is such as"),
        ([{"until": "format >= 1 for 0 steps"}, {}], "a condition is such as"),
        ([{"until": 3}, {"until": 6}], "stage 2 is the last and goes on to the end of the run"),
        ([{}, {}], "stage 1 needs until, since another follows: a step, a share, or a condition"),
        ([{"until": 0.5}, {"until": 3}, {}], "stage 2 ends with step 3, and one before with step 5"),
        ([{"until": 3, "weights": {"a": -1}}, {}], "the weight of a must be at least 0, got -1.0"),
        ([{"until": 3, "difficulty": "dull"}, {}], "a difficulty is easy, medium, hard"),
        (
            [{"until": 3, "weight": {"a": 1}}, {}],
            "stages.0: Stage has no field 'weight' (did you mean 'weights'?)",
        ),
    ],
)
def test_stages_that_cannot_be(stages, message):
    with pytest.raises(ConfigurationError) as refused:
        TrainingConfig(stages=stages, max_steps=10)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_staleness": 1, "stages": [{"until": 3}, {}]}, "what stages will say of their step"),
        ({"max_staleness": 1, "scenario_order": "success"}, "what scenario_order success will say"),
        ({"max_staleness": 1, "group_sizes": "difficulty"}, "what group_sizes difficulty will say"),
        ({"group_sizes": "success", "num_generations": 3}, "success makes 4 to 16: set num_generat"),
        ({"group_sizes": "success", "min_group_size": 5}, "makes groups of 4, and min_group_size 5 leaves"),
        ({"group_sizes": "difficulty", "min_group_size": 7}, "makes groups of 6, and min_group_size 7"),
        ({"success_memory": 0.1}, "success_memory is of measured success, which nothing here follows"),
        ({"strata": "difficulty"}, "strata difficulty changes nothing in a shuffled order"),
        ({"strata": ["family", "side"]}, "strata family, side changes nothing in a shuffled order"),
        (
            {"stages": [{"weights": {"a": 1}}], "advantage_estimator": "turn_gae"},
            "a stage's weights goes with",
        ),
    ],
)
def test_settings_that_cannot_be_together(settings, message):
    with pytest.raises(ConfigurationError) as refused:
        TrainingConfig(**settings)
    assert message in str(refused.value)


def test_settings_survive_a_file():
    config = TrainingConfig(stages=STAGES, max_steps=10, difficulty=["easy", "hard"])
    assert TrainingConfig(**json.loads(json.dumps(config.model_dump(mode="json")))) == config
