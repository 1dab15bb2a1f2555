"""Measures of few runs by hand, the verdict that intervals allow, and a recommender that guesses nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from repository_paths import ROOT

from stateset_agents.algorithms.intervals import stratified_interval
from stateset_agents.numeric.studies.study import (
    SEEDS_FOR_RIVALS,
    ArmDifference,
    Cell,
    GridCell,
    StudyFolder,
    analyse,
    area_under_curve,
    grid,
    probability_of_improvement,
    recommend,
    sentence,
    study_report,
    worst_drawdown,
)
from stateset_agents.types.errors import ConfigurationError


def cell(arm: str, seed: int, scores: list[float], **changes: Any) -> Cell:
    tasks = ["cart_pole", "acrobot"][: len(scores)]
    plain = Cell(
        suite="mix",
        tasks=tasks,
        arm=arm,
        seed=seed,
        steps=100,
        curve={"steps": [50, 100], "returns": [scores, scores], "scores": [[0.0] * len(scores), scores]},
        final={"returns": scores, "scores": scores},
        worst_task=min(scores),
        fairness=0.5,
        sign_flips=0.25,
        absolute_shares=[0.5] * len(scores),
        weights={"names": [], "steps": [], "values": []},
        parts={"key": arm, "outcome": arm == "difficulty"},
        settings={"group_strategy": arm},
        cpu_seconds=2.0,
        command="stateset-agents study run cell",
    )
    return dataclasses.replace(plain, **changes)


def folder(
    path: Path, cells: list[Cell], arms: tuple[str, ...] = ("ppo", "task"), **more: Any
) -> StudyFolder:
    study = {
        "schema_version": 1,
        "name": "toy",
        "suites": ["mix"],
        "arms": {arm: {"group_strategy": arm} for arm in arms},
        "seeds": [0, 1, 2],
        "total_steps": 100,
        "num_cells": 6,
        **more,
    }
    (path / "study.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    head = {"schema_version": 1, "file": "cells"}
    lines = [json.dumps(record) for record in (head, *(each.to_json() for each in cells))]
    (path / "cells.jsonl").write_text("\n".join(lines) + "\n")
    return StudyFolder(path)


def test_the_interquartile_mean_of_suites_and_its_interval() -> None:
    runs = [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]
    centre, interval = stratified_interval({"a": runs})
    assert centre == pytest.approx(0.5)  # of 0 0 .5 .5 1 1 the middle four
    assert interval is not None
    assert interval[0] <= 0.5 <= interval[1]
    assert stratified_interval({"a": runs}) == (centre, interval)  # the same draws
    assert stratified_interval({"a": runs, "b": runs[:2]})[1] is None
    same = stratified_interval({"a": [[0.3]] * 3, "b": [[0.9]] * 3})
    assert same[1] == pytest.approx((0.6, 0.6))  # suites are not mixed up
    with pytest.raises(ConfigurationError, match="finish a cell"):
        stratified_interval({"a": []})


def test_probability_of_improvement_by_hand() -> None:
    assert probability_of_improvement({"a": [0.9, 0.8]}, {"a": [0.7, 0.8]}) == (3.5 / 4, None)
    centre, interval = probability_of_improvement({"a": [3.0, 4, 5]}, {"a": [0.0, 1, 2]})
    assert (centre, interval) == (1, (1, 1))
    level, wide = probability_of_improvement({"a": [0.0, 1, 2]}, {"a": [0.0, 1, 2]})
    assert level == 0.5
    assert wide is not None
    assert wide[0] < 0.5 < wide[1]
    with pytest.raises(ConfigurationError, match="no suite in common"):
        probability_of_improvement({"a": [1.0]}, {"b": [1.0]})


def test_areas_and_falls_by_hand() -> None:
    assert area_under_curve([100], [1.0], length=100) == 0.5
    assert area_under_curve([50, 100], [1.0, 1.0], length=100) == 0.75
    assert area_under_curve([50], [2.0], length=100) == 0.75  # goes on level, held at 1
    assert area_under_curve([100, 150], [1.0, 0.0], length=100) == 0.5  # what is beyond does not count
    assert worst_drawdown([0.0, 0.8, 0.5, 0.9, 0.7]) == pytest.approx(0.3)
    assert worst_drawdown([0.1, 0.2]) == 0
    with pytest.raises(ConfigurationError, match="as many scores as steps"):
        area_under_curve([], [], length=1)


# ------------------------------------------------------------------------------------------ verdict


@pytest.mark.parametrize(
    ("scores", "verdict", "words"),
    [
        ([0.9, 0.8, 0.85], "better", "task is better"),
        ([0.02, 0.1, 0.12], "worse", "task is worse"),
        ([0.3, 0.7, 0.5], "none shown", "no difference shown"),
    ],
)
def test_the_verdict_follows_the_interval(
    tmp_path: Path, scores: list[float], verdict: str, words: str
) -> None:
    cells = [cell("ppo", seed, [0.5, score]) for seed, score in enumerate((0.45, 0.5, 0.55))]
    cells += [cell("task", seed, [0.5, score]) for seed, score in enumerate(scores)]
    found = analyse(folder(tmp_path, cells))
    difference = next(each for each in found["differences"] if each["measure"] == "worst_task")
    final = next(each for each in found["differences"] if each["measure"] == "final_performance")
    assert final["verdict"] == verdict
    assert final["mean"] == pytest.approx((sum(scores) - 1.5) / 6)
    assert difference["num_seeds"] == 3
    line = next(line for line in found["verdict"] if "final score of task" in line and "worst" not in line)
    assert words in line
    assert (final["interval"][0] > 0) == (verdict == "better")
    assert words in study_report(StudyFolder(tmp_path))


def test_a_sentence_without_an_interval_claims_nothing() -> None:
    plain = ArmDifference(
        suite="mix",
        arm="task",
        than="ppo",
        measure="worst_task",
        num_seeds=1,
        mean=0.9,
        interval=None,
    )
    assert sentence(plain).endswith("+0.900, 1 seed, no interval: no difference shown.")
    assert "nothing can be said" in sentence(dataclasses.replace(plain, mean=None, num_seeds=0))


def test_ways_of_making_parts_are_compared_from_ten_seeds_on(tmp_path: Path) -> None:
    def study(seeds: int) -> list[str]:
        cells = [
            cell(arm, seed, [0.5, 0.1 * place + 0.01 * seed * (place + 1)])
            for place, arm in enumerate(("ppo", "task", "difficulty"))
            for seed in range(seeds)
        ]
        rows = analyse(folder(tmp_path, cells, ("ppo", "task", "difficulty")))["verdict"]
        return [line for line in rows if "task and difficulty" in line or "task against diff" in line]

    assert study(SEEDS_FOR_RIVALS - 1) == [
        "mix: task and difficulty are not compared with 9 seeds, 10 are needed."
    ]
    (line,) = study(SEEDS_FOR_RIVALS)
    assert "final score of task against difficulty" in line


def test_a_study_under_way_says_what_is_missing(tmp_path: Path) -> None:
    under_way = folder(tmp_path, [cell("task", 0, [0.5, 0.5]), cell("ppo", 0, [0.5, None or 0.0])])
    with under_way.cells_file.open("a") as stream:
        stream.write('{"suite": "mix", "torn')
    found = analyse(under_way)
    assert (found["num_cells"], found["missing"], found["reference"]) == (2, 4, "ppo")
    assert [each.arm for each in under_way.cells()] == ["ppo", "task"]  # in the order of study.yaml
    assert found["arms"]["task"]["interval"] is None
    assert "2 cells of 6, 4 are missing" in study_report(under_way)
    assert found["arms"]["task"]["training_stability"]["std_over_seeds"] is None


def test_curves_keep_a_tasks_last_score_where_it_had_no_episode(tmp_path: Path) -> None:
    curve = {"steps": [50, 100], "returns": [[1, 1], [1, 1]], "scores": [[1.0, None], [None, 1.0]]}
    found = analyse(folder(tmp_path, [cell("ppo", 0, [1.0, 1.0], curve=curve)]))
    # mean scores .5 and 1 at steps 50 and 100
    assert found["arms"]["ppo"]["sample_efficiency"] == pytest.approx((0.25 + 0.75) / 2)


def test_single_tasks_have_no_worst_and_no_fairness(tmp_path: Path) -> None:
    cells = [cell(arm, seed, [0.1 * seed]) for arm in ("ppo", "task") for seed in range(3)]
    measures = {each["measure"] for each in analyse(folder(tmp_path, cells))["differences"]}
    assert measures == {"final_performance", "sample_efficiency"}


def test_folders_that_are_none_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"has no study\.yaml"):
        analyse(StudyFolder(tmp_path))
    with pytest.raises(ConfigurationError, match="no finished cell"):
        analyse(folder(tmp_path, []))
    one = cell("ppo", 0, [0.5])
    with pytest.raises(ConfigurationError, match="twice"):
        folder(tmp_path, [one, one]).cells()
    with pytest.raises(ConfigurationError, match="not in"):
        folder(tmp_path, [dataclasses.replace(one, arm="other")]).cells()


# ------------------------------------------------------------------------------------------ sensitivity


def grid_cell(value: int, iqm: float | None, interval: tuple[float, float] | None, cpu: float) -> GridCell:
    return GridCell(settings={"n_groups": value}, num_seeds=3, iqm=iqm, interval=interval, cpu_seconds=cpu)


def test_the_cheapest_that_overlaps_the_best_is_recommended() -> None:
    cells = [
        grid_cell(2, 0.5, (0.4, 0.6), 1.0),
        grid_cell(4, 0.8, (0.7, 0.9), 9.0),
        grid_cell(6, 0.75, (0.65, 0.85), 3.0),
        grid_cell(8, None, None, 0.0),
    ]
    chosen, why = recommend(cells)
    assert chosen is cells[2]
    assert "overlaps the best one's (0.800), at 3.0 CPU s in place of 9.0" in why
    assert "1 of 4 combinations are not measured" in why
    assert recommend(cells[:2])[0] is cells[1]
    assert recommend(cells[3:]) == (
        None,
        "no combination has three seeds or more: nothing is recommended.",
    )


def test_nothing_is_recommended_where_nothing_was_learned() -> None:
    floor = [grid_cell(2, 0.01, (-0.02, 0.03), 1.0), grid_cell(4, 0.02, (0.0, 0.05), 9.0)]
    chosen, why = recommend(floor)
    assert chosen is None
    assert why.startswith("the best has IQM 0.020 [0.000, 0.050], not shown above a random policy's 0")


def test_a_grid_has_every_combination_and_guesses_none(tmp_path: Path) -> None:
    cells = [
        cell(f"n_groups {value}", seed, [0.1 * value, 0.2], settings={"n_groups": value})
        for value in (2, 4)
        for seed in range(3)
    ]
    found = grid(cells, {"n_groups": [2, 3, 4]})
    assert [(each.settings["n_groups"], each.num_seeds) for each in found] == [(2, 3), (3, 0), (4, 3)]
    assert found[1].iqm is None
    arms = ("n_groups 2", "n_groups 4")
    report = study_report(folder(tmp_path, cells, arms, axes={"n_groups": [2, 3, 4]}))
    assert "| 3 | 0 | not measured | - |" in report
    assert "Recommended: n_groups 4" in report
    with pytest.raises(ConfigurationError, match="at least one setting"):
        grid(cells, {})


def test_the_page_has_the_tables_of_the_committed_study() -> None:
    report = study_report(StudyFolder(ROOT / "benchmarks" / "studies" / "scales"))
    page = (ROOT / "docs" / "evidence" / "ppo-and-parts.md").read_text(encoding="utf-8")
    lines = [line for line in report.splitlines() if line.startswith(("|", "-"))]
    assert len(lines) == 30
    assert [line for line in lines if line not in page] == []


def test_by_task_no_committed_run_has_a_sign_flip_and_the_small_task_is_not_drowned() -> None:
    cells = StudyFolder(ROOT / "benchmarks" / "studies" / "scales").cells()
    by_task = [each for each in cells if each.arm == "task"]
    assert [each.sign_flips for each in by_task] == [0.0] * 10
    assert min(each.worst_task for each in by_task) > 0.1
    by_ppo = [each.worst_task for each in cells if each.arm == "PPO"]
    assert sum(worst < 0.1 for worst in by_ppo) >= 9  # one of ten got .44
