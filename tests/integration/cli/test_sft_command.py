"""`demonstrate` writes what `sft` reads; a fine-tuning ends, goes on and is refused in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import the_line

from stateset_agents.cli.main import main
from stateset_agents.tracking.run_log import RunLog

QUICK = ["--set", "sft.learning_rate=5e-4", "--set", "agent.max_new_tokens=48"]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("shown") / "honest.jsonl"
    assert main(["demonstrate", "retail_desk", "--episodes", "24", "--out", str(file)]) == 0
    return file


@pytest.fixture(scope="module")
def finished(shown: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    run = ["sft", str(shown), "--model", "embedded:desk", "--max-steps", "3", "--output-dir", str(runs)]
    assert main([*run, *QUICK, "--set", "sft.validation_share=0.2"]) == 0
    return runs / "0001-sft"


def test_an_honest_agent_s_conversations_are_a_file_for_sft(shown: Path) -> None:
    chats = [json.loads(line) for line in shown.read_text().splitlines()]
    assert len(chats) == 24
    assert len({chat["family"] for chat in chats}) == 6
    assert all(chat["success"] for chat in chats)
    for chat in chats:
        calls = [call["id"] for message in chat["messages"] for call in message.get("tool_calls", ())]
        answers = [message["tool_call_id"] for message in chat["messages"] if message["role"] == "tool"]
        assert calls == answers
        assert len(set(calls)) == len(calls) > 0


def test_what_fails_is_left_out_unless_it_is_asked_for(tmp_path, capsys):
    file = tmp_path / "silent.jsonl"
    silent = ["demonstrate", "retail_desk", "--agent", "silent", "--episodes", "6", "--out", str(file)]
    code = main(silent)
    assert "none of 6 conversations succeeded" in the_line(code, capsys.readouterr().err)
    assert not file.exists()
    assert main([*silent, "--keep-failures"]) == 0
    assert len(file.read_text().splitlines()) == 6
    code = main(["demonstrate", "retail_desk", "--episodes", "1", "--out", str(file)])
    assert "silent.jsonl exists: give another file, or remove it" in the_line(code, capsys.readouterr().err)


def test_columns_of_other_names_are_mapped_and_the_run_keeps_how(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"asked": f"hi {number}", "said": "hello"} for number in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = f"{{dataset: {file}, columns: {{prompt: asked, completion: said}}}}"
    runs = ["--output-dir", str(tmp_path)]
    assert main(["sft", source, "--model", "embedded:desk", "--max-steps", "1", *runs]) == 0
    run = tmp_path / "0001-sft"
    assert yaml.safe_load((run / "config.yaml").read_text())["conversations"] == yaml.safe_load(source)
    assert main(["sft", "--resume", str(run), "--max-steps", "2"]) == 0


def test_a_fine_tuning_says_where_its_model_is_and_that_is_evaluated(finished, capsys, tmp_path):
    summary = RunLog.open(finished).summary()
    assert (summary["steps"], summary["ended"]) == (3, "finished")
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["made_by"] == "sft"
    assert config["sft"]["learning_rate"] == 5e-4
    desk = tmp_path / "desk.yaml"
    desk.write_text("environment: retail_desk\nagent: {max_new_tokens: 48}\n")
    model = str(finished / "checkpoints" / "best" / "model")
    assert main(["evaluate", str(desk), "--model", model, "--episodes", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == 6


def test_a_finished_fine_tuning_can_be_given_more(finished, capsys):
    assert main(["sft", "--resume", str(finished), "--max-steps", "4"]) == 0
    assert "trained 4 steps" in capsys.readouterr().out
    assert RunLog.open(finished).summary()["steps"] == 4


@pytest.mark.long
def test_an_interrupted_one_says_how_to_go_on(shown, tmp_path):
    command = [sys.executable, "-m", "stateset_agents", "sft", str(shown), "--model", "embedded:desk", *QUICK]
    command += ["--max-steps", "200", "--output-dir", str(tmp_path)]  # a line each 10 steps
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.startswith("step "):
                process.send_signal(signal.SIGINT)
                break
        process.stdout.read()
        said = process.stderr.read()
    assert process.returncode == 130
    assert "resume with: stateset-agents sft --resume" in said
    assert list((tmp_path / "0001-sft" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["FILE"], "--model is missing"),
        ([], "give a file of conversations or --resume RUN"),
        (
            ["nothing.jsonl", "--model", "embedded:desk"],
            "cannot read conversations nothing.jsonl",
        ),
        (
            ["FILE", "--model", "embedded:desk", "--set", "training.beta=1"],
            "settings here are agent.NAME and sft.NAME",
        ),
        (["FILE", "--model", "embedded:desk", "--set", "sft.epochs=1"], "SFTConfig has no field 'epochs'"),
        (["RUN"], "is a folder: sft"),
        (["FILE", "--best"], "--best imitates a run"),
        (["RUN", "--best"], "has no successful conversation"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, problem, shown, finished, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"FILE": str(shown), "RUN": str(finished)}
    code = main(["sft", *[names.get(argument, argument) for argument in arguments]])
    assert problem in the_line(code, capsys.readouterr().err)
    assert not (tmp_path / "runs").exists()


def test_other_verbs_say_whose_run_it_is(finished, capsys):
    assert "sft --resume" in the_line(main(["train", "--resume", str(finished)]), capsys.readouterr().err)
    assert "sft --resume" in the_line(main(["evaluate", str(finished)]), capsys.readouterr().err)
