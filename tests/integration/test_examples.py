"""Every example runs as its first lines say, from any folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
"""Beside other test workers, more threads than cores only wait for one another."""


def test_quickstart_trains_and_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")],
        cwd=tmp_path,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *_, answer, folder = done.stdout.strip().splitlines()
    assert answer
    assert folder.startswith("run folder:")
    run = tmp_path / "runs" / "0001-quickstart"
    assert (run / "checkpoints").is_dir()
    assert len((run / "metrics.jsonl").read_text().splitlines()) > 1


def test_the_readme_s_program_trains_and_saves(tmp_path: Path) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "my-agent" / "model.safetensors").is_file()


def test_the_table_of_scripted_agents_is_as_documented() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES.parent / "scripts" / "desk_agents.py")],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    results = (EXAMPLES.parent / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(rows) == 6
    for name, success, reward in rows:
        shown = reward.replace("-0.", "\u2212.").replace("0.", ".")
        share = f"{float(success.rstrip('%')):g} %"
        assert f"| {name.strip().replace('_', ' ')} | {share} | {shown} |" in results
