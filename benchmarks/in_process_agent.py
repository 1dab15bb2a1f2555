"""What an agent program in the trainer's process costs, beside an environment of ours.

    .venv/bin/python -m benchmarks.in_process_agent --pairs 8 --conversations 64

Both sides hold the same conversations word for word, with the same model and the same sampled tokens: one as
an environment that does nothing else, one as a program that asks by `openai.AsyncOpenAI`. They are played in
turn, interleaved, so that a machine that becomes slower slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.processors import this_processor
from stateset_agents import AgentConfig, EnvironmentReward, MultiTurnAgent
from stateset_agents.core.computational_engine import ComputationalEngine
from stateset_agents.core.environment import Conversation, Environment, Observation
from stateset_agents.environments.programs.in_process_agent import InProcessAgent
from stateset_agents.runs.session import platform_line
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Trajectory, TrajectoryGroup

SECOND = "and order K28?"


class _Talk:
    """A conversation of an environment as lean as one can be."""

    tools: Sequence[Any] = ()

    def __init__(self, scenario: Scenario) -> None:
        self.opening = scenario.messages()
        self._num_replies = 0

    async def step(self, reply: Message) -> Observation:
        self._num_replies += 1
        if self._num_replies == 2:
            return Observation(terminated=True)
        return Observation(messages=(Message(role="user", content=SECOND),))

    async def outcome(self) -> Outcome:
        return Outcome(reward=0.0)

    def fork(self) -> Conversation:
        raise NotImplementedError

    async def close(self) -> None: ...


class _AsksTwice:
    local = True

    def __init__(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        self._scenarios = [Scenario.from_dict(task) for task in tasks]

    def scenarios(self, split: str) -> Sequence[Scenario]:
        return self._scenarios

    async def start(self, scenario: Scenario, seed: int) -> Conversation:
        return _Talk(scenario)


async def _program(client: Any, scenario: Scenario) -> dict[str, Any]:
    messages: list[Any] = []
    for text in (scenario.opening, SECOND):
        messages.append({"role": "user", "content": text})
        answer = await client.chat.completions.create(model="any", messages=messages)
        messages.append(answer.choices[0].message)
    return {"reward": 0.0}


def _tokens(groups: Sequence[TrajectoryGroup]) -> list[list[int]]:
    talks: list[Trajectory] = [talk for group in groups for talk in group.trajectories]
    return [talk.token_ids for talk in talks]


async def _main(pairs: int, conversations: int, max_new_tokens: int, model: str) -> None:
    tasks = [{"id": f"t{n}", "opening": f"where is order K{n}?"} for n in range(conversations // 8)]
    sides: dict[str, Environment] = {
        "environment": _AsksTwice(tasks),
        "program": InProcessAgent(_program, tasks, local=True),
    }
    clocks = {"wall": time.perf_counter, "CPU": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in sides} for clock in clocks}
    async with MultiTurnAgent(AgentConfig(model_name=model, max_new_tokens=max_new_tokens)) as agent:
        for pair in range(-1, pairs):  # the first warms up
            tokens = {}
            for name, environment in sides.items() if pair % 2 else reversed(sides.items()):
                engine = ComputationalEngine(agent, environment, EnvironmentReward(), num_generations=8)
                began = {clock: read() for clock, read in clocks.items()}
                groups = await engine.rollout(environment.scenarios("train"), seed=0, step=pair + 1)
                if pair >= 0:
                    for clock, read in clocks.items():
                        seconds[clock][name].append((read() - began[clock]) / conversations)
                tokens[name] = _tokens(groups)
            if tokens["environment"] != tokens["program"]:
                raise SystemExit("the two sides held other conversations: no ratio would mean anything")
    print(f"{platform_line()}, {this_processor().key}")
    print(
        f"{model}, {conversations} conversations of 2 replies within {max_new_tokens} tokens, {pairs} pairs"
    )
    for clock, of in seconds.items():
        ours, theirs = of["environment"], of["program"]
        ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
        each = [f"{statistics.median(side) * 1e3:.1f} ms" for side in (ours, theirs)]
        print(
            f"{clock:4} a conversation: environment {each[0]}, program {each[1]}, "
            f"ratio {statistics.median(ratios):.3f} (median; {ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=64, help="a multiple of 8")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--model", default="embedded:desk")
    arguments = parser.parse_args()
    asyncio.run(_main(arguments.pairs, arguments.conversations, arguments.max_new_tokens, arguments.model))
