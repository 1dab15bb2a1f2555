"""Measure a model on problems: `evaluate.py --model-path runs/grpo-math/final`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from stateset_agents import AgentConfig, MultiTurnAgent, StatesetError
from stateset_agents.evaluation.evaluator import evaluate

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from grpo.data import problems  # noqa: E402  # the folder above is put on the path first
from grpo.rewards import reward  # noqa: E402  # likewise
from grpo.utils import analyse  # noqa: E402  # likewise


async def measure(model: str, dataset: str) -> dict[str, object]:
    """Success on the file's test split with its interval, and what the replies look like."""
    environment = problems(dataset)
    async with MultiTurnAgent(AgentConfig(model_name=model, max_new_tokens=64)) as agent:
        result = await evaluate(agent, environment, reward(), environment.scenarios("test"), temperature=1.0)
    played = [trajectory for group in result.groups for trajectory in group.trajectories]
    return {"success": result.success, "interval": result.interval, **analyse(played)}


def main() -> None:
    """Print the result, and keep it in `--output-dir`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", default="embedded:reasoner")
    parser.add_argument("--dataset-path", default=str(PROJECT / "data" / "math_problems.json"))
    parser.add_argument("--output-dir", type=Path, default=Path("runs/grpo-math"))
    chosen = parser.parse_args()
    try:
        measured = asyncio.run(measure(chosen.model_path, chosen.dataset_path))
    except StatesetError as error:
        sys.exit(f"error: {error}")
    result = json.dumps(measured, indent=2)
    chosen.output_dir.mkdir(parents=True, exist_ok=True)
    (chosen.output_dir / "evaluation.json").write_text(result, encoding="utf-8")
    print(result)


if __name__ == "__main__":
    main()
