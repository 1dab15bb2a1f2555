"""The rows of the five documents that this package was ordered by: what each asks for, and whether it works.

`tests/integration/documents/rows_*.yaml` name the tests that show each row; `--tests` runs them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateset_agents.runtime.yaml_files import read_yaml

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "integration" / "documents"
TESTS = {
    "s0": "test_infrastructure.py",
    "s1": "test_stateset.py",
    "s2": "test_acquisition.py",
    "s3": "test_reasoning.py",
    "s4": "test_grouping.py",
}
"""The file of each document's own tests."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a document."""

    id: str
    what: str
    state: str
    """works, or differs."""
    line: str
    """What the printed call says where the row differs."""
    correction: str
    tests: tuple[str, ...]
    """Node ids for pytest, from the root on."""


def rows() -> list[Row]:
    """All rows, in the documents' order."""
    return [
        _row(item, TESTS[document])
        for document in TESTS
        for item in read_yaml(FOLDER / f"rows_{document}.yaml")
    ]


def _row(item: Any, file: str) -> Row:
    own = f"tests/integration/documents/{file}::"
    tests = tuple(test if "::" in test else own + test for test in item["tests"])
    tests = tuple(
        test if test.startswith("tests/") else f"tests/integration/documents/{test}" for test in tests
    )
    line, correction = str(item.get("line", "")).strip(), str(item.get("correction", ""))
    return Row(item["id"], str(item["what"]).strip(), item["state"], line, correction, tests)


def main() -> int:
    """Print the table, and with `--tests` what the tests say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true", help="run the tests of all rows")
    arguments = parser.parse_args()
    table = rows()
    width = max(len(row.what) for row in table)
    for row in table:
        note = "" if row.state == "works" else f"  ({row.correction}) {row.line}"
        print(f"{row.id:6} {row.state:8} {len(row.tests):2} tests  {row.what:{width}}{note}".rstrip())
    counts = Counter(row.state for row in table)
    print(", ".join(f"{count} {state}" for state, count in counts.items()), f"of {len(table)} rows")
    if not arguments.tests:
        return 0
    nodes = sorted({test for row in table for test in row.tests})
    return subprocess.call([sys.executable, "-m", "pytest", "-q", *nodes], cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
