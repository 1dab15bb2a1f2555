"""Checkpoints under attack: a kill at every operation on the disk, damaged bytes, read-only folders."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import same_bits

from stateset_agents.runs.checkpoint_files import (
    Checkpoint,
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    mark_best,
    prune,
    remove_after,
    restore_replaced,
    save_checkpoint,
    write_texts,
)
from stateset_agents.runs.checkpoints import truncate_run
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.training.loop.run_state import RunState
from stateset_agents.types.errors import CheckpointError

DISK = {"open", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
"""Audit events (https://docs.python.org/3/library/audit_events.html) of what changes files and folders."""


def checkpoint_of(step: int, note: str = "") -> Checkpoint:
    """One whose weights say which step's it is, with moments and a critic."""
    weights = {"layer.weight": torch.full((3, 2), float(step)), "layer.bias": torch.arange(2.0)}
    optimizer = {
        "optimizer": {"state": {0: {"exp_avg": torch.ones(3, 2)}}, "param_groups": [{"lr": 0.1}]},
        "num_updates": step,
    }
    return Checkpoint(
        step=step, weights=weights, optimizer=optimizer, critic={"head": torch.ones(2)}, state={"note": note}
    )


def save(folder: Path, step: int, note: str = "") -> Path:
    def write_model(path: Path) -> None:
        (path / "config.json").write_text('{"model_type": "tiny"}')

    return save_checkpoint(folder, checkpoint_of(step, note), write_model=write_model)


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill, not a power cut: what was written is there without waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def killed_at(number: int, work: Callable[[], Any]) -> bool:
    """Do `work` in a process of its own that is killed as it begins its disk operation of that number (from
    1); False where it came to its end before."""
    child = os.fork()
    if child == 0:
        left = number

        def hook(event: str, arguments: Any) -> None:
            nonlocal left
            if event in DISK:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            work()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def every_kill(tmp_path: Path, prepared: Path, work: Callable[[Path], Any]) -> list[Path]:
    """A copy of `prepared` for every disk operation of `work`, as a kill there left it."""
    left: list[Path] = []
    while True:
        copy = shutil.copytree(prepared, tmp_path / f"kill-{len(left) + 1}", symlinks=True)
        left.append(copy)
        if not killed_at(len(left), lambda here=copy: work(here)):
            return left


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-*"))


@pytest.mark.long
def test_a_kill_at_any_operation_of_a_save_leaves_whole_checkpoints_and_none_is_lost(tmp_path):
    before = tmp_path / "before"
    for step in (2, 4, 6):
        save(before, step, note="old")
    mark_best(before, 2)

    def keep(folder: Path) -> None:
        """Step 6 again, as after its evaluation, then step 8."""
        for step in (6, 8):
            save(folder, step, note="new")
            mark_best(folder, 6 if step == 8 else 2)
            prune(folder, 2)

    left = every_kill(tmp_path, before, keep)
    assert len(left) > 60
    newest = []
    for folder in left:
        restore_replaced(folder)
        found = latest_checkpoint(folder)
        assert found is not None
        for path in folder.glob("step-*"):
            loaded = load_checkpoint(path)
            assert loaded.weights["layer.weight"].unique().item() == loaded.step
        newest.append((load_checkpoint(found).step, load_checkpoint(found).state["note"]))
        keep(folder)  # what goes on from there ends like a run that nobody killed
        assert steps(folder) == [6, 8]
        assert best_checkpoint(folder) == (folder / "step-000006").resolve()
        assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert set(newest) == {(6, "old"), (6, "new"), (8, "new")}
    assert newest == sorted(newest, key=[(6, "old"), (6, "new"), (8, "new")].index)


@pytest.mark.long
def test_a_kill_while_its_texts_are_written_anew_leaves_a_whole_checkpoint_with_all_the_old_or_all_the_new(
    tmp_path,
):
    before = tmp_path / "before"
    made = save(before, 2)
    weights = (made / "model" / "model.safetensors").stat()
    texts = {"model/README.md": "new", "model/config.json": "{}"}
    left = every_kill(tmp_path, before, lambda folder: write_texts(folder / "step-000002", texts))
    assert len(left) > 15
    found = []
    for folder in left:
        restore_replaced(folder)
        path = latest_checkpoint(folder)
        assert load_checkpoint(path).weights["layer.weight"].unique().item() == 2.0
        config = (path / "model" / "config.json").read_text()
        assert ((path / "model" / "README.md").exists(), config) in [
            (False, '{"model_type": "tiny"}'),
            (True, "{}"),
        ]
        found.append(config == "{}")
        write_texts(path, texts)
        prune(folder, 1)
        assert [one.name for one in folder.iterdir()] == ["step-000002"]
    assert found == sorted(found)
    assert set(found) == {False, True}
    write_texts(made, texts)
    assert (made / "model" / "model.safetensors").stat().st_ino == weights.st_ino  # linked, not copied
    load_checkpoint(made)


def test_a_disk_without_links_gets_copies_and_a_damaged_checkpoint_no_texts(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    made = save(tmp_path, 2)
    monkeypatch.setattr(os, "link", refuse)
    write_texts(made, {"model/README.md": "new"})
    assert load_checkpoint(made).step == 2
    (made / "model" / "config.json").write_text("torn")
    with pytest.raises(CheckpointError, match=r"model/config\.json is truncated or altered"):
        write_texts(made, {"model/README.md": "newer"})
    assert (made / "model" / "README.md").read_text() == "new"


@pytest.mark.long
def test_a_kill_at_any_operation_of_a_resume_leaves_no_checkpoint_without_its_logs(tmp_path):
    made = RunFolder.create(tmp_path / "runs")
    with JsonlTracker(made) as tracker:
        for step in range(1, 8):
            tracker.log_metrics(step, {"reward/mean": 0.1})
            tracker.log_event("step done", step=step)
            if step % 2 == 0:
                save(made.checkpoints, step)
    state = RunState(step=2, evaluated_step=2)
    left = every_kill(
        tmp_path, made.path, lambda folder: truncate_run(RunFolder(folder), {"training": {}}, state)
    )
    found = []
    for folder in left:
        run = RunFolder(folder)
        newest = load_checkpoint(latest_checkpoint(run.checkpoints)).step
        with JsonlTracker(run):  # cuts what is torn
            logged = run.metrics.read_text().count("step")
        assert logged >= newest
        assert [load_checkpoint(path).step for path in run.checkpoints.glob("step-*")]  # all of them whole
        found.append(newest)
    assert found == sorted(found, reverse=True)
    assert set(found) == {2, 4, 6}


def test_all_files_and_folders_are_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path, monkeypatch
):
    order: list[str] = []

    def noted(descriptor: int) -> None:
        order.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        order.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    path = save(tmp_path, 3)
    before, after = order[: order.index("rename")], order[order.index("rename") + 1 :]
    partial = tmp_path / ".step-000003.partial"
    assert set(before) == {str(partial / one.relative_to(path)) for one in (path, *path.rglob("*"))}
    assert before[-1] == str(partial)
    assert after == [str(tmp_path)]


def test_what_the_system_kept_of_a_removal_has_no_checkpoints_name(tmp_path):
    for step in (2, 4, 6):
        save(tmp_path, step)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            shutil, "rmtree", lambda path, ignore_errors: (path / "state.json").unlink(missing_ok=True)
        )
        remove_after(tmp_path, 4)
        prune(tmp_path, 1)
    assert steps(tmp_path) == [4]
    assert load_checkpoint(latest_checkpoint(tmp_path)).step == 4
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]


def test_no_flipped_bit_and_no_cut_is_loaded(tmp_path):
    path = save(tmp_path, 3, note="the one")
    whole = load_checkpoint(path)
    dice = random.Random(5)
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        content = file.read_bytes()
        for _ in range(40):
            damaged = bytearray(content)
            if dice.random() < 0.5:
                damaged[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
            else:
                del damaged[dice.randrange(len(content)) :]
            file.write_bytes(damaged)
            try:
                loaded = load_checkpoint(path)
            except CheckpointError:
                continue
            assert file.name == "manifest.json"  # white space between its words
            assert (loaded.step, loaded.state) == (whole.step, whole.state)
            assert same_bits(dict(loaded.weights), dict(whole.weights))
        file.write_bytes(content)
    assert load_checkpoint(path).state == whole.state


def test_every_file_that_is_missing_or_a_folder_is_named(tmp_path):
    path = save(tmp_path, 3)
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        name, content = str(file.relative_to(path)), file.read_bytes()
        file.unlink()
        for spoil in (lambda: None, file.mkdir):
            spoil()
            with pytest.raises(CheckpointError, match=f"{name}.*train again"):
                load_checkpoint(path)
        file.rmdir()
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", '{"optimizer": {"param_groups": []}}'),
        ("state.json", '{"step": 3}'),
        ("state.json", '{"step": "x", "optimizer": {"param_groups": []}}'),
        ("optimizer.safetensors", "no tensors"),
        ("model/model.safetensors", ""),
    ],
)
def test_contents_that_cannot_be_are_one_line_even_with_the_right_sums(tmp_path, name, content):
    import hashlib

    path = save(tmp_path, 3)
    (path / name).write_text(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = hashlib.sha256(content.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"is damaged \(.*there is no other one: train again$"):
        load_checkpoint(path)


def test_the_one_to_go_on_from_is_sound_itself(tmp_path):
    first, torn, newest = (save(tmp_path, step) for step in (2, 4, 6))
    (torn / "optimizer.safetensors").unlink()
    (newest / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"; resume from {first}$"):
        load_checkpoint(newest)


def test_a_newer_schema_asks_for_the_program_that_wrote_it(tmp_path):
    path = save(tmp_path, 3)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "schema_version": 2}))
    with pytest.raises(
        CheckpointError, match=r"schema 2 and this program reads 1: use the .* that wrote it$"
    ):
        load_checkpoint(path)


def test_progress_that_only_another_version_knows_is_one_line(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"unknown progress .*'queue'.*: use the stateset-agents that wrote"
    ):
        RunState.from_json({"step": 3, "queue": [1]})
    assert RunState.from_json({"step": 3}) == replace(RunState(), step=3)  # an older one knew less


def test_links_in_the_way_are_not_followed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "model").mkdir(parents=True)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in (".step-000003.partial", ".step-000003.replaced", ".step-000001.removed"):
        (folder / name).symlink_to(elsewhere)
    save(folder, 1)
    save(folder, 3, note="first")
    path = save(folder, 3, note="second")
    prune(folder, 1)
    assert load_checkpoint(path).state["note"] == "second"
    assert [one.name for one in folder.iterdir()] == ["step-000003"]
    assert [one.name for one in elsewhere.rglob("*")] == ["model"]


def test_a_checkpoint_behind_a_link_is_kept_and_read_there(tmp_path):
    kept = save(tmp_path / "archive", 2)
    folder = tmp_path / "checkpoints"
    save(folder, 4)
    (folder / "step-000002").symlink_to(kept)
    assert load_checkpoint(folder / "step-000002").step == 2
    prune(folder, 1)
    assert steps(folder) == [4]
    assert load_checkpoint(kept).step == 2


def test_a_stray_file_with_a_checkpoints_name_is_none(tmp_path):
    path = save(tmp_path, 2)
    (tmp_path / "step-000009").write_text("notes")
    assert latest_checkpoint(tmp_path) == path


def test_a_folder_that_may_not_be_written_is_one_line_and_stays_as_it_is(tmp_path):
    save(tmp_path, 2)
    save(tmp_path, 4)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.owner() == tmp_path.owner() and parent != Path("/tmp"):
            parent.chmod(0o755)  # pytest's folders are their owner's alone
    child = os.fork()
    if child == 0:
        said = []
        try:
            if os.geteuid() == 0:
                os.seteuid(65534)  # nobody: no rights hold for root
            else:
                tmp_path.chmod(0o555)
            for work in (
                lambda: save(tmp_path, 6),
                lambda: mark_best(tmp_path, 4),
                lambda: remove_after(tmp_path, 2),
                lambda: prune(tmp_path, 1),
            ):
                with pytest.raises(CheckpointError, match=r"Permission denied\)"):
                    work()
                said.append(load_checkpoint(tmp_path / "step-000004").step)
        finally:
            os._exit(0 if said == [4] * 4 else 1)
    _, status = os.waitpid(child, 0)
    tmp_path.chmod(0o755)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004"]


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_a_description_that_is_nested_too_deeply_is_damage(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    (path / name).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        load_checkpoint(path)
