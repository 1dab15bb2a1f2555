"""Runs of the embedded model that are killed, and resumed, end with the bits of one that nobody disturbed."""

from __future__ import annotations

import random
import shlex
import signal
from pathlib import Path

import pytest
import torch
from killed_runs import (
    STEPS,
    Training,
    Whole,
    assert_same,
    kill_often,
    left_by,
    steps_done,
    undisturbed,
    write_runs,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crash")
    write_runs(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    return undisturbed(folder, "grpo")


@pytest.mark.long
def test_ten_kills_end_with_the_same_bits(folder: Path, whole: Whole) -> None:
    done = kill_often(folder, whole, kills=10, in_a_write=2, dice=random.Random(7))
    assert (done.all, done.in_a_write) == (10, 2)
    assert whole.left["deterministic"]


def interrupted(folder: Path) -> tuple[Path, list[str]]:
    """A run folder in which Ctrl-C ended a training, and the arguments that go on with it."""
    path = folder / "interrupted" / "0001-grpo"
    with Training(folder, "grpo.yaml", "--output-dir", "interrupted") as run:
        assert run.until(lambda: steps_done(path) >= 3)
        run.signal(signal.SIGINT)
        assert run.ends() == 130
        said = run.said
    done = steps_done(path)
    assert 3 <= done < STEPS
    assert (path / "checkpoints" / f"step-{done:06d}" / "manifest.json").is_file()
    before, _, command = said.rstrip("\n").splitlines()[-1].partition("resume with: ")
    assert before == f"stateset-agents: stopped after step {done} of {STEPS}; "
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("stateset-agents", "train")
    return path, arguments


@pytest.mark.long
def test_ctrl_c_keeps_a_checkpoint_and_says_how_to_resume(tmp_path: Path) -> None:
    write_runs(tmp_path)
    _, arguments = interrupted(tmp_path)
    assert arguments


@pytest.mark.long
def test_what_ctrl_c_says_resumes_to_the_same_bits(folder: Path, whole: Whole) -> None:
    path, arguments = interrupted(folder)
    with Training(folder, *arguments) as run:
        assert run.ends() == 0, run.said
    assert_same(left_by(path), whole.left)


@pytest.mark.long
def test_the_comparison_sees_one_bit(whole: Whole) -> None:
    weights = "model/model.safetensors"
    flipped = bytearray(whole.left[weights])
    flipped[-1] ^= 1
    with pytest.raises(AssertionError, match=weights):
        assert_same({**whole.left, weights: bytes(flipped)}, whole.left)
    assert torch.get_num_threads() == whole.left["state"]["machine"]["threads"] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "kills", "in_a_write"),
    [("grpo", 20, 4), ("critic", 20, 4), ("branches", 20, 4), ("compact", 20, 4), ("overlap", 20, 4)],
)
def test_a_hundred_kills_end_with_the_same_bits(
    tmp_path: Path, name: str, kills: int, in_a_write: int
) -> None:
    write_runs(tmp_path)
    whole = undisturbed(tmp_path, name)
    assert whole.left["deterministic"] is (name != "overlap")
    rows = [line["rollout/rows"] for line in whole.left["metrics"] if "rollout/rows" in line]
    assert (max(rows) > 1) == (name == "compact")
    done = kill_often(tmp_path, whole, kills=kills, in_a_write=in_a_write, dice=random.Random(name))
    print(f"{name}: {done}")
    assert (done.all, done.in_a_write) == (kills, in_a_write)
