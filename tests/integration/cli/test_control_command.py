"""Numeric trainings from a YAML file: train, resume, evaluate, compare, diagnose, report, refuse."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import the_line
from repository_paths import ROOT

from stateset_agents.cli.main import main
from stateset_agents.numeric.experiment import load_control, make_environment
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

FILE: dict[str, Any] = {
    "kind": "control",
    "environment": "control_toys:RuledSignals",
    "policy": {"hidden": [16]},
    "training": {
        "total_steps": 3072,
        "num_groups": 8,
        "group_size": 8,
        "minibatch_size": 128,
        "learning_rate": 1e-2,
        "run_name": "signals",
    },
    "evaluation": {"episodes": 30},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file, a whole run and one that has just begun."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "signals.yaml").write_text(yaml.safe_dump(FILE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["train", "signals.yaml"]) == 0
        assert main(["train", "signals.yaml", "--max-steps", "384", "--no-eval"]) == 0
    return folder


@pytest.fixture(autouse=True)
def _at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def test_a_file_becomes_a_run_measured_before_after_and_against_the_rules() -> None:
    log = RunLog.open("runs/0001-signals")
    summary, config = log.summary(), log.config()
    assert (summary["steps"], summary["ended"]) == (3072, "finished")
    assert (summary["before"]["n"], summary["after"]["mean_reward"]) == (30, 4.5)
    assert summary["rules"]["seer"]["difference"] == 0
    assert summary["rules"]["blind"]["difference_interval"][0] > 0
    assert config["environment"] == {"name": "control_toys:RuledSignals"}
    assert config["training"]["learning_rate"] == 1e-2
    assert {record["stage"] for record in log.episodes()} == {"before", "train", "after"}
    assert log.folder.report.is_file()


def test_a_window_has_the_traces_of_the_policy_and_a_rule_from_one_start() -> None:
    worst, median, best = RunLog.open("runs/0001-signals").windows()
    assert [window.name for window in (worst, median, best)] == ["worst", "median", "best"]
    assert list(worst.traces) == ["policy", "seer"]
    assert worst.returns == {"policy": 4.5, "seer": 4.5}
    policy, seer = worst.traces.values()
    assert policy.panels[0].series == seer.panels[0].series  # the signals: nobody decides them
    assert list(policy.panels[1].series["named"]) == [1.0] * 6
    assert policy.seconds_per_step == 15


def test_a_run_that_began_goes_on_from_anywhere_and_a_whole_one_says_so(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    begun = str(home / "runs" / "0002-signals")
    assert main(["train", "--resume", begun, "--max-steps", "768"]) == 0
    assert [line.step for line in RunLog.open(begun).metrics()] == [384, 768]
    assert "before" not in RunLog.open(begun).summary()
    assert "trained 768 steps" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    monkeypatch.chdir(home)
    assert main(["train", "--resume", "runs/0001-signals"]) == 0
    assert capsys.readouterr().out == (
        "run folder: runs/0001-signals\nthis run is finished, all 3072 steps of it: give it more with "
        "--max-steps 6144\nreport: runs/0001-signals/report.html\n"
    )


def test_evaluate_measures_a_run_a_checkpoint_the_untrained_policy_and_a_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def result(*arguments: str) -> dict[str, Any]:
        assert main(["evaluate", *arguments, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    run = result("runs/0001-signals")
    assert (run["mean_reward"], run["n"], set(run["rules"])) == (4.5, 30, {"seer", "blind"})
    checkpoint = "runs/0001-signals/checkpoints/step-003072"
    assert result("signals.yaml", "--model", checkpoint)["mean_reward"] == 4.5
    untrained = result("signals.yaml", "--episodes", "7")
    assert (untrained["model"], untrained["n"]) == ("untrained", 7)
    assert untrained["mean_reward"] < 3
    assert result("signals.yaml", "--model", "seer")["components"] == {"named": 6.0, "cost": -1.5}
    assert main(["evaluate", "runs/0001-signals"]) == 0
    assert "mean return 4.5, over 30 held-out starts" in capsys.readouterr().out


def test_compare_pairs_two_policies_start_by_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "runs/0001-signals", "blind", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    a, b, compared = found["a"], found["b"], found["comparison"]
    assert compared["reward"] == pytest.approx(b["mean_reward"] - a["mean_reward"])
    assert (compared["verdict"], compared["wins"], compared["num_pairs"]) == ("worse", 0, 30)
    assert main(["compare", "signals.yaml", "untrained", "runs/0001-signals"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "B is better"
    assert main(["compare", "runs/0001-signals", "runs/0001-signals"]) == 0
    assert "unclear: 0 of 30" in capsys.readouterr().out


def test_diagnose_and_report_read_a_numeric_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "runs/0001-signals"]) == 0
    assert "rules: return 4.5, of blind 0.6, seer 4.5" in capsys.readouterr().out
    assert main(["report", "runs/0001-signals"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "training.clip_ration=1"], r"ControlConfig has no field 'clip_ration' \(did you mean"),
        (["--set", "clip_ratio=1"], r"has no field 'clip_ratio' \(did you mean 'training.clip_ratio'\?\)"),
        (["--set", "agent.model_name=x"], "ControlFile has no field 'agent'"),
        (["--set", "environment=cart_pol"], r"got 'cart_pol' \(did you mean 'cart_pole'\?\)"),
        (["--set", "environment={name: cart_pole, horizn: 3}"], r"no argument 'horizn' \(did you mean"),
        (["--set", "environment={gymnasium: CartPol-v1}"], "gymnasium cannot make CartPol-v1"),
        (["--set", "environment=pathlib:Path"], "gave a PosixPath: name a BatchedEnvironment"),
        (["--set", "policy.hidden=[0]"], r"every width must be at least 1, got \[0\]"),
        (["--set", "kind=contrl"], "kind: input should be 'control', got 'contrl'"),
        (["--profile", "balanced"], "--profile is of conversations"),
    ],
)
def test_train_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["train", "signals.yaml", *arguments])
    assert re.search(message, the_line(code, capsys.readouterr().err))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["evaluate", "signals.yaml", "--tries", "3"], "--tries is of conversations, got 3"),
        (["evaluate", "signals.yaml", "--temperature", "1"], "its likeliest action, got --temperature 1.0"),
        (["evaluate", "signals.yaml", "--endpoint", "http://x"], "--endpoint is of conversations"),
        (["evaluate", "signals.yaml", "--model", "sear"], "(did you mean 'seer'?)"),
        (["evaluate", "signals.yaml", "--model", "runs"], "a policy must be a run folder or a checkpoint"),
        (["compare", "signals.yaml", "seer"], "compare needs a file and two policies"),
        (
            ["evaluate", "runs/0001-signals", "--set", "environment=cart_pole"],
            "is of other observations or actions than CartPole-v1",
        ),
    ],
)
def test_measuring_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(arguments)
    assert message in the_line(code, capsys.readouterr().err)


def test_another_kind_is_refused_with_the_one_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "it.yaml").write_text("kind: contrl\nenvironment: cart_pole\n")
    code = main(["train", str(tmp_path / "it.yaml")])
    assert "kind must be control or left out, got 'contrl' (did you mean 'control'?)" in (
        the_line(code, capsys.readouterr().err)
    )


def test_a_run_of_a_program_says_where_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("kind: control\nmade_by: program\nenvironment: {name: x}\n")
    with pytest.raises(ConfigurationError, match="is of a run that a program made and names only its"):
        load_control(tmp_path / "config.yaml")


@pytest.mark.first(1)
@pytest.mark.parametrize("example", ["cartpole.yaml", "autoscaling.yaml"])
def test_the_example_begins(tmp_path: Path, example: str) -> None:
    few = ("--max-steps", "2000", "--output-dir", str(tmp_path), "--set", "evaluation.episodes=5")
    assert main(["train", str(ROOT / "examples" / example), *few]) == 0
    assert RunLog.open(tmp_path / "latest").summary()["after"]["n"] == 5


def test_code_beside_the_file_and_gymnasium_ids_are_found(tmp_path: Path) -> None:
    (tmp_path / "rooms_of_mine.py").write_text("from control_toys import Signals\n")
    file = tmp_path / "mine.yaml"
    file.write_text("kind: control\nenvironment: {name: 'rooms_of_mine:Signals', horizon: 4}\n")
    config = load_control(file)
    assert config.environment == {"name": f"{tmp_path}/rooms_of_mine:Signals", "horizon": 4}
    assert make_environment(config.environment).spec.horizon == 4
    file.write_text("kind: control\nenvironment: {gymnasium: CartPole-v1, horizon: 50}\n")
    assert make_environment(load_control(file).environment).spec.horizon == 50
