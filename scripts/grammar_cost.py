"""What a grammar costs: CPU seconds of a training step for each sampled token, by how replies are kept.

    python -m scripts.grammar_cost
    python -m scripts.grammar_cost --repetitions 5

SmolLM2 at the desk, one reply a conversation, 16 conversations a step, one thread. `free` has no grammar,
`words or a call` one that lets both through, `call` one that lets through calls alone. Each way is a process
of its own and takes its turn; of its steps the first is left out. Printed are a way's seconds over those of
`free` in the same turn: median, least and largest.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "examples" / "desk_with_smollm2.yaml"
WAYS: Mapping[str, Mapping[str, Any]] = {
    "free": {},
    "words or a call": {"agent.constrain": "calls"},
    "call": {"agent.constrain": "strict", "environment.tool_choice": "first"},
}


class Clock:
    """CPU seconds and sampled tokens of the steps."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_train_begin(self, trainer: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        now = time.process_time()
        self.steps.append((now - self._began) / metrics["tokens/agent"])
        self._began = now


async def played(changes: Mapping[str, Any], steps: int) -> list[float]:
    """CPU seconds a sampled token, of each step after the first."""
    from stateset_agents.training.experiment import Experiment, load_experiment

    with tempfile.TemporaryDirectory() as folder:
        common = {
            "training.output_dir": folder,
            "training.max_steps": steps,
            "environment.max_turns": 1,
            "training.per_device_train_batch_size": 4,
            "training.num_generations": 4,
            "training.save_steps": 0,
            "training.eval_steps": 0,
            "training.progress": False,
        }
        clock = Clock()
        config = load_experiment(str(FILE), {**common, **changes})
        async with Experiment(config, measures=False, callbacks=[clock]) as experiment:
            await experiment.train()
        return clock.steps[1:]


def child(changes: Mapping[str, Any], steps: int, pipe: Any) -> None:
    """One training in a process of its own."""
    import torch

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    pipe.send(asyncio.run(played(changes, steps)))


def main() -> None:
    """Print each way's ratio."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    chosen = parser.parse_args()
    apart = multiprocessing.get_context("spawn")
    ratios: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(chosen.repetitions):
        seconds = {}
        for way in list(WAYS)[:: -1 if turn % 2 else 1]:
            here, there = apart.Pipe()
            process = apart.Process(target=child, args=(WAYS[way], chosen.steps, there))
            process.start()
            seconds[way] = statistics.median(here.recv())
            process.join()
        for way, each in seconds.items():
            ratios[way].append(each / seconds["free"])
        print(", ".join(f"{way} {1000 * each:.2f} ms a token" for way, each in seconds.items()), flush=True)
    for way, each in ratios.items():
        print(f"{way}: {statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
