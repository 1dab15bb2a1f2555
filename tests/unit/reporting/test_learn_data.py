"""What goes into the learning pages: of a run, of a study, of nothing; and the papers' toys by hand."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import learn_toys as toys
import pytest
from report_runs import finished_run, numeric_run
from study_folders import comparison, write_study

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.cli.main import main
from stateset_agents.cli.pages import write_pages
from stateset_agents.cli.study import study_data
from stateset_agents.reporting.learn_pages import (
    PAGES,
    lab_data,
    parts_data,
    render_learn_page,
    run_parts,
    toy_parts,
)
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.errors import ConfigurationError


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return RunLog.open(finished_run(tmp_path, steps=6).path)


def test_a_run_s_page_has_whole_steps_with_the_tokens_that_were_sampled(log: RunLog) -> None:
    data = lab_data(log)
    assert [step["step"] for step in data["steps"]] == [1, 2, 3, 4, 5, 6]
    assert data["total_steps"] == 6
    member = data["steps"][0]["groups"][0]["members"][0]
    assert member["ids"] == [3, 4, 6]  # a call of two tokens, an answer of one; no prompt, no branch
    assert member["turns"] == [2, 1]
    assert len(member["logprobs"]) == 3
    assert data["texts"] == {3: " look", 4: "<|end|>", 6: " Done"}


def test_the_update_s_log_probs_are_there_where_the_run_recorded_them(tmp_path: Path, log: RunLog) -> None:
    recorded = RunLog.open(finished_run(tmp_path / "recorded", steps=1, learner=True).path)
    members = lab_data(recorded)["steps"][0]["groups"][0]["members"]
    assert [len(one.get("learner_logprobs", ())) for one in members] == [3, 3, 3, 0]
    assert members[0]["old_logprobs"] == [-0.001, -0.11, -0.22]
    assert "old_logprobs" not in lab_data(log)["steps"][0]["groups"][0]["members"][0]


def test_of_a_long_run_the_page_has_steps_evenly_spaced_within_its_limit(log: RunLog) -> None:
    members = sum(len(group["members"]) for group in lab_data(log)["steps"][0]["groups"])
    data = lab_data(log, 3 * members)
    assert [step["step"] for step in data["steps"]] == [1, 3, 6]
    assert [step["step"] for step in lab_data(log, 1)["steps"]] == [1]  # never none


def test_the_page_begins_with_the_run_s_own_settings(log: RunLog) -> None:
    training = {
        "loss_type": "dapo",
        "clip_ratio": 0.1,
        "clip_ratio_high": 0.3,
        "beta": 0.02,
        "num_iterations": 2,
    }
    log.folder.write_config({"training": {**training, "baseline_type": "leave_one_out"}})
    own = lab_data(log)["settings"]
    assert (own["loss"], own["low"], own["high"], own["beta"]) == ("dapo", 0.1, 0.3, 0.02)
    assert own["baseline"] == "leave_one_out"
    assert own["told"]["num_iterations"] == 2


def test_a_conversation_s_raw_advantage_is_its_reward_less_its_group_s_mean(log: RunLog) -> None:
    data = run_parts(log)
    rewards = [member["reward"] for member in lab_data(log)["steps"][0]["groups"][0]["members"]]
    (wanted,) = group_advantages([rewards], scaling="none")
    assert data["trajectories"]["raw"][: len(rewards)] == pytest.approx(wanted)
    assert data["trajectories"]["returns"][: len(rewards)] == rewards
    assert data["outcome_names"] == ["reward", "sampled tokens"]
    assert data["trajectories"]["features"][0] == [0.0, float(data["trajectories"]["tasks"][0]), 1.0]


def test_what_is_known_before_acting_comes_from_earlier_steps_alone(log: RunLog) -> None:
    trajectories = run_parts(log)["trajectories"]
    priors = {at: {prior for prior, _, step in trajectories["features"] if step == at} for at in (1, 6)}
    assert priors[1] == {0.0}
    assert priors[6] != {0.0}


def test_a_numeric_run_has_no_conversations_to_show(tmp_path: Path) -> None:
    folder = numeric_run(tmp_path)
    with pytest.raises(ConfigurationError, match="no conversations in rollouts"):
        lab_data(RunLog.open(folder.path))


def test_a_numeric_run_s_page_has_the_metrics_of_its_parts(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "parts", conversations=False)
    with pytest.raises(ConfigurationError, match="0001-parts has no finished update yet: train it first"):
        parts_data(RunLog.open(folder.path))
    with JsonlTracker(folder) as tracker:
        for step in range(1, 1001):
            metrics = {"time/rollout": 4.0, "part_size/a": float(step), "time/step": 1.0}
            tracker.log_metrics(10 * step, metrics | ({"score/a": 0.5} if step > 1 else {}))
            tracker.log_metrics(10 * step, {"eval/reward": 1.0})  # no update
    data = parts_data(RunLog.open(folder.path))
    assert data["total_updates"] == 1000
    assert len(data["steps"]) == 400
    assert (data["steps"][0], data["steps"][-1]) == (10, 10_000)
    assert data["series"].keys() == {"part_size/a", "score/a"}
    assert data["series"]["part_size/a"] == [step / 10 for step in data["steps"]]
    assert data["series"]["score/a"][:2] == [None, 0.5]


def test_the_same_seed_makes_the_same_toy() -> None:
    assert json.dumps(toy_parts(3)) == json.dumps(toy_parts(3))
    assert toy_parts(3) != toy_parts(4)
    assert len(toy_parts()["trajectories"]["raw"]) == 240


def test_a_study_s_page_has_its_finished_cells_without_a_line_that_was_cut_off(tmp_path: Path) -> None:
    data = study_data(write_study(tmp_path / "study", comparison(seeds=2)))
    assert len(data["cells"]) == 16
    assert data["reference"] == "none"
    assert {own["verdict"] for own in data["differences"]} <= {"better", "worse", "none shown"}


def test_a_folder_that_is_neither_or_has_nothing_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study", comparison(seeds=1))
    (study / "cells.jsonl").unlink()
    for folder, message in ((tmp_path, "is no run folder"), (study, "no finished cell")):
        assert main(["learn", str(folder)]) == 1
        assert message in capsys.readouterr().err


def test_each_page_is_small_and_loads_nothing(tmp_path: Path, log: RunLog) -> None:
    paths = [
        *write_pages(out=tmp_path / "papers"),
        *write_pages(log.folder.path),
        *write_pages(numeric_run(tmp_path / "numeric").path),
        *write_pages(write_study(tmp_path / "study", comparison(seeds=1))),
    ]
    assert {path.stem for path in paths} == set(PAGES)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        assert len(text) < 400_000
        assert "default-src 'none'" in text
        assert " src=" not in text
        assert "@import" not in text
    assert (log.folder.path / "learn" / "lab.html").is_file()


def test_a_run_s_words_cannot_become_markup() -> None:
    page = render_learn_page("lab", {"run": "</script><b>", "settings": {}, "steps": []})
    assert "</script><b>" not in page
    packed = page.partition('id="data">')[2].partition("<")[0]
    assert json.loads(gzip.decompress(base64.b64decode(packed)))["run"] == "</script><b>"


# ------------------------------------------------------------------------------- the papers, by hand


def test_conflicting_gradients_lose_what_works_against_the_other() -> None:
    assert toys.pcgrad([[1.0, 0.0], [-1.0, 1.0]]) == ([[0.5, 0.5], [0.0, 1.0]], [0.5, 1.5])
    assert toys.pcgrad([[1.0, 0.0], [1.0, 1.0]])[1] == [2.0, 1.0]  # no conflict, nothing is cut
    assert toys.pcgrad([[1.0, 0.0], [-2.0, 0.0]])[1] == [0.0, 0.0]


def test_a_customer_sits_by_the_size_of_the_table_and_where_the_last_one_sat() -> None:
    assert toys.restaurant([3, 1], 1, alpha=1.0, beta=3.0) == [3 / 8, 4 / 8, 1 / 8]
    assert toys.restaurant([], None, alpha=0.5, beta=3.0) == [1.0]


def test_a_process_foresees_what_it_has_seen() -> None:
    process = toys.Process(length=1.0, signal=1.0, noise=0.1)
    mean, variance = toys.gp_predict([0.0], [0.5], 0.0, process)
    assert mean == pytest.approx(0.5 / 1.01)
    assert variance == pytest.approx(1.01 - 1 / 1.01)
    assert toys.gp_predict([], [], 0.0, process) == (0.0, pytest.approx(1.01))


def test_a_switch_opens_a_component_and_the_old_one_is_found_again() -> None:
    stream = [(x / 4, 2.0) for x in range(8)] + [(x / 4, -2.0) for x in range(8)] + [(0.9, 2.0)]
    steps = toys.mixture(stream, toys.Process(length=1.0, signal=2.0, noise=0.1), alpha=0.5, beta=1.0)
    assert [step.chosen for step in steps] == [0] * 8 + [1] * 8 + [0]


def test_shared_modules_cannot_meet_opposite_targets_and_routed_ones_can() -> None:
    for routed, solved in ((True, True), (False, False)):
        now = toys.Modules((0.5, 0.2), ((0.01, -0.01), (-0.01, 0.01)))
        for _ in range(200):
            now, loss = toys.module_step(now, [1.0, -1.0], rate=0.3, routed=routed)
        assert (loss < 1e-3) is solved


def test_the_own_reward_in_the_mean_shrinks_the_gradient() -> None:
    assert toys.expected_gradient(0.3, 4, baseline="group_mean", scaling="none") == pytest.approx(
        0.21 * 3 / 4
    )
    assert toys.expected_gradient(0.3, 4, baseline="leave_one_out", scaling="none") == pytest.approx(0.21)
