"""Heatmaps of a run's conversations, from rollouts.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from report_runs import conversation, log_stage, log_step

from stateset_agents.reporting.conversations import Distributions
from stateset_agents.tracking.jsonl import dump, read_lines
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.trajectory import Status, TrajectoryGroup


def heatmaps(folder: RunFolder) -> dict[str, dict[str, Any]]:
    found = Distributions(folder)
    found.read()
    return {chart["title"]: chart for chart in found.select()}


def test_rewards_and_failures_are_counted_by_step(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        log_stage(tracker, 0, "before", wins={0})  # not of training
        log_step(tracker, 1)  # two groups of four, one of each succeeds, with a branch each
        broke = conversation(7, success=False, metadata={"violations": {"truth": 2, "consent": 0}})
        cut = conversation(7, success=None, member=1, status=Status.TRUNCATED)
        tracker.log_rollouts(2, [TrajectoryGroup(key="2/x", trajectories=(broke, cut))])
    charts = heatmaps(folder)
    rewards = charts["Reward by step"]
    assert rewards["columns"] == [(1, 1), (2, 2)]
    assert rewards["totals"] == [8, 2]
    assert (rewards["rows"][0][0], rewards["rows"][-1][1]) == (0.15, 0.9)
    assert (rewards["counts"][0][0], rewards["counts"][0][-1], sum(rewards["counts"][0])) == (6, 2, 8)
    wrong = charts["What went wrong by step"]
    assert wrong["rows"] == ["none", "truncated", "truth"]
    assert wrong["counts"] == [[6, 0, 0], [0, 1, 1]]
    assert charts["Reward by length"]["columns"] == [(3, 3)]  # sampled tokens of each


def test_lines_in_another_order_of_fields_are_parsed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        log_step(tracker, 3)
    expected = heatmaps(folder)
    header, *records = [record for _, record in read_lines(folder.rollouts)]
    lines = [dump(record) for record in (header, *(dict(sorted(record.items())) for record in records))]
    folder.rollouts.write_text("\n".join(lines) + "\n")
    assert heatmaps(folder) == expected


def test_a_run_without_conversations_has_no_heatmap(tmp_path: Path) -> None:
    assert heatmaps(RunFolder.create(tmp_path)) == {}
