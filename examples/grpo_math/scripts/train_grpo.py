"""Train on problems: `train_grpo.py --config ../configs/grpo_math.yaml --output-dir runs/grpo-math`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from stateset_agents import StatesetError

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT))

from grpo.trainer import train  # noqa: E402  # the folder above is put on the path first


def main() -> None:
    """Print before and after, and where the model is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(PROJECT / "configs" / "grpo_math.yaml"))
    parser.add_argument("--output-dir", default="runs/grpo-math")
    parser.add_argument("--wandb-project", help="log to Weights & Biases, too")
    parser.add_argument("--max-steps", type=int)
    chosen = parser.parse_args()
    changes = {} if chosen.max_steps is None else {"training.max_steps": chosen.max_steps}
    try:
        final = asyncio.run(train(chosen.config, chosen.output_dir, chosen.wandb_project, **changes))
    except StatesetError as error:  # a setting or a library that is missing: one line, no traceback
        sys.exit(f"error: {error}")
    print(f"model: {final}")


if __name__ == "__main__":
    main()
