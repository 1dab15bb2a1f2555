"""`stateset-agents init`: the folders that it writes pass their test and their audit, and train."""

from __future__ import annotations

import json
import os
import pty
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import contents, the_line
from warm_python import warm_python

from stateset_agents.cli import init
from stateset_agents.cli.main import main

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """run("stateset-agents train ..."): a command as `init` prints it, in a process of its own."""
    monkeypatch.chdir(tmp_path)

    def command(line: str) -> subprocess.CompletedProcess[str]:
        program, *words = shlex.split(line)
        module = {"python": [], "stateset-agents": ["-m", "stateset_agents"]}[program]
        return subprocess.run(
            [*warm_python(), *module, *words],
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )

    return command


def printed_commands(printed: str) -> list[str]:
    """Test, audit, train, report."""
    commands = printed.replace("\r", "").partition("go on with:\n")[2].splitlines()
    assert [words.split()[1] for words in commands] == ["-m", "audit", "train", "report"]
    return [words.strip() for words in commands]


def settings(folder: str) -> Any:
    return yaml.safe_load(Path(folder, "run.yaml").read_text())


def check_passes(run: Run, *commands: str) -> None:
    for command in commands:
        done = run(command)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_passes_its_test_and_its_audit_and_trains(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "shop"]) == 0
    test, audit, train, report = printed_commands(capsys.readouterr().out)
    assert audit == "stateset-agents audit shop/run.yaml --max-reward .05"
    check_passes(run, test, audit)
    check_passes(run, f"{train} --max-steps 2 --no-eval", report)
    assert Path("runs/latest/report.html").is_file()


@pytest.mark.first(1)
@pytest.mark.parametrize(
    ("file", "line", "mend"),
    [
        ("verdict.py", "if order_id not in state.looked_up or now != right:", "if False:"),
        ("verdict.py", "if order_id not in state.looked_up or now != right:", "if now != right:"),
        ("verdict.py", "return re.findall(", "return True or re.findall("),
        ("tools.py", '["status"] = "cancelled"', '["status"] = "shipped"'),
    ],
)
def test_the_example_s_test_finds_a_verdict_that_pays_short_cuts(
    run: Run, file: str, line: str, mend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "shop"]) == 0
    test = printed_commands(capsys.readouterr().out)[0]
    path = Path("shop", file)
    assert line in path.read_text()
    path.write_text(path.read_text().replace(line, mend))
    assert run(f"{test} -q").returncode == 1


@pytest.mark.long
def test_the_example_learns(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "shop"]) == 0
    train = printed_commands(capsys.readouterr().out)[2]
    check_passes(run, train)
    summary = json.loads(Path("runs/latest/summary.json").read_text())
    before, after = summary["before"], summary["after"]
    assert before["n"] == after["n"] == 48
    assert before["interval"][1] < after["interval"][0], summary
    assert after["success"] > 0.6


def test_options_stand_in_the_settings(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = 'def fetch(order_id: str) -> str:\n    """Fetch an order."""\n    return order_id\n'
    (tmp_path / "stock_room.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    options = [
        "--domain",
        'say "yes" 😀: it',
        "--model",
        "./my model",
        "--tools",
        "stock_room:fetch",
        "refund",
    ]
    assert main(["init", "a folder", *options]) == 0
    test, audit, train, _ = printed_commands(capsys.readouterr().out)
    made = settings("a folder")
    assert made["agent"] == {"model_name": "./my model", "max_new_tokens": 256}
    assert made["environment"]["system_prompt"] == 'say "yes" 😀: it'
    assert made["environment"]["tools"] == ["tools:Shop", "stock_room:fetch", "tools:refund"]
    check_passes(run, test)
    for command in (audit, train):  # refund is to be written
        done = run(command)
        assert "tool refund: parameter 'WRITE_ITS_ARGUMENTS' needs a type" in the_line(
            done.returncode, done.stderr
        )
    tools = Path("a folder", "tools.py")
    tools.write_text(tools.read_text().replace("WRITE_ITS_ARGUMENTS", "order_id: str"))
    schemas = "from stateset_agents.core.tools import Toolbox; Toolbox(['tools:refund', 'stock_room:fetch'])"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'a folder'}:{tmp_path}")
    assert subprocess.run([sys.executable, "-c", schemas], check=False).returncode == 0


# --- rows of the user's own


def openai_rows(path: Path) -> None:
    def row(order: str) -> dict[str, Any]:
        function = {"name": "track", "arguments": json.dumps({"order_id": order})}
        call = {"id": "a", "type": "function", "function": function}
        messages = [
            {"role": "system", "content": "You answer for a shop."},
            {"role": "user", "content": f"Where is {order}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "in Lyon"},
            {"role": "assistant", "content": "In Lyon."},
            {"role": "user", "content": "Thanks!"},
            {"role": "assistant", "content": "You are welcome."},
        ]
        return {"id": order, "topic": "delivery", "messages": messages}

    path.write_text("".join(f"{json.dumps(row(f'K{number}'))}\n" for number in range(20, 25)))


def csv_rows(path: Path) -> None:
    lines = [f"What is {number} plus {number}?,{2 * number}" for number in range(5)]
    path.write_text("\n".join(["question,answer", *lines]))


def sharegpt_rows(path: Path) -> None:
    def turns(day: str) -> list[dict[str, str]]:
        return [{"from": "human", "value": f"Open on {day}?"}, {"from": "gpt", "value": "Yes."}]

    days = ("monday", "tuesday", "friday", "sunday")
    path.write_text(json.dumps([{"conversations": turns(day)} for day in days]))


@pytest.mark.long
def test_logs_with_calls_are_judged_by_them(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    openai_rows(Path("calls.jsonl"))
    assert main(["init", "desk", "--data", "calls.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert init._VERDICTS["calls"] in printed
    assert "held out as test, drawn by a hash: 1 of 5" in printed
    assert "embedded:desk knows the words of its own desk alone" in printed
    rows = [json.loads(line) for line in Path("desk/scenarios.jsonl").read_text().splitlines()]
    assert [row["prompt"][-1]["content"] for row in rows] == [f"Where is K{n}?" for n in range(20, 25)]
    assert [row["script"] for row in rows] == [["Thanks!"]] * 5
    assert sorted(row["split"] for row in rows) == ["test", *["train"] * 4]
    assert settings("desk")["environment"]["system_prompt"] is None  # each row has its own
    test, audit, train, _ = printed_commands(printed)
    check_passes(run, test, audit, f"{train} --max-steps 1 --no-eval")


@pytest.mark.long
def test_rows_with_answers_are_paid_by_them(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    csv_rows(Path("sums.csv"))
    assert main(["init", "sums", "--data", "sums.csv", "--model", "embedded:desk", "--domain", "sums."]) == 0
    printed = capsys.readouterr().out
    assert init._VERDICTS["answer"] in printed
    assert settings("sums")["reward"] == "correctness"
    assert not Path("sums/verdict.py").exists()
    test, audit, train, _ = printed_commands(printed)
    check_passes(run, test, audit, f"{train} --max-steps 1 --no-eval")


def test_rows_that_do_not_say_what_a_success_is_wait_for_a_verdict(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    sharegpt_rows(Path("talks.json"))
    assert main(["init", "desk", "--data", "talks.json", "--model", "embedded:desk"]) == 0
    printed = capsys.readouterr().out
    assert init._VERDICTS["unwritten"] in printed
    test, audit, train, _ = printed_commands(printed)
    check_passes(run, test)
    train = f"{train} --max-steps 1 --no-eval"
    for command in (audit, train):
        done = run(command)
        errors = "".join(line for line in done.stderr.splitlines(keepends=True) if " WARNING " not in line)
        assert "write served() in verdict.py and take this line out" in the_line(done.returncode, errors)
    verdict = Path("desk/verdict.py")
    lines = [line for line in verdict.read_text().splitlines() if not line.startswith("raise ")]
    by_a_word = '    return "yes" in messages[-1].content.lower()'
    verdict.write_text("\n".join([*lines, by_a_word, ""]))
    assert "keyword_stuffer: mean reward 1.000 is over 0.05" in run(audit).stdout
    verdict.write_text("\n".join([*lines, '    return messages[-1].content == "Yes."', ""]))
    check_passes(run, audit, train)


def test_a_row_that_does_not_open_fails_the_test(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sharegpt_rows(Path("talks.json"))
    assert main(["init", "desk", "--data", "talks.json"]) == 0
    test = printed_commands(capsys.readouterr().out)[0]
    with Path("desk/scenarios.jsonl").open("a") as file:
        print(json.dumps({"opening": "", "context": {"question": "What?"}}), file=file)
    assert run(test).returncode != 0


def test_rows_keep_the_splits_that_they_name(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"question": "Why?", "split": "test"},
        {"question": "How?"},
        {"question": "Who?", "split": "validation"},
    ]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert main(["init", "desk", "--data", "rows.jsonl"]) == 0
    assert "held out" not in capsys.readouterr().out
    made = [json.loads(line) for line in Path("desk/scenarios.jsonl").read_text().splitlines()]
    assert [row.get("split") for row in made] == ["test", None, "validation"]


# --- what cannot be done is one line, and writes nothing


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["taken"], "taken is there already: name a new or an empty folder"),
        (["taken/file"], "taken/file is there already"),
        (["taken/file/below"], "cannot make the folder taken/file/below: Not a directory"),
        (["new", "--tools", "a-b"], "--tools must be MODULE:FUNCTION or the name of a function to write"),
        (["new", "--tools", "class"], "--tools must be MODULE:FUNCTION or the name of a function to write"),
        (["new", "--tools", "find", "find"], "--tools must be some, each once, and none called Shop"),
        (["new", "--tools", "Shop"], "--tools must be some, each once, and none called Shop"),
        (["new", "--tools", "nowhere:x"], "tool 'nowhere:x' cannot be imported: No module named 'nowhere'"),
        (["new", "--data", "none.csv"], "cannot read file none.csv: No such file"),
        (["new", "--data", "one.jsonl"], "one.jsonl has too few rows, none is left for test: give at least"),
        (["new", "--data", "no.jsonl"], 'no.jsonl, scenario a: context["answer"] must be a number, a text'),
        (["new", "--data", "empty.jsonl"], "gives no row: the lines above say why"),
    ],
)
def test_what_cannot_work_is_one_line(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").mkdir()
    Path("taken/file").write_text("mine")
    Path("one.jsonl").write_text('{"question": "2+2?", "answer": 4}\n')
    answers = [{"id": id, "question": f"{id}?", "answer": said} for id, said in (("a", False), ("b", 4))]
    Path("no.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in answers))
    Path("empty.jsonl").write_text('{"colour": "red"}\n')
    before = contents(tmp_path)
    assert message in the_line(main(["init", *options]), capsys.readouterr().err)
    assert contents(tmp_path) == before
    assert not Path("new").exists()


def test_an_empty_folder_is_taken(run: Run) -> None:
    Path("desk").mkdir()
    assert main(["init", "desk"]) == 0
    assert Path("desk/run.yaml").is_file()


# --- at a terminal


def at_terminal(answers: list[str], *arguments: str) -> tuple[int, str]:
    """The exit code, and what the screen showed. Each answer is typed once its question is there."""
    process, screen = pty.fork()
    if process == 0:  # the child
        command = [*warm_python(), "-m", "stateset_agents", "init", *arguments]
        os.execve(sys.executable, command, {**os.environ, "TERM": "xterm"})
    seen, end = "", time.monotonic() + 120
    while time.monotonic() < end:
        if seen.rpartition("\n")[2].endswith("): ") and answers:
            os.write(screen, answers.pop(0).encode())
            seen += "\n"
        if select.select([screen], [], [], 1.0)[0]:
            try:
                piece = os.read(screen, 65536)
            except OSError:  # the terminal's other side is closed
                break
            if not piece:
                break
            seen += piece.decode()
    _, status = os.waitpid(process, 0)
    os.close(screen)
    assert not answers, seen
    return os.waitstatus_to_exitcode(status), seen


def test_it_asks_at_a_terminal(run: Run) -> None:
    csv_rows(Path("sums.csv"))
    code, seen = at_terminal(["sums.\n", "sums.csv\n", "add subtract\n", "Qwen/Qwen3-0.6B\n"], "desk")
    assert code == 0, seen
    made = settings("desk")
    assert made["agent"] == {"model_name": "Qwen/Qwen3-0.6B", "max_new_tokens": 256}
    assert made["environment"]["system_prompt"] == "sums."
    assert made["environment"]["tools"] == ["tools:add", "tools:subtract"]
    assert made["reward"] == "correctness"
    check_passes(run, printed_commands(seen)[0])


def test_empty_answers_are_the_example(run: Run) -> None:
    code, seen = at_terminal(["\n"] * 4, "asked")
    assert code == 0, seen
    assert main(["init", "not-asked"]) == 0  # no terminal here
    ask, not_asked = contents(Path("asked")), contents(Path("not-asked"))
    assert ask.keys() == not_asked.keys()
    assert {name for name in ask if ask[name] != not_asked[name]} == {"README.md"}  # its commands name it


def test_one_option_and_nothing_is_asked(run: Run) -> None:
    code, seen = at_terminal([], "desk", "--model", "embedded:desk")
    assert code == 0, seen
    assert "(empty" not in seen


def test_ctrl_d_leaves_and_writes_nothing(run: Run) -> None:
    code, seen = at_terminal(["sums.\n", "\x04"], "desk")
    assert code == 130, seen
    assert "Traceback" not in seen
    assert not Path("desk").exists()
