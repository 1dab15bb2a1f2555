"""Every example runs as its first lines say, from any folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_quickstart_trains_and_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "quickstart.py")],
        cwd=tmp_path,
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
