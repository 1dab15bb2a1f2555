"""`stateset-agents evaluate`: success of a model on an environment's held-out scenarios."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli import numeric
from stateset_agents.cli.measure.endpoint import (
    Endpoint,
    add_endpoint_options,
    endpoint_lines,
    endpoint_of,
    how_to_go_on,
)
from stateset_agents.cli.output import (
    bounds,
    check_writable,
    exclusions,
    floors,
    percent,
    print_result,
    rate,
    table,
)
from stateset_agents.cli.run_settings import is_control, overrides
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.evaluation.evaluator import Evaluation
    from stateset_agents.training.experiment import ExperimentConfig


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("evaluate", help="measure a model on held-out scenarios")
    parser.add_argument("config", help="YAML file or run folder: environment, reward, evaluation")
    parser.add_argument(
        "--model",
        help="instead of the file's agent.model_name, or of what the run trained: a model, checkpoint or run",
    )
    add_options(parser)
    add_endpoint_options(parser)
    parser.set_defaults(run=run)


def add_options(parser: argparse.ArgumentParser) -> None:
    """How a model is measured; `compare` has them too."""
    parser.add_argument("--temperature", type=float, help="of sampling; 0 is greedy (default 1)")
    parser.add_argument("--episodes", type=int, help="held-out scenarios to play; all when not given")
    parser.add_argument("--tries", type=int, help="of each scenario, for pass@k and pass^k (default 1)")
    parser.add_argument("--seed", type=int, help="of users and sampling (default: the file's, or 0)")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", metavar="FILE", help="write that object to a file")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when it could be measured."""
    if is_control(args.config):
        return numeric.evaluate(args)
    of_run = args.config if Path(args.config).is_dir() else None
    endpoint = endpoint_of(args, args.model)
    config = experiment(args, None if endpoint else args.model or of_run)
    check_writable(args.out)
    try:
        result = event_loop.run(play(config, temperature(args), endpoint))[1]
    except KeyboardInterrupt:
        if endpoint is None:
            raise
        print(f"stateset-agents: {how_to_go_on(args.argv)}", file=sys.stderr)
        return 130
    print_result(result, args, "\n".join(_lines(result)))
    return 0


def experiment(args: argparse.Namespace, model: str | None) -> ExperimentConfig:
    """What the file and the options say, of `model` where it is given."""
    from stateset_agents.training.experiment import load_experiment

    temperature(args)
    named = {
        "agent.model_name": model,
        "evaluation.episodes": args.episodes,
        "evaluation.tries": args.tries,
        "evaluation.seed": args.seed,
    }
    return load_experiment(args.config, overrides(args.set, named))


def temperature(args: argparse.Namespace) -> float:
    """Of the options. Raises ConfigurationError for one below 0."""
    if args.temperature is None:
        return 1.0
    if not args.temperature >= 0:
        raise ConfigurationError(f"--temperature must be at least 0 (greedy), got {args.temperature}")
    return float(args.temperature)


async def play(
    config: ExperimentConfig, temperature: float, endpoint: Endpoint | None = None
) -> tuple[Evaluation, dict[str, Any]]:
    """The agent, or the endpoint's model, on the held-out scenarios; the second is what JSON has of it."""
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.evaluation.evaluator import evaluate, held_out
    from stateset_agents.evaluation.floors import with_floors
    from stateset_agents.evaluation.kept_conversations import KeptConversations
    from stateset_agents.training.components import make_environment, make_reward
    from stateset_agents.training.experiment import EvaluationConfig

    settings = config.evaluation or EvaluationConfig()
    environment, reward_fn = make_environment(config.environment), make_reward(config.reward)
    scenarios = held_out(environment, settings.split, settings.episodes)
    limits = replace(config.training.rollout_limits(), max_concurrent=settings.max_concurrent)
    measured = partial(
        evaluate,
        environment=environment,
        reward_fn=reward_fn,
        scenarios=scenarios,
        tries=settings.tries,
        temperature=temperature,
        seed=settings.seed,
        limits=limits,
    )
    if endpoint is None:
        async with MultiTurnAgent(config.agent) as local:
            evaluation = await measured(local)
        model, asked = config.agent.model_name, {}
    else:
        agent = endpoint.agent(config, settings)
        played = {"environment": dict(config.environment), "split": settings.split}
        how = {"seed": settings.seed, "temperature": temperature, "tries": settings.tries}
        file = endpoint.file(agent, {**played, **how})
        with KeptConversations(file, identity=played, usage=lambda: agent.usage) as kept:
            evaluation = await measured(agent, kept=kept)
        model, asked = endpoint.model, {"endpoint": endpoint.summary(agent, kept)}
    evaluation = await with_floors(evaluation, environment, scenarios, seed=settings.seed, limits=limits)
    return evaluation, {"model": model, **evaluation.summary(), **asked}


def _lines(result: Mapping[str, Any]) -> list[str]:
    of = f"n = {result['n']}" + (f", {result['tries']} tries of each scenario" if result["tries"] > 1 else "")
    lines = [
        f"{result['model']} at temperature {result['temperature']}: {rate(result)}, {of}",
        *floors(result),
    ]
    rows: list[tuple[str, str, Any]] = [
        (f"pass@{k}, pass^{k}", f"{percent(estimate)}   {percent(result['pass_hat'][k])}", estimate["n"])
        for k, estimate in result.get("pass_at", {}).items()
    ]
    if "twins" in result:
        rows.append(("twins, both right", percent(result["twins"]), result["twins"]["n"]))
    for kind in ("parts", "families"):
        rows += [
            (name, percent({"value": estimate["success"], **estimate}), _with_floors(result, kind, name))
            for name, estimate in result.get(kind, {}).items()
        ]
    violations = result.get("violations", {}).items()
    rows += [(f"broken: {rule}", percent(estimate), estimate["n"]) for rule, estimate in violations]
    if "user_miss" in result:
        miss = result["user_miss"]
        rows.append(("user_miss", f"{miss['value']:.2f}{bounds(miss['interval'], '.2f')}", miss["n"]))
    if result["mean_reward"] is not None and result["success"] is not None:
        reward = f"{result['mean_reward']:.3f}{bounds(result['reward_interval'], '.3f')}"
        rows.append(("mean reward", reward, result["num_scored"]))
    lines += [*exclusions(result), *endpoint_lines(result)]
    return lines + table([(name, number, f"n = {n}") for name, number, n in rows])


def _with_floors(result: Mapping[str, Any], kind: str, name: str) -> str:
    """`19  (idle 100.0%, transfer_at_once 100.0%)`: how many, and what agents got that know nothing."""
    got = [
        f"{agent} {floor[kind][name]['success']:.1%}"
        for agent, floor in result.get("floors", {}).items()
        if name in floor[kind]
    ]
    shown = f"  ({', '.join(got)})" if got else ""
    return f"{result[kind][name]['n']}{shown}"
