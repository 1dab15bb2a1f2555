"""Does an application go on answering while it trains? Prints request latency and event-loop lag.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/event_loop.py --requests 600

An aiohttp server and a training of the embedded model share one process and one event loop; another process
sends 20 requests a second. Steps are made large, so that an update takes longer than a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import tempfile
import time
from collections.abc import Mapping

import aiohttp
from aiohttp import web

from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.core.reward import EnvironmentReward
from stateset_agents.environments.retail_desk import RetailDesk
from stateset_agents.runs.callbacks import Callback
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.trainer import MultiTurnGRPOTrainer

RATE = 20
"""Requests a second."""


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def ask(address: str, requests: int) -> None:
    """The client: asks on the beat, whether or not earlier answers are there; prints its latencies."""
    took: list[float] = []

    async def one(session: aiohttp.ClientSession) -> None:
        started = time.perf_counter()
        async with session.get(address) as answer:
            if answer.status == 200 and (await answer.json())["num_steps"]:
                took.append(time.perf_counter() - started)

    async with aiohttp.ClientSession() as session:
        started = time.perf_counter()
        latencies = []
        for number in range(requests):
            await asyncio.sleep(max(0.0, started + number / RATE - time.perf_counter()))
            latencies.append(asyncio.create_task(one(session)))
        await asyncio.gather(*latencies, return_exceptions=True)
    print(json.dumps(took))


class Updates(Callback):
    """How long each update took, and an event for the first step's end."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun = asyncio.Event()

    async def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note it."""
        self.seconds.append(metrics["time/update"])
        self.begun.set()


async def lags(seconds: list[float]) -> None:
    """How late the loop wakes, every 5 ms."""
    while True:
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        seconds.append(time.perf_counter() - due)


async def main(requests: int, episodes: int) -> None:
    """Serve, train, be asked, and print."""
    agent = MultiTurnAgent(AgentConfig(model_name="embedded:desk", max_new_tokens=48))
    updates, lag = Updates(), [0.0]
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            output_dir=folder,
            max_steps=10_000,
            save_steps=2,
            progress=False,
            num_generations=16,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=episodes // 4,
        )
        trainer = MultiTurnGRPOTrainer(agent, RetailDesk(), EnvironmentReward(), config, callbacks=[updates])

        async def progress(_: web.Request) -> web.Response:
            return web.json_response(trainer.progress.to_json())

        app = web.Application()
        app.router.add_get("/progress", progress)
        runner = web.AppRunner(app)
        async with trainer:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            address = f"http://127.0.0.1:{runner.addresses[0][1]}/progress"
            gc.freeze()  # a collection that walks all of torch and transformers stops the process for 1/4 s
            training = asyncio.create_task(trainer.train())
            await updates.begun.wait()
            watcher = asyncio.create_task(lags(lag))
            client = await asyncio.create_subprocess_exec(
                sys.executable, __file__, "--client", address, "--requests", str(requests),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            output, _ = await client.communicate()
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            await runner.cleanup()
        await training
    took = json.loads(output)
    print(f"updates    {len(updates.seconds)}, of {min(updates.seconds):.2f} to {max(updates.seconds):.2f} s")
    print(f"requests   {requests}, lost {requests - len(took)}")
    for name, values in (("latency", took), ("loop lag", lag)):
        shares = [1000 * percentile(values, share) for share in (0.5, 0.99, 1.0)]
        print(f"{name:10} p50 {shares[0]:.1f} ms, p99 {shares[1]:.1f} ms, worst {shares[2]:.1f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--episodes", type=int, default=32, help="of one step; a multiple of 4")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        asyncio.run(ask(args.client, args.requests))
    else:
        asyncio.run(main(args.requests, args.episodes))
