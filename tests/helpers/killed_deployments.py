"""A deployment whose process is killed between any two statements, and one that nobody disturbs.

    python killed_deployments.py FOLDER KILLS CONVERSATIONS

The caller does one step after another and repeats the one that it got no answer to. Prints JSON: how many
were killed and what both journals hold in the end.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stateset_agents.deployment.controller import DeploymentController, start_deployment
from stateset_agents.deployment.guards import Answer
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan

PLAN = DeploymentPlan(
    stages=(0.3, 0.6),
    shadow_answers=5,
    hold_seconds=20,
    hold_outcomes=10,
    outcome_timeout=40,
    salt="killed deployments",
)

Step = tuple[str, int]


def steps(conversations: int) -> Iterator[Step]:
    """Each conversation is assigned, answered and, unless it is a seventh one, reported when four more have
    come; and it goes on once."""
    for number in range(conversations):
        yield "assign", number
        yield "answer", number
        if number >= 4:
            if number % 7:
                yield "report", number - 4
            yield "assign", number - 4


def do(step: Step, controller: DeploymentController) -> str:
    """One step; what the caller learns from it."""
    kind, number = step
    name = f"conversation {number}"
    if kind == "assign":
        return controller.assign(name).arm
    if kind == "answer":
        arm = "candidate" if controller.state.mode == "shadow" else None
        controller.record_answer(name, 0, Answer(seconds=random.Random(number).random()), arm=arm)
        return ""
    is_candidate = controller.assign(name).arm == "candidate"
    controller.report_outcome(
        name, success=float(random.Random(name).random() < (0.4 if is_candidate else 0.9))
    )
    return ""


def begin(path: Path) -> None:
    with Journal(path) as journal:
        start_deployment(journal, candidate="new", baseline="old", plan=PLAN, who="ann", clock=lambda: 0.0)


def open_at(path: Path, time: Callable[[], float], kill_at: int | None) -> DeploymentController:
    journal = Journal(path)
    if kill_at is not None:
        left = kill_at

        def on_statement(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        journal._connection.set_trace_callback(on_statement)
    return DeploymentController(journal, "0001", clock=time)


def run(
    path: Path, todo: list[Step], first: int, kill_at: int | None, on_done: Callable[[str], None]
) -> None:
    """Do the steps from `first` on; the clock shows the number of the step."""
    now = float(first)
    controller = open_at(path, lambda: now, kill_at)
    for index in range(first, len(todo)):
        now = float(index)
        on_done(do(todo[index], controller))


def left_by(path: Path) -> dict[str, Any]:
    """What a journal holds, to the bit."""
    with Journal(path) as journal:
        controller = DeploymentController(journal, "0001", clock=lambda: 1e9)
        evidence = controller.ledger.evidence
        return {
            "hashes": controller.hashes,
            "mode": controller.state.mode,
            "share": controller.state.share,
            "moves": [f"{move.mode} {move.share:g}" for move in controller.moves()],
            "wealth": [evidence.promote.log_wealth.hex(), evidence.roll_back.log_wealth.hex()],
            "outcomes": evidence.num_outcomes,
            "rows": dict(controller.ledger.counts),
        }


def killed(path: Path, todo: list[Step], first: int, kill_at: int | None) -> tuple[bool, list[str]]:
    """Was a process killed that worked from `first` on, and what the caller had learned by then."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        run(path, todo, first, kill_at, lambda said: void(os.write(write, f"{said}\n".encode())))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        learned = answers.read().split("\n")[:-1]
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"the process at step {first} ended by itself with {os.WEXITSTATUS(status)}")
    return os.WIFSIGNALED(status), learned


def void(_: object) -> None:
    """Drop a value."""


def main() -> None:
    folder, kills, conversations = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    todo = list(steps(conversations))
    undisturbed: list[str] = []
    for name in ("whole", "killed"):
        begin(folder / name)
    run(folder / "whole", todo, 0, None, undisturbed.append)
    dice, path, learned, done = random.Random(7), folder / "killed", list[str](), 0
    while len(learned) < len(todo):
        was_killed, more = killed(path, todo, len(learned), dice.randint(1, 60) if done < kills else None)
        learned += more
        done += was_killed
        assert learned == undisturbed[: len(learned)], f"after kill {done}: an arm changed"
    print(json.dumps({"kills": done, "whole": left_by(folder / "whole"), "killed": left_by(path)}))


if __name__ == "__main__":
    main()
