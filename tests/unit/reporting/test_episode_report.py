"""The page of a numeric run: what its charts and tables are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_runs import finished_run, numeric_run, page_data

from stateset_agents.reporting.episodes import action_table, episode_charts
from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.diagnostics import diagnose
from stateset_agents.tracking.run_log import MetricLine, RunLog


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = numeric_run(tmp_path_factory.mktemp("runs"))
    write_report(folder.path)
    return page_data(folder)


def chart(charts: list[dict[str, Any]], title: str) -> dict[str, Any]:
    return next(one for one in charts if one["title"] == title)


def test_the_page_has_curves_of_returns_and_no_terms_of_conversations(data: dict[str, Any]) -> None:
    assert [one["title"] for one in data["curves"]] == [
        "Return",
        "Held-out return",
        "Entropy",
        "Time",
        "Speed",
    ]
    [held_out] = chart(data["curves"], "Held-out return")["series"]
    assert (held_out["values"][:2], held_out["low"][:2], held_out["high"][:2]) == ([9, 18], [8, 16], [10, 20])
    assert data["terms"] == data["measured"] == data["conversations"] == []
    assert ["environment", "pole"] in data["facts"]
    assert ["episodes", "120"] in data["facts"]


def test_returns_have_their_middle_eight_tenths_and_ends_their_shares(data: dict[str, Any]) -> None:
    charts = data["numeric"]["episodes"]
    [returns] = chart(charts, "Returns")["series"]
    assert returns["steps"] == [100 * number for number in range(1, 13)]
    # ten returns 10 to 19: the middle lies between 14 and 15, the tenth at 10.9
    assert (returns["low"][0], returns["values"][0], returns["high"][0]) == pytest.approx((10.9, 14.5, 18.1))
    ended, cut = chart(charts, "How episodes end")["series"]
    assert (ended["name"], ended["values"][0], ended["values"][-1]) == ("ended by itself", 1.0, 0.0)
    assert (cut["name"], cut["values"][9]) == ("cut by a limit", 0.9)  # returns 100 to 109


def test_parts_of_the_reward_are_stacked_above_and_below_zero(data: dict[str, Any]) -> None:
    parts = chart(data["numeric"]["episodes"], "Parts of the reward")
    assert (parts["stacked"], parts["signed"]) == (True, True)
    assert {line["name"]: line["values"][-1] for line in parts["series"]} == {"upright": 144, "cost": -24}
    assert parts["range"] == pytest.approx([-25.2, 151.2])
    single = [MetricLine(1, 0.0, {"reward/mean": 1.0, "reward/std": 0.0, "reward/all": 1.0})]
    assert episode_charts([], single) == []


def test_actions_are_counted_at_both_ends_and_rare_ones_taken_together(data: dict[str, Any]) -> None:
    assert data["numeric"]["actions"] == {
        "rows": [
            {"name": "left", "first": 0.99, "last": 0.88},
            {"name": "right", "first": 0.01, "last": 0.12},
        ],
        "updates": 1,
    }
    counts = {str(index): index for index in (*range(1, 31), 100)}
    assert action_table([(1, counts)]) is None  # its first tenth would be its last
    many = action_table([(1, counts), (2, counts)])
    assert many is not None
    names = [row["name"] for row in many["rows"]]
    assert names == [*map(str, range(9, 31)), "100", "8 others"]
    assert sum(row["last"] for row in many["rows"]) == pytest.approx(1)


def test_differences_to_the_untrained_policy_and_to_rules_are_paired(data: dict[str, Any]) -> None:
    before, after, rule = data["numeric"]["players"]
    assert [row["name"] for row in (before, after, rule)] == ["policy before", "policy after", "hpa"]
    # returns 5, 6, 7, 8 became 15, 17, 19, 21
    assert before["difference"] == 11.5
    assert before["difference_interval"][0] == 0  # four starts are too few for a verdict
    assert after["difference"] is None
    assert (rule["mean"], rule["difference_interval"]) == (9.0, [7.0, 11.0])


def test_a_window_draws_what_nobody_decides_once_and_time_in_minutes(data: dict[str, Any]) -> None:
    worst, _, best = data["numeric"]["windows"]
    assert (worst["name"], worst["note"]) == ("worst", "policy -1.25, hpa -1.5")
    replicas, response = best["charts"]
    assert [line["name"] for line in replicas["series"]] == ["load", "policy: ready", "hpa: ready"]
    assert replicas["series"][0]["steps"] == [0.25, 0.5, 0.75]
    assert (replicas["along"], replicas["smoothed"], response["note"]) == ("minute", False, "ms")


def test_a_page_of_conversations_has_no_numeric_part_and_the_other_way_round(tmp_path: Path) -> None:
    talks, numbers = finished_run(tmp_path, steps=2), numeric_run(tmp_path)
    pages = [write_report(folder.path).read_text() for folder in (talks, numbers)]
    assert "numeric" not in page_data(talks)
    for section, shown in (("conversations", (True, False)), ("episodes", (False, True))):
        assert tuple(f'<section id="{section}"' in page for page in pages) == shown


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    folder = numeric_run(tmp_path, updates=1)
    for file in (folder.summary, folder.windows):
        file.unlink()
    folder.metrics.write_text(folder.metrics.read_text().splitlines()[0] + "\n")
    folder.episodes.write_text(folder.episodes.read_text().splitlines()[0] + "\n")
    write_report(folder.path)
    found = page_data(folder)
    assert (found["curves"], found["numeric"]["players"], found["numeric"]["episodes"]) == ([], [], [])


def test_a_solved_numeric_task_is_no_failure(tmp_path: Path) -> None:
    folder = numeric_run(tmp_path)
    lines = [
        f'{{"step":{n},"time":0,"reward/mean":5,"episode/length":5,"group/zero_variance":0.95,'
        f'"policy/entropy":{1 / n**3}}}'
        for n in range(1, 20)
    ]
    header = folder.metrics.read_text().splitlines()[0]
    folder.metrics.write_text("\n".join([header, *lines]) + "\n")
    found = {finding.check: finding for finding in diagnose(RunLog(folder))}
    assert found["entropy"].verdict == "warn"
    assert "nats a step at the start" in found["entropy"].seen  # it has no tokens
    assert "the task is solved" in found["tied groups"].cure
