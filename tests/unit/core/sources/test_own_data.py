"""Own data: logged chats and Hugging Face datasets as scenarios, in programs and YAML files."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.reward import EnvironmentReward, create_customer_service_reward
from stateset_agents.core.sources.datasets import chat_scenarios, dataset_scenarios
from stateset_agents.core.tools import NOT_RECORDED, tool
from stateset_agents.environments.chat_logs import ChatLogs, made_the_recorded_calls
from stateset_agents.evaluation.audit import audit
from stateset_agents.evaluation.evaluator import evaluate
from stateset_agents.training.components import check_scored, make_environment
from stateset_agents.training.experiment import load_experiment
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall


def call(name: str, id: str = "", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CHAT = {
    "id": "c1",
    "topic": "delivery",
    "success": True,
    "rating": 5,
    "messages": [
        {"role": "system", "content": "You answer for a shop."},
        {"role": "user", "content": "Where is my order K27?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("get_order", "a", order_id="K27"), call("track", "b", order_id="K27")],
        },
        {"role": "tool", "tool_call_id": "b", "content": "Lyon"},
        {"role": "tool", "tool_call_id": "a", "content": '{"status": "sent"}'},
        {"role": "assistant", "content": "It is in Lyon."},
        {"role": "user", "content": "Thanks. When does it come?"},
        {"role": "assistant", "content": "On Tuesday."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get_order",
                "description": "Look an order up.",
                "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}},
            },
        }
    ],
}


def test_a_chat_becomes_a_scenario() -> None:
    [scenario] = chat_scenarios([CHAT])
    assert (scenario.id, scenario.family, scenario.split) == ("c1", "delivery", "train")
    assert scenario.opening == "Where is my order K27?"
    context = dict(scenario.context)
    assert [message.role for message in scenario.prompt] == ["system", "user"]
    assert scenario.prompt[0].content == "You answer for a shop."
    assert context["script"] == ["Thanks. When does it come?"]
    assert context["recorded"] == [
        {"name": "get_order", "arguments": {"order_id": "K27"}, "content": '{"status": "sent"}'},
        {"name": "track", "arguments": {"order_id": "K27"}, "content": "Lyon"},
    ]
    assert context["reference"] == "On Tuesday."
    assert (context["success"], context["rating"]) == (True, 5)
    [bare] = chat_scenarios([{"messages": [{"role": "user", "content": "hi"}]}])
    assert (dict(bare.context), bare.prompt, bare.tools) == ({"script": []}, (), None)
    assert bare.id == chat_scenarios([{"messages": [{"content": "hi", "role": "user"}]}])[0].id


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ({"opening": "hi"}, "this row is no conversation: it has opening; give it messages"),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "needs a message of the user"),
        ({"messages": [{"role": "bot", "content": "hi"}]}, "message role must be one of .* got 'bot'"),
        ({"messages": [{"role": "user", "content": "hi"}], "split": "tset"}, "got 'tset'"),
    ],
)
def test_what_is_no_chat_is_named_by_its_place(chat: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "logs.jsonl"
    file.write_text(json.dumps(CHAT) + "\n\n" + json.dumps(chat) + "\n")
    with pytest.raises(ConfigurationError, match=rf"logs\.jsonl, line 3: .*{said}"):
        chat_scenarios(file)


def many(number: int, **fields: Any) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"call {place}"}], **fields} for place in range(number)]


def test_shares_are_held_out_the_same_in_every_run() -> None:
    found = chat_scenarios(many(400), shares={"validation": 0.1, "test": 0.25})
    counts = {split: sum(one.split == split for one in found) for split in ("train", "validation", "test")}
    assert counts["test"] == pytest.approx(100, abs=25)
    assert counts["validation"] == pytest.approx(40, abs=18)
    fewer = {one.id: one.split for one in chat_scenarios(many(50), shares={"validation": 0.1, "test": 0.25})}
    assert fewer.items() <= {one.id: one.split for one in found}.items()  # more logs move nobody
    named = chat_scenarios(many(40, split="validation"), shares={"test": 0.9})
    assert {one.split for one in named} == {"validation"}
    with pytest.raises(ConfigurationError, match="leave nothing to train on"):
        chat_scenarios(many(2), shares={"test": 0.5, "validation": 0.5})
    with pytest.raises(ConfigurationError, match="shares are of validation and test, got 'train'"):
        chat_scenarios(many(2), shares={"train": 0.5})


def test_equal_logs_are_held_out_together() -> None:
    found = chat_scenarios(
        [row | {"id": f"{i}{n}"} for n in "ab" for i, row in enumerate(many(40))], shares={"test": 0.5}
    )
    assert [one.split for one in found[:40]] == [one.split for one in found[40:]]
    assert {one.split for one in found} == {"train", "test"}
    alike = [
        row | {"id": f"{n}{i}"}
        for n, split in enumerate(("", "test", "train"))
        for i, row in enumerate(many(9, split=split))
    ]
    found = chat_scenarios(alike, shares={"validation": 0.3})
    assert [one.split for one in found] == ["test"] * 18 + ["train"] * 9


async def test_a_log_is_played_again_its_tools_answer_as_they_did() -> None:
    environment = ChatLogs([CHAT])
    [scenario] = environment.scenarios("train")
    conversation = await environment.start(scenario, 0)
    assert [message.content for message in conversation.opening] == [
        "You answer for a shop.",
        "Where is my order K27?",
    ]
    offered = {schema["function"]["name"]: schema["function"] for schema in conversation.tools}
    assert offered["get_order"]["description"] == "Look an order up."
    assert offered["track"]["parameters"]["properties"] == {"order_id": {"type": "string"}}  # from its call
    calls = [
        ToolCall(name="track", arguments={"order_id": " k27"}, id="1"),
        ToolCall(name="track", arguments={"order_id": "K28"}, id="2"),
        ToolCall(name="refund", id="3"),
        ToolCall(name="", id="4", error="the tool call is not JSON"),
    ]
    seen = await conversation.step(Message(role="assistant", content="", tool_calls=tuple(calls)))
    assert [message.content for message in seen.messages] == [
        "Lyon",
        NOT_RECORDED,
        "error: unknown tool 'refund'; there are: get_order, track",
        "error: the tool call is not JSON",
    ]
    assert (await conversation.step(Message(role="assistant", content="In Lyon."))).messages[0].content == (
        "Thanks. When does it come?"
    )
    assert (await conversation.outcome()).success is False  # get_order is missing
    last = ToolCall(name="get_order", arguments={"order_id": "K27"})
    await conversation.step(Message(role="assistant", content="", tool_calls=(last,)))
    assert (await conversation.outcome()).success is True
    assert (await conversation.step(Message(role="assistant", content="On Tuesday."))).terminated


async def test_tools_that_run_stand_in_for_recorded_ones() -> None:
    @tool
    def track(order_id: str) -> str:
        """Where a parcel is."""
        return f"{order_id} is in Oslo"

    environment = ChatLogs([CHAT], tools=[track], system_prompt="Be brief.")
    conversation = await environment.start(environment.scenarios("train")[0], 0)
    assert conversation.opening[0].content == "Be brief."
    asked = ToolCall(name="track", arguments={"order_id": "K9"})
    seen = await conversation.step(Message(role="assistant", content="", tool_calls=(asked,)))
    assert seen.messages[0].content == "K9 is in Oslo"
    [schema] = [one for one in conversation.tools if one["function"]["name"] == "track"]
    assert schema["function"]["description"] == "Where a parcel is."


async def test_logs_are_an_evaluation_set() -> None:
    """An agent that does what the log did, against one that only talks; what went wrong is no example."""
    wrong = {**CHAT, "id": "c2", "success": False}
    talk = {"id": "c3", "messages": [{"role": "user", "content": "hello"}]}
    environment = ChatLogs([CHAT, wrong, talk])
    script = [
        f'<tool_call>{{"name": "{name}", "arguments": {{"order_id": "K27"}}}}</tool_call>'
        for name in ("get_order", "track")
    ]
    rates = []
    for lines in ([*script, "It is in Lyon.", "On Tuesday."], ["It is in Lyon.", "On Tuesday."]):
        backend = ScriptedBackend(lambda request, lines=lines: lines[min(request.turn, len(lines) - 1)])
        async with MultiTurnAgent(AgentConfig(), backend=backend) as agent:
            result = await evaluate(agent, environment, EnvironmentReward(), environment.scenarios("train"))
        rates.append((result.success, result.n))
    assert rates == [(1.0, 1), (0.0, 1)]
    played = await audit(environment, EnvironmentReward(), environment.scenarios("train"))
    assert played.policies["silent"].success == 0.0


@pytest.mark.parametrize("verdict", [False, 0, "False", "0.0"])
async def test_a_failure_however_it_is_written_is_no_example(verdict: Any) -> None:
    failed = [{**CHAT, "success": verdict}, {"traj": CHAT["messages"], "reward": verdict}]
    environment = ChatLogs(failed, keep_duplicates=True)
    found = [made_the_recorded_calls(one, ()) for one in environment.scenarios("train")]
    assert found == [None, None]
    assert made_the_recorded_calls(chat_scenarios([{**CHAT, "reward": 0}])[0], ()) is False


SEATS = {
    "messages": [
        {"role": "user", "content": "Two seats to Z\u00fcrich for $20"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("book", "a", price=20.0, city="Z\u00fcrich", note=None, side=None)],
        },
        {"role": "tool", "tool_call_id": "a", "content": "booked"},
        {"role": "assistant", "content": "Booked."},
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "book",
                "parameters": {
                    "properties": {
                        "price": {"type": "number"},
                        "city": {"type": "string"},
                        "note": {"type": ["string", "null"], "default": None},
                        "side": {"type": "string"},
                    },
                    "required": ["price", "city"],
                },
            },
        }
    ],
}


@pytest.mark.parametrize(
    ("arguments", "is_same"),
    [
        ({"city": "zu\u0308rich ", "price": 20}, True),
        ({"price": 20.0, "city": "Z\u00fcrich", "note": None}, True),
        ({"price": True, "city": "Z\u00fcrich"}, False),
        ({"price": "20", "city": "Z\u00fcrich"}, False),
        ({"price": 20, "city": "Z\u00fcrich", "note": "window"}, False),
    ],
)
async def test_a_recorded_call_is_known_by_its_values(arguments: dict[str, Any], is_same: bool) -> None:
    environment = ChatLogs([SEATS])
    conversation = await environment.start(environment.scenarios("train")[0], seed=0)
    made = (ToolCall(name="book", arguments=arguments),)
    seen = await conversation.step(Message(role="assistant", content="", tool_calls=made))
    assert (seen.messages[0].content == "booked") is is_same
    assert (await conversation.outcome()).success is is_same


def test_a_tool_of_another_shape_is_named() -> None:
    with pytest.raises(ConfigurationError, match="conversation 1: a tool must be in OpenAI's shape"):
        ChatLogs([{**CHAT, "tools": ["track"]}])


def test_a_yaml_file_names_logs(tmp_path: Path) -> None:
    (tmp_path / "logs.jsonl").write_text("\n".join(json.dumps(one) for one in many(30)))
    file = tmp_path / "run.yaml"
    file.write_text("environment: {name: chats, logs: logs.jsonl, shares: {test: 0.5}, max_turns: 3}\n")
    environment = make_environment(load_experiment(file).environment)
    assert len(environment.scenarios("train")) + len(environment.scenarios("test")) == 30
    assert environment.scenarios("test")


# ------------------------------------------------------------------------------------------ datasets

ROWS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n), "level": n % 2} for n in range(6)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def test_columns_become_openings_and_context() -> None:
    table = datasets.Dataset.from_list(ROWS)
    found = dataset_scenarios(
        table, columns={"opening": "question", "answer": "answer"}, family="sums", limit=4
    )
    assert [one.opening for one in found] == [row["question"] for row in ROWS[:4]]
    assert dict(found[1].context) == {"answer": "2"}
    assert {(one.family, one.split) for one in found} == {("sums", "train")}
    assert [one.id for one in found] == ["train-0", "train-1", "train-2", "train-3"]


def test_rows_that_are_scenarios_need_no_columns() -> None:
    rows = [{"opening": "hi", "topic": "a", "split": "test", "id": "x", "context": {"expected_facts": ["1"]}}]
    [scenario] = dataset_scenarios(datasets.Dataset.from_list(rows))
    assert (scenario.id, scenario.family, scenario.split) == ("x", "a", "test")
    assert scenario.context["expected_facts"] == ["1"]
    logs = datasets.Dataset.from_list(
        [{"messages": [{"role": "user", "content": f"hi {n}"}]} for n in range(2)]
    )
    assert [one.opening for one in dataset_scenarios(logs)] == ["hi 0", "hi 1"]


def test_splits_are_ours_by_name_or_as_told(tmp_path: Path) -> None:
    tables = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    )
    columns = {"opening": "question"}
    tables.save_to_disk(tmp_path / "saved")
    for source in (tables, str(tmp_path / "saved")):
        found = dataset_scenarios(source, columns=columns)
        assert [one.split for one in found] == ["train"] * 6 + ["test"] * 2
        told = dataset_scenarios(source, columns=columns, splits={"validation": "test"})
        assert [one.split for one in told] == ["validation"] * 2
    with pytest.raises(ConfigurationError, match=r"has no split 'dev'; there are train, test: give splits"):
        dataset_scenarios(tables, columns=columns, splits={"test": "dev"})
    with pytest.raises(ConfigurationError, match="a split of splits must be train, validation or test"):
        dataset_scenarios(tables, columns=columns, splits={"dev": "test"})


def test_files_are_read_and_slices_taken(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.to_csv(tmp_path / "sums.csv")
    table.to_parquet(tmp_path / "sums.parquet")
    file = tmp_path / "run.yaml"
    for name in ("sums.csv", "sums.parquet"):
        file.write_text(
            "environment:\n"
            "  name: conversation\n"
            "  scenarios:\n"
            f"    dataset: ./{name}\n"
            "    columns: {opening: question, answer: answer}\n"
            "    splits: {train: 'train[:4]', test: 'train[4:]'}\n"
            "    family: sums\n"
        )
        environment = make_environment(load_experiment(file).environment)
        assert [len(environment.scenarios(split)) for split in ("train", "test")] == [4, 2]
        assert environment.scenarios("test")[0].opening == "What is 4 + 4?"
        assert str(environment.scenarios("test")[0].context["answer"]) == "8"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": {"opening": "qestion"}}, "no column 'qestion' .did you mean 'question'"),
        (
            {"columns": {"opening": "level"}},
            "row 0 of the dataset's split 'train': the opening must be text, got int",
        ),
        ({"columns": ["question"]}, "columns must map our key to its column"),
        ({"columns": {"opening": "question"}, "limit": 0}, "limit must be a whole number of at least 1"),
        ({"columns": {"opening": "question"}, "splits": {"train": "train"}}, "a Dataset has no splits"),
    ],
)
def test_what_cannot_be_read_is_one_line(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        dataset_scenarios(datasets.Dataset.from_list(ROWS), **settings)


def test_what_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"dataset file .*none.csv' does not exist"):
        dataset_scenarios(tmp_path / "none.csv")
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ConfigurationError, match=r"dataset file .*empty.csv' is empty"):
        dataset_scenarios(tmp_path / "empty.csv")
    (tmp_path / "header.csv").write_text("topic,context\n")
    with pytest.raises(ConfigurationError, match=r"dataset .*header.csv' has no row"):
        dataset_scenarios(tmp_path / "header.csv")
    (tmp_path / "torn.json").write_text('{"a": ')
    with pytest.raises(ConfigurationError, match=r"torn.json, line 1: not JSON") as caught:
        dataset_scenarios(tmp_path / "torn.json")
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match="cannot load dataset 'nobody/nothing'") as caught:
        dataset_scenarios("nobody/nothing")
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"have no argument 'colums' .did you mean 'columns'"):
        ConversationEnvironment({"dataset": "x", "colums": {}})
    with pytest.raises(ConfigurationError, match="got one mapping"):
        ConversationEnvironment({"topic": "refund"})


def test_without_the_library_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigurationError, match=r"pip install 'datasets>=4'"):
        dataset_scenarios("x")


def test_the_library_is_loaded_for_datasets_only() -> None:
    code = (
        "import sys; from stateset_agents.core.environment import ConversationEnvironment as E; "
        "E([{'opening': 'hi'}]); print('datasets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_id_that_two_calls_have_pairs_them_with_their_results_in_order() -> None:
    def call(at: str, id: str) -> dict[str, Any]:
        return {"id": id, "function": {"name": "look", "arguments": {"at": at}}}

    def result(content: str, id: str | None) -> dict[str, Any]:
        return {"role": "tool", "content": content, "tool_call_id": id}

    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("A", "x"), call("B", "x"), call("C", "y")],
        },
        *(result("of C", "y"), result("of A", "x"), result("of B", "x")),
        {"role": "assistant", "content": None, "tool_calls": [call("D", "x"), call("E", "z"), call("F", "")]},
        *(result("of D", None), result("of E", "z"), result("of F", "unknown")),
    ]
    recorded = chat_scenarios([{"messages": messages}])[0].context["recorded"]
    assert {entry["arguments"]["at"]: entry["content"] for entry in recorded} == {
        letter: f"of {letter}" for letter in "ABCDEF"
    }


def test_logs_under_other_names_are_mapped_as_scenarios_are(tmp_path: Path) -> None:
    said = [[{"role": "user", "content": f"hi {number}"}] for number in range(40)]
    file = tmp_path / "logs.jsonl"
    file.write_text("".join(json.dumps({"turns": messages, "stars": 5}) + "\n" for messages in said))
    with pytest.raises(
        ConfigurationError, match=r"or map what it has: {dataset: FILE, columns: {messages: C"
    ):
        ChatLogs(file)
    logs = {"dataset": file, "columns": {"messages": "turns", "rating": "stars"}}
    rows = [{"messages": messages, "rating": 5} for messages in said]
    shares = {"test": 0.5}
    assert chat_scenarios(logs, shares=shares) == chat_scenarios(rows, shares=shares)
    assert 0 < len(ChatLogs(logs, shares=shares).scenarios("test")) < 40
    held_out = chat_scenarios(
        {**logs, "splits": {"test": "train[:10]", "train": "train[10:]"}}, shares=shares
    )
    assert [scenario.split == "test" for scenario in held_out[:10]] == [True] * 10
    assert {scenario.split for scenario in held_out[10:]} == {"train"}
    with pytest.raises(ConfigurationError, match="conversations of a dataset have no argument 'colums'"):
        ChatLogs({"dataset": file, "colums": {}})


def test_a_column_is_mapped_to_the_prompt_as_the_error_says_at_each_door(tmp_path: Path) -> None:
    row = {"question": "How many?", "passage": "Two lamps.", "both": "Two lamps. How many?", "answer": "Two."}
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(ConfigurationError, match=r"map it: columns: {prompt: THAT_COLUMN}"):
        ChatLogs(file)
    logs = {"dataset": file, "columns": {"prompt": "both", "completion": "answer"}}
    for environment in (ChatLogs(logs), ConversationEnvironment(logs)):
        (scenario,) = environment.scenarios("train")
        assert (scenario.opening, scenario.context["reference"]) == (row["both"], "Two.")


def test_a_training_that_nothing_would_score_is_refused() -> None:
    def check(environment: ConversationEnvironment) -> None:
        check_scored(EnvironmentReward(), environment, environment.scenarios("train"))

    silent = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}]
    for environment in (ConversationEnvironment([{"opening": "hi"}]), ChatLogs(silent)):
        with pytest.raises(
            ConfigurationError, match="nothing would score a conversation: none of the 1 scen"
        ):
            check(environment)
        check_scored(create_customer_service_reward(), environment, environment.scenarios("train"))
    check(ConversationEnvironment([{"opening": "hi", "context": {"expected_facts": {"day": "Friday"}}}]))
    check(ConversationEnvironment([{"opening": "hi"}], success=lambda s, m: True))
    check(ChatLogs([*silent, CHAT]))
