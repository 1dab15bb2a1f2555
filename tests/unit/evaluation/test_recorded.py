"""Recorded conversations are the conversations that were recorded: one row, several rows, trees, thoughts."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from repository_paths import ROOT

from stateset_agents.core.reward import reward_function
from stateset_agents.evaluation.recorded import groups_of, trajectory_of
from stateset_agents.evaluation.rescoring import rescore
from stateset_agents.tracking.jsonl import read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RecordedRollout, RunLog
from stateset_agents.tracking.tracker import JsonlTracker, rollout_record
from stateset_agents.types.messages import Completion, Message, ToolCall, VersionSpan
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup, Turn

OLD_RUN = ROOT / "tests" / "fixtures" / "old_run" / "run"

texts = st.text(alphabet="ab <>/\n✓\ud800", max_size=6)
thoughts = st.none() | texts
ids = st.lists(st.integers(0, 99), min_size=1, max_size=4)


@st.composite
def replies(draw: st.DrawFn) -> Message:
    calls = [
        ToolCall(name="look", arguments={"at": 1}, id="1"),
        ToolCall(name="x", error="no JSON", written="{"),
    ]
    called = draw(st.sampled_from([0, 0, 1, 2]))
    return Message(
        role="assistant", content=draw(texts), reasoning=draw(thoughts), tool_calls=tuple(calls[:called])
    )


@st.composite
def conversations(draw: st.DrawFn) -> Trajectory:
    """Turns that follow the one before, an earlier one, or none."""
    turns: list[Turn] = []
    seen: list[tuple[int, ...]] = []
    for index in range(draw(st.integers(1, 5))):
        follows = draw(st.sampled_from([-1, -1, None, *range(index)]))
        before = index - 1 if follows == -1 else follows
        row = () if before is None or before < 0 else seen[before]
        prompt, sampled = tuple(draw(ids)), tuple(draw(ids))
        is_summary = draw(st.booleans()) and index > 0
        completion = Completion(
            message=draw(replies()),
            prompt_ids=row + prompt,
            token_ids=sampled,
            logprobs=tuple(-token / 8 for token in sampled),
            finish_reason=draw(st.sampled_from(["stop", "length"])),
            version_spans=(VersionSpan(index, 0, len(sampled)),),
        )
        feedback = () if is_summary else (Message(role="user", content=draw(texts)),)
        turns.append(
            Turn(
                prompt_ids=prompt,
                completion=completion,
                follows=follows,
                is_summary=is_summary,
                feedback=feedback,
            )
        )
        seen.append(row + prompt + sampled)
    return Trajectory(
        scenario=Scenario(id="s"),
        opening=(Message(role="user", content=draw(texts)),),
        turns=tuple(turns),
        reward=0.5,
        turn_rewards=(0.25,) * len(turns),
    )


def recorded(*members: Trajectory) -> list[RecordedRollout]:
    """What is read back from a run folder."""
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.create(Path(root))
        with JsonlTracker(folder) as tracker:
            tracker.log_rollouts(1, [TrajectoryGroup(key="g", trajectories=members)])
        return list(RunLog(folder).rollouts())


@settings(max_examples=60, deadline=None)
@given(st.lists(conversations(), min_size=1, max_size=3))
def test_a_conversation_is_read_as_it_was_recorded(members: list[Trajectory]) -> None:
    for rollout, member in zip(recorded(*members), members, strict=True):
        read = trajectory_of(rollout)
        assert read == member
        assert read.rows == member.rows
        assert read.messages == member.messages
        assert list(rollout.token_ids) == member.token_ids
        assert list(rollout.mask) == member.action_mask


def turn(before: tuple[int, ...], prompt: tuple[int, ...], sampled: tuple[int, ...], **fields: Any) -> Turn:
    message = Message(role="assistant", content="two words", reasoning="a thought of five words")
    completion = Completion(
        message=message,
        prompt_ids=before + prompt,
        token_ids=sampled,
        logprobs=(-0.5,) * len(sampled),
        finish_reason="stop",
    )
    return Turn(prompt_ids=prompt, completion=completion, **fields)


def test_only_what_a_turn_does_not_have_by_default_is_recorded() -> None:
    talk = Trajectory(
        scenario=Scenario(id="s"),
        turns=(
            turn((), (1,), (2,)),
            turn((1, 2), (3,), (4,)),
            turn((), (1, 2), (5,), follows=None),
            turn((1, 2), (6,), (7,), follows=0, is_summary=True),
        ),
    )
    first, second, opens, forks = rollout_record(talk)["turns"]
    assert {"follows", "is_summary"}.isdisjoint(first.keys() | second.keys())
    assert (opens["follows"], "is_summary" in opens) == (None, False)
    assert (forks["follows"], forks["is_summary"]) == (0, True)


def test_a_run_of_an_older_version_is_one_row_and_would_be_recorded_alike() -> None:
    rollouts = list(RunLog.open(OLD_RUN).rollouts(branches=True))
    lines = [line for _, line in read_lines(OLD_RUN / "rollouts.jsonl")][1:]
    assert len(rollouts) == len(lines) > 0
    for rollout, line in zip(rollouts, lines, strict=True):
        trajectory = trajectory_of(rollout)
        (row,) = trajectory.rows
        assert row.token_ids == line["token_ids"]
        again = rollout_record(trajectory, rollout.advantages)
        assert json.dumps(again) == json.dumps({name: line[name] for name in again})


async def test_rewards_are_asked_about_words_alone_whatever_the_rows() -> None:
    @reward_function
    def num_words(replies: Sequence[Message]) -> float:
        return sum(len(reply.content.split()) for reply in replies)

    talk = Trajectory(
        scenario=Scenario(id="s"),
        turns=(
            turn((), (1,), (2,)),
            turn((1, 2), (3,), (4,), is_summary=True),
            turn((), (1, 5), (6,), follows=None),
        ),
        reward=1.0,
    )
    members = [talk, dataclasses.replace(talk, member=1, turns=talk.turns[:1], reward=0.0)]
    result = await rescore(groups_of(recorded(*members)), num_words)
    assert (result.all.n, result.all.new_mean) == (2, 3.0)  # four words, and two: no thought, no summary
