"""What the command line says to bad input: one line that names value and mend; and nothing is lost."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import contents, the_line, without_warnings
from tiny_desk import RUN, write_desk
from transformers.utils import logging as transformers_logging
from warm_python import warm_python

from stateset_agents.cli.main import main

_REWRITES = (
    "{% for m in messages[-2:] %}{{ m.role + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
"""Shows the last two messages only."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, scenarios, parts of its own and run.yaml, which works as it stands."""
    folder = tmp_path_factory.mktemp("desk")
    write_desk(folder)
    return folder


@pytest.fixture(autouse=True)
def _at_the_desk(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Call `main` there, and leave the process as it was."""
    logger = logging.getLogger("stateset_agents")
    before = logger.handlers[:], logger.propagate, logger.level
    monkeypatch.chdir(desk)
    monkeypatch.syspath_prepend(desk)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("COLUMNS", "80")
    transformers_logging.disable_progress_bar()  # read from the environment when transformers was imported
    yield
    transformers_logging.enable_progress_bar()
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


@pytest.fixture
def error_line(capsys: pytest.CaptureFixture[str]) -> Any:
    """told("train", ...): the one line on stderr of a command that fails."""

    def run(*arguments: str) -> str:
        code = main(arguments)
        return the_line(code, capsys.readouterr().err)

    return run


# ------------------------------------------------------------------------------ settings

SETTINGS = {
    "training.learnig_rate=1e-4": "training: TrainingConfig has no field 'learnig_rate' (did you mean "
    "'learning_rate'?)",
    "agent.max_new_token=3": "AgentConfig has no field 'max_new_token' (did you mean 'max_new_tokens'?)",
    "evaluation.episode=3": "EvaluationConfig has no field 'episode' (did you mean 'episodes'?)",
    "trainin.seed=1": "ExperimentConfig has no field 'trainin' (did you mean 'training'?)",
    "environment.max_turn=3": "environment 'conversation' has no argument 'max_turn' (did you mean "
    "'max_turns'?)",
    "environment.name=conversations": "got 'conversations' (did you mean 'conversation'?)",
    "reward=costumer_service": "got 'costumer_service' (did you mean 'customer_service'?)",
    "reward=cli_parts:evn_share": "has no 'evn_share' (did you mean 'even_share'?)",
    "training.profile=fast": "input should be 'conservative', 'balanced' or 'aggressive', got 'fast'",
    "training.num_generations=1": "compares conversations: num_generations must be at least 2, got 1",
    "environment.max_turns=0": "max_turns must be a whole number from 1 on, got 0",
    "training.learning_rate=-0.1": "learning_rate: input should be greater than or equal to 0, got -0.1",
    "training.learning_rate=quick": "learning_rate: input should be a valid number",
    "environment.scenarios=[]": "scenarios is empty: give at least one scenario",
    "environment.scenarios=5": "scenarios must be a list of scenarios or a JSONL file's path, got 5",
    "environment.success=1": "success must be a function with named parameters or 'module:function', got 1",
    "environment.system_prompt=3": "system_prompt must be text, got 3",
    "environment.local=maybe": "local must be true, false or absent, got 'maybe'",
    "environment.tools=[look]": "a tool must be a typed function or 'module:function', got 'look'",
    "reward=os:getcwd": "reward 'os:getcwd' is a str: name a RewardFunction or its maker",
    "environment.scenarios=none.jsonl": "none.jsonl: No such file or directory",
    "agent.model_name=./no-model": "no-model' does not exist; give a folder written by "
    "save_pretrained or a hub name",
    "agent.model_name=no-such-model": "cannot load a model from 'no-such-model'",
    f"agent.chat_template={json.dumps(_REWRITES)}": "the chat template rewrites history",
    "reward=environment": "nothing would score a conversation: none of the ",
    "training.seed": "--set takes NAME=VALUE such as training.beta=0.02, got 'training.seed'",
    "training.seed={": "--set 'training.seed={': the value is not YAML: while parsing",
    "max_steps=3": "run.yaml: ExperimentConfig has no field 'max_steps' (did you mean 'training.max_steps'?)",
    "group_size=4": "ExperimentConfig has no field 'group_size' (did you mean 'training.group_size'?)",
    "evaluation.split=test": "the environment has no test scenario: give some split='test', or name "
    "another split (in a file evaluation.split)",
}


@pytest.mark.parametrize(("item", "message"), SETTINGS.items())
def test_a_setting_that_cannot_be_is_told_in_one_line(
    error_line: Any, desk: Path, item: str, message: str
) -> None:
    assert message in error_line("train", "run.yaml", "--set", item)
    assert not (desk / "runs").exists()  # nothing was begun


def test_a_field_of_the_file_that_cannot_be_names_the_file(error_line: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({**RUN, "training": {"num_generation": 4}}))
    message = error_line("train", str(file))
    assert message.startswith(f"{file}: training: TrainingConfig has no field 'num_generation'")
    assert "did you mean 'num_generations'?" in message


FILES = {
    "training: {seed: 1": "is not YAML",
    "- a\n- b\n": "must hold sections such as agent, environment, training",
    "": "must hold sections",
    "training:\n  seed: 1\n": "environment is missing: add a line such as `environment: retail_desk`",
}


@pytest.mark.parametrize(("text", "message"), FILES.items())
def test_a_file_that_is_no_experiment_is_named(
    error_line: Any, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    line = error_line("train", str(file))
    assert line.startswith(str(file))
    assert message in line


def test_a_file_that_is_not_there_is_named(error_line: Any) -> None:
    assert error_line("train", "nowhere.yaml") == "cannot read nowhere.yaml: No such file or directory"


CALLS = {
    "": "holds no scenario: write one JSON object a line",
    "\n\n": "holds no scenario: write one JSON object a line",
    '{"opening": "hi"}\n{"opening": \n': ", line 2: not JSON (Expecting value): '{\"opening\": '",
    '{"opening": "hi"}\n\n["hi"]\n': ", line 3: a scenario must be a mapping, got list",
    '{"opening": "hi", "split": "dev"}\n': ", line 1: scenario split must be train, validation or test",
}


@pytest.mark.parametrize(("text", "message"), CALLS.items())
def test_a_scenario_file_that_cannot_be_read_is_named_with_its_line(
    error_line: Any, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    line = error_line("train", "run.yaml", "--set", f"environment.scenarios={file}")
    assert line.startswith(str(file))
    assert message in line


def test_a_file_and_a_run_to_resume_are_not_both_taken(error_line: Any) -> None:
    message = "give a YAML file (examples/demo.yaml) or --resume RUN, one of the two"
    assert error_line("train", "run.yaml", "--resume", "runs/latest") == message
    assert error_line("train") == message


@pytest.mark.parametrize("under", ["calls.jsonl", "/proc/nowhere"])
def test_an_output_folder_that_cannot_be_written_is_named(error_line: Any, under: str) -> None:
    line = error_line("train", "run.yaml", "--output-dir", f"{under}/runs")
    assert line.startswith(f"cannot write a run folder in '{under}/runs': ")
    assert line.endswith("; choose another folder")


def test_a_run_is_not_taken_for_a_file_to_train_from(error_line: Any) -> None:
    line = error_line("train", "model")
    assert line == (
        "'model' is a folder: to go on with that run, stateset-agents train --resume model; "
        "for a new run with its settings, stateset-agents train model/config.yaml"
    )


def test_a_folder_that_is_no_run_is_neither_resumed_nor_reported(error_line: Any) -> None:
    message = "'model' is no run folder (it has no metrics.jsonl): give one such as runs/latest"
    assert error_line("train", "--resume", "model") == message
    assert error_line("report", "model") == message


def test_evaluate_says_it_in_one_line_too(error_line: Any, tmp_path: Path) -> None:
    assert "--temperature must be at least 0 (greedy), got -1.0" in error_line(
        "evaluate", "run.yaml", "--temperature", "-1"
    )
    assert "no-model' does not exist" in error_line(
        "evaluate", "run.yaml", "--model", "./no-model", "--set", "evaluation.split=validation"
    )
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 262}
    (tmp_path / "torn" / "config.json").write_text(json.dumps(config))
    split = ("--set", "evaluation.split=validation")
    assert "cannot load a model from" in error_line(
        "evaluate", "run.yaml", "--model", str(tmp_path / "torn"), *split
    )


# ------------------------------------------------------------------------------ a run that cannot go on


def test_evaluate_waits_for_the_environment_as_long_as_the_file_says(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "environment.name=cli_parts:Hanging",
        "evaluation.split=validation",
        "training.turn_timeout=0.1",
    ]
    code = main(["evaluate", "run.yaml", *(f"--set={setting}" for setting in settings)])
    line = the_line(code, without_warnings(capsys.readouterr().err))
    assert "opening a conversation took the environment longer than 0.1 s" in line


def test_every_reward_of_the_first_step_failing_stops_and_keeps_what_was_said(
    desk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["train", "run.yaml", "--set", "reward=cli_parts:broken", "--output-dir", str(tmp_path / "runs")]
    )
    line = the_line(code, without_warnings(capsys.readouterr().err))
    assert line.startswith("step 1 has no group with 2 scored members (0 of 2 conversations failed); ")
    assert "reward broken failed: ConnectionError: the judge is down" in line
    run = tmp_path / "runs" / "latest"
    assert len((run / "rollouts.jsonl").read_text().splitlines()) == 1 + 2
    assert (run / "checkpoints" / "step-000001" / "manifest.json").is_file()


def test_every_conversation_of_the_first_step_failing_stops_the_run(
    desk: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        [
            *("train", "run.yaml", "--set", "environment.name=cli_parts:Closed"),
            *("--output-dir", str(tmp_path / "runs")),
        ]
    )
    line = the_line(code, without_warnings(capsys.readouterr().err))
    assert line.startswith("step 1 has no group with 2 scored members (2 of 2 conversations failed); ")
    assert line.endswith("ConnectionError: the desk is closed (at cli_parts.py:18)")


@pytest.fixture(scope="module")
def finished(desk: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, both kept as checkpoints."""
    root = tmp_path_factory.mktemp("finished")
    before = Path.cwd()
    os.chdir(desk)
    try:
        assert main(["train", "run.yaml", "--output-dir", str(root)]) == 0
    finally:
        os.chdir(before)
    return root / "0001-run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    shutil.copytree(finished, tmp_path / "0001-run")
    return tmp_path / "0001-run"


def test_a_truncated_checkpoint_is_named_with_the_one_to_use_instead(error_line: Any, run: Path) -> None:
    last = run / "checkpoints" / "step-000002"
    weights = last / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = contents(run)
    line = error_line("train", "--resume", str(run), "--max-steps", "3")
    assert line.startswith(f"{last} is damaged: model/model.safetensors is truncated or altered")
    assert contents(run) == before  # nothing is lost
    _, _, instead = line.rpartition("resume from ")
    assert main(["train", "--resume", instead, "--max-steps", "3"]) == 0
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()[1:]]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("training.learning_rate=0.5", "(training.learning_rate was 5e-06 and is 0.5)"),
        ("environment.max_turns=3", "(environment.max_turns was 2 and is 3)"),
        ("agent.max_new_tokens=9", "(agent.max_new_tokens was 3 and is 9)"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_and_left_alone(
    error_line: Any, run: Path, item: str, message: str
) -> None:
    before = contents(run)
    line = error_line("train", "--resume", str(run), "--max-steps", "3", "--set", item)
    assert message in line
    assert line.endswith("resume with the same ones")
    assert contents(run) == before


# ------------------------------------------------------------------------------ as a process, and help


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("training.learnig_rate=1", "has no field 'learnig_rate' (did you mean 'learning_rate'?)"),
        ("agent.model_name=./no-model", "no-model' does not exist"),
    ],
)
def test_the_process_says_one_line_and_exits_with_1(desk: Path, item: str, message: str) -> None:
    done = subprocess.run(
        [*warm_python(), "-m", "stateset_agents.cli.main", "train", "run.yaml", "--set", item],
        cwd=desk,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert message in the_line(done.returncode, done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trian run.yaml", "(did you mean 'train'?): `stateset-agents --help` lists them"),
        ("train run.yaml max_steps=3", "(settings go behind --set: --set training.max_steps=3)"),
        ("train run.yaml agent.seed=3", "(settings go behind --set: --set agent.seed=3)"),
        ("train run.yaml --max-step-s 3", "(did you mean '--max-steps'?)"),
    ],
)
def test_a_wrong_command_says_what_was_meant(
    capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    with pytest.raises(SystemExit) as left:
        main(command.split())
    assert left.value.code == 2
    errors = capsys.readouterr().err
    assert errors.rstrip().endswith(message)
    assert errors.startswith(("usage: stateset-agents train [-h]", "usage: stateset-agents VERB ...\n"))


def test_a_reader_that_has_enough_gets_no_traceback() -> None:
    command = [*warm_python(), "-m", "stateset_agents.cli.main", "audit", "retail_desk", "--episodes", "6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_to_audit_is_told_what_there_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", name]) == 1
    assert "ENV is empty: give one of conversation, chats, retail_desk" in capsys.readouterr().err


def test_a_file_to_audit_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "nowhere.yaml"]) == 1
    assert "cannot read nowhere.yaml: No such file" in capsys.readouterr().err


def test_of_several_processes_one_says_what_is_wrong_and_every_verb_but_train_is_for_one(
    error_line: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    commands = (["evaluate", "run.yaml"], ["report", "run"], ["train", "nowhere.yaml"])
    lines = [error_line(*command) for command in commands]
    assert lines[0].endswith("evaluate is for one: leave the launcher out")
    assert "report is for one" in lines[1]
    assert "nowhere.yaml" in lines[2]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for command in commands:
        assert main(command) == 1
        assert capsys.readouterr().err == ""
