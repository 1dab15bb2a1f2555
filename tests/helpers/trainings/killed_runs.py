"""Trainings of the embedded model that are killed: `from killed_runs import undisturbed, kill_often`.

Each is the command line's `train` in a process of its own, forked from one that has imported torch already:
it is at work after a second, and the moments of kills fall into that work.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.runs.checkpoint_files import Checkpoint, load_checkpoint

__all__ = [
    "RUNS",
    "STEPS",
    "Kills",
    "Training",
    "Whole",
    "assert_same",
    "forks",
    "kill_often",
    "undisturbed",
    "write_runs",
]

STEPS = 8
_PER_STEP, _MEMBERS, _SCENARIOS = 2, 4, 5
"""16 episodes of 5 scenarios: three whole epochs and a part of a fourth."""
_TRAINING: dict[str, Any] = {
    "max_steps": STEPS,
    "num_generations": _MEMBERS,
    "per_device_train_batch_size": _PER_STEP,
    "save_steps": 2,
    "eval_steps": 4,
    "eval_episodes": 4,
}
_LONGEST = 900.0
"""Seconds that anything may take, on a machine that has no time at all."""
RUNS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        "kl_controller": "adaptive",
        "temperature_schedule": "adaptive",
        "num_iterations": 2,
        "log_learner_logprobs": True,
    },
    "critic": {"advantage_estimator": "token_gae", "value_dropout": 0.1, "precision": "bf16"},
    "branches": {"advantage_estimator": "branch", "num_branches": 1, "lr_scheduler_type": "cosine"},
    "compact": {"advantage_estimator": "turn_group"},
    "overlap": {"max_staleness": 1},
}
"""What a checkpoint has to keep differs: a moving coefficient and temperature, a critic, nothing more. The
last is not repeatable bit by bit, but trains each scenario once."""
_COMPACT = {"history": "compact", "compact_room": 60, "compact_prompt": "sum up", "max_context_tokens": 100}
_AGENTS: Mapping[str, Mapping[str, Any]] = {"compact": _COMPACT}
"""Of runs whose conversations have several rows."""


def write_runs(folder: Path) -> None:
    """One settings file for each of RUNS."""
    for name, settings in RUNS.items():
        run = {
            "agent": {"model_name": "embedded:desk", "max_new_tokens": 16, **_AGENTS.get(name, {})},
            "environment": {"name": "retail_desk", "num_train": _SCENARIOS},
            "training": {**_TRAINING, **settings, "run_name": name},
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(run))


@cache
def forks() -> Any:
    """Processes begin as forks of one that has imported what a training needs, and runs nothing."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "stateset_agents.backends.local.backend",
            "stateset_agents.cli.main",
            "stateset_agents.environments.retail_desk",
            "stateset_agents.training.experiment",
            "transformers.models.llama.modeling_llama",
            "killed_runs",
        ]
    )
    return context


def _command(folder: Path, arguments: tuple[str, ...], said: Path) -> None:
    from stateset_agents.cli.main import main

    os.chdir(folder)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.exit(main(["train", *arguments]))


class Training:
    """`stateset-agents train` as a process of its own, killed with the block at the latest."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._said = folder / f"said-{time.monotonic_ns()}.txt"
        self.process = forks().Process(target=_command, args=(folder, arguments, self._said), daemon=True)

    def __enter__(self) -> Training:
        self.process.start()
        self.started = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.close()

    @property
    def said(self) -> str:
        """What it has printed."""
        return self._said.read_text() if self._said.exists() else ""

    @property
    def lives(self) -> bool:
        alive: bool = self.process.is_alive()
        return alive

    def ends(self) -> int | None:
        """Its exit code."""
        self.process.join(_LONGEST)
        code: int | None = self.process.exitcode
        return code

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def hold(self) -> None:
        """Let it stand still; none of its threads goes on when this returns."""
        self.signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any(
            task.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()
        ):
            time.sleep(0.0005)

    def kill(self) -> bool:
        """kill -9; was it alive?"""
        self.process.kill()
        return self.ends() == -signal.SIGKILL

    def until(self, what: Callable[[], bool]) -> bool:
        """Wait until `what()` holds; False where the process ended before."""
        end = time.monotonic() + _LONGEST
        while not what():
            if not self.lives:
                return False
            assert time.monotonic() < end, self.said
            time.sleep(0.0005)
        return True


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A run that nobody disturbed."""

    name: str
    left: Mapping[str, Any]
    checkpoints: Mapping[int, Checkpoint]
    """Every one it ever had."""
    seconds_to_begin: float
    seconds_of_a_step: float


def undisturbed(folder: Path, name: str) -> Whole:
    """Run `name` to its end, keeping all its checkpoints."""
    with Training(
        folder, f"{name}.yaml", "--output-dir", "whole", "--set", "training.save_total_limit=99"
    ) as run:
        path = folder / "whole"
        begun = run.until(lambda: any(path.glob(f"*-{name}/config.yaml")))
        seconds = time.monotonic() - run.started
        assert begun, run.said
        assert run.ends() == 0, run.said
    [path] = path.glob(f"*-{name}")
    checkpoints = {
        step: load_checkpoint(path / "checkpoints" / f"step-{step:06d}") for step in range(2, STEPS + 1, 2)
    }
    return Whole(
        name=name,
        left=left_by(path),
        checkpoints=checkpoints,
        seconds_to_begin=seconds,
        seconds_of_a_step=median(
            line["time/step"] for line in lines(path / "metrics.jsonl") if "time/step" in line
        ),
    )


def lines(file: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; every line must be whole."""
    return [json.loads(line) for line in file.read_text().splitlines()][1:]


def left_by(run: Path) -> dict[str, Any]:
    """All that must be equal bit by bit: weights, optimiser, schedule, what was said and measured."""
    last = run / "checkpoints" / f"step-{STEPS:06d}"
    state = json.loads((last / "state.json").read_text())
    del state["progress"]["train_seconds"]
    timed = ("time", "memory/", "tokens/per_second")
    tensors = {str(file.relative_to(last)): file.read_bytes() for file in last.rglob("*.safetensors")}
    return {
        **tensors,
        "state": {name: state[name] for name in ("optimizer", "progress", "machine")},
        "rollouts": lines(run / "rollouts.jsonl"),
        "tokens": sorted(line["id"] for line in lines(run / "tokens.jsonl")),
        "metrics": [
            {name: value for name, value in record.items() if not name.startswith(timed)}
            for record in lines(run / "metrics.jsonl")
        ],
        "best": os.readlink(run / "checkpoints" / "best"),
        "deterministic": json.loads((run / "summary.json").read_text())["deterministic"],
    }


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Part by part, so that a failure says which part differs and not all its bytes."""
    differing = [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)]
    assert not differing, f"these differ: {differing}"


def assert_each_scenario_is_trained_once(run: Path) -> None:
    """Every scenario once in each epoch, by every member; the last epoch is cut short."""
    records = [
        (line["step"], line["scenario"], line["member"])
        for line in lines(run / "rollouts.jsonl")
        if line["stage"] == "train" and not line["branch_of"]
    ]
    groups = [records[first : first + _MEMBERS] for first in range(0, len(records), _MEMBERS)]
    assert all([record[2] for record in group] == list(range(_MEMBERS)) for group in groups)
    assert all(len({record[:2] for record in group}) == 1 for group in groups)
    played = [group[0][:2] for group in groups]
    ends = [
        (line["epoch"], line["scenario"])
        for line in lines(run / "events.jsonl")
        if line["event"] == "group consumed"
    ]
    assert ends == [(place // _SCENARIOS, scenario) for place, (_, scenario) in enumerate(played)]
    assert [step for step, _ in played] == [1 + place // _PER_STEP for place in range(STEPS * _PER_STEP)]
    everyone = {scenario.id for scenario in RetailDesk(num_train=_SCENARIOS).scenarios("train")}
    for first in range(0, len(played), _SCENARIOS):
        epoch = [scenario for _, scenario in played[first : first + _SCENARIOS]]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) == everyone or len(epoch) < _SCENARIOS


@dataclass
class Kills:
    """What was done to the runs of these settings."""

    all: int = 0
    in_a_write: int = 0
    while_beginning: int = 0
    runs: int = 0
    starts: int = 0


class Killer:
    """Kills a training at moments that its dice choose."""

    def __init__(self, whole: Whole, dice: random.Random) -> None:
        self._whole, self._dice = whole, dice
        self.struck_while_beginning = False

    def strike(self, run: Training, path: Path) -> bool:
        """kill -9 while it begins or within its first steps; False where it ended by itself before."""
        whole, moment = self._whole, self._dice.random()
        self.struck_while_beginning = self._dice.random() < 0.4
        if self.struck_while_beginning:
            time.sleep(moment * whole.seconds_to_begin)
            return run.kill()
        goal = steps_done(path) + self._dice.randrange(4)  # 0: as soon as it has begun
        if not run.until(lambda: steps_done(path) >= goal):
            return False
        time.sleep(moment * whole.seconds_of_a_step)
        return run.kill()

    def strike_in_a_write(self, run: Training, path: Path) -> bool:
        """kill -9 while a checkpoint stands under its temporary name, with so many of its files as the dice
        say; False where it ended by itself before."""
        wanted, self.struck_while_beginning = self._dice.randrange(1, 10), False

        def is_unfinished() -> bool:
            try:
                return sum(1 for _ in path.glob("checkpoints/.step-*.partial/**/*.*")) >= wanted
            except FileNotFoundError:  # renamed to its own name while it was read
                return False

        while True:
            if not run.until(is_unfinished):
                return False
            run.hold()
            if is_unfinished():  # it may have been renamed just before the process stood still
                break
            run.signal(signal.SIGCONT)
        assert run.kill()
        assert is_unfinished()
        return True


def steps_done(run: Path) -> int:
    """Whole lines of steps in metrics.jsonl."""
    file = run / "metrics.jsonl"
    return sum(b'"time/step"' in line for line in file.read_bytes().splitlines()) if file.exists() else 0


def kill_often(folder: Path, whole: Whole, *, kills: int, in_a_write: int, dice: random.Random) -> Kills:
    """Kill runs of these settings so often in all, resume them each time, and compare what they end with.

    After each kill, whatever checkpoint stands is whole and equal to that of the undisturbed run.
    """
    done = Kills()
    while done.all < kills:
        left = [True] * (in_a_write - done.in_a_write)
        left += [False] * (kills - done.all - len(left))
        dice.shuffle(left)
        root = folder / f"killed-{done.runs}"
        done.runs += 1
        _kill_one(folder, root, whole, left[:_MOST_KILLS], dice, done)
        path = the_run(root)
        assert path is not None
        if whole.left["deterministic"]:
            assert_same(left_by(path), whole.left)
        assert_each_scenario_is_trained_once(path)
        debris = [entry.name for entry in (path / "checkpoints").iterdir() if entry.name.startswith(".")]
        assert not debris, debris
    return done


_MOST_KILLS = 12
"""Of one run."""


def _kill_one(
    folder: Path, root: Path, whole: Whole, plan: list[bool], dice: random.Random, done: Kills
) -> None:
    """Begin a run, kill it as planned (True: in a write) and let it end at last."""
    killer = Killer(whole, dice)
    for writing in plan:
        with started(folder, root, whole.name) as run:
            done.starts += 1
            path = the_run(root) or root / f"0001-{whole.name}"
            if not (killer.strike_in_a_write(run, path) if writing else killer.strike(run, path)):
                assert run.ends() == 0, run.said
                return
        done.all += 1
        done.in_a_write += writing
        done.while_beginning += killer.struck_while_beginning
        for step, checkpoint in standing(path).items():
            if whole.left["deterministic"]:
                assert_equal_checkpoints(checkpoint, whole.checkpoints[step])
    with started(folder, root, whole.name) as run:
        done.starts += 1
        assert run.ends() == 0, run.said


def the_run(root: Path) -> Path | None:
    """The run folder that can be resumed: one with settings and logs."""
    found = [path for path in sorted(root.glob("0*")) if (path / "config.yaml").exists()]
    return found[-1] if found else None


def started(folder: Path, root: Path, name: str) -> Training:
    """Resumed, or begun where a kill came before there was anything to resume."""
    path = the_run(root)
    if path is None:
        return Training(folder, f"{name}.yaml", "--output-dir", root.name)
    return Training(folder, "--resume", str(path))


def standing(run: Path) -> dict[int, Checkpoint]:
    """Every checkpoint of a run folder, loaded."""
    return {int(path.name[5:]): load_checkpoint(path) for path in run.glob("checkpoints/step-*")}


def assert_equal_checkpoints(one: Checkpoint, other: Checkpoint) -> None:
    assert one.step == other.step
    for mine, theirs in ((one.weights, other.weights), (one.critic, other.critic)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    moments, others = one.optimizer["optimizer"]["state"], other.optimizer["optimizer"]["state"]
    assert moments.keys() == others.keys()
    assert all(
        torch.equal(moments[index][key], others[index][key]) for index in moments for key in moments[index]
    )
