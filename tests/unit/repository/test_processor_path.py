"""The suite as other processors run it: a path that was not taken starts nothing."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
from repository_paths import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("processor_path", ROOT / "scripts" / "processor_path.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["processor_path"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_the_command_runs_on_the_forced_path(script: ModuleType, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; print('in', os.environ['ATEN_CPU_CAPABILITY']); raise SystemExit(7)"
    assert script.main(["avx2", sys.executable, "-c", code]) == 7
    said = capfd.readouterr().out
    assert "processor path avx2: ATen AVX2; oneDNN brg_matmul:avx2; MKL" in said
    assert "in avx2" in said


@pytest.mark.long
def test_a_path_that_was_not_taken_starts_nothing(
    script: ModuleType, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in script.PATHS["avx2"].environment:  # the suite itself may run on a forced path
        monkeypatch.delenv(name, raising=False)
    unforced = dataclasses.replace(script.PATHS["avx2"], environment={})
    monkeypatch.setitem(script.PATHS, "avx2", unforced)
    assert script.main(["avx2", sys.executable, "-c", "print('started')"]) == 2
    said = capfd.readouterr()
    assert "started" not in said.out
    assert "processor path avx2 was not taken: " in said.err
    assert "mkl is CNR:OFF, not .*CNR:COMPATIBLE" in said.err


def test_an_unknown_path_is_named_with_those_there_are(
    script: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["amx"]) == 2
    assert capfd.readouterr().err == "the path must be one of native, torch-linears, avx2, got amx\n"


def test_no_test_that_the_forced_paths_leave_out_computes_with_torch() -> None:
    """A folder of `OF_TEXT` in the Makefile exists, and no file in it imports torch at its top."""
    command = ["make", "--dry-run", "test-avx2"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = re.findall(r"--ignore (\S+)", told)
    assert "tests/unit/core/chat" in folders
    files = {folder: list((ROOT / folder).rglob("*.py")) for folder in folders}
    assert all(files.values())
    with_torch = re.compile(r"^(import torch|from torch)\b", re.MULTILINE)
    assert [path for some in files.values() for path in some if with_torch.search(path.read_text())] == []
