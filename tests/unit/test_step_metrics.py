"""What a step's conversations look like in numbers."""

from __future__ import annotations

from dataclasses import replace

from tiny_training import group_of, talk

from stateset_agents.core.trajectory import Branch, TrajectoryGroup
from stateset_agents.messages import Message, ToolCall
from stateset_agents.training.step_metrics import rollout_metrics


def test_a_turn_with_an_unreadable_call_is_malformed() -> None:
    conversation = talk(([1], [2]), ([3], [4]), ([5], [6]), ([7], [8]))
    broken = ToolCall(name="look", arguments={}, id="1", error="not JSON")
    first, *rest = conversation.turns
    said = replace(first.completion, message=Message(role="assistant", content="", tool_calls=(broken,)))
    spoiled = replace(conversation, turns=(replace(first, completion=said), *rest))
    metrics = rollout_metrics([TrajectoryGroup(key="g", trajectories=(spoiled,))])
    assert metrics["rollout/malformed"] == 0.25


def test_branches_are_counted_as_cost_and_move_no_other_figure() -> None:
    plain = group_of(1.0, 0.0)
    rich = talk(([9], [1]), ([8], [2, 3, 4]), reward=100.0)
    lost = talk(([9], [1]), ([8], [2]))
    branched = replace(plain, branches=tuple(Branch(turn=1, trajectory=one) for one in (rich, lost)))
    costs = {"rollout/branches": 2.0, "rollout/branches_unscored": 1.0, "tokens/branches": 4.0}
    assert rollout_metrics([branched]) == rollout_metrics([plain]) | costs
