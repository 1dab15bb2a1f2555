"""Every attack scores 0 and leaves nothing, every honest program 1: for root and for nobody."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from attacks import ATTACKS, HONEST, HONEST_STDIN
from repository_paths import HELPERS, ROOT

USERS = ["root", "nobody"] if os.geteuid() == 0 else ["this user"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """That every user may enter; pytest's own are closed."""
    made = Path(tempfile.mkdtemp(prefix="attacks-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def attacked(folder: Path, *arguments: str) -> Mapping[str, Any]:
    """What attack_run.py found."""
    done = subprocess.run(
        [sys.executable, str(HELPERS / "attack_run.py"), str(folder), *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


def test_the_first_attack_of_each_kind_scores_nothing(folder: Path) -> None:
    first = [next(iter(programs)) for programs in ATTACKS.values()]
    found = attacked(folder, "--only", *first)
    scores = {name: score for some in found["attacks"].values() for name, score in some.items()}
    assert scores == dict.fromkeys(first, 0.0)
    assert found["left"] == []


@pytest.mark.long
@pytest.mark.parametrize("user", USERS)
def test_every_attack_scores_nothing_and_every_honest_program_all(user: str, folder: Path) -> None:
    found = attacked(folder, *(["--as-nobody"] if user == "nobody" else []))
    assert found["user"] == {"root": 0, "nobody": 65534}.get(user, os.geteuid())
    scores = {(kind, name): score for kind, some in found["attacks"].items() for name, score in some.items()}
    assert {attack: score for attack, score in scores.items() if score != 0} == {}
    assert {program: score for program, score in found["honest"].items() if score != 1} == {}
    assert found["left"] == []
    assert len(scores) == sum(len(programs) for programs in ATTACKS.values()) > 120
    assert found["honest"].keys() == HONEST.keys() | HONEST_STDIN.keys()


@pytest.mark.long
def test_the_attacks_would_succeed_without_walls(folder: Path) -> None:
    """Or they would prove nothing."""
    kept = [
        "the scenario's file",
        "the scenario's file by a path in /proc",
        "the generator by its path",
        "the grader's environment",
        "subprocess",
        "a socket",
        "an abstract unix socket",
    ]
    found = attacked(folder, "--sandbox", "unsafe", "--only", *kept, "a folder", "a file")
    scores = {name: score for some in found["attacks"].values() for name, score in some.items() if score}
    assert scores == dict.fromkeys(kept, 1.0)
    assert {Path(path).name for path in found["left"]} == {"folder", "file"}
