"""Problems of reasoning-gym: which data sets are allowed, and what it says where the library is missing.

Where the extra is installed, the audit is run again on every data set that is allowed.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

from scripts.reasoning_gym_audit import faults
from stateset_agents.environments.problems.procedural import ALLOWED, ReasoningGymProblems, verdict_of
from stateset_agents.evaluation.audit import audit
from stateset_agents.rewards import create_reasoning_reward
from stateset_agents.training.components import make_environment
from stateset_agents.types.errors import ConfigurationError

IS_INSTALLED = importlib.util.find_spec("reasoning_gym") is not None
UNTRUSTED = (
    "game_of_life_halting",
    "coin_flip",
    "prime_factorization",
    "countdown",
    "simple_integration",
    "rush_hour",
)


def test_data_sets_whose_verdict_was_found_wanting_are_left_out() -> None:
    assert not ALLOWED & set(UNTRUSTED)
    assert len(ALLOWED) >= 75
    assert {"chain_sum", "leg_counting"} <= ALLOWED


def test_a_part_of_a_score_is_no_right_answer() -> None:
    assert [verdict_of(score) for score in (0.0, 0.05, 0.99, 1.0)] == [0.0, 0.0, 0.0, 1.0]


def test_a_missing_library_is_named_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigurationError, match=r'pip install "reasoning-gym>=0\.1\.25,<0\.2"'):
        make_environment({"name": "reasoning_gym"})


if IS_INSTALLED:

    @pytest.mark.parametrize("name", sorted(ALLOWED))
    def test_an_allowed_data_set_passes_the_audit(name: str) -> None:
        assert faults(name) == []

    @pytest.mark.parametrize("name", UNTRUSTED)
    def test_an_untrusted_data_set_fails_it(name: str) -> None:
        assert faults(name) != []

    async def test_no_attack_is_paid_and_own_answers_are() -> None:
        environment = ReasoningGymProblems(["chain_sum", "leg_counting", "spell_backward"], num_test=12)
        scenarios = environment.scenarios("test")
        assert [scenario.family for scenario in scenarios[:3]] == [
            "chain_sum",
            "leg_counting",
            "spell_backward",
        ]
        played = await audit(environment, create_reasoning_reward(min_steps=0), scenarios)
        assert played.over(max_success=0.0) == []
        assert played.lost() == []
        assert played.honest is not None
        assert played.honest.success == 1.0

    def test_the_solver_adds_term_by_term_and_of_others_knows_the_answer() -> None:
        environment = ReasoningGymProblems({"chain_sum": {"min_terms": 3}, "leg_counting": {}}, num_train=20)
        for scenario in environment.scenarios("train"):
            trace = environment.solve(scenario)
            assert environment.judge(scenario, trace.answer) == 1
            if scenario.family == "leg_counting":
                assert trace.steps == ()
                continue
            expression = scenario.opening.rpartition(": ")[2].removesuffix(" =")
            assert len(trace.steps) == len(expression.split()) // 2
            assert trace.steps[-1] == trace.answer

    def test_splits_share_no_question_and_seeds_draw_others() -> None:
        texts = {}
        for seed in (0, 1):
            environment = ReasoningGymProblems("chain_sum", num_train=60, num_test=30, seed=seed)
            for split in ("train", "validation", "test"):
                texts[split, seed] = {scenario.opening for scenario in environment.scenarios(split)}
        assert texts["test", 0] == texts["test", 1]
        assert texts["train", 0] != texts["train", 1]
        held_out = texts["test", 0] | texts["validation", 0]
        assert not held_out & (texts["train", 0] | texts["train", 1])
        assert len(texts["train", 0]) == 60

    @pytest.mark.parametrize(
        ("datasets", "message"),
        [
            (
                "chain_sums",
                "'chain_sums', which is none whose verdict was found to hold .did you mean 'chain_sum'",
            ),
            ("coin_flip", "'coin_flip', which is none whose verdict was found to hold"),
            ([], "datasets is empty"),
            ({"chain_sum": {"terms": 3}}, "data set 'chain_sum' does not take {'terms': 3}"),
            ({"chain_sum": 3}, "the arguments of data set 'chain_sum' must be a mapping, got 3"),
        ],
    )
    def test_data_sets_that_cannot_be_had_are_refused(datasets: object, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            ReasoningGymProblems(datasets)  # type: ignore[arg-type]  # some are the mistake
