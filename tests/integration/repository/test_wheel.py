"""The wheel and the source archive in an environment of their own: what they weigh, and that they work."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from repository_paths import ROOT

MOST_BYTES = 7_000_000


def ran(*command: str | Path, cwd: Path) -> str:
    """What a program prints; it must succeed."""
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_a_wheel_trains_its_example_without_the_repository_and_goes_again(tmp_path: Path) -> None:
    built = tmp_path / "built"
    ran(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    ran(python, "-m", "pip", "install", "-q", "build", cwd=tmp_path)
    ran(
        python, "-m", "build", "--outdir", built, ROOT, cwd=tmp_path
    )  # the source archive, and the wheel of that
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.stat().st_size <= MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"stateset_agents"}
    with tarfile.open(archive) as files:
        assert any(name.endswith("/LICENSE") for name in files.getnames())
    torch = f"torch=={_version('torch')}"
    ran(python, "-m", "pip", "install", "-q", torch, wheel, cwd=tmp_path)
    program = python.parent / "stateset-agents"
    ran(program, "init", tmp_path / "desk", cwd=tmp_path)
    (settings,) = (tmp_path / "desk").glob("*.yaml")
    printed = ran(program, "train", settings.name, "--max-steps", "3", cwd=tmp_path / "desk")
    assert "success" in printed
    ran(python, "-m", "pip", "uninstall", "-q", "-y", "stateset-agents", cwd=tmp_path)
    assert not list((tmp_path / "venv").rglob("stateset_agents*"))
    assert not program.exists()


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package).split("+")[0]
