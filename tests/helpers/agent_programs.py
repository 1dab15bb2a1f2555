"""Conversations with the programs of examples/agents, and what they were refused."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from engines import make_engine
from repository_paths import ROOT
from warm_python import of_another

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.environments.programs import rollout_endpoint
from stateset_agents.training.components import make_environment, make_reward
from stateset_agents.training.experiment import load_experiment
from stateset_agents.types.trajectory import Trajectory

__all__ = ["FOLDER", "NAMES", "Played", "play", "started_warm", "train"]

FOLDER = ROOT / "examples" / "agents"
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@dataclass
class Played:
    """Conversations of one program."""

    talks: list[Trajectory]
    refused: list[str]
    """Answers of the endpoint with a status from 400 on."""
    seconds: float
    paths: Counter[str] = field(default_factory=Counter)
    """Requests by dialect."""


@contextmanager
def watched(refused: list[str], paths: Counter[str]) -> Iterator[None]:
    """Every answer of the endpoints that start meanwhile is looked at."""
    inner = rollout_endpoint.api_error_middleware

    async def watching(http: Any, handler: Any) -> Any:
        answer = await inner(http, handler)
        paths[http.path.partition("/v1/")[2]] += 1
        if answer.status >= 400:
            refused.append(f"{http.method} {http.path.partition('/v1')[2]}: {answer.status} {answer.text}")
        return answer

    with patch.object(rollout_endpoint, "api_error_middleware", watching):
        yield


async def play(
    name: str, num_scenarios: int, num_generations: int, command: Sequence[str] | None = None
) -> Played:
    """Conversations of a program with the agent of its YAML file, sampled as in training; `command` in place
    of the file's."""
    config = load_experiment(FOLDER / f"{name}.yaml")
    environment = make_environment({**config.environment, **({"command": list(command)} if command else {})})
    refused: list[str] = []
    paths: Counter[str] = Counter()
    began = time.monotonic()
    with watched(refused, paths):
        async with MultiTurnAgent(config.agent) as agent:
            engine = make_engine(
                agent,
                environment,
                make_reward(config.reward),
                num_generations=num_generations,
                episode_retries=0,
                turn_timeout=120.0,
                max_concurrent=4,
            )
            groups = await engine.rollout(environment.scenarios("train")[:num_scenarios], seed=0, step=0)
    talks = [talk for group in groups for talk in group.trajectories]
    return Played(talks, refused, time.monotonic() - began, paths)


def train(name: str, folder: Path, command: Sequence[str]) -> tuple[float, float]:
    """Train as its YAML file says, with `command` for the file's; greedy success before and after."""
    subprocess.run(
        [
            *(sys.executable, "-m", "stateset_agents", "train", str(FOLDER / f"{name}.yaml")),
            *("--output-dir", str(folder), "--set", f"environment.command={json.dumps(command)}"),
        ],
        check=True,
    )
    (summary,) = folder.glob("*/summary.json")
    measured = json.loads(summary.read_text())
    return measured["before"]["greedy"], measured["after"]["greedy"]


@contextmanager
def started_warm(name: str) -> Iterator[list[str]]:
    """The command of a program that is forked from a process which has its imports: they take seconds."""
    python, file = load_experiment(FOLDER / f"{name}.yaml").environment["command"]
    modules = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
    modules.discard("shop")
    with of_another(Path(python), sorted(modules)) as words:
        yield [*words, file]
