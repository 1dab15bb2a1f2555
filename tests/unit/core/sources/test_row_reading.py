"""What rows say and do not say: openings, nulls, text, weights, thoughts, places of errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from published_rows import scripted

from stateset_agents.core.chat.replies.parsing import parse_reply
from stateset_agents.core.environment import ConversationEnvironment
from stateset_agents.core.sources.datasets import chat_scenarios, dataset_scenarios, read_any_scenarios
from stateset_agents.core.sources.files import read_rows
from stateset_agents.core.sources.row_shapes import (
    expect_chat,
    read_messages,
    read_reply,
    read_row,
    read_schemas,
    without_unasked_nulls,
)
from stateset_agents.core.users.simulated_user import default_user
from stateset_agents.environments.chat_logs import ChatLogs
from stateset_agents.evaluation.demonstrations import chat_of
from stateset_agents.evaluation.evaluator import evaluate
from stateset_agents.rewards.verifiable import create_correctness_reward
from stateset_agents.training.components import make_environment
from stateset_agents.training.experiment import load_experiment
from stateset_agents.training.sft.demonstrations import load_demonstrations
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Completion, Message, ToolCall
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def talk(*replies: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "hi"}, *({"role": "assistant"} | r for r in replies)],
        **more,
    }


# ------------------------------------------------------------------------------------ openings


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"utterance": "hi"}, "which column is the user's first message.*opening: utterance"),
        ({"topic": "refund", "dialogue": "hi"}, "which column .*opening: dialogue"),
        ({"topic": "refund", "context": {"question": "hi?"}}, "which column .*opening: question"),
        ({}, "which column .*there are no others: name it `opening`"),
        ({"id": "a", "split": "test"}, "which column .*there are id, split: name it"),
        ({"opening": None, "order_id": "K1"}, "which column .*opening: order_id"),
        ({"topic": "refund", "question": ""}, "column 'question' is empty"),
        ({"prompt": 5}, "column 'prompt' must be text, got int 5"),
        ({"opening": 5}, "the opening must be text, got int 5"),
        ({"opening": "hi", "messages": [{"role": "user", "content": "ho"}]}, "an opening and messages"),
        ({"question": "Which?", "choices": ["a", "b"]}, "nothing says how the model is shown it"),
        ({"prompt": [{"role": "assistant", "content": "hi"}]}, "prompt needs a message of the user"),
        (
            {"prompt": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I th"}]},
            "prompt ends with words of the assistant",
        ),
        ({"prompt": "hi", "system": "a", "messages": [{"role": "system", "content": "b"}]}, "user"),
        ({"question": "a", "answer": "b", "system": 3}, "column 'system' must be text"),
        ({"messages": "[{'role': 'user'}]"}, "messages is a text that is not JSON .*json.dumps"),
        (
            {"messages": [{"role": "user", "value": "hi"}]},
            "message 1 of messages is the user's .*it has role, v",
        ),
        ({"conversations": [{"from": "human", "value": None}]}, "message 1 of conversations is the user's"),
        ({"conversations": [{"from": "human", "value": " "}]}, "give it `value`, or leave the row out"),
        ({"conversations": [{"from": "bing", "value": "a"}]}, "`from` must be one of human, gpt.* 'bing'"),
        ({"instruction": "and?", "history": [["2?", "3"]]}, "has 'history' beside 'instruction'"),
        ({"prompt": "a", "system": "b", "system_prompt": "c"}, "'system' and 'system_prompt', which differ"),
        ({"messages": ["hi"]}, "a message must be a mapping, got str 'hi'"),
        ({"messages": []}, "messages must be a list of messages"),
    ],
)
def test_no_opening_is_invented_where_something_could_be_one(row: Any, said: str, tmp_path: Path) -> None:
    path = lines(tmp_path / "rows.jsonl", {"opening": "a"}, row)
    with pytest.raises(ConfigurationError, match=rf"rows\.jsonl, line 2: .*{said}"):
        ConversationEnvironment(path)
    with pytest.raises(ConfigurationError, match=rf"scenario 1: .*{said}"):
        ConversationEnvironment([row])


async def test_an_opening_is_made_up_of_topic_and_context_alone_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [{"topic": "refund", "context": "Order delayed"}, {"topic": "refund", "opening": None, "id": "b"}]
    environment = ConversationEnvironment(rows)
    assert [record.getMessage() for record in caplog.records] == [
        "scenarios: openings are made up of topic and context (rows: 2)"
    ]
    conversation = await environment.start(environment.scenarios("train")[0], 0)
    assert "refund. Order delayed." in conversation.opening[0].content
    with pytest.raises(ConfigurationError, match="'question' could be it"):
        default_user(Scenario(id="s", context={"question": "hi?"}), 0)
    spoken = ConversationEnvironment(
        [{"order_id": "K1"}], user=lambda scenario, seed: default_user(scenario, seed)
    )
    assert spoken.scenarios("train")[0].context == {"order_id": "K1"}  # a user of one's own opens


def test_what_could_have_been_read_and_was_not_is_told(caplog: pytest.LogCaptureFixture) -> None:
    ConversationEnvironment([talk({"content": "a"}, prompt="Which?"), {"question": "a?", "problem": "b?"}])
    assert [record.getMessage() for record in caplog.records] == [
        "scenarios: 'messages' is read as the conversation, 'prompt' is not (shape OpenAI messages, rows: 1)",
        "scenarios: 'question' is read as what is asked, 'problem' is not (shape question, rows: 1)",
    ]


def test_what_was_read_is_said_once_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": f"{n}?", "answer": f"{n}"} for n in range(3)]
    rows += [talk({"content": "a", "mood": "glad", "name": None}), talk({"content": "b", "mood": "sad"})]
    ConversationEnvironment(rows)
    assert [record.getMessage() for record in caplog.records] == [
        "scenarios: 'question' is read as what is asked, 'answer' beside it (shape question, rows: 3)",
        "scenarios: the key 'mood' of messages is not read (messages with it: 2)",
    ]


async def test_system_message_and_earlier_turns_stand_in_the_first_prompt_and_count_as_no_reply() -> None:
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2? Say Answer: 4"},
        {"role": "assistant", "content": "Answer: 4"},
        {"role": "user", "content": "3 + 3?"},
    ]
    judged: list[Any] = []
    environment = ConversationEnvironment(
        [{"prompt": prompt, "answer": "6"}],
        user=None,
        success=lambda messages, replies: judged.append((len(messages), len(replies))) or True,
    )
    [scenario] = environment.scenarios("train")
    assert scenario.opening == "3 + 3?"
    agent = await scripted("Answer: 6")
    result = await evaluate(agent, environment, create_correctness_reward(), [scenario])
    assert result.mean_reward == 1.0
    assert judged == [(5, 1)]
    [trajectory] = result.groups[0].trajectories
    text = agent.backend.tokenizer.decode(trajectory.turns[0].prompt_ids)
    assert [text.count(words) for words in ("Be brief.", "Answer: 4", "3 + 3?")] == [1, 2, 1]
    changed = ConversationEnvironment([{"prompt": prompt}], user=None, system_prompt="Be long.")
    opening = (await changed.start(changed.scenarios("train")[0], 0)).opening
    assert [message.content for message in opening if message.role == "system"] == ["Be long."]


def test_a_scenarios_prompt_ends_with_its_opening() -> None:
    said = (Message(role="system", content="s"), Message(role="user", content="hi"))
    assert Scenario(id="a", opening="hi", prompt=said).messages() == said
    with pytest.raises(ConfigurationError, match="scenario a: its prompt must end with the opening 'ho'"):
        Scenario(id="a", opening="ho", prompt=said)


def test_an_opening_may_have_a_system_message_beside_it() -> None:
    [scenario] = read_any_scenarios([{"opening": "hi", "system": "Be brief."}])
    assert [message.role for message in scenario.messages()] == ["system", "user"]


# ------------------------------------------------------------------------------------ messages


def test_thoughts_and_calls_in_words_are_read_where_their_tags_are_closed() -> None:
    assert read_reply("<think>a</think>b") == Message(role="assistant", content="b", reasoning="a")
    assert read_reply("a</think>\n\nb").reasoning == "a"
    for words in ("Use the <think> tag.", "<think>never ends", "a <tool_call> is a tag"):
        assert read_reply(words) == Message(role="assistant", content=words)
    python = "One moment.<tool_call>{'name': 'f', 'arguments': {'x': True, 'y': None}}</tool_call>"
    reply = read_reply(python)
    assert reply.content == "One moment."
    assert reply.tool_calls == (ToolCall(name="f", arguments={"x": True, "y": None}),)
    with pytest.raises(ConfigurationError, match=r"not JSON.*mend the call, or leave the row out"):
        read_reply("<tool_call>{f(}</tool_call>")


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"content": "<think>a</think>b", "reasoning": "c"}, "its calls or thought twice"),
        ({"content": "b", "weight": True}, "weight must be a number of at least 0, got True"),
        ({"role": "user", "content": "", "tool_calls": [{"name": "f"}]}, "a message of the user calls 'f'"),
        ({"role": "robot", "content": "a"}, "message role must be one of"),
        ({"content": "<think>a</think>b<think>c</think>d"}, "a second thought, or words behind a tool call"),
        (
            {"content": '<tool_call>{"name": "f"}</tool_call> b'},
            "a second thought, or words behind a tool call",
        ),
        ({"content": "a", "reasoning": "b", "thinking": "c"}, "reasoning and thinking, which differ"),
        ({"tool_calls": [{"name": "f"}], "function_call": {"name": "g"}}, "tool_calls and function_call"),
        ({"tool_calls": [{"name": "f", "arguments": '{"x": NaN}'}]}, "tool call 'f' are no JSON"),
        ({"tool_calls": [{"name": "f", "arguments": {"x": b"a"}}]}, "tool call 'f' are no JSON"),
        (
            {"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}]},
            "a reply has a picture",
        ),
    ],
)
def test_a_message_that_says_two_things_is_refused(message: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        read_messages([{"role": "assistant"} | message], "messages")


def test_results_that_stand_in_one_message_are_given_to_their_calls() -> None:
    two = "".join(f'<tool_call>{{"name": "f", "arguments": {{"x": {x}}}}}</tool_call>' for x in (1, 2))
    told = "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
    row = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": two}]}
    row["conversations"].append({"from": "tool", "value": told})
    [scenario] = chat_scenarios([row])
    assert [call["content"] for call in scenario.context["recorded"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            [{"role": "tool", "tool_call_id": "99", "content": "x"}],
            "'x' with tool_call_id '99' answers no call",
        ),
        ([{"role": "tool", "content": "x"}] * 2, "'x' with tool_call_id None answers no call .* ids are 1"),
    ],
)
def test_a_result_of_no_call_is_refused(told: list[dict[str, Any]], said: str) -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(ConfigurationError, match=said):
        chat_scenarios([talk(call, *told, {"content": "a"})])
    with pytest.raises(ConfigurationError, match="ids are none"):
        chat_scenarios([talk(*told, {"content": "a"})])


async def test_a_call_without_a_result_is_no_example() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    asked = {"role": "user", "content": "And?"}
    with pytest.raises(ConfigurationError, match="a call has no result: add it, or leave the row out"):
        load_demonstrations(await scripted(""), [talk(call, asked, {"content": "a"})])
    assert load_demonstrations(await scripted(""), [talk(call)]).train


def test_a_refusal_is_what_was_said() -> None:
    row = expect_chat(talk({"content": None, "refusal": "I can't."}))
    assert [message.content for message in row.completion] == ["I can't."]


async def test_a_reply_of_nothing_is_no_target() -> None:
    agent = await scripted("")
    empty = {"content": None, "function_call": None, "tool_calls": None}
    with pytest.raises(ConfigurationError, match="conversation 1: reply 1 is empty"):
        load_demonstrations(agent, [talk(empty)])
    more = [{"role": "user", "content": "so?"}, {"role": "assistant", "content": "yes"}]
    row = talk(empty | {"weight": 0})
    [sample] = load_demonstrations(agent, [{"messages": [*row["messages"], *more]}]).train
    assert sum(sample.advantages) == len(agent.template.reply(Message(role="assistant", content="yes"), ()))


@pytest.mark.parametrize("reply", [{"content": "a\ud83d"}, {"reasoning": "a\udc00", "content": "b"}])
async def test_half_of_a_character_is_no_target(reply: dict[str, Any]) -> None:
    agent = await scripted("")
    with pytest.raises(ConfigurationError, match=r"conversation 1: reply 1 has half of a character"):
        load_demonstrations(agent, [talk(reply)])
    late = talk(reply | {"weight": 0})
    late["messages"] += talk({"content": "c"})["messages"]
    [sample] = load_demonstrations(agent, [late]).train
    assert {*sample.advantages} == {0.0, 1.0}


@pytest.mark.parametrize("written", ["a<think>b</think>", "a<tool_call>{b</tool_call>"])
async def test_what_an_agent_got_wrong_is_shown_and_no_target(written: str) -> None:
    agent, reply = await scripted(""), parse_reply(written)
    with pytest.raises(ConfigurationError, match="conversation 1: reply 1 thinks behind its first words, or"):
        load_demonstrations(agent, [talk(reply.to_record())])
    asked = Message(role="user", content="hi")
    begun = {"prompt_ids": (), "token_ids": (), "logprobs": (), "finish_reason": "stop"}
    replies = [Completion(message=said, **begun) for said in (reply, Message(role="assistant", content="c"))]
    turns = tuple(Turn(prompt_ids=(), completion=said, feedback=(asked,)) for said in replies)
    played = Trajectory(scenario=Scenario(id="s", opening="hi"), opening=(asked,), turns=turns)
    [sample] = load_demonstrations(agent, [chat_of(played)]).train
    first, second = sample.trajectory.turns
    assert sample.advantages == (0.0,) * len(first.completion.token_ids) + (1.0,) * len(
        second.completion.token_ids
    )
    [scenario] = chat_scenarios([chat_of(played)])
    assert "recorded" not in scenario.context


@pytest.mark.parametrize("label", [False, 0, "False"])
async def test_a_completion_whose_label_is_false_is_no_target(label: Any) -> None:
    with pytest.raises(ConfigurationError, match="its label is false: it shows what not to say"):
        load_demonstrations(await scripted(""), [{"prompt": "a", "completion": "b", "label": label}])


@pytest.mark.parametrize("logs", [5, {"messages": []}])
def test_logs_that_are_no_rows_are_one_line(logs: Any) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"conversations must be a (file or a list of rows|list of conversations, got one mapping)",
    ):
        ChatLogs(logs)


def test_what_a_replay_cannot_say_is_refused_and_can_be_trained_on() -> None:
    late = talk({"content": "a"})
    late["messages"].append({"role": "system", "content": "Now be rude."})
    with pytest.raises(ConfigurationError, match="conversation 1: a system message stands behind the first"):
        ChatLogs([late])


async def test_tools_are_offered_as_their_row_has_them() -> None:
    def row(name: str, **more: Any) -> dict[str, Any]:
        call = {"function": {"name": name, "arguments": "{}"}}
        return talk({"tool_calls": [call]}, id=name, **more)

    schema = {"name": "a", "description": "A.", "parameters": {"type": "object", "properties": {}}}
    plain = talk({"content": "hello"}, id="plain")
    environment = ChatLogs([row("a", tools=[schema]), row("b"), row("c"), plain])
    offered = {}
    for scenario in environment.scenarios("train"):
        conversation = await environment.start(scenario, 0)
        offered[scenario.id] = [schema["function"]["name"] for schema in conversation.tools]
    # those that name none are offered what such rows call: else the offer would tell the answer
    assert offered == {"a": ["a"], "b": ["b", "c"], "c": ["b", "c"], "plain": ["b", "c"]}


# ------------------------------------------------------------------------------------ Arrow's nulls


def tool_row(name: str, arguments: dict[str, Any], *required: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in (*arguments, f"{name}_note")}
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": name, "parameters": parameters}
    return talk(
        {"tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}]},
        tools=[{"type": "function", "function": function}],
        rating=name,
    )


async def test_a_table_of_two_tools_gives_the_ids_of_its_file(tmp_path: Path) -> None:
    rows = [tool_row("track", {"order_id": "K27"}, "order_id"), tool_row("pay", {"amount": "20"})]
    rows.append(talk({"content": "bye"}, thought="x"))
    table = datasets.Dataset.from_list(rows)
    assert "amount" in json.dumps(table[0])  # Arrow adds it
    table.to_parquet(tmp_path / "rows.parquet")
    agent = await scripted("")
    file = lines(tmp_path / "rows.jsonl", *rows)

    def ids(source: Any) -> list[list[int]]:
        return [list(sample.rows[0].token_ids) for sample in load_demonstrations(agent, source).train]

    assert ids(file) == ids(table) == ids(tmp_path / "rows.parquet")
    for environment in (ChatLogs(file), ChatLogs(table), ConversationEnvironment(table)):
        scenarios = environment.scenarios("train")
        assert [scenario.tools for scenario in scenarios] == [
            s.tools for s in ChatLogs(file).scenarios("train")
        ]
        assert scenarios[0].context["recorded"][0]["arguments"] == {"order_id": "K27"}
    assert "thought" not in ConversationEnvironment(table).scenarios("train")[0].context


def test_a_null_that_the_schema_requires_stays() -> None:
    nested = {"properties": {"when": {"properties": {"day": {}}, "required": ["day"]}}, "required": ["city"]}
    arguments = {"city": None, "days": None, "when": {"day": None, "hour": None}, "to": [{"x": None}]}
    assert without_unasked_nulls(arguments, nested) == {"city": None, "when": {"day": None}, "to": [{}]}
    stops = {"properties": {"stops": {"anyOf": [{"items": nested}, {"type": "null"}]}}}
    through = {"stops": [{"city": None, "days": None}]}
    assert without_unasked_nulls(through, stops) == {"stops": [{"city": None}]}
    [row] = chat_scenarios([talk({"tool_calls": [{"name": "f", "arguments": '{"x": null}'}]})])
    assert row.context["recorded"][0]["arguments"] == {"x": None}  # text was not through Arrow


def test_schemas_are_read_as_they_are_published() -> None:
    published = [
        {"name": "a", "parameters": {"x": {"type": "List[int]"}, "y": {"type": "Any, optional"}}},
        {"type": "function", "function": {"name": "b", "parameters": {"type": "dict", "properties": {}}}},
        {"name": "c", "input_schema": {"type": "object"}, "strict": None},
        {"name": "d", "parameters": {"properties": {"type": {"type": "string"}}}},
    ]
    a, b, c, d = (schema["function"] for schema in read_schemas(json.dumps(published)))
    assert a["parameters"] == {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"type": "integer"}}, "y": {}},
        "required": ["x"],
    }
    assert b["parameters"] == {"type": "object", "properties": {}}
    assert c == {"name": "c", "parameters": {"type": "object"}}
    assert d["parameters"] == published[3]["parameters"]
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"properties": {"a": deep}}
    assert len(read_schemas([{"name": "f"}, {"name": "f"}])) == 1
    for tools, said in (
        ("track, pay", "tools is a text that is not JSON"),
        ([{"name": "f"}, {"name": "f", "description": "F."}], "tool 'f' stands twice in tools, with two"),
        ([{"name": "f", "parameters": [1]}], "the parameters of tool 'f' must be a JSON schema"),
        ([{"name": "f", "parameters": deep}], "a tool has more than 64 levels"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            read_schemas(tools)
    assert expect_chat(talk({"content": "a"}, tools=[], functions=[{"name": "f"}])).tools is not None
    assert expect_chat(talk({"content": "a"}, tools="")).tools is None


# ------------------------------------------------------------------------------------ files


def test_cells_of_a_csv_file_are_text_unless_types_say_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('\ufeffopening,code,level,share,tags,topic\nNA,01234,5,.5,"[1, 2]",\n7,NA,,1e3,[],x\n')
    first, second = dataset_scenarios(file)
    assert (first.opening, second.opening, second.family) == ("NA", "7", "x")
    assert [first.context[key] for key in ("code", "level", "share")] == ["01234", "5", ".5"]
    assert second.context["code"] == "NA"
    config = tmp_path / "run.yaml"
    config.write_text(
        "environment:\n  name: conversation\n  scenarios:\n    dataset: ./rows.csv\n"
        "    types: {level: int, share: float, tags: json}\n"
    )
    environment = make_environment(load_experiment(config).environment)
    contexts = [dict(scenario.context) for scenario in environment.scenarios("train")]
    assert contexts == [
        {"code": "01234", "level": 5, "share": 0.5, "tags": [1, 2], "topic": ""},
        {"code": "NA", "share": 1000.0, "tags": [], "topic": "x"},
    ]
    (odd := tmp_path / "odd.jsonl").write_text('{"prompt": "a"}\nnull\n')
    with pytest.raises(
        ConfigurationError, match=r"odd\.jsonl, line 2: a row must be a mapping, got NoneType"
    ):
        dataset_scenarios(odd)
    for types, said in (
        ({"code": "int"}, r"line 3: column 'code' must be int by types, got 'NA'"),
        ({"code": "number"}, "types: code must be one of int, float, bool, json, or left out"),
        ({"cod": "int"}, "no column 'cod' .did you mean 'code'"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            dataset_scenarios(file, types=types)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"a,b\n1\n", "a.csv, line 2: 1 cells where the header has 2"),
        ("a.csv", b'a,b\n1,"2\n', "a.csv, line 2: not CSV"),
        ("a.csv", b"a,a\n1,2\n", "a.csv, line 1: each column needs a name of its own"),
        ("a.jsonl", b'{"a": "\xe9"}', "a.jsonl is not UTF-8 text .byte 7., line 1: save it as UTF-8"),
        ("a.jsonl", b'{"a": 1}\n{"a": \xe9}', "a.jsonl is not UTF-8 text .byte 15., line 2"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00", "a.jsonl.gz is a broken gzip file"),
        ("a.parquet", b"PAR1", "cannot read rows .*a.parquet"),
        ("a.json", b'[{"a": 1},', "a.json, line 1: not JSON"),
        ("a.json", b'{"a": 1}\n{"a": ', "a.json, line 2: not JSON"),
    ],
)
def test_a_file_that_cannot_be_read_names_the_line(
    name: str, content: bytes, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=said) as caught:
        read_rows(tmp_path / name, of="rows")
    assert "\n" not in str(caught.value)


def test_lines_and_lists_are_told_apart_by_what_stands_in_them(tmp_path: Path) -> None:
    rows = [{"a": 1}, {"a": 2}]
    array, objects = json.dumps(rows, indent=1), "\n".join(map(json.dumps, rows))
    for name in ("a.json", "a.jsonl"):
        for text in (array, objects):
            (tmp_path / name).write_text(text)
            assert [row for _, row in read_rows(tmp_path / name, of="rows")] == rows
    (tmp_path / "a.json").write_text(json.dumps({"info": 1, "simulations": rows}))
    assert [row for _, row in read_rows(tmp_path / "a.json", of="rows")] == rows


def test_braces_in_cells_and_lines_of_text_stay(tmp_path: Path) -> None:
    cell = "what is wrong\n}\n{\n here"
    (tmp_path / "c.csv").write_text(f'id,question,answer\n7,"{cell}",4')
    assert read_rows(tmp_path / "c.csv", of="file") == [
        ("line 2", {"id": "7", "question": cell, "answer": "4"})
    ]
    (tmp_path / "c.txt").write_text("}\n{\n")
    assert [row["text"] for _, row in read_rows(tmp_path / "c.txt", of="file")] == ["}", "{"]


def test_an_object_that_could_be_a_row_and_holds_rows_is_refused(tmp_path: Path) -> None:
    row = talk({"content": "a"}, data=[{"prompt": "z", "completion": "w"}])
    (tmp_path / "one.json").write_text(json.dumps(row))
    with pytest.raises(ConfigurationError, match=r"one\.json: .*'data' and 'messages'.*\[\{\.\.\.\}\]"):
        read_rows(tmp_path / "one.json", of="file")
    (tmp_path / "one.json").write_text(json.dumps([row]))
    assert read_rows(tmp_path / "one.json", of="file") == [("entry 1", row)]


def test_equal_rows_are_named_by_their_lines_and_kept_where_one_says_so(tmp_path: Path) -> None:
    row = talk({"content": "a"})
    path = lines(tmp_path / "logs.jsonl", row, talk({"content": "b"}), row)
    with pytest.raises(ConfigurationError, match=r"line 3 is line 1 again, word by word: .*keep_duplicates"):
        ChatLogs(path)
    with pytest.raises(ConfigurationError, match=r"line 3 is line 1 again"):
        ConversationEnvironment(path)
    kept = [scenario.id for scenario in ChatLogs(path, keep_duplicates=True).scenarios("train")]
    assert kept[2] == f"{kept[0]}-2"
    assert len(dataset_scenarios(path)) == 3  # numbered


def test_a_row_of_no_shape_is_left_to_its_door() -> None:
    assert read_row({"opening": "hi", "answer": 3}) is None
    assert read_row({"text": "hi"}) is None
    with pytest.raises(ConfigurationError, match="a row must be a mapping, got list"):
        read_row([1])


def test_a_scenario_of_a_row_is_written_and_read_back_whole() -> None:
    url = "data:image/png;base64,iVBORw0K"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hi"}]
    row = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": parts}], "tools": []}
    [scenario] = chat_scenarios([row])
    assert len(scenario.prompt[1].images) == 1
    assert Scenario.from_record(json.loads(json.dumps(scenario.to_record()))) == scenario
    assert "prompt" not in Scenario(id="a").to_record()  # checkpoints of before know of none


async def test_facts_of_a_row_are_its_verdict() -> None:
    row = {"question": "Where is K27?", "expected_facts": ["Lyon"]}
    for user in (None, default_user):
        environment = ConversationEnvironment([row], user=user)
        for words, success in (("It is in Lyon.", True), ("No idea.", False)):
            conversation = await environment.start(environment.scenarios("train")[0], 0)
            assert (await conversation.step(Message(role="assistant", content=words))).terminated
            assert (await conversation.outcome()).success is success
