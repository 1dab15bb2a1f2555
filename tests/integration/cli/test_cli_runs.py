"""Runs of the command line: found from anywhere, evaluated by their folder, measured once."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from report_runs import finished_run, log_stage, page_data
from tiny_desk import RUN, write_desk
from tiny_training import make_trainer, talk

from stateset_agents.backends.pretrained.loading import load_model_and_tokenizer
from stateset_agents.cli.main import main
from stateset_agents.reporting.report import write_report
from stateset_agents.tracking import console
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.training.experiment import Experiment, load_experiment
from stateset_agents.training.settings.paths import resolve_paths
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import TrajectoryGroup


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("desk")
    write_desk(folder)
    measured = {**RUN, "evaluation": {"split": "validation"}}
    (folder / "measured.yaml").write_text(yaml.safe_dump(measured))
    return folder


@pytest.fixture(scope="module")
def finished(desk: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with both checkpoints, begun in another folder than the file's."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(elsewhere)
        assert main(["train", str(desk / "measured.yaml")]) == 0
    return elsewhere / "runs" / "0001-run"


def test_paths_of_a_file_start_from_its_folder_and_runs_go_where_the_command_is(
    desk: Path, finished: Path
) -> None:
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["agent"]["model_name"] == str(desk / "model")
    assert config["environment"]["scenarios"] == str(desk / "calls.jsonl")
    assert config["training"]["output_dir"] == "runs"
    assert config["reward"] == {"name": f"{desk}/{RUN['reward']}"}


@pytest.mark.long
def test_train_shows_how_far_it_has_come_before_between_and_after(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "_PLAY_SECONDS", 0.0)
    assert main(["train", str(desk / "measured.yaml")]) == 0
    printed = capsys.readouterr()
    played = [line.rpartition("  left")[0] for line in printed.err.splitlines() if " played " in line]
    assert played == [f"{stage}: {n}/2 conversations played" for stage in ("before", "after") for n in (1, 2)]
    assert [line[:8] for line in printed.out.splitlines() if line.startswith("step ")] == [
        "step 1/2",
        "step 2/2",
    ]
    assert main(["train", str(desk / "measured.yaml"), "--no-eval", "--set", "training.progress=false"]) == 0
    printed = capsys.readouterr()
    assert " played " not in printed.err
    assert "step 1/2" not in printed.out + printed.err


def test_a_run_is_resumed_from_anywhere(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--resume", str(finished), "--max-steps", "3", "--no-eval"]) == 0
    assert "settings:" not in capsys.readouterr().out  # config.yaml has all, and does not say who set them
    assert max(line.step for line in RunLog.open(finished).metrics()) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_run_begun_without_measuring_does_not_measure_when_it_goes_on(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(desk / "measured.yaml"), "--max-steps", "1", "--no-eval"]) == 0
    assert main(["train", "--resume", "runs/latest", "--max-steps", "2"]) == 0
    assert "before:" not in capsys.readouterr().out
    assert "after" not in RunLog.open("runs/latest").summary()
    assert main(["train", "--resume", "runs/latest", "--max-steps", "1"]) == 0
    assert "all 2 steps of it: give it more with --max-steps 4" in capsys.readouterr().out


def test_a_finished_run_says_so_and_how_to_go_on(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = max(line.step for line in RunLog.open(finished).metrics())
    monkeypatch.chdir(finished.parent.parent)
    again = ["train", "--resume", str(finished), "--max-steps", str(steps)]
    assert main(again) == 0  # measures what a resume without evaluation left out
    capsys.readouterr()
    assert main(again) == 0
    output = capsys.readouterr()
    assert output.out == (
        f"run folder: runs/0001-run\nthis run is finished, all {steps} steps of it: give it more with "
        f"--max-steps {2 * steps}\nreport: runs/0001-run/report.html\n"
    )
    assert "nothing is left" not in output.err


def test_a_path_on_the_command_line_starts_from_the_working_directory(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"opening": "hi"}\n')
    config = load_experiment(desk / "run.yaml", {"environment.scenarios": "mine.jsonl"})
    assert config.environment["scenarios"] == str(tmp_path / "mine.jsonl")
    assert config.agent.model_name == str(desk / "model")


def test_only_paths_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "conversation").mkdir()
    (tmp_path / "shop.py").touch()
    (tmp_path / "stall").mkdir()
    (tmp_path / "stall" / "__init__.py").touch()
    data: dict[str, Any] = {
        "agent": {"model_name": "hf:model", "system_prompt": "Be kind / brief."},
        "environment": {
            "name": "conversation",
            "scenarios": "calls.jsonl",
            "books": ["./a.txt", "b"],
            "n": 3,
        },
        "reward": "environment",
        "training": {"output_dir": "./runs"},
    }
    resolve_paths(data, tmp_path)
    assert data == {
        "agent": {"model_name": f"hf:{tmp_path}/model", "system_prompt": "Be kind / brief."},
        "environment": {
            "name": "conversation",
            "scenarios": f"{tmp_path}/calls.jsonl",
            "books": [f"{tmp_path}/a.txt", "b"],
            "n": 3,
        },
        "reward": "environment",
        "training": {"output_dir": "./runs"},
    }
    (tmp_path / "python").symlink_to(sys.executable)
    data = {"environment": {"command": ["./python", "-i"]}}
    resolve_paths(data, tmp_path)
    assert data == {"environment": {"command": [f"{tmp_path}/python", "-i"]}}  # one of a virtual environment
    for name in ("shop:Shop", "stall:Stall"):
        data = {"environment": {"name": name}, "reward": name}
        resolve_paths(data, tmp_path)
        assert data == {"environment": {"name": f"{tmp_path}/{name}"}, "reward": f"{tmp_path}/{name}"}
    data = {"reward": {"name": "gated", "gates": [{"reward": "shop:kind"}, "say shop:kind"]}}
    resolve_paths(data, tmp_path)
    assert data["reward"]["gates"] == [{"reward": f"{tmp_path}/shop:kind"}, "say shop:kind"]
    for name in ("elsewhere:Shop", "conversation:Shop"):  # a folder without a module in it
        data = {"reward": name}
        resolve_paths(data, tmp_path)
        assert data == {"reward": name}
    for name in ("embedded:desk", "gpt2", "org/model", "hf:gpt2", "~/model"):
        data = {"agent": {"model_name": name}}
        resolve_paths(data, tmp_path)
        assert data["agent"]["model_name"] == name


@pytest.mark.parametrize("which", ["", "checkpoints/step-000002", "checkpoints/step-000002/model"])
def test_evaluate_finds_the_model_of_a_run_and_of_a_checkpoint(
    finished: Path, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    assert main(["evaluate", str(finished), "--model", str(finished / which), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["n"] == 1
    loaded = load_model_and_tokenizer(str(finished / which))[0].state_dict()
    newest = sorted((finished / "checkpoints").glob("step-*"))[-1]
    expected = load_model_and_tokenizer(str(newest / "model" if not which else finished / which))[0]
    assert all(torch.equal(loaded[name], weight) for name, weight in expected.state_dict().items())


def test_two_models_are_compared_pair_by_pair(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", str(finished), str(finished / "checkpoints" / "step-000002"), str(finished)]
    assert main(command) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(f"A  {command[2]}: no verdict, mean reward ")
    assert output[2].startswith("B - A: mean reward ")
    assert output[3] == "which is better is unclear: 0 of 1 scenarios differ, at least 20 must"
    assert main([*command[:3], command[2], "--json"]) == 0  # with itself
    result = json.loads(capsys.readouterr().out)["comparison"]
    assert (result["reward"], result["reward_interval"], result["num_pairs"]) == (0.0, None, 1)
    assert result["success"] is None


def test_two_runs_are_replayed_on_the_scenarios_of_the_first(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished.parent)
    assert main(["compare", finished.name, str(finished), "--replay", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["a"]["model"], result["b"]["model"]) == (finished.name, str(finished))  # as it was written
    assert main(["compare", str(finished / "config.yaml"), "embedded:desk"]) == 1
    expected = f"two run folders, got {finished / 'config.yaml'} embedded:desk"
    assert capsys.readouterr().err.splitlines()[-1].endswith(expected)


def test_two_runs_are_compared_by_what_they_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (finished_run(tmp_path / name, steps=1) for name in "ab")
    config = yaml.safe_load(b.config.read_text())
    b.write_config({**config, "reward": {"name": "kind"}, "training": {"seed": 4, "beta": 0.01}})
    with JsonlTracker(b) as tracker:  # 0, 2, 3, ..., 7 succeed in A; in B nobody but 1
        b.drop_stage("after", 1)
        log_stage(tracker, 1, "after", wins={1})
    for run in (a, b):
        summary = json.loads(run.summary.read_text())
        run.write_summary({**summary, "after": {**summary["after"], **MEASURED}})
    assert main(["compare", str(a.path), str(b.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "B wins 1, loses 7, ties 0 of 8 scenarios" in lines
    assert lines[-5:] == [
        "one seed each: another seed may differ",
        "settings that differ, A -> B:",
        "  training.seed: 3 -> 4",
        "  reward.name: not set -> kind",
        "the reward differs, so success and reward may not mean the same in both",
    ]
    assert main(["compare", str(a.path), str(b.path), "--tries", "2"]) == 1
    assert capsys.readouterr().err.endswith("leave it out, or add --replay\n")
    b.rollouts.write_text(b.rollouts.read_text().replace('"K3"', '"K4"'))
    assert main(["compare", str(a.path), str(b.path)]) == 1
    assert "scenario test-3 is another in" in capsys.readouterr().err
    b.drop_stage("after", 1)
    assert main(["compare", str(a.path), str(b.path)]) == 1
    assert "has no held-out conversations from after its training" in capsys.readouterr().err


MEASURED = {"mean_reward": 0.5, "num_failed": 0, "num_unscored": 0, "tries": 1, "temperature": 1.0}
"""What an evaluation's summary has besides success."""


def test_a_run_without_a_checkpoint_is_no_model(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    with pytest.raises(ConfigurationError, match=r"the run '.*0001-run' has no checkpoint yet"):
        load_model_and_tokenizer(str(run.path))


@pytest.mark.long
async def test_conversations_logged_before_a_kill_are_not_logged_twice(desk: Path, tmp_path: Path) -> None:
    config = load_experiment(desk / "measured.yaml", {"training.output_dir": str(tmp_path)})
    async with Experiment(config) as first:
        await first.before()
        await first.train()
        await first.after()
        run = first.run
    content = run.rollouts.read_text()
    # a kill after the "after" conversations were written and before summary.json was
    summary = {name: value for name, value in RunLog(run).summary().items() if name == "before"}
    run.write_summary(summary)
    async with Experiment(load_experiment(run.path), run=run) as again:
        await again.before()
        await again.train()
        await again.after()
    assert run.rollouts.read_text() == content
    assert [rollout.stage for rollout in RunLog(run).rollouts("before", "after")] == ["before", "after"]


def test_only_the_stage_of_that_step_is_dropped(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    group = TrajectoryGroup(key="g", trajectories=(talk(([1], [2])),))
    with JsonlTracker(run) as tracker:
        tracker.log_rollouts(2, [group], stage="after")
        tracker.log_rollouts(3, [group], stage="train")
        tracker.log_rollouts(3, [group, group], stage="after")
        run.drop_stage("after", 3)
        run.drop_stage("before", 3)
        tracker.log_rollouts(3, [group], stage="after")
    assert [(rollout.step, rollout.stage) for rollout in RunLog(run).rollouts()] == [
        (2, "after"),
        (3, "train"),
        (3, "after"),
    ]


def test_the_report_of_a_stopped_run_says_how_far_it_came(desk: Path, tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    settings = load_experiment(desk / "run.yaml").training
    run.write_config({"training": settings.model_dump(mode="json")})
    with JsonlTracker(run) as tracker:
        tracker.log_metrics(1, {"reward/mean": 0.5})

    def facts() -> dict[str, str]:
        write_report(run.path)
        return dict(page_data(run)["facts"])

    assert facts()["steps"] == "unfinished: step 1 of 2"
    run.write_config({"training": {**settings.model_dump(mode="json"), "max_steps": None}})
    assert facts()["steps"] == "unfinished: step 1 of 1,000"
    reason = "stopped as asked after step 1 of 1000"
    run.write_summary({"steps": 1, "num_steps": 1000, "ended": "stopped", "why": reason})
    assert (facts()["steps"], facts()["ended"]) == ("unfinished: step 1 of 1,000", reason)
    run.write_summary({"steps": 1, "num_steps": 1, "ended": "finished", "why": "the one step is done"})
    assert facts()["steps"] == "1"
    assert "ended" not in facts()


async def test_a_program_s_run_says_so_and_how_to_go_on_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    await trainer.train()
    run = trainer.run
    await trainer.close()
    assert yaml.safe_load(run.config.read_text())["made_by"] == "program"
    capsys.readouterr()
    for command in (["train", "--resume", str(run.path)], ["evaluate", str(run.path)]):
        assert await asyncio.to_thread(main, command) == 1
        output = capsys.readouterr().err
        assert f"await trainer.load_checkpoint('{run.path}')" in output
        assert f"--model {run.path}" in output
        assert output.count("\n") == 1
    again = make_trainer(tmp_path, max_steps=2, run=run)
    await again.load_checkpoint(run.path)
    assert again.step_number == 1
    await again.close()


async def test_leaving_an_experiment_closes_what_it_holds(desk: Path, tmp_path: Path) -> None:
    config = load_experiment(desk / "run.yaml", {"training.output_dir": str(tmp_path)})
    async with Experiment(config) as experiment:
        assert experiment.trainer.is_ready
        run = experiment.run
    with JsonlTracker(run):  # the lock is free again
        pass
    with pytest.raises(ConfigurationError, match="was stopped"):
        await experiment.trainer.step()


@pytest.mark.long
def test_a_measurement_with_several_tries_is_a_table_and_a_file(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "measured.json"
    assert main(["evaluate", str(finished), "--tries", "2", "--out", str(out)]) == 0
    output = capsys.readouterr().out.splitlines()
    result = json.loads(out.read_text())
    assert (result["tries"], result["n"]) == (2, 2)
    assert result["model"] == str(finished)
    assert output[0].endswith("n = 2, 2 tries of each scenario")
    assert main(["evaluate", str(finished), "--out", str(tmp_path)]) == 1
    assert "cannot write" in capsys.readouterr().err
