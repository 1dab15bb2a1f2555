"""The table of the documents' rows is whole, and each test that it names is there."""

from __future__ import annotations

import re
from collections import Counter

from repository_paths import ROOT

from scripts.document_rows import rows

NUMBER_OF_ROWS = {"S0": 30, "S1": 15, "S2": 13, "S3": 18, "S4": 12}


def test_every_row_is_in_the_table_once() -> None:
    assert [row.id for row in rows()] == [
        f"{document}-{number:02}"
        for document, count in NUMBER_OF_ROWS.items()
        for number in range(1, count + 1)
    ]


def test_a_row_works_or_says_in_a_line_what_to_write() -> None:
    states = Counter(row.state for row in rows())
    assert set(states) <= {"works", "differs"}
    assert states["differs"] <= 8
    for row in rows():
        if row.state == "differs":
            assert row.line
            assert row.correction


def test_the_tests_of_each_row_are_there() -> None:
    texts: dict[str, str] = {}
    for row in rows():
        assert row.tests, row.id
        for node in row.tests:
            file, _, name = node.partition("::")
            text = texts.setdefault(file, (ROOT / file).read_text())
            function = name.partition("[")[0].rpartition("::")[2]
            assert re.search(rf"def {function}\(", text), f"{row.id}: {node}"
