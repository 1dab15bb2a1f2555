"""Runs that are killed or interrupted, and resumed, end with the bits of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tiny_tokenizer

STEPS = 16
_RUN = f"""
agent: {{model_name: ./model, chat_template: plain, max_new_tokens: 4}}
environment: {{name: conversation, scenarios: calls.jsonl, max_turns: 2}}
reward: "parity:even_share"
training:
  max_steps: {STEPS}
  num_generations: 4
  gradient_accumulation_steps: 2
  learning_rate: 0.003
  save_steps: 2
  dropout: true
"""
_REWARD = """
from stateset_agents.core.reward import reward_function

@reward_function(local=True)
async def even_share(trajectory):
    ids = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    return sum(token % 2 == 0 for token in ids) / len(ids)
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model (its config has dropout), scenarios, a reward of its own and run.yaml."""
    folder = tmp_path_factory.mktemp("desk")
    model = tiny_model("gpt2")
    assert model.config.resid_pdrop == model.config.attn_pdrop == model.config.embd_pdrop == 0.1
    model.save_pretrained(folder / "model")
    tiny_tokenizer().hf.save_pretrained(folder / "model")
    openings = enumerate(("hi", "hello", "ok", "yes"))
    calls = [{"id": f"s{n}", "opening": word, "context": {"script": ["go on"]}} for n, word in openings]
    (folder / "calls.jsonl").write_text("".join(json.dumps(call) + "\n" for call in calls))
    (folder / "parity.py").write_text(_REWARD)
    (folder / "run.yaml").write_text(_RUN)
    return folder


@pytest.fixture(scope="module")
def undisturbed(desk: Path) -> dict[str, Any]:
    """What a run leaves that nobody disturbs."""
    with training(desk, "run.yaml", "--output-dir", "whole") as run:
        assert run.wait(120) == 0, errors_of(run)
    return left_by(desk / "whole" / "latest")


@contextmanager
def training(desk: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`stateset-agents train` as a process of its own, ended with the block."""
    run = subprocess.Popen(
        [sys.executable, "-m", "stateset_agents.cli.main", "train", *arguments],
        cwd=desk,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield run
    finally:
        run.kill()
        run.communicate()


def errors_of(run: subprocess.Popen[str]) -> str:
    assert run.stderr is not None
    return run.stderr.read()


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; every line must be whole."""
    return [json.loads(line) for line in file.read_text().splitlines()][1:]


def left_by(run: Path) -> dict[str, Any]:
    """All that must be equal bit by bit: weights, optimiser, schedule, what was said and measured."""
    last = run / "checkpoints" / f"step-{STEPS:06d}"
    state = json.loads((last / "state.json").read_text())
    del state["progress"]["train_seconds"]
    timed = ("time", "tokens/per_second")
    return {
        "weights": (last / "model" / "model.safetensors").read_bytes(),
        "moments": (last / "optimizer.safetensors").read_bytes(),
        "state": {name: state[name] for name in ("optimizer", "progress", "machine")},
        "rollouts": lines(run / "rollouts.jsonl"),
        "metrics": [
            {name: value for name, value in record.items() if not name.startswith(timed)}
            for record in lines(run / "metrics.jsonl")
        ],
    }


def steps_done(run: Path) -> int:
    """Whole lines of metrics, without the header."""
    file = run / "metrics.jsonl"
    return max(0, file.read_bytes().count(b"\n") - 1) if file.exists() else 0


def until(what: Any, run: subprocess.Popen[str]) -> None:
    """Poll until `what()` holds, while the process lives."""
    end = time.monotonic() + 120
    while not what():
        assert run.poll() is None, errors_of(run)
        assert time.monotonic() < end
        time.sleep(0.0005)


def kill_within_a_step(moment: float, folder: Path, run: subprocess.Popen[str]) -> None:
    """kill -9 at a moment (0 to 1) of the time that a step takes, counted from a step's metrics."""
    before = steps_done(folder)
    until(lambda: steps_done(folder) > before, run)
    time.sleep(moment * lines(folder / "metrics.jsonl")[-1]["time/step"])
    run.send_signal(signal.SIGKILL)
    run.wait()


def kill_while_saving(folder: Path, run: subprocess.Popen[str]) -> None:
    """kill -9 while a checkpoint stands under its temporary name."""

    def unfinished() -> bool:
        return any((folder / "checkpoints").glob(".step-*.partial/*"))

    while True:
        until(unfinished, run)
        run.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, run.pid, os.WSTOPPED | os.WNOWAIT)
        if unfinished():  # it may have been renamed just before the process stood still
            break
        run.send_signal(signal.SIGCONT)
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert unfinished()


def test_kills_at_random_moments_and_resumes_end_with_the_same_bits(
    desk: Path, undisturbed: dict[str, Any]
) -> None:
    dice = random.Random(7)
    folder = desk / "killed" / "0001-run"
    start = ["run.yaml", "--output-dir", "killed"]
    resume = ["--resume", str(folder)]
    with training(desk, *start) as run:
        kill_within_a_step(dice.random(), folder, run)
    for saving in (True, False, True):
        with training(desk, *resume) as run:
            if saving:
                kill_while_saving(folder, run)
            else:
                kill_within_a_step(dice.random(), folder, run)
    assert steps_done(folder) < STEPS
    with training(desk, *resume) as run:
        assert run.wait(120) == 0, errors_of(run)
        assert errors_of(run) == ""
    assert [record["step"] for record in lines(folder / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert_same(left_by(folder), undisturbed)
    assert not list((folder / "checkpoints").glob(".*"))  # no debris


def test_ctrl_c_keeps_a_checkpoint_and_says_how_to_resume(desk: Path, undisturbed: dict[str, Any]) -> None:
    folder = desk / "interrupted" / "0001-run"
    with training(desk, "run.yaml", "--output-dir", "interrupted") as run:
        until(lambda: steps_done(folder) >= 3, run)
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        said = errors_of(run)
    done = steps_done(folder)
    assert 3 <= done < STEPS
    assert (folder / "checkpoints" / f"step-{done:06d}" / "manifest.json").is_file()
    before, _, command = said.rstrip("\n").partition("resume with: ")
    assert before == f"stateset-agents: stopped after step {done} of {STEPS}; "
    program, verb, *arguments = shlex.split(command)
    assert (program, verb) == ("stateset-agents", "train")
    with training(desk, *arguments) as run:
        assert run.wait(120) == 0, errors_of(run)
    assert_same(left_by(folder), undisturbed)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Part by part, so that a failure says which part differs and not all its bytes."""
    assert [name for name in other if one[name] != other[name]] == []


def test_the_comparison_sees_one_bit(undisturbed: dict[str, Any]) -> None:
    flipped = bytearray(undisturbed["weights"])
    flipped[-1] ^= 1
    with pytest.raises(AssertionError, match="weights"):
        assert_same({**undisturbed, "weights": bytes(flipped)}, undisturbed)
    assert torch.get_num_threads() == undisturbed["state"]["machine"]["threads"] == 1
