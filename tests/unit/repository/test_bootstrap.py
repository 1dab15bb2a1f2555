"""The set-up script: when it runs, which torch it asks for, and what it says when it cannot."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from repository_paths import ROOT

SCRIPT = ROOT / "scripts" / "bootstrap.py"


@pytest.fixture(scope="module")
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clone(tmp_path: Path, bootstrap: ModuleType) -> Path:
    """A project in a path with spaces whose environment was set up for the CPU build."""
    root = tmp_path / "a clone with spaces"
    (root / "scripts").mkdir(parents=True)
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("torchvision==1.0\ntorch==2.13.0\nuv==0.13.8\n")
    (root / "scripts" / "bootstrap.py").write_bytes(SCRIPT.read_bytes())
    venv = root / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    key = bootstrap.inputs_key(root, bootstrap.venv_version(venv))
    bootstrap.write_stamp(venv, bootstrap.Stamp(key, str(venv), "cpu"))
    return root


def test_a_second_run_starts_no_process(
    bootstrap: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*command: object, **_: object) -> None:
        raise AssertionError(f"ran {command}")

    monkeypatch.setattr(bootstrap, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(bootstrap.subprocess, "run", refuse)
    assert bootstrap.main(clone) == 0


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt", "scripts/bootstrap.py"])
def test_a_changed_input_makes_the_set_up_run_again(bootstrap: ModuleType, clone: Path, changed: str) -> None:
    assert bootstrap.up_to_date(clone, clone / ".venv", "cpu")
    with (clone / changed).open("a") as file:
        file.write("# changed\n")
    assert not bootstrap.up_to_date(clone, clone / ".venv", "cpu")


def test_an_environment_that_was_moved_is_made_anew(bootstrap: ModuleType, clone: Path) -> None:
    moved = clone.rename(clone.with_name("moved"))
    assert not bootstrap.up_to_date(moved, moved / ".venv", "cpu")
    assert str(clone) in bootstrap.why_unusable(moved / ".venv")
    (moved / ".venv" / bootstrap.STAMP).unlink()
    assert "another folder" in bootstrap.why_unusable(moved / ".venv")


def test_an_environment_behind_a_link_is_left_alone(
    bootstrap: ModuleType, clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = clone / ".venv" / "pyvenv.cfg"
    other = tmp_path / "other"
    other.mkdir()
    for name in ("pyproject.toml", "constraints.txt", "scripts"):
        (other / name).symlink_to(clone / name)
    (other / ".venv").symlink_to(clone / ".venv")
    assert bootstrap.main(other) == 1
    assert "is a link to" in capsys.readouterr().err
    assert kept.is_file()


def test_an_environment_made_by_hand_is_reused(bootstrap: ModuleType, clone: Path) -> None:
    (clone / ".venv" / bootstrap.STAMP).unlink()
    assert bootstrap.why_unusable(clone / ".venv") is None
    assert not bootstrap.up_to_date(clone, clone / ".venv", "cpu")


def test_an_environment_whose_python_is_gone_is_made_anew(bootstrap: ModuleType, clone: Path) -> None:
    bootstrap.venv_python(clone / ".venv").unlink()
    assert not bootstrap.up_to_date(clone, clone / ".venv", "cpu")
    assert bootstrap.why_unusable(clone / ".venv") == "its Python is gone"


def test_a_new_gpu_asks_for_the_cuda_build_and_a_missing_one_keeps_it(
    bootstrap: ModuleType, clone: Path
) -> None:
    venv = clone / ".venv"
    assert not bootstrap.up_to_date(clone, venv, "cuda")
    bootstrap.write_stamp(venv, bootstrap.read_stamp(venv)._replace(torch="cuda"))
    assert bootstrap.up_to_date(clone, venv, "cpu")


@pytest.mark.parametrize(
    ("platform", "gpu", "build"),
    [("linux", False, "cpu"), ("linux", True, "cuda"), ("darwin", False, "plain"), ("win32", True, "plain")],
)
def test_each_machine_gets_its_torch_build(
    bootstrap: ModuleType, platform: str, gpu: bool, build: str
) -> None:
    assert bootstrap.torch_build(platform, gpu) == build


def test_without_a_gpu_no_attempt_can_pull_cuda(bootstrap: ModuleType, tmp_path: Path) -> None:
    by_pip, by_uv = bootstrap.torch_attempts("cpu", "2.13.0", tmp_path)
    assert by_pip[-1][-1] == "torch==2.13.0+cpu"
    assert by_uv[-1][-3:] == ["--torch-backend", "cpu", "torch==2.13.0"]


def test_with_a_gpu_uv_chooses_the_cuda_build(bootstrap: ModuleType, tmp_path: Path) -> None:
    by_uv, by_pip = bootstrap.torch_attempts("cuda", "2.13.0", tmp_path)
    assert by_uv[-1][-3:] == ["--torch-backend", "auto", "torch==2.13.0"]
    assert by_pip[-1][-1] == "torch==2.13.0"


def test_the_torch_version_comes_from_the_constraints(bootstrap: ModuleType, clone: Path) -> None:
    assert bootstrap.pinned(clone, "torch") == "2.13.0"
    with pytest.raises(bootstrap.SetupError, match="pins no jax"):
        bootstrap.pinned(clone, "jax")


def test_an_old_python_is_told_what_to_install(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "OLDEST", (99, 0))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(bootstrap.SetupError, match=r"Python 3\.11 or newer is needed.*apt install"):
        bootstrap.find_python()


def test_a_python_without_ensurepip_is_told_which_package_to_install(
    bootstrap: ModuleType, tmp_path: Path
) -> None:
    python = tmp_path / "python3.11"
    python.write_text('#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\necho 3 11\n')
    python.chmod(0o755)
    with pytest.raises(bootstrap.SetupError, match=r"apt install python3\.11-venv"):
        bootstrap.create_venv(str(python), tmp_path / ".venv")


@pytest.mark.long
def test_a_failing_step_is_named_and_leaves_no_stamp(
    bootstrap: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        bootstrap, "torch_attempts", lambda *_: [[[sys.executable, "-c", "raise OSError(7)"]]]
    )
    (clone / "constraints.txt").write_text("torch==2.13.9\n")
    assert bootstrap.main(clone) == 1
    said = capsys.readouterr().err
    assert "OSError: 7" in said
    assert "set-up failed: torch 2.13.9" in said
    assert bootstrap.read_stamp(clone / ".venv") is None
