"""Run folders: numbering, the newest run, schema versions, resuming, and disks that refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from stateset_agents.tracking.jsonl import JsonlWriter, read_json, read_lines
from stateset_agents.tracking.run_folder import RunFolder, replace_file
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.errors import ConfigurationError


def test_each_run_gets_the_next_number_and_latest_points_to_it(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path / "runs", "desk demo").path.name for _ in range(3)]
    assert names == ["0001-desk-demo", "0002-desk-demo", "0003-desk-demo"]
    latest = tmp_path / "runs" / "latest"
    assert latest.is_symlink()
    assert not latest.readlink().is_absolute()
    assert RunFolder.open(latest).path == tmp_path / "runs" / "0003-desk-demo"


def test_numbers_go_on_after_a_run_was_deleted(tmp_path: Path) -> None:
    (tmp_path / "0041-old").mkdir()
    (tmp_path / "notes").mkdir()
    assert RunFolder.create(tmp_path, "new").path.name == "0042-new"


@pytest.mark.parametrize(
    ("name", "folder"), [("../../etc", "0001-etc"), ("a/b c", "0001-a-b-c"), ("", "0001-run")]
)
def test_a_name_cannot_leave_the_root(tmp_path: Path, name: str, folder: str) -> None:
    assert RunFolder.create(tmp_path, name).path == tmp_path / folder


def test_every_file_says_its_schema_version(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_config({"seed": 1})
    folder.write_summary({"steps": 2})
    numeric = RunFolder.create(tmp_path, conversations=False)
    conversations = [folder.metrics, folder.rollouts, folder.timeline, folder.events]
    assert [file for file in folder.by_step if file.exists()] == conversations
    assert [file.name for file in numeric.by_step if file.exists()] == [
        *("metrics.jsonl", "episodes.jsonl", "events.jsonl")
    ]
    for file in (*conversations, numeric.episodes):
        assert json.loads(file.read_text().splitlines()[0]) == {"schema_version": 1, "file": file.stem}
    assert folder.config.read_text() == "schema_version: 1\nseed: 1\n"
    assert json.loads(folder.summary.read_text()) == {"schema_version": 1, "steps": 2}
    assert RunLog(folder).config() == {"seed": 1}
    assert RunLog(folder).summary() == {"steps": 2}


@pytest.mark.parametrize("file", ["config.yaml", "summary.json", "metrics.jsonl"])
def test_another_schema_version_is_refused_by_name(tmp_path: Path, file: str) -> None:
    folder = RunFolder.create(tmp_path)
    (folder.path / file).write_text('{"schema_version": 2}\n')
    log = RunLog(folder)
    with pytest.raises(ConfigurationError, match=rf"{file} has schema version 2 and this program reads 1"):
        {
            "config.yaml": log.config,
            "summary.json": log.summary,
            "metrics.jsonl": lambda: list(log.metrics()),
        }[file]()


def test_a_summary_with_numbers_that_are_not_finite_is_still_json(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_summary({"before": {"success": float("nan"), "interval": (0.0, float("inf"))}})
    assert RunLog(folder).summary() == {"before": {"success": None, "interval": [0.0, None]}}


def test_a_text_cut_in_the_middle_of_a_character_does_not_cost_the_summary(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_summary({"why": "half of an emoji: \ud83d"})
    assert RunLog(folder).summary()["why"] == "half of an emoji: \ud83d"
    assert folder.summary.read_text().count("\n") == 4  # a field a line


def test_a_folder_whose_name_cannot_be_is_one_clear_line() -> None:
    with pytest.raises(ConfigurationError, match=r"in 'runs\\x00': .*null.*; choose another folder"):
        RunFolder.create("runs\0")


def test_a_file_in_the_place_of_the_root_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(
        ConfigurationError, match=r"cannot write a run folder in .*runs.*choose another"
    ) as caught:
        RunFolder.create(tmp_path / "runs")
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no run folder \(it has no metrics\.jsonl\)"):
        RunFolder.open(tmp_path)


def test_a_tracker_that_is_open_goes_on_after_the_cut(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        for step in (1, 2, 3):
            tracker.log_metrics(step, {"reward/mean": step / 10})
        folder.truncate_after(1)
        tracker.log_metrics(2, {"reward/mean": 0.9})
    assert [line.values["reward/mean"] for line in RunLog(folder).metrics()] == [0.1, 0.9]


def test_resuming_drops_what_later_steps_wrote(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        for step in (1, 2, 3):
            tracker.log_metrics(step, {"reward/mean": step / 10})
            tracker.log_event("step done", step=step)
        tracker.log_event("said after step 3")
    folder.truncate_after(1)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(2, {"reward/mean": 0.9})
    log = RunLog(folder)
    assert [(line.step, line.values["reward/mean"]) for line in log.metrics()] == [(1, 0.1), (2, 0.9)]
    assert [event.get("step") for event in log.events()] == [1]


def test_a_line_that_a_kill_has_torn_is_left_out_and_overwritten(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(1, {"reward/mean": 0.5})
    with folder.metrics.open("a") as file:
        file.write('{"step": 2, "reward/me')
    assert [line.step for line in RunLog(folder).metrics()] == [1]
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(2, {"reward/mean": 0.6})
    assert [line.step for line in RunLog(folder).metrics()] == [1, 2]


def test_a_torn_line_longer_than_a_block_is_cut_off_whole(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    JsonlWriter(file).close()
    content = file.read_bytes()
    file.write_bytes(content + b'{"token_ids":[' + b"1," * 200_000)
    JsonlWriter(file).close()
    assert file.read_bytes() == content


def test_a_broken_line_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with folder.metrics.open("a") as file:
        file.write("oops\n")
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl, line 2: not JSON"):
        list(RunLog(folder).metrics())


@pytest.mark.parametrize("number", ["1e999", "-1E+400", "Infinity", "NaN", "9" * 400])
def test_a_number_that_is_not_finite_is_a_damaged_line_however_it_is_written(
    tmp_path: Path, number: str
) -> None:
    folder = RunFolder.create(tmp_path)
    folder.summary.write_text(f'{{"schema_version": 1, "best": {number}}}')
    with pytest.raises(ConfigurationError, match=r"summary.json: not JSON \(.*\): .*; remove it"):
        read_json(folder.summary)
    with folder.metrics.open("a") as stream:
        stream.write(f'{{"step": 1, "loss/policy": {number}}}\n')
    with pytest.raises(ConfigurationError, match=r"metrics.jsonl, line 2: not JSON \(.*\): .*; remove it"):
        list(read_lines(folder.metrics))


def test_lines_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(1, {"reward/mean": float("nan"), "time/rollout": 2})
        (line,) = RunLog(folder).metrics()
    assert str(line.values["reward/mean"]) == "nan"
    assert line.values["time/rollout"] == 2.0


def test_a_full_disk_is_one_line_and_leaves_what_was_written(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(1, {"reward/mean": 0.5})
        before = folder.metrics.read_bytes()
        full = r"cannot write .*metrics\.jsonl: File too large; free the disk, then resume the run$"
        with files_of_at_most(len(before) + 10), pytest.raises(ConfigurationError, match=full):
            tracker.log_metrics(2, {"reward/mean": 0.6})
        assert folder.metrics.read_bytes() == before
        tracker.log_metrics(2, {"reward/mean": 0.7})
    assert [line.values["reward/mean"] for line in RunLog(folder).metrics()] == [0.5, 0.7]


def test_a_link_is_written_through_and_a_pipe_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("there/file")
    replace_file(link, "new")
    assert link.is_symlink()
    assert (tmp_path / "there" / "file").read_text() == "new"
    os.mkfifo(pipe)
    with pytest.raises(ConfigurationError, match="pipe: it is a pipe or a device; name a file"):
        replace_file(pipe, "new")
    assert pipe.is_fifo()
