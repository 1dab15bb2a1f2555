"""`stateset-agents import`: what a file holds, and each form read by the door that it is for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
from chat_templates import trl_tokenizer
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from published_rows import PUBLISHED, Published, scripted
from pydantic import TypeAdapter
from repository_paths import ROOT
from trl.data_utils import apply_chat_template, is_conversational

from stateset_agents.cli.main import main
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.sources.datasets import chat_scenarios
from stateset_agents.core.sources.files import read_rows
from stateset_agents.core.sources.row_shapes import read_messages
from stateset_agents.core.sources.scenario_files import read_scenarios
from stateset_agents.training.sft.demonstrations import load_demonstrations
from stateset_agents.training.update.batch import Sample

EXPORTS = ROOT / "tests" / "fixtures" / "exports"
FILES = sorted(file.name for file in EXPORTS.iterdir() if file.suffix != ".eval")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def written(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> Path:
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return folder / name


def imported(source: Path, form: str, folder: Path, *more: str) -> Path:
    option = "--to" if form in ("openai", "trl") else "--as"
    output = folder / f"{form}.jsonl"
    output.unlink(missing_ok=True)
    assert main(["import", str(source), option, form, "--output", str(output), *more]) == 0
    return output


def files_of(door: str) -> list[Any]:
    """Published rows in files, of which a door reads all."""
    shown = [one for one in PUBLISHED if not one.is_picture and "Arrow" not in one.name]
    read = [one for one in shown if not {door, "all"} & one.refused.keys()]
    return [pytest.param(one, id=one.name) for one in read]


def parts(scenario: Any) -> tuple[Any, ...]:
    asked = [(message.role, message.content, message.reasoning) for message in scenario.messages()]
    calls = [call.name for message in scenario.messages() for call in message.tool_calls]
    return scenario.id, scenario.family, scenario.split, asked, calls, scenario.tools


@pytest.mark.parametrize("published", files_of("scenarios"))
def test_scenarios_say_what_the_file_said(published: Published, tmp_path: Path) -> None:
    source = published.written(tmp_path)
    before = read_scenarios(source, needs_opening=True)
    after = read_scenarios(imported(source, "scenarios", tmp_path), needs_opening=True)
    assert list(map(parts, after)) == list(map(parts, before))
    for old, new in zip(before, after, strict=True):
        kept = {key: value for key, value in old.context.items() if key not in ("prompt", "query")}
        assert {key: new.context[key] for key in kept} == kept


@pytest.mark.parametrize("published", files_of("sft"))
def test_logs_replay_what_the_file_said(published: Published, tmp_path: Path) -> None:
    source = published.written(tmp_path)
    before, after = chat_scenarios(source), chat_scenarios(imported(source, "replay", tmp_path))
    assert list(map(parts, after)) == list(map(parts, before))
    for old, new in zip(before, after, strict=True):
        for key in ("script", "recorded", "reference"):
            assert new.context.get(key) == old.context.get(key)


@pytest.mark.parametrize("published", files_of("sft"))
async def test_examples_train_the_tokens_that_the_file_trains(published: Published, tmp_path: Path) -> None:
    source = published.written(tmp_path)
    async with await scripted("Bye.") as agent:
        before = load_demonstrations(agent, source).train
        after = load_demonstrations(agent, imported(source, "sft", tmp_path)).train
    failures = sum(sample.trajectory.scenario.context.get("success") is False for sample in before)
    assert len(after) == len(before) - failures
    for old, new in zip(before, after, strict=False):
        assert trained(new) == trained(old) != []


def trained(sample: Sample) -> list[int]:
    tokens = [id for turn in sample.trajectory.turns for id in turn.completion.token_ids]
    return [id for id, weight in zip(tokens, sample.advantages, strict=True) if weight]


@pytest.mark.parametrize("name", FILES)
def test_each_form_of_an_export(name: str, tmp_path: Path) -> None:
    first, second = (row for _, row in read_rows(EXPORTS / name, of="file"))
    words = [message.content for message in read_messages(second["messages"], "messages").messages]
    assert words == ["You answer for a shop.", "Hello!", "Hi."]
    assert len({first["id"], second["id"]}) == 2
    evaluation = lines(imported(EXPORTS / name, "evaluation", tmp_path))
    assert [row["split"] for row in evaluation] == ["test", "test"]
    assert evaluation[0]["recorded"][0]["content"] == "Lyon"
    environment = ConversationEnvironment(str(tmp_path / "evaluation.jsonl"))
    assert len(environment.scenarios("test")) == 2
    examples = lines(imported(EXPORTS / name, "sft", tmp_path))
    assert len(examples) == (1 if "inspect" in name else 2)  # Inspect's scorer found one wrong


# --- what is said


def test_auto_says_what_was_found_and_what_it_could_become(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(EXPORTS / "langfuse-observations.jsonl")]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "format: Langfuse, 6 records, 4 calls of models, 2 conversations",
        "tools: track (calls: 1)",
        "system prompts: 1; 'You answer for a shop.' (rows: 2)",
        "left out: 2: type SPAN is no call of a model (first: line 1)",
        "rows that it gives: 2 scenarios, 2 replay, 2 sft, 2 evaluation, 2 openai, 4 trl",
    ]


def test_rows_that_a_form_cannot_have_are_counted_by_their_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"role": "user", "content": "Where is K27?"}
    source = written(
        tmp_path,
        [
            {"messages": [asked, {"role": "assistant", "content": "In Lyon."}]},
            {"messages": [asked, {"role": "assistant", "content": "In Lyon."}]},
            {"messages": [asked, {"role": "assistant", "content": "No."}], "success": False},
            {"messages": [asked, {"role": "assistant", "content": ""}], "id": "empty"},
            {"messages": [asked]},
            {"messages": [{"role": "user", "content": " "}]},
            {"messages": [asked, asked, {"role": "user", "content": " "}]},
        ],
    )
    assert len(lines(imported(source, "sft", tmp_path))) == 1
    out = capsys.readouterr().out
    for reason in (
        "left out: 2: message 1 of messages is the user's and has no words",
        "left out: 1: all that it says stands in an earlier row (first: line 2)",
        "left out: 1: it was reported as a failure (first: line 3)",
        "left out: 1: reply 1 is empty",
        "left out: 1: it shows no reply (first: line 5)",
        "rows that it gives: 1 sft\n",
    ):
        assert reason in out


def test_an_answer_of_nought_is_one_to_check_by(tmp_path: Path) -> None:
    rows = [{"question": f"{answer!r}?", "answer": answer} for answer in (0, False, "", [])]
    made = lines(imported(written(tmp_path, rows), "evaluation", tmp_path))
    assert [row["answer"] for row in made] == [0, False]


def test_what_a_failed_agent_did_is_nothing_to_check_by(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"completion": "No.", "success": False}
    rows = [{"prompt": "Who?", **failed}, {"prompt": "Where?", "answer": "Lyon", **failed}]
    made = lines(imported(written(tmp_path, rows), "evaluation", tmp_path))
    assert [row["answer"] for row in made] == ["Lyon"]
    assert "left out: 1: nothing in it says what is right: no answer, " in capsys.readouterr().out


async def test_failures_are_left_out_however_they_are_written_and_told_by_sft(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verdicts = [True, None, 1, "yes", False, 0, "false", "0"]
    rows = [{"prompt": f"{n}?", "completion": "Yes.", "success": v} for n, v in enumerate(verdicts)]
    source = written(tmp_path, rows)
    assert [row["id"] for row in lines(imported(source, "sft", tmp_path))] == [
        row["id"] for row in lines(imported(source, "replay", tmp_path))[:4]
    ]
    async with await scripted("Bye.") as agent:
        assert len(load_demonstrations(agent, source).train) == 8
    assert "4 of 8 conversations were reported as failures and are imitated, too" in caplog.text


def test_what_no_replay_can_show_is_imitated_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"role": "user", "content": "Where is K27?"}
    said = {"role": "assistant", "content": "In Lyon."}
    later = {"role": "system", "content": "Be brief."}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    shown = {"role": "user", "content": [{"type": "text", "text": "And this?"}, picture]}
    rows = [{"messages": [asked, said, more, asked, said]} for more in (later, shown)]
    rows[1]["messages"].pop(3)  # no two messages of the user behind one another
    source = written(tmp_path, rows)
    for form, number in (("sft", 2), ("openai", 2), ("trl", 4)):
        assert len(lines(imported(source, form, tmp_path))) == number
    capsys.readouterr()
    for form in ("scenarios", "replay", "evaluation"):
        assert main(["import", str(source), "--as", form]) == 1
        assert "stands behind the first reply, where a replay cannot show it" in capsys.readouterr().out


def test_one_form_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["import", "rows.jsonl", "--as", "sft", "--to", "openai"])
    assert "--to: not allowed with argument --as" in capsys.readouterr().err


def test_auto_says_what_each_form_leaves_out_and_what_was_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = ["train", "dev", "Train", "dev", "dEv"]
    rows = [{"prompt": f"{n}?", "question": "Who?", "split": split} for n, split in enumerate(splits)]
    assert main(["import", str(written(tmp_path, rows))]) == 0
    out = capsys.readouterr().out
    for line in (
        "'prompt' is read as what is asked, 'question' is not (shape TRL, rows: 5)\n",
        "got 'dev' (first: line 2); also 'Train', 'dEv'\n",
        "left out of replay, sft, openai, trl: 1: it shows no reply (first: line 1)\n",
        "left out of evaluation: 1: nothing in it says what is right",
        "rows that it gives: 1 scenarios, 0 replay",
    ):
        assert line in out
    assert len([line for line in out.splitlines() if line.startswith("left out: 4: ")]) == 1
    assert main(["import", str(written(tmp_path, [{"colour": "red"}]))]) == 1
    assert "left out: 1: which column is the user's first message?" in capsys.readouterr().out


def test_what_repeats_has_an_id_twice_or_no_json_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"prompt": "Who?", "completion": "Ann."}
    rows = [
        {"id": "a", **one},
        {"id": "b", **one, "split": "test"},
        {"id": "c", **one, "level": 1},
        {"id": "a", **one, "level": 2},
        {"id": "d", **one, "level": float("nan")},
    ]
    source = written(tmp_path, rows)
    for form in ("scenarios", "replay", "sft", "evaluation", "trl"):
        assert [row["id"] for row in lines(imported(source, form, tmp_path))] == ["a", "c"]
        out = capsys.readouterr().out
        for reason in (
            "all that it says stands in an earlier row (first: line 2)",
            "its id 'a' is an earlier row's: give it another (first: line 4)",
            "the values of 'level' are no JSON (Out of range float",
        ):
            assert f"left out: 1: {reason}" in out


def test_what_gives_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = written(tmp_path, [{"prompt": "Where is K27?"}])
    assert main(["import", str(source), "--as", "sft", "--output", str(tmp_path / "out.jsonl")]) == 1
    assert "gives no row: the lines above say why" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    assert main(["import", str(source), "--output", str(tmp_path / "out.jsonl")]) == 1
    assert "say what" in capsys.readouterr().err
    assert main(["import", str(source), "--as", "sft", "--deployments", "x"]) == 1
    assert "go together" in capsys.readouterr().err
    assert main(["import", str(source), "--as", "scenarios"]) == 0  # nothing is written
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows.jsonl", "rows.jsonl exists: give another file, or remove it"),
        ("new.csv", "--output must name JSON lines, ROWS.jsonl, got"),
        ("new.jsonl.gz", "--output must name JSON lines, ROWS.jsonl, got"),
        ("pipe", "pipe: it is a pipe or a device; name a file"),
    ],
)
def test_no_file_is_overwritten_or_has_another_s_name(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path, [{"prompt": "Where is K27?"}])
    os.mkfifo(tmp_path / "pipe")
    before = source.read_text()
    assert main(["import", str(source), "--as", "scenarios", "--output", str(tmp_path / name)]) == 1
    assert said in capsys.readouterr().err
    assert source.read_text() == before
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "pipe"}
    assert (tmp_path / "pipe").is_fifo()


def test_personal_text_is_taken_out_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = EXPORTS / "langsmith-runs.jsonl"
    assert "ann@example.org" in imported(source, "replay", tmp_path).read_text()
    for form in ("scenarios", "replay", "sft", "evaluation", "openai", "trl"):
        text = imported(source, form, tmp_path, "--redact").read_text()
        assert "ann@example.org" not in text
        assert "[mail 1]" in text
        assert "019" not in json.loads(text.splitlines()[0]).get("id", "")[:3]  # LangSmith's ids are hashed
        assert "personal text taken out: 1 mail\n" in capsys.readouterr().out


def test_calls_and_fields_lose_personal_text_too(tmp_path: Path) -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": {"mail": "ann@example.org", "pin": "1234"}}}
    row = {
        "id": "Ann",
        "note": "ann@example.org",
        "messages": [
            {"role": "user", "content": "I am ann@example.org."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": '{"password": "x1"}'},
            {"role": "assistant", "content": "Hello ann@example.org"},
        ],
    }
    source = written(tmp_path, [row, {"opening": "I am ann@example.org", "id": "Bob", "answer": "x"}])
    text = imported(source, "scenarios", tmp_path, "--redact").read_text()
    assert not any(word in text for word in ("ann@", "1234", "x1", '"Ann"', "Bob"))


# --- traces


def test_a_later_call_has_the_thoughts_of_the_calls_before_it(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "2+2?"}]
    said = {"role": "assistant", "content": "4"}
    more = [*asked, said, {"role": "user", "content": "Sure?"}]
    call = {"traceId": "t", "type": "GENERATION", "startTime": "2026-01-01"}
    source = written(
        tmp_path,
        [
            call | {"id": "1", "input": asked, "output": said | {"reasoning_content": "Two and two."}},
            call | {"id": "2", "input": more, "output": {"role": "assistant", "content": "Yes."}},
            call | {"id": "3", "input": [{"role": "user", "content": "Bye."}], "output": "Bye."},
            call | {"id": "4", "input": "a text", "output": None},
            call | {"id": "5", "input": {"args": [1]}, "output": "x"},
        ],
    )
    first, second = (row for _, row in read_rows(source, of="file"))
    assert (first["id"], second["id"]) == ("t", "t-2")
    assert first["messages"][1] == said | {"reasoning_content": "Two and two."}
    assert second["messages"][0]["content"] == "Bye."


def test_only_calls_of_one_trace_or_session_are_merged(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "Hi."}]
    said = {"role": "assistant", "content": "Hello."}
    more = [*asked, said, {"role": "user", "content": "Bye."}]
    first = {"type": "GENERATION", "startTime": "2026-01-01", "input": asked, "output": said}
    later = first | {"input": more, "output": "Bye."}
    ann, ben = {"traceId": "ann", "tags": ["a"]}, {"traceId": "ben", "sessionId": "s"}
    calls = [first | ann, later | ben, first | {"traceId": "ben"}, first | {"traceId": "c", "sessionId": "s"}]
    rows = [row for _, row in read_rows(written(tmp_path, calls), of="file")]
    assert [(row["id"], len(row["messages"]), row.get("tags")) for row in rows] == [
        ("ann", 2, ["a"]),
        ("ben", 4, None),
    ]
    # of LangSmith's runs the session is the project's, and the thread is what others call a session
    run = {"run_type": "llm", "session_id": "project", "inputs": {"messages": asked}, "outputs": said}
    runs = [run | {"trace_id": "ann"}, run | {"trace_id": "ben", "inputs": {"messages": more}}]
    thread = {"extra": {"metadata": {"thread_id": "7"}}}
    for given, sessions in ([runs, [None, None]], [[each | thread for each in runs], ["7"]]):
        found = read_rows(written(tmp_path, given), of="file")
        assert [row.get("session") for _, row in found] == sessions


def test_rows_with_an_epoch_and_a_target_are_no_export_of_inspect(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    row = {"messages": talk, "epoch": 1, "target": "Hello.", "split": "test", "system": "Be brief."}
    [(_, read)] = read_rows(written(tmp_path, [row]), of="file")
    assert read == row


def test_a_trace_of_langfuse_with_its_observations(tmp_path: Path) -> None:
    inner = {"id": "1", "type": "GENERATION", "traceId": "t", "input": "Hi.", "output": "Hello."}
    trace = {"id": "t", "timestamp": "x", "input": {"args": []}, "output": None, "observations": [inner]}
    trace["scores"] = [{"name": "helpful", "value": 1}]
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    [(_, row)] = read_rows(tmp_path / "trace.json", of="file")
    assert [message["content"] for message in row["messages"]] == ["Hi.", "Hello."]
    assert row["scores"] == trace["scores"]
    [(_, bare)] = read_rows(
        written(tmp_path, [trace | {"observations": ["1"], "input": "Hi.", "output": "Yo."}]), of="x"
    )
    assert (bare["id"], bare["messages"][1]["content"]) == ("t", "Yo.")


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ('{"answer": 42}', '{"answer": 42}'),
        ({"answer": 42}, '{"answer": 42}'),
        ('["a","b"]', '["a","b"]'),
        ('{"message": "hello", "confidence": 0.9}', '{"message": "hello", "confidence": 0.9}'),
        ('{"title": "Lyon", "content": "a town"}', '{"title": "Lyon", "content": "a town"}'),
        ('{"name": "Ann", "role": "engineer"}', '{"name": "Ann", "role": "engineer"}'),
        ('{"role": "assistant", "content": "hello"}', "hello"),
        ({"content": "hello"}, "hello"),
        ({"choices": [{"message": {"role": "assistant", "content": "hello"}}]}, "hello"),
        ({"output": "hello"}, "hello"),
        ([{"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}], None),
        ({"choices": []}, None),
        ({}, None),
    ],
)
def test_an_answer_that_is_json_stays_what_it_was(output: Any, said: str | None, tmp_path: Path) -> None:
    call = {"traceId": "t", "type": "GENERATION", "startTime": "2026-01-01", "input": "Hi."}
    rows = read_rows(written(tmp_path, [call | {"output": output}]), of="file")
    assert [row["messages"][1:] for _, row in rows] == (
        [] if said is None else [[{"role": "assistant", "content": said}]]
    )


def test_langchain_runs_have_their_tools_beside(tmp_path: Path) -> None:
    ai = {"lc": 1, "id": ["langchain", "AIMessage"], "kwargs": {"content": "Hello."}}
    human = {"lc": 1, "id": ["langchain", "HumanMessage"], "kwargs": {"content": "Hi."}}
    run = {
        "id": "r",
        "trace_id": "t",
        "run_type": "llm",
        "inputs": {"messages": [[human]]},
        "outputs": {"generations": [[{"text": "Hello.", "message": ai}]]},
        "extra": {"invocation_params": {"tools": [{"type": "function", "function": {"name": "look"}}]}},
    }
    [(_, row)] = read_rows(written(tmp_path, [run, run | {"error": "boom"}]), of="file")
    assert [(m["role"], m["content"]) for m in row["messages"]] == [("user", "Hi."), ("assistant", "Hello.")]
    assert row["tools"][0]["function"]["name"] == "look"


@pytest.mark.parametrize(
    "record",
    [
        {"runType": "llm", "inputs": [], "extra": 5},
        {"traceId": "t", "type": [], "startTime": 1, "input": 5},
        {"epoch": 1, "messages": {"a": 1}, "target": None, "model_usage": {}, "events": 5},
        {"attributes": 5, "trace_id": "t", "span_id": "s"},
        {"resourceSpans": [5], "attributes": {}, "traceId": "", "spanId": ""},
    ],
)
def test_an_export_in_a_form_of_its_own_is_a_line(
    record: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", str(written(tmp_path, [record]))]) == 1
    error = capsys.readouterr().err
    assert "export has a form of its own" in error or "gives no row" in error


ODD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Langfuse": (
        {"traceId": "t", "type": "GENERATION", "startTime": 1, "input": "Hi.", "output": "Hello."},
        {"id": "u", "timestamp": 1, "observations": 5},
    ),
    "LangSmith": (
        {"run_type": "llm", "inputs": {"prompt": "Hi."}, "outputs": {"output": "Hello."}},
        {"run_type": "llm", "inputs": {"prompt": "Hi."}, "outputs": {"output": "Yo."}, "extra": 5},
    ),
    "OpenTelemetry": (
        {
            "trace_id": "t",
            "span_id": "1",
            "attributes": {"gen_ai.prompt": "Hi.", "gen_ai.completion": "Hello."},
        },
        {"trace_id": "t", "span_id": "2", "attributes": 5},
    ),
}


@pytest.mark.parametrize("platform", ODD)
def test_one_odd_record_is_left_out_with_its_place(
    platform: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, odd = ODD[platform]
    [row] = lines(imported(written(tmp_path, [odd, good]), "sft", tmp_path))
    assert [message["content"] for message in row["messages"]] == ["Hi.", "Hello."]
    [said] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert said.startswith("left out: 1: it has a form of its own (")
    assert said.endswith("(first: line 1)")


# --- rows for others

KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "tool_calls", "weight"},
    "tool": {"role", "content", "tool_call_id"},
}


@pytest.mark.parametrize("name", FILES)
def test_openai_takes_the_lines(name: str, tmp_path: Path) -> None:
    check = TypeAdapter(list[ChatCompletionMessageParam])
    for line in lines(imported(EXPORTS / name, "openai", tmp_path)):
        assert line.keys() <= {"messages", "tools", "parallel_tool_calls"}
        for message in line["messages"]:
            assert message.keys() <= KEYS[message["role"]]
        check.validate_python(
            [
                {key: value for key, value in message.items() if key != "weight"}
                for message in line["messages"]
            ]
        )
        TypeAdapter(list[ChatCompletionToolParam]).validate_python(line.get("tools", []))
        calls = [call["id"] for message in line["messages"] for call in message.get("tool_calls", ())]
        results = [message["tool_call_id"] for message in line["messages"] if message["role"] == "tool"]
        assert calls == results
        assert "" not in calls
        assert line["messages"][-1]["role"] == "assistant"


def test_openai_gets_ids_weights_and_no_thoughts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = {"type": "function", "function": {"name": "track", "parameters": {"type": "object"}}}
    call = {"function": {"name": "track", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Where is K27, and K28?"},
        {"role": "assistant", "reasoning": "Look.", "tool_calls": [call, call]},
        {"role": "tool", "content": "Lyon"},
        {"role": "tool", "content": "Oslo"},
        {"role": "assistant", "content": "Here.", "weight": 0},
        {"role": "assistant", "content": "Lyon and Oslo."},
        {"role": "user", "content": "Thanks."},
    ]
    good = [*messages[:4], messages[5], messages[6]]
    source = written(
        tmp_path,
        [
            {"messages": good, "tools": [tool], "parallel_tool_calls": True, "kind": "x"},
            {"messages": messages, "tools": [tool]},
            {"messages": [*messages[:3], messages[5]], "tools": [tool]},
            {"messages": good, "id": "no tools"},
            {"messages": [messages[0], messages[5] | {"weight": 0.5}]},
        ],
    )
    [line] = lines(imported(source, "openai", tmp_path))
    calls = line["messages"][1]["tool_calls"]
    assert [call["id"] for call in calls] == ["call_1", "call_2"]
    assert [message.get("tool_call_id") for message in line["messages"][2:4]] == ["call_1", "call_2"]
    assert line["messages"][1].keys() == {"role", "content", "tool_calls"}
    assert line["messages"][1]["content"] is None
    assert line["messages"][-1]["content"] == "Lyon and Oslo."
    assert (line["parallel_tool_calls"], "kind" in line) == (True, False)
    out = capsys.readouterr().out
    for reason in (
        "two replies stand behind one another",
        "a call has no result: add it, or leave the row out",
        "OpenAI takes no call of 'track'",
        "OpenAI takes the weights 0 and 1 alone",
    ):
        assert reason in out


def test_trl_takes_a_row_for_each_reply(tmp_path: Path) -> None:
    output = imported(EXPORTS / "otlp-spans.json", "trl", tmp_path)
    table = datasets.load_dataset(
        "json", data_files=str(output), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert {"prompt", "completion", "tools"} <= set(table.column_names)
    tokenizer = trl_tokenizer("qwen3").hf
    texts = []
    for row in table:
        assert is_conversational(row)
        tools = json.loads(row["tools"]) if row["tools"] else None
        whole = apply_chat_template(
            {"prompt": row["prompt"], "completion": row["completion"]}, tokenizer, tools=tools
        )
        texts.append(whole["completion"])
        assert '"track"' in whole["prompt"] or tools is None
    assert '{"name": "track", "arguments": {"order_id": "K27"}}' in texts[0]
    assert ["In Lyon." in texts[1], "You are welcome." in texts[2], "Hi." in texts[3]] == [True] * 3
