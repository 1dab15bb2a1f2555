"""What the SDKs of tracing platforms write is read as tests/fixtures/exports are: `make test-exports`."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from repository_paths import ROOT

from stateset_agents.core.sources.imports import convert, read_import

pytestmark = pytest.mark.exports
SAMPLES = ROOT / "tests" / "fixtures" / "exports"


@pytest.mark.parametrize("kind", ["telemetry", "inspect"])
def test_what_an_sdk_writes_gives_the_rows_of_the_sample(kind: str, tmp_path: Path) -> None:
    python = ROOT / f".venv-{kind}" / "bin" / "python"
    script = ROOT / "tests" / "helpers" / "platform_exports.py"
    subprocess.run([python, script, kind, tmp_path], check=True, timeout=300)
    files = sorted(file.name for file in tmp_path.iterdir() if file.suffix != ".eval")
    assert files == sorted(
        file.name
        for file in SAMPLES.iterdir()
        if file.suffix != ".eval" and ("inspect" in file.name) == (kind == "inspect")
    )
    for name in files:
        made, sample = read_import(tmp_path / name), read_import(SAMPLES / name)
        assert made.summary() == sample.summary()
        for form in ("scenarios", "replay", "sft", "evaluation", "openai", "trl"):
            rows, left_out = convert(made.rows, form)
            known, known_left_out = convert(sample.rows, form)
            assert [says(row) for row in rows] == [says(row) for row in known]
            assert len(left_out) == len(known_left_out)


def says(row: dict[str, Any]) -> list[tuple[str, Any]]:
    """Roles and words: ids and times are new each time."""
    messages = [row.get(key) or [] for key in ("prompt", "messages", "completion")]
    return [(message["role"], message["content"]) for part in messages for message in part]
