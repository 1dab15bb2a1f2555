"""`stateset-agents build-embedded`: make a model that ships with this package anew, from recipe to folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stateset_agents.embedded.build import RECIPES
from stateset_agents.types.errors import ConfigurationError


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser(
        "build-embedded", help="make a model that ships, such as embedded:desk, anew"
    )
    parser.add_argument(
        "output", type=Path, help="folder for the model; load it as AgentConfig(model_name=...)"
    )
    parser.add_argument("--model", choices=sorted(RECIPES), default="desk", help="which one (default desk)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of demonstrations, weights and order (default 0)"
    )
    parser.add_argument(
        "--steps", type=int, help="steps of the (first) fine-tuning (default: as the shipped model)"
    )
    parser.add_argument("--dialogues", type=int, help="demonstrations (default: as the shipped model)")
    parser.add_argument(
        "--threads", type=int, default=1, help="same seed and threads, same bytes (default 1)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the folder is written."""
    import torch
    from transformers.utils import logging as transformers_logging

    from stateset_agents.embedded.build import build_embedded

    if args.threads < 1:
        raise ConfigurationError(f"--threads must be at least 1, got {args.threads}")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped there
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)

    def tell(step: int, steps: int, loss: float) -> None:
        if step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {loss:.3f}", flush=True)

    try:
        built = build_embedded(
            args.output,
            model=args.model,
            seed=args.seed,
            steps=args.steps,
            dialogues=args.dialogues,
            on_step=tell,
        )
    finally:
        torch.set_num_threads(before)
    print(
        f"{built.folder}: {built.num_parameters:,} parameters, {built.num_bytes / 1e6:.1f} MB, "
        f"{built.seconds:.0f} s; dialogues of {built.mean_tokens:.0f} tokens on average"
    )
    return 0
