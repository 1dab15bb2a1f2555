"""Help, version and completion of the command line: every verb has a sentence, examples and exit codes."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from stateset_agents.cli.main import command_parser, main


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield verb
                yield from _parsers(verb)


VERBS = [parser.prog.removeprefix("stateset-agents ") for parser in _parsers(command_parser())]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_verb_s_help_is_whole_and_narrow(verb, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    with pytest.raises(SystemExit, match="0"):
        main([*verb.split(), "--help"])
    text = capsys.readouterr().out
    usage, sentence, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: stateset-agents {verb} [-h]")
    assert sentence.split("\n")[-1].endswith(".")
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) <= (75 if verb in ("serve", "compare", "optimize-prompt") else 50)
    examples = text.partition("\nexamples:\n")[2].partition("\n\nexit codes: ")
    commands = [shlex.split(line) for line in examples[0].splitlines()]
    assert len(commands) >= 2
    assert [words[0] for words in commands] == ["stateset-agents"] * len(commands)
    assert any(words[1 : 1 + len(verb.split())] == verb.split() for words in commands)
    for words in commands:
        command_parser().parse_args(words[1:])  # a wrong one exits
    codes = [code.split()[0] for code in " ".join(examples[2].split()).split("; ")]
    assert codes[:3] == ["0", "1", "2"]
    assert codes[-1] == "130"


def test_a_bare_call_shows_the_verbs(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 40
    listed = {line.split()[0] for line in text.splitlines() if line.startswith("  ")}
    assert {verb for verb in VERBS if " " not in verb} <= listed
    assert main(["study"]) == 0
    assert "report" in capsys.readouterr().out


def test_the_version_is_the_installed_one(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"stateset-agents {metadata.version('stateset-agents')}\n"


def test_a_wrong_verb_is_one_line_with_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["trian"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "stateset-agents: error: no verb 'trian' (did you mean 'train'?): `stateset-agents --help` lists them"
    )


@pytest.fixture
def completion(tmp_path, capsys):
    def script(shell: str) -> Path:
        with pytest.raises(SystemExit, match="0"):
            main(["--print-completion", shell])
        path = tmp_path / f"completion.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return script


def test_bash_completes_verbs_and_options(completion):
    script = completion("bash")
    lines = [
        f"source {script}",
        'words() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); '
        '_shtab_stateset_agents; echo "${COMPREPLY[@]}"; }',
        "words stateset-agents eva",
        "words stateset-agents train --res",
    ]
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["evaluate", "--resume"]
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_scripts(shell, completion):
    script = completion(shell)
    assert "rollback" in script.read_text()
    if shutil.which(shell):  # few machines have both
        done = subprocess.run([shell, "-n", script], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
