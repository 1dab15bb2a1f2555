"""Scenarios come from plain dicts and JSONL files; the same content is the same scenario in every run."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stateset_agents.core.sources.scenario_files import load_scenarios, read_scenarios
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario

REFUND = {"topic": "refund", "context": "Order delayed"}


def test_a_plain_dict_becomes_a_scenario() -> None:
    scenario = Scenario.from_dict(REFUND)
    assert scenario.family == "refund"
    assert scenario.context == {"text": "Order delayed", "topic": "refund"}
    assert (scenario.opening, scenario.split) == ("", "train")


def test_every_field_may_be_given() -> None:
    data = {"id": 0, "family": "f", "opening": "hi", "context": {"a": 1}, "split": "test", "b": 2}
    assert Scenario.from_dict(data) == Scenario(
        id="0", family="f", opening="hi", context={"a": 1, "b": 2}, split="test"
    )


def test_nothing_given_is_nothing_said() -> None:
    scenario = Scenario.from_dict({"id": "", "opening": None, "family": None})
    assert (scenario.opening, scenario.family) == ("", "default")
    assert len(scenario.id) == 12


def test_the_id_is_made_of_the_content_in_any_order_and_any_process() -> None:
    turned = {"context": "Order delayed", "topic": "refund"}
    assert Scenario.from_dict(REFUND).id == Scenario.from_dict(turned).id
    assert Scenario.from_dict(REFUND).id != Scenario.from_dict({**REFUND, "topic": "shipping"}).id
    code = f"from stateset_agents import Scenario; print(Scenario.from_dict({REFUND!r}).id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == Scenario.from_dict(REFUND).id == "fde07ffb18f3"


def test_the_dict_that_it_came_from_may_change() -> None:
    context = {"a": 1}
    scenario = Scenario.from_dict({"context": context})
    context["a"] = 2
    assert scenario.context == {"a": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("refund", "a scenario must be a mapping, got str: 'refund'"),
        ([REFUND], "a scenario must be a mapping, got list"),
        ({"split": "dev"}, "split must be train, validation or test, got 'dev'"),
        ({"opening": 3}, "opening must be text, got int"),
        ({"topic": "a", "context": {"topic": "b"}}, "key 'topic' also stands in its context"),
        ({"when": datetime.date(2024, 1, 1)}, "no plain JSON needs an id of its own"),
        ({1: "a", "b": 2}, "no plain JSON needs an id of its own"),
    ],
)
def test_a_scenario_that_cannot_be_read_says_why(data: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Scenario.from_dict(data)


def test_an_object_without_a_json_form_is_fine_in_a_scenario_with_an_id() -> None:
    when = datetime.date(2024, 1, 1)
    assert Scenario.from_dict({"id": "a", "when": when}).context == {"when": when}


def test_dicts_and_scenarios_load_together() -> None:
    scenario = Scenario(id="a")
    assert load_scenarios([scenario, {"id": "b"}]) == [scenario, Scenario(id="b")]


def test_no_scenario_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="scenarios is empty: give at least one scenario"):
        load_scenarios([])


def test_twins_are_named_by_their_places() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_scenarios([REFUND, {"topic": "shipping"}, dict(REFUND)])
    assert str(caught.value).startswith("scenario 3 is scenario 1 again, word by word: take one out")


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_holds_one_object_a_line(tmp_path: Path) -> None:
    lines = [
        json.dumps(REFUND),
        "",
        "  ",
        json.dumps({"id": "b", "context": "a\u2028b\x85c"}, ensure_ascii=False),
    ]
    path = write(tmp_path / "scenarios.jsonl", "\ufeff" + "\r\n".join(lines) + "\n")
    first, second = read_scenarios(path)
    assert first == Scenario.from_dict(REFUND)
    assert second.context == {"text": "a\u2028b\x85c"}
    assert read_scenarios(str(path)) == [first, second]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"id": "a"}\n{"id": ', "line 2: not JSON (Expecting value): '{\"id\": '"),
        ('{"id": "a"}\n\n[1]', "line 3: a scenario must be a mapping, got list: [1]"),
        ('{"id": "a", "split": "dev"}', "line 1: scenario split must be train"),
        ('{"id": ' + "9" * 5000 + "}", "line 1: cannot be read"),
        ("[" * 100_000, "line 1: cannot be read"),
        ('{"id": "a"}\n{"id": "b"}\n{"id": "a"}', "line 3: id 'a' stands twice, first at line 1"),
    ],
)
def test_an_error_in_a_file_names_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "scenarios.jsonl", text)
    with pytest.raises(ConfigurationError) as caught:
        read_scenarios(path)
    assert str(caught.value).startswith(f"{path}, {message}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no scenario"), ("\n \n", "holds no scenario"), (b"{\xff}", "is not UTF-8 text (byte 1)")],
)
def test_a_file_without_scenarios_is_an_error(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_scenarios(write(tmp_path / "scenarios.jsonl", text))
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read scenario file .*missing.jsonl: No such file"):
        read_scenarios(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigurationError, match="cannot read scenario file"):
        read_scenarios(tmp_path)


def test_a_key_that_is_nearly_a_field_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for text in ("hi", "ho"):
        scenario = Scenario.from_dict({"opneing": text, "text": "late", "order_id": "K1"})
        assert scenario.context["opneing"] == text
    Scenario.from_dict({"opening": "hi", "openings": ["hi", "ho"]})  # the field is there: meant as it stands
    assert [record.getMessage() for record in caplog.records] == [
        "scenario key 'opneing' is no field and goes into the context; did you mean 'opening'?"
    ]


def test_a_scenario_file_may_come_from_windows(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"opening": "hi"}\r\n\r\n{"opening": "gr\xc3\xbc\xc3\x9f dich"}\r\n')
    assert [scenario.opening for scenario in read_scenarios(file)] == ["hi", "gr\u00fc\u00df dich"]


def test_a_scenario_file_that_is_not_there_is_looked_for_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        read_scenarios("calls.jsonl")
    assert str(caught.value) == (
        "cannot read scenario file calls.jsonl: No such file or directory "
        f"(looked for {tmp_path / 'calls.jsonl'})"
    )
