"""`stateset-agents evaluate`: success of a model on an environment's held-out scenarios."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from stateset_agents.cli.train import overrides

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("evaluate", help="measure a model on held-out scenarios")
    parser.add_argument("config", help="YAML file or a run's config.yaml: environment, reward, evaluation")
    parser.add_argument(
        "--model", help="instead of the file's agent.model_name, e.g. a checkpoint's model folder"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling; 0 is greedy (default 1)")
    parser.add_argument("--episodes", type=int, help="held-out scenarios to play; all when not given")
    parser.add_argument("--seed", type=int, default=0, help="of users and sampling")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, profile=None, max_steps=None, output_dir=None, no_eval=False)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when it could be measured."""
    from stateset_agents.training.experiment import load_experiment

    seed, args.seed = args.seed, None
    config = load_experiment(args.config, overrides(args))
    if args.model is not None:
        agent = config.agent.model_copy(update={"model_name": args.model})
        config = config.model_copy(update={"agent": agent})
    result = asyncio.run(_evaluate(config, args, seed))
    print(json.dumps(result, indent=2) if args.json else _text(result))
    return 0


async def _evaluate(config: Any, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    from stateset_agents.evaluation.evaluator import evaluate, held_out
    from stateset_agents.training.experiment import EvaluationConfig, Experiment

    trainer = Experiment(config).trainer
    settings = config.evaluation or EvaluationConfig()
    scenarios = held_out(trainer.environment, settings.split, args.episodes or settings.episodes)
    async with trainer.agent as agent:
        result = await evaluate(
            agent,
            trainer.environment,
            trainer.reward_fn,
            scenarios,
            temperature=args.temperature,
            seed=seed,
            max_concurrent=settings.max_concurrent,
        )
    return {"model": config.agent.model_name, **result.summary()}


def _text(result: dict[str, Any]) -> str:
    low, high = result["interval"]
    lines = [
        f"{result['model']} at temperature {result['temperature']}: "
        f"success {result['success']:.1%} [{low:.1%}, {high:.1%}], n = {result['n']}"
    ]
    lines += [
        f"  {name:16} {one['success']:.1%}  (n = {one['n']})" for name, one in result["families"].items()
    ]
    return "\n".join(lines)
