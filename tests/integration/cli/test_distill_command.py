"""`distill` in both modes: a run folder, what it says, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import the_line
from tiny_desk import RUN, write_desk
from tiny_models import tiny_model, tiny_tokenizer

from stateset_agents.cli.imitation import ONLY_OF_TRAIN
from stateset_agents.cli.main import command_parser, main
from stateset_agents.tracking.run_log import RunLog


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A student, a teacher, scenarios; commands are given there."""
    write_desk(tmp_path)
    tiny_model("gpt2", seed=1).save_pretrained(tmp_path / "teacher")
    tiny_tokenizer().hf.save_pretrained(tmp_path / "teacher")
    with (tmp_path / "calls.jsonl").open("a") as file:
        file.write('{"opening": "yes", "split": "test"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


TRACES = {
    "teacher": "embedded:desk",
    "in_format": False,
    "episodes": 24,
    "max_new_tokens": 48,
    "min_reward": 0.5,
}
SFT = {"max_steps": 2, "validation_share": 0.0, "progress": False}
SHOP = {"agent": {"model_name": "embedded:desk", "max_new_tokens": 48}, "environment": "retail_desk"}


def write(folder: Path, **sections: Any) -> str:
    file = folder / "distill.yaml"
    file.write_text(yaml.safe_dump({**RUN, **sections}))
    return str(file)


def of_words(folder: Path, **more: Any) -> str:
    traces = {**TRACES, **more}
    return write(
        folder, **SHOP, reward="environment", training={}, traces=traces, sft=SFT, evaluation={"episodes": 6}
    )


@pytest.mark.long
def test_a_teacher_s_words_are_imitated_in_a_run_folder(desk, capsys):
    assert main(["distill", of_words(desk, samples=2, temperature=1.0), "--seed", "3"]) == 0
    printed = capsys.readouterr().out
    run = desk / "runs" / "0001-distill"
    traces = [json.loads(line) for line in (run / "traces.jsonl").read_text().splitlines()]
    assert all(trace["teacher"]["model"] == "embedded:desk" for trace in traces)
    assert all(len(trace["teacher"]["weights"]) == 64 for trace in traces)
    assert all(trace["success"] and trace["reward"] >= 0.5 for trace in traces)
    told = RunLog.open(run).summary()["distillation"]
    assert told["traces"]["asked"] == 48
    assert 0 < told["traces"]["kept"] == len(traces) < 48
    assert told["before"]["n"] == told["after"]["n"] == 6
    for beginning in ("teacher: ", "run folder: ", "before: ", "after: ", "traces: ", "model: ", "report: "):
        assert f"\n{beginning}" in f"\n{printed}"
    assert (run / "report.html").exists()
    assert list((run / "checkpoints").glob("*/model/config.json"))
    assert main(["sft", "--resume", str(run), "--max-steps", "3"]) == 0
    assert RunLog.open(run).summary()["steps"] == 3


@pytest.mark.long
def test_what_a_teacher_said_is_not_asked_again(desk, capsys):
    command = ["distill", of_words(desk), "--no-eval", "--conversations", "kept.jsonl"]
    assert main(command) == 0
    kept = (desk / "kept.jsonl").read_text()
    assert main(command) == 0
    assert (desk / "kept.jsonl").read_text() == kept
    one, other = (desk / "runs" / f"000{number}-distill" / "traces.jsonl" for number in (1, 2))
    assert one.read_text() == other.read_text()
    assert "before: " not in capsys.readouterr().out


def test_an_on_policy_distillation_sets_every_option_that_train_reads() -> None:
    parser = command_parser()
    train, distill = (vars(parser.parse_args([verb, "run.yaml"])) for verb in ("train", "distill"))
    assert train.keys() - distill.keys() == ONLY_OF_TRAIN.keys()
    assert all(train[name] == value for name, value in ONLY_OF_TRAIN.items())


@pytest.mark.long
def test_a_teacher_s_log_probs_are_followed_in_a_run_folder(desk, capsys):
    training = {**RUN["training"], "distillation": {"teacher": "./teacher"}}
    assert main(["distill", write(desk, training=training), "--max-steps", "1"]) == 0
    assert "trained 1 step" in capsys.readouterr().out
    run = desk / "runs" / "0001-run"
    (line,) = RunLog.open(run).metrics()
    assert line.values["kl/teacher"] > 0
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["training"]["distillation"]["teacher"] == str(desk / "teacher")
    assert main(["train", "--resume", str(run), "--max-steps", "2"]) == 0
    assert len(list(RunLog.open(run).metrics())) == 2


@pytest.mark.parametrize(
    ("sections", "options", "problem"),
    [
        ({}, [], "has no teacher: give one of them"),
        (
            {"traces": TRACES, "training": {"distillation": {"teacher": "./teacher"}}},
            [],
            "has both a section traces and training.distillation",
        ),
        (
            {"training": {"distillation": {"teacher": "./teacher"}}, "sft": SFT},
            [],
            "on-policy distillation reads training: take sft out",
        ),
        (
            {"training": {"distillation": {"teacher": "./teacher"}}},
            ["--conversations", "kept.jsonl"],
            "--conversations keeps a teacher's replies",
        ),
        ({**SHOP, "traces": {**TRACES, "min_reward": 2.0}}, [], "replies can be shown"),
        ({"traces": {"teacher": {"max_new_tokens": 3}}}, [], "max_new_tokens stands beside it"),
        ({"traces": {**TRACES, "episodes": 9}}, [], "the environment has 2 train scenarios, got 9"),
        ({"traces": {"teacher": "nowhere"}}, [], "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line(desk, capsys, sections, options, problem):
    code = main(["distill", write(desk, **sections), *options])
    assert problem in the_line(code, capsys.readouterr().err)
    assert not (desk / "runs").exists()


def test_train_says_whose_file_it_is(desk, capsys):
    code = main(["train", of_words(desk)])
    assert "traces and sft are for stateset-agents distill" in the_line(code, capsys.readouterr().err)
