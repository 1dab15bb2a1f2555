"""What the tracker records of a conversation, and that nothing is lost on the way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RecordedRollout, RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.messages import Completion, Message, ToolCall, VersionSpan
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Branch, Outcome, Status, Trajectory, TrajectoryGroup, Turn


def conversation() -> Trajectory:
    """Two turns: a tool call (one of two is broken) and an answer; row P P A A A U A A."""
    calls = (
        ToolCall(name="get_order", arguments={"order_id": "K27"}, id="1"),
        ToolCall(name="", id="2", error="arguments are no JSON", written="<tool_call>{"),
    )
    first = Completion(
        message=Message(role="assistant", content="", tool_calls=calls),
        prompt_ids=(1, 2),
        token_ids=(3, 4, 5),
        logprobs=(-0.5, -0.25, -0.125),
        finish_reason="stop",
        version_spans=(VersionSpan(7, 0, 2), VersionSpan(8, 2, 3)),
    )
    second = Completion(
        message=Message(role="assistant", content="It is in Oslo. ✓"),
        prompt_ids=(1, 2, 3, 4, 5, 6),
        token_ids=(7, 8),
        logprobs=(-1.0, -2.0),
        finish_reason="length",
        version_spans=(VersionSpan(8, 0, 2),),
    )
    feedback = (
        Message(role="tool", content='{"status": "sent"}', tool_call_id="1", name="get_order"),
        Message(role="tool", content="error: arguments are no JSON", tool_call_id="2"),
    )
    return Trajectory(
        scenario=Scenario(id="s1", family="status", opening="Where is K27?", context={"order": "K27"}),
        member=3,
        seed=11,
        opening=(
            Message(role="system", content="Be kind."),
            Message(role="user", content="Where is K27?"),
        ),
        turns=(
            Turn(
                prompt_ids=(1, 2), completion=first, feedback=feedback, reward=0.25, breakdown={"told": 0.25}
            ),
            Turn(prompt_ids=(6,), completion=second),
        ),
        status=Status.TRUNCATED,
        outcome=Outcome(
            reward=0.5, success=True, breakdown={"told": 1.0}, changes=({"table": "tickets", "rowid": 4},)
        ),
        reward=0.75,
        breakdown={"environment": 0.75},
        metadata={"requests": 2},
    )


def written(tmp_path: Path, *groups: TrajectoryGroup, **options: Any) -> list[RecordedRollout]:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_rollouts(5, groups, **options)
    return list(RunLog(folder).rollouts())


def test_a_record_holds_the_whole_conversation(tmp_path: Path) -> None:
    group = TrajectoryGroup(key="5/s1", trajectories=(conversation(),), weight=0.5)
    (rollout,) = written(tmp_path, group, advantages=[[[0.1, 0.2, 0.3, 0.4, 0.5]]])
    assert trajectory_of(rollout) == conversation()
    assert (rollout.step, rollout.stage, rollout.group, rollout.weight) == (5, "train", "5/s1", 0.5)
    assert rollout.mask == (0, 0, 1, 1, 1, 0, 1, 1)
    assert rollout.versions == (-1, -1, 7, 7, 8, -1, 8, 8)
    assert rollout.advantages == (0.1, 0.2, 0.3, 0.4, 0.5)
    assert rollout.success is True
    written_calls = [call.written for message in rollout.messages for call in message.tool_calls]
    assert written_calls == ["", "<tool_call>{"]


def test_a_failed_conversation_is_recorded_with_its_error(tmp_path: Path) -> None:
    failed = Trajectory(scenario=Scenario(id="s2"), status=Status.FAILED, error="tool broke")
    (rollout,) = written(tmp_path, TrajectoryGroup(key="g", trajectories=(failed,)), stage="before")
    assert trajectory_of(rollout) == failed
    assert (rollout.stage, rollout.status, rollout.error) == ("before", "failed", "tool broke")
    assert rollout.success is None
    assert rollout.advantages is None


def test_stages_can_be_read_apart(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    group = TrajectoryGroup(key="g", trajectories=(conversation(),))
    with JsonlTracker(folder) as tracker:
        tracker.log_rollouts(0, [group], stage="before")
        tracker.log_rollouts(1, [group])
    assert [rollout.stage for rollout in RunLog(folder).rollouts("before", "after")] == ["before"]


def test_branches_are_marked_and_read_only_when_asked_for(tmp_path: Path) -> None:
    another = replace(conversation(), reward=0.25)
    group = TrajectoryGroup(
        key="g", trajectories=(conversation(),), branches=(Branch(turn=1, trajectory=another),)
    )
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_rollouts(1, [group], [[[0.0] * 5]])
    (member,) = RunLog(folder).rollouts()
    assert (member.branch_of, member.reward) == (None, 0.75)
    again, branch = RunLog(folder).rollouts("train", branches=True)
    assert again == member
    assert (branch.branch_of, branch.reward, branch.advantages) == ((3, 1), 0.25, None)
    assert trajectory_of(branch) == another


def test_logprobs_that_are_not_finite_stay_readable(tmp_path: Path) -> None:
    plain = conversation()
    last = plain.turns[-1]
    wild = replace(last, completion=replace(last.completion, logprobs=(float("-inf"), -2.0)))
    group = TrajectoryGroup(key="g", trajectories=(replace(plain, turns=(plain.turns[0], wild)),))
    (rollout,) = written(tmp_path, group)
    assert rollout.logprobs[-2:] == (None, -2.0)


def test_what_the_tokens_say_is_kept_once_also_by_a_second_tracker(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    group = TrajectoryGroup(key="g", trajectories=(conversation(),))
    for _ in range(2):
        with JsonlTracker(folder, piece=lambda id: f"<{id}>") as tracker:
            tracker.log_rollouts(1, [group, group])
    texts = RunLog(folder).tokens()
    assert texts == {id: f"<{id}>" for id in conversation().token_ids}
    assert len(folder.tokens.read_text().splitlines()) == 1 + len(texts)


def test_a_run_without_a_tokenizer_has_ids_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_rollouts(1, [TrajectoryGroup(key="g", trajectories=(conversation(),))])
    assert RunLog(folder).tokens() == {}


def test_advantages_must_match_the_groups(tmp_path: Path) -> None:
    group = TrajectoryGroup(key="g", trajectories=(conversation(), replace(conversation(), member=4)))
    with pytest.raises(ValueError, match="shorter"):
        written(tmp_path, group, advantages=[[[0.0] * 5]])


def test_a_metric_without_a_stage_is_refused(tmp_path: Path) -> None:
    with JsonlTracker(RunFolder.create(tmp_path)) as tracker, pytest.raises(ValueError, match="got step"):
        tracker.log_metrics(1, {"reward/mean": 1.0, "step": 2.0})
