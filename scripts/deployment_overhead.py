"""What a deployment costs its server: assignment and journal, by the call and as a share of the server's CPU.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/deployment_overhead.py

    OMP_NUM_THREADS=1 .venv/bin/python scripts/deployment_overhead.py --tokens 64

First each of the controller's calls by itself, and in batches of 50 as a busy server makes them; a move,
which is synced to the disk, apart. Then `embedded:desk` serves at most 16 tokens to 50 clients at once, by
itself and as the baseline of a deployment whose candidate gets no conversation, in turns. Each conversation
has one request, and so an assignment and an answer. CPU seconds are of the server's process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import aiohttp

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.deployment.controller import DeploymentController, start_deployment
from stateset_agents.deployment.conversations import Deployed
from stateset_agents.deployment.guards import Answer
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.serving.limits import Limits
from stateset_agents.serving.server import AgentServer

AT_ONCE = 50
GRADUAL = DeploymentPlan(stages=(0.5,), shadow_answers=0, hold_seconds=0, hold_outcomes=10**9)
NOBODY = GRADUAL.model_copy(update={"stages": (1e-12,)})


def percentiles(seconds: list[float]) -> str:
    """`p50 0.12 ms, p99 0.30 ms`."""
    ranked = sorted(seconds)
    p50, p99 = (1000 * ranked[int(share * len(ranked))] for share in (0.5, 0.99))
    return f"p50 {p50:.3f} ms, p99 {p99:.3f} ms"


def timed(name: str, count: int, call: Callable[[int], object], each: int = 1) -> None:
    """`each`: how many conversations one call is for."""
    walls, cpus = [], []
    for number in range(count):
        wall, cpu = time.perf_counter(), time.thread_time()
        call(number)
        walls.append((time.perf_counter() - wall) / each)
        cpus.append((time.thread_time() - cpu) / each)
    cpu_mean = 1e6 * statistics.mean(cpus)
    print(f"{name:44} {percentiles(walls)}; CPU {percentiles(cpus)}, mean {cpu_mean:.0f} us", flush=True)


def calls(folder: Path, count: int) -> None:
    """The controller's calls, one after the other."""
    with Journal(folder / "calls.sqlite") as journal:
        record = start_deployment(journal, candidate="new", baseline="old", plan=GRADUAL, who="script")
        controller = DeploymentController(journal, record.id)
        answer = Answer(seconds=0.5, cost=100.0)

        def batch(number: int) -> None:
            with controller.batch():
                for inner in range(AT_ONCE):
                    controller.assign(f"b{number} {inner}")
            with controller.batch():
                for inner in range(AT_ONCE):
                    controller.record_answer(f"b{number} {inner}", 0, answer)

        def move(number: int) -> None:
            with journal.transaction(durable=True):
                journal.insert("deployments", [f"x{number}", 0.0, "", "", "", "", "", ""])

        timed("assign a new conversation", count, lambda n: controller.assign(f"c{n}"))
        timed("assign a known one", count, lambda n: controller.assign(f"c{n}"))
        timed("record an answer", count, lambda n: controller.record_answer(f"c{n}", 0, answer))
        timed("report an outcome", count, lambda n: controller.report_outcome(f"c{n}", success=n % 2))
        timed("assign and record, 50 together, for each", count // AT_ONCE, batch, each=AT_ONCE)
        timed("a synced transaction, as for a move", 100, move)


async def serve(is_deployed: bool, folder: Path) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    limits = Limits(max_running_per_client=AT_ONCE)
    async with (
        MultiTurnAgent(AgentConfig(model_name="embedded:desk")) as old,
        MultiTurnAgent(AgentConfig(model_name="new"), backend=ScriptedBackend([])) as new,
    ):
        if not is_deployed:
            async with AgentServer(old, limits=limits) as server:
                print(server.url, flush=True)
                await stop.wait()
            return
        with Journal(folder / "served.sqlite") as journal:
            async with (
                Deployed(old, new, NOBODY, journal) as deployed,
                AgentServer(deployed, limits=limits) as server,
            ):
                print(server.url, flush=True)
                await stop.wait()


def cpu_seconds(pid: int) -> float:
    """Of a process so far, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def ask(url: str, first: int, count: int, tokens: int) -> list[float]:
    """Seconds of each of so many requests, 50 at once."""
    numbers, seconds = iter(range(first, first + count)), []

    async def client(http: aiohttp.ClientSession) -> None:
        for number in numbers:
            messages = [{"role": "user", "content": f"where is order K{number}?"}]
            body = {"messages": messages, "max_tokens": tokens, "seed": number}
            since = time.perf_counter()
            async with http.post(f"{url}/chat/completions", json=body) as answer:
                answer.raise_for_status()
                await answer.read()
            seconds.append(time.perf_counter() - since)

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(client(http) for _ in range(AT_ONCE)))
    return seconds


def served(folder: Path, rounds: int, count: int, tokens: int) -> None:
    """Both servers, in turns."""
    command = [sys.executable, __file__, "--serve"]
    servers = {
        name: subprocess.Popen([*command, name, "--folder", str(folder)], stdout=subprocess.PIPE, text=True)
        for name in ("alone", "deployed")
    }
    try:
        urls = {}
        for name, server in servers.items():
            assert server.stdout is not None
            urls[name] = server.stdout.readline().strip()
            asyncio.run(ask(urls[name], 10**6, 2 * AT_ONCE, tokens))  # warm
        cpus: dict[str, list[float]] = {name: [] for name in servers}
        walls: dict[str, list[float]] = {name: [] for name in servers}
        for number in range(rounds):
            for name, server in servers.items():
                before = cpu_seconds(server.pid)
                walls[name] += asyncio.run(ask(urls[name], number * count, count, tokens))
                cpus[name].append((cpu_seconds(server.pid) - before) / count)
        for name in servers:
            print(
                f"{name:10} {1000 * statistics.median(cpus[name]):.3f} CPU ms a request; "
                f"{percentiles(walls[name])}"
            )
        ratios = [with_it / without for without, with_it in zip(cpus["alone"], cpus["deployed"], strict=True)]
        print(
            f"CPU of a deployment: {100 * (statistics.median(ratios) - 1):+.1f} % (median of {rounds} pairs)"
        )
    finally:
        for server in servers.values():
            server.terminate()
            server.wait(60)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="calls, and requests of a round")
    parser.add_argument("--rounds", type=int, default=5, help="of both servers (0: the calls alone)")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer, at most")
    parser.add_argument("--serve", choices=("alone", "deployed"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        asyncio.run(serve(args.serve == "deployed", Path(args.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        calls(Path(folder), args.count)
        if args.rounds:
            served(Path(folder), args.rounds, args.count, args.tokens)


if __name__ == "__main__":
    main()
