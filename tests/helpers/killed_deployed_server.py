"""A served deployment whose process is killed between any two statements, and one that nobody disturbs.

    python killed_deployed_server.py FOLDER KILLS CONVERSATIONS

A client asks and reports one step after another, and repeats the one that it got no answer to from the server
that is started next. Prints JSON: how many were killed, and what both journals hold in the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.deployment.controller import DeploymentController
from stateset_agents.deployment.conversations import Deployed
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.serving.server import AgentServer

PLAN = DeploymentPlan(
    stages=(0.3, 0.6), shadow_answers=0, hold_seconds=0, hold_outcomes=10, salt="killed deployments"
)
Step = tuple[str, int]


def steps(conversations: int) -> Iterator[Step]:
    """Each conversation has a turn, another when four more have come, and, unless it is a seventh, an end."""
    for number in range(conversations):
        yield "first", number
        if number >= 4:
            yield "second", number - 4
            yield "report", number - 4


async def serve(path: Path, kill_at: int | None, port_to: int) -> None:
    """Until somebody kills it: the journal's statement number `kill_at`, or the client at the end."""
    journal = Journal(path)
    if kill_at is not None:
        left = kill_at

        def on_statement(_: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        journal._connection.set_trace_callback(on_statement)
    async with (
        MultiTurnAgent(AgentConfig(model_name="old"), backend=ScriptedBackend(lambda _: "baseline")) as old,
        MultiTurnAgent(AgentConfig(model_name="new"), backend=ScriptedBackend(lambda _: "candidate")) as new,
        Deployed(old, new, PLAN, journal) as deployed,
        AgentServer(deployed) as server,
    ):
        os.write(port_to, f"{server.url}\n".encode())
        await asyncio.Event().wait()


def started(path: Path, kill_at: int | None) -> tuple[int, str]:
    """The process, and its URL; "" if it was killed before it listened."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        asyncio.run(serve(path, kill_at, write))
    os.close(write)
    with os.fdopen(read) as answers:
        return child, answers.readline().strip()


def do(step: Step, client: openai.OpenAI) -> str:
    """One step; what the client learns from it."""
    kind, number = step
    name = f"conversation {number}"
    if kind == "report":
        arm = client.with_options(max_retries=0).post(
            "/outcomes", body={"conversation": name, "success": success(name, number)}, cast_to=object
        )
        assert isinstance(arm, dict)
        return ""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    if kind == "second":
        messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
    answer = client.chat.completions.create(model="old", messages=messages, user=name)
    ARMS.setdefault(number, str(answer.choices[0].message.content))
    return str(answer.choices[0].message.content)


ARMS: dict[int, str] = {}
"""Who answered each conversation first."""


def success(name: str, number: int) -> bool:
    return random.Random(name).random() < (0.4 if ARMS[number] == "candidate" else 0.9)


def run(path: Path, todo: list[Step], kills: int) -> tuple[int, list[str]]:
    """How many were killed, and what the client learned."""
    ARMS.clear()
    dice, done, learned = random.Random(7), 0, list[str]()
    while len(learned) < len(todo):
        child, url = started(path, dice.randint(1, 90) if done < kills else None)
        with openai.OpenAI(base_url=url or "http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client:
            try:
                while url and len(learned) < len(todo):
                    learned.append(do(todo[len(learned)], client))
            except openai.APIConnectionError:
                pass
        if len(learned) == len(todo):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            raise SystemExit(f"the server at step {len(learned)} ended by itself with {status}")
        done += len(learned) < len(todo)
    return done, learned


def left_by(path: Path) -> dict[str, Any]:
    """What a journal holds; times aside."""
    with Journal(path) as journal:
        controller = DeploymentController(journal, "0001")
        evidence = controller.ledger.evidence
        return {
            "mode": controller.state.mode,
            "moves": [f"{move.mode} {move.share:g}" for move in controller.moves()],
            "wealth": [evidence.promote.log_wealth.hex(), evidence.roll_back.log_wealth.hex()],
            "outcomes": evidence.num_outcomes,
            "rows": dict(sorted(controller.ledger.counts.items())),
        }


def main() -> None:
    folder, kills, conversations = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    todo = list(steps(conversations))
    _, undisturbed = run(folder / "whole", todo, 0)
    done, learned = run(folder / "killed", todo, kills)
    assert learned == undisturbed, "an arm changed"
    print(
        json.dumps({"kills": done, "whole": left_by(folder / "whole"), "killed": left_by(folder / "killed")})
    )


if __name__ == "__main__":
    main()
