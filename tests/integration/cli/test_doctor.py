"""`stateset-agents doctor` in real processes: all well here, and one line with the cure where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from repository_paths import ROOT
from warm_python import warm_python

from stateset_agents.cli.health import EXTRAS, REQUIRED, machine_findings, trial_findings
from stateset_agents.sandbox import levels
from stateset_agents.tracking.monitors import Finding
from stateset_agents.training.update.learner import Learner
from stateset_agents.training.update.protocol import Learned


def doctor(folder: Path, *arguments: str, hidden: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A process in `folder` that finds no module of the `hidden` names, and asks no model hub."""
    stubs = folder / "stubs"
    stubs.mkdir()
    for name in hidden:
        (stubs / f"{name}.py").write_text(f"raise ModuleNotFoundError('hidden', name={name!r})")
    path = os.pathsep.join([str(stubs), str(ROOT)])
    python = [sys.executable] if hidden else warm_python()
    return subprocess.run(
        [*python, "-m", "stateset_agents.cli.main", "doctor", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_it_finds_this_machine_able_to_train(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert result["ok"] is True
    verdicts = {finding["check"]: finding["verdict"] for finding in result["findings"]}
    assert {verdicts[name] for name in ("torch", "transformers", "sandbox", "output folder")} == {"ok"}
    assert list(verdicts)[-4:] == ["generation", "determinism", "training step", "checkpoint"]
    assert {verdicts[name] for name in list(verdicts)[-4:]} == {"ok"}
    assert [path.name for path in tmp_path.iterdir()] == ["stubs"]  # nothing is left behind


@pytest.mark.long
def test_a_broken_machine_is_told_line_by_line_and_fails(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    done = doctor(tmp_path, "--output-dir", "a-file/runs", hidden=("torch", "peft", "mcp"))
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert '✗ torch: not installed -> pip install "torch>=2.6"' in lines
    assert '! peft: not installed (only a LoRA adapter needs it) -> pip install "peft>=0.18"' in lines
    assert (
        '! mcp: not installed (only an MCP server as tools needs it) -> pip install "mcp>=1.24,<3"' in lines
    )
    assert any(
        line.startswith("✗ output folder: a-file/runs cannot be written (Not a directory) -> give another")
        for line in lines
    )
    assert lines[-2] == "✗ trial: left out -> mend the packages above first"
    assert lines[-1].endswith(" to know about")
    assert "pip install stateset-agents" not in done.stdout


def test_an_old_or_broken_package_is_named_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "peft.py").write_text("")
    information = tmp_path / "peft-0.9.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.9.dev1\n")
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    findings = {finding.check: finding for finding in machine_findings(str(tmp_path))}
    assert findings["peft"].seen == "0.9.dev1 is not >=0.18 (only a LoRA adapter needs it)"
    (tmp_path / "peft.py").write_text("raise OSError('libcudart.so.12:\\n cannot open shared object file')")
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    findings = {finding.check: finding for finding in machine_findings(str(tmp_path))}
    assert findings["peft"].seen.startswith(
        "cannot be imported (OSError: libcudart.so.12: cannot open shared object file)"
    )
    assert findings["peft"].cure == 'pip install "peft>=0.18"'


def test_more_threads_than_cores_are_warned_of(tmp_path: Path) -> None:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(4 * (os.cpu_count() or 1))
    try:
        findings = {finding.check: finding for finding in machine_findings(str(tmp_path))}
        assert findings["threads"].verdict == "warn"
        assert "more than there are cores" in findings["threads"].seen
        assert "OMP_NUM_THREADS" in findings["threads"].cure
    finally:
        torch.set_num_threads(before)


def test_a_training_step_that_does_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(self: Learner, batch: Any, *, step: int) -> Learned:
        return Learned({"optimizer/grad_norm": 1.0})

    monkeypatch.setattr(Learner, "learn", learn)
    *well, last = trial_findings()
    assert [finding.verdict for finding in well] == ["ok", "ok"]
    assert (last.check, last.verdict) == ("training step", "fail")
    assert last.seen == "a step on the desk changed no weight (gradient norm 1.0)"


@pytest.mark.long
def test_an_exception_of_the_installation_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(self: Learner, batch: Any, *, step: int) -> Learned:
        raise RuntimeError("CUDA error:\nno kernel image is available")

    monkeypatch.setattr(Learner, "learn", learn)
    *_, last = trial_findings()
    assert (last.check, last.verdict) == ("training step", "fail")
    assert last.seen == "RuntimeError: CUDA error: no kernel image is available"


def test_its_versions_are_those_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = {name for names in project["optional-dependencies"].values() for name in names}
    assert set(REQUIRED) <= set(project["dependencies"])
    assert set(EXTRAS) <= optional


def test_it_says_which_walls_this_machine_has_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sandbox() -> Finding:
        return next(found for found in machine_findings(str(tmp_path)) if found.check == "sandbox")

    assert sandbox().seen.startswith("programs run behind ")
    monkeypatch.setattr(levels, "_why_not", lambda level, python: None if level == "namespaces" else "gone")
    assert sandbox().seen.startswith("programs run behind namespaces")
    assert sandbox().seen.endswith("(no landlock: gone; no bubblewrap: gone)")
    monkeypatch.setattr(levels, "_why_not", lambda level, python: "gone")
    assert sandbox().verdict == "warn"
    assert "install bubblewrap" in sandbox().cure
