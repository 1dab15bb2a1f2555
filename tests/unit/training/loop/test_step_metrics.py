"""What a step's conversations look like in numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tiny_training import group_of, talk

from stateset_agents.algorithms.intervals import share_interval
from stateset_agents.training.loop.metrics import merge_processes, rollout_metrics, untrained_tokens
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Branch, Outcome, Trajectory, TrajectoryGroup


def test_a_turn_with_an_unreadable_call_is_malformed() -> None:
    conversation = talk(([1], [2]), ([3], [4]), ([5], [6]), ([7], [8]))
    broken = ToolCall(name="look", arguments={}, id="1", error="not JSON")
    first, *rest = conversation.turns
    said = replace(first.completion, message=Message(role="assistant", content="", tool_calls=(broken,)))
    spoiled = replace(conversation, turns=(replace(first, completion=said), *rest))
    metrics = rollout_metrics([TrajectoryGroup(key="g", trajectories=(spoiled,))])
    assert metrics["rollout/malformed"] == 0.25


def test_the_share_of_replies_that_their_limit_cut() -> None:
    first, *rest = talk(([1], [2]), ([3], [4]), ([5], [6]), ([7], [8])).turns
    cut = replace(first, completion=replace(first.completion, finish_reason="length"))
    conversation = replace(talk(), turns=(cut, *rest))
    metrics = rollout_metrics([TrajectoryGroup(key="g", trajectories=(conversation,))])
    assert metrics["rollout/cut_replies"] == 0.25


def test_the_share_of_the_prompts_tokens_that_the_model_was_never_trained_on() -> None:
    group = TrajectoryGroup(key="g", trajectories=(talk(([1, 2, 9], [7]), ([8], [3])),))
    assert untrained_tokens([group], {1, 2, 3}) == {"tokens/untrained": 0.5}  # 9 and 8 of 1, 2, 9, 8
    assert untrained_tokens([], {1}) == {}


def test_rows_are_counted_and_what_they_repeat_is_said_once() -> None:
    prompt = [1, 2, 3]
    apart = talk((prompt, [4, 5]), ([*prompt, 5, 6], [7]), ([*prompt, 5, 6, 7, 8], [9]), follows=[None] * 3)
    group = TrajectoryGroup(key="g", trajectories=(apart, talk((prompt, [4]), ([5], [6]))))
    metrics = rollout_metrics([group])
    assert (metrics["rollout/rows"], metrics["rollout/rows_max"]) == (2.0, 3.0)
    assert metrics["tokens/agent"] == 6.0
    assert metrics["tokens/environment"] == (3 + 2 + 1) + (3 + 1)  # 5 and 6 once more, 8; of the other 5


def test_a_term_called_mean_and_a_family_called_rate_leave_the_mean_and_the_rate_as_they_are() -> None:
    conversations = group_of(1.0, 0.0).trajectories
    odd = [
        replace(
            one,
            scenario=replace(one.scenario, family="rate"),
            breakdown={"mean": 7.0},
            outcome=Outcome(success=success),
        )
        for one, success in zip(conversations, (True, False), strict=True)
    ]
    plain = replace(talk(([1], [2])), outcome=Outcome(success=True))
    metrics = rollout_metrics([TrajectoryGroup(key="g", trajectories=(*odd, plain))])
    assert (metrics["reward/mean"], metrics["reward/mean_part"]) == (0.5, 7.0)
    assert (metrics["success/rate"], metrics["success/rate_part"]) == (pytest.approx(2 / 3), 0.5)


def test_a_step_s_interval_is_over_scenarios_not_conversations() -> None:
    groups = []
    for place, successes in enumerate((8, 0, 4, 4)):
        members = tuple(
            replace(
                talk(
                    reward=float(member < successes), outcome=Outcome(reward=None, success=member < successes)
                ),
                scenario=Scenario(id=f"s{place}", split="train"),
            )
            for member in range(8)
        )
        groups.append(TrajectoryGroup(key=f"g{place}", trajectories=members))
    metrics = rollout_metrics(groups)
    # Four shares of mean .5 and deviation .408: .5 -+ 3.18 * .408 / 2; 32 conversations would give .5 -+ .18.
    assert (metrics["rollout/reward_low"], metrics["rollout/reward_high"]) == pytest.approx(
        (-0.15, 1.15), abs=1e-3
    )
    shares = share_interval([1.0, 0.0, 0.5, 0.5])
    assert (metrics["rollout/success_low"], metrics["rollout/success_high"]) == shares
    assert "rollout/reward_low" not in rollout_metrics(groups[:1])  # one scenario says nothing of others
    assert "rollout/reward_low" not in rollout_metrics([groups[2], groups[2]])


def test_branches_are_counted_as_cost_and_move_no_other_figure() -> None:
    plain = group_of(1.0, 0.0)
    rich = talk(([9], [1]), ([8], [2, 3, 4]), reward=100.0)
    lost = talk(([9], [1]), ([8], [2]))
    branched = replace(plain, branches=tuple(Branch(turn=1, trajectory=one) for one in (rich, lost)))
    costs = {"rollout/branches": 2.0, "rollout/branches_unscored": 1.0, "tokens/branches": 4.0}
    assert rollout_metrics([branched]) == rollout_metrics([plain]) | costs


def test_what_several_processes_measured_is_one_figure() -> None:
    here = {"time/step": 2.0, "engine/decode_rows": 30.0, "engine/occupancy": 0.5, "breaker/judge": 0.5}
    there = {"time/step": math.nan, "engine/decode_rows": 10.0, "engine/occupancy": 0.9, "breaker/judge": 1.0}
    merged = merge_processes([here, there])
    assert math.isnan(merged.pop("time/step"))
    assert merged == {"engine/decode_rows": 40.0, "engine/occupancy": 0.6, "breaker/judge": 1.0}
    assert merge_processes([{"engine/occupancy": 1.0}, {"engine/occupancy": 1.0}]) == {
        "engine/occupancy": 1.0
    }


def _thought(words: int, steps: int, difficulty: int, *, right: bool, tags: bool = True) -> Trajectory:
    """A reply with so many words in so many lines of thought."""
    lines = [["word"] for _ in range(steps)]
    lines[-1] += ["more"] * (words - steps)
    thinking = "\n".join(" ".join(line) for line in lines)
    content = f"<think>{thinking}</think><answer>5 apples</answer>" if tags else "5"
    conversation = talk(([1], [2]), reward=1.0, breakdown={"format": float(tags), "answer": float(right)})
    [turn] = conversation.turns
    said = replace(turn.completion, message=Message(role="assistant", content=content))
    scenario = replace(conversation.scenario, context={"difficulty": difficulty})
    return replace(conversation, scenario=scenario, turns=(replace(turn, completion=said),))


def test_thoughts_are_measured_by_right_and_wrong() -> None:
    members = (
        _thought(4, 1, 1, right=True),
        _thought(6, 2, 2, right=True),
        _thought(8, 3, 3, right=True),
        _thought(20, 1, 3, right=False),
        _thought(1, 1, 3, right=False, tags=False),
    )
    metrics = rollout_metrics([TrajectoryGroup(key="g", trajectories=members)])
    assert {name: value for name, value in metrics.items() if name.startswith("reasoning/")} == {
        "reasoning/format": 0.8,
        "reasoning/steps": 1.75,
        "reasoning/thinking_words_right": 6.0,
        "reasoning/answer_words_right": 2.0,
        "reasoning/thinking_words_wrong": 20.0,
        "reasoning/answer_words_wrong": 2.0,
        "reasoning/steps_by_difficulty": pytest.approx(1.0),
    }


def test_without_a_reward_for_the_format_nothing_is_said_of_thoughts() -> None:
    metrics = rollout_metrics([group_of(1.0, 0.0)])
    assert not any(name.startswith("reasoning/") for name in metrics)


def test_two_right_replies_say_nothing_of_steps_and_difficulty() -> None:
    members = (_thought(4, 1, 1, right=True), _thought(6, 2, 2, right=True), _thought(8, 3, 3, right=False))
    metrics = rollout_metrics([TrajectoryGroup(key="g", trajectories=members)])
    assert "reasoning/steps_by_difficulty" not in metrics
