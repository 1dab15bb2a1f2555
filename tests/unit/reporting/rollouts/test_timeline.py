"""What a conversation did when: from the stopwatch over the run's file to the page."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from environments import ChattyEnvironment, scenarios
from report_runs import conversation, finished_run
from tiny_training import make_agent

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.reporting import conversations
from stateset_agents.reporting.conversations import Timeline
from stateset_agents.tracking.jsonl import read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker, timeline_record
from stateset_agents.types.trajectory import Span, Stopwatch


def shown(folder: RunFolder) -> dict[str, Any]:
    timeline = Timeline(folder)
    timeline.read()
    return timeline.select()


def test_a_stopwatch_leaves_no_gap_and_lays_like_things_together() -> None:
    watch = Stopwatch()
    watch.lap("environment")
    watch.lap("environment")
    begun = watch.spans[-1].end + 0.001
    time.sleep(0.002)
    watch.lap("waiting", begun)
    watch.lap("model")
    spans = watch.spans
    assert [span.doing for span in spans] == ["environment", "waiting", "model"]
    assert spans[1].end == begun
    assert all(earlier.end == later.begin for earlier, later in pairwise(spans))


async def test_an_engine_s_conversations_say_what_they_did_when() -> None:
    backend = ScriptedBackend(["a", "b"], delay=0.02)
    async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
        engine = ComputationalEngine(agent, ChattyEnvironment(), EnvironmentReward(), num_generations=2)
        (group,) = await engine.rollout(scenarios(1), seed=0, step=0)
    for member in group.trajectories:
        *spans, scoring = member.spans
        assert scoring.doing == "reward"
        assert [span.doing for span in spans] == [
            "environment",
            "model",
            "environment",
            "model",
            "environment",
        ]
        assert all(span.end - span.begin >= 0.02 for span in spans if span.doing == "model")
        assert scoring.begin >= max(another.spans[-2].end for another in group.trajectories)


async def test_a_model_says_when_it_took_a_turn_up() -> None:
    async with make_agent(max_new_tokens=4) as agent:
        engine = ComputationalEngine(agent, ChattyEnvironment(), EnvironmentReward(), num_generations=3)
        (group,) = await engine.rollout(scenarios(1), seed=0, step=0)
    for member in group.trajectories:
        doings = [span.doing for span in member.spans]
        assert doings[:3] == ["environment", "waiting", "model"]
        assert doings.count("model") == len(member.turns)


def test_the_file_has_pauses_as_spans_too() -> None:
    record = timeline_record(conversation(1, success=True, member=1))
    assert record == {
        "member": 1,
        "begin": 100.0,
        "spans": [
            ["environment", 0.001],
            ["waiting", 0.249],
            ["model", 0.375],
            ["environment", 0.375],
            ["model", 1.0],
            ["idle", 0.5],
            ["reward", 0.01],
        ],
    }


def test_a_step_is_shown_group_by_group_with_the_updates_of_its_time(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=3)
    with JsonlTracker(folder) as tracker:
        for step, begin, end in ((1, 90.0, 99.0), (2, 99.5, 100.5), (3, 102.6, 103.0)):
            tracker.log_event("update begun", step=step, monotonic=begin)
            tracker.log_event("update ended", step=step, monotonic=end)
    data = shown(folder)
    last = data["steps"][-1]
    assert (data["total"], last["step"], last["length"]) == (3, 3, 30_000)
    assert last["updates"] == [
        {"step": 2, "begin": -5_000, "end": 5_000},
        {"step": 3, "begin": 26_000, "end": 30_000},
    ]
    assert [group["group"] for group in last["groups"]] == ["3/0", "3/1"]
    rows = last["groups"][0]["rows"]
    assert [(row["member"], row["branch_of"]) for row in rows] == [
        *((member, None) for member in range(4)),
        (0, [0, 1]),
    ]
    lines = [line for _, line in read_lines(folder.timeline) if line.get("step") == 3][:5]
    for row, line in zip(rows, lines, strict=True):
        assert row["did"] == "".join(doing[0] for doing, _ in line["spans"]) == "ewmemir"
        assert row["ticks"] == [round(seconds * 10_000) for _, seconds in line["spans"]]


def test_a_step_says_how_many_rows_its_conversations_had(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=3)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(2, {"rollout/rows": 1.25, "rollout/rows_max": 3.0})
        tracker.log_metrics(3, {"rollout/rows": 1.0, "rollout/rows_max": 1.0})
    assert [step["rows"] for step in shown(folder)["steps"]] == [None, (1.25, 3.0), None]


def test_an_update_of_another_session_has_another_clock(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=3)
    with JsonlTracker(folder) as tracker:
        for step, begin, end in ((1, 90.0, 99.0), (2, 99.5, 100.5), (3, 102.6, 103.0)):
            if step == 3:
                tracker.log_event("resumed", step=2)
            tracker.log_event("update begun", step=step, monotonic=begin)
            tracker.log_event("update ended", step=step, monotonic=end)
    assert [[update["step"] for update in step["updates"]] for step in shown(folder)["steps"]] == [
        [2],
        [2],
        [3],
    ]


def test_a_scenario_that_comes_twice_in_a_step_is_two_groups(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=1)
    text = folder.timeline.read_text().replace('"1/1"', '"1/0"')
    folder.timeline.write_text(text)
    (step,) = shown(folder)["steps"]
    assert [(group["group"], len(group["rows"])) for group in step["groups"]] == [("1/0", 5), ("1/0", 5)]


def test_a_page_takes_whole_steps_evenly_and_at_least_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = finished_run(tmp_path, steps=101)
    data = shown(folder)
    steps = [step["step"] for step in data["steps"]]
    assert (data["total"], len(steps), steps[0], steps[-1]) == (101, 40, 1, 101)
    assert max(later - earlier for earlier, later in pairwise(steps)) == 3
    monkeypatch.setattr(conversations, "_MAX_BYTES", 10)
    assert [step["step"] for step in shown(folder)["steps"]] == [101]


def test_new_lines_are_read_and_a_truncated_file_again(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=4)
    timeline = Timeline(folder)
    timeline.read()
    folder.truncate_after(2)
    timeline.read()
    assert [step["step"] for step in timeline.select()["steps"]] == [1, 2]
    folder.timeline.unlink()  # a run of an earlier version
    assert shown(folder) == {"total": 0, "steps": []}


def test_spans_are_no_part_of_what_a_conversation_is() -> None:
    timed = conversation(1, success=True)
    assert timed == replace(timed, spans=(Span("model", 1.0, 2.0),))
    assert "doing=" not in repr(timed)
