"""`stateset-agents audit`: what an environment and its reward pay agents that deserve nothing."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.named_environment import named_environment
from stateset_agents.cli.output import bounds, check_writable, percent, print_result, table
from stateset_agents.runtime import event_loop
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

if TYPE_CHECKING:
    from stateset_agents.evaluation.audit import Audit
    from stateset_agents.evaluation.evaluator import Evaluation


def add_parser(subparsers: Any) -> None:
    """Register the verb."""
    parser = subparsers.add_parser("audit", help="play agents that cheat, and say what they are paid")
    parser.add_argument(
        "environment",
        metavar="ENV",
        help="a name (retail_desk, module:Class, '{name: ..., argument: ...}'), a YAML file or a run folder",
    )
    parser.add_argument(
        "--reward",
        help="instead of the file's; a name, module:name or '{name: ..., ...}' (default environment)",
    )
    parser.add_argument("--split", default="test", help="train, validation or test (default)")
    parser.add_argument("--episodes", type=int, default=60, help="scenarios to play, at most (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="of the users (default 0)")
    parser.add_argument("--without", action="append", default=[], metavar="AGENT", help="leave one out")
    parser.add_argument("--max-success", type=float, help="exit 1 where an agent succeeds more often")
    parser.add_argument("--max-reward", type=float, help="exit 1 where an agent's mean reward is higher")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="AGENT=LIMIT",
        help="another limit for one agent, of success and of reward: refuser=0.3 where the right answer "
        "is no in 30 %% of the cases",
    )
    parser.add_argument(
        "--min-scored",
        type=float,
        metavar="SHARE",
        help="exit 1 where a smaller share of an agent's conversations was played and scored (default 0.9)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--out", metavar="FILE", help="write that object to a file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 when an agent got more than a limit or too many of its conversations broke."""
    from stateset_agents.evaluation.audit import MIN_SCORED, expect_limits

    check_writable(args.out)
    allowed = dict(_parse_limit(item) for item in args.allow)
    limits = {"max_success": args.max_success, "max_reward": args.max_reward}
    min_scored = MIN_SCORED if args.min_scored is None else args.min_scored
    expect_limits(**limits, allow=allowed, min_scored=min_scored)  # before anything is played
    result = event_loop.run(_audited(args))
    over, lost = result.over(**limits, allow=allowed), result.lost(min_scored)
    print_result(
        {**result.summary(), "over": over, "lost": lost}, args, "\n".join([*_lines(result), *over, *lost])
    )
    return int(bool(over or lost))


async def _audited(args: argparse.Namespace) -> Audit:
    from stateset_agents.evaluation.audit import audit, degenerate_agents_of
    from stateset_agents.evaluation.evaluator import held_out
    from stateset_agents.training.components import make_environment, make_reward

    named = named_environment(args.environment, args.reward)
    environment, reward_fn = make_environment(named.environment), make_reward(named.reward)
    if args.episodes < 1:
        raise ConfigurationError(f"--episodes must be at least 1, got {args.episodes}")
    available = len(held_out(environment, args.split, None))
    scenarios = held_out(environment, args.split, min(args.episodes, available))
    policies = degenerate_agents_of(environment)
    for name in args.without:
        if name not in policies:
            raise ConfigurationError(
                f"--without {name}: there are {', '.join(policies)}{nearest(name, policies)}"
            )
    return await audit(
        environment,
        reward_fn,
        scenarios,
        policies={name: make for name, make in policies.items() if name not in args.without},
        seed=args.seed,
        limits=named.training.rollout_limits(),
    )


def _parse_limit(item: str) -> tuple[str, float]:
    name, equals, limit = item.partition("=")
    try:
        if equals:
            return name, float(limit)
    except ValueError:
        pass
    raise ConfigurationError(f"--allow takes AGENT=LIMIT such as refuser=0.3, got {item!r}")


def _lines(result: Audit) -> list[str]:
    rows = [("agent", "success", "mean reward", "n")]
    rows += [(name, *_numbers(evaluation)) for name, evaluation in result.policies.items()]
    if result.honest is not None:
        rows.append(("(honest)", *_numbers(result.honest)))
    return [*table(rows, indent=""), _ceiling(result)]


def _numbers(evaluation: Evaluation) -> tuple[str, str, str]:
    success = "no verdict"
    if evaluation.success is not None:
        success = percent({"value": evaluation.success, "interval": evaluation.interval})
    reward = "unscored"
    if evaluation.mean_reward is not None:
        reward = f"{evaluation.mean_reward:+.3f}{bounds(evaluation.reward_interval, '+.3f')}"
    counts = ((evaluation.num_failed, "failed"), (evaluation.num_unscored, "unscored"))
    lost = ", ".join(f"{number} {measure}" for number, measure in counts if number)
    return success, reward, f"{evaluation.n} ({lost})" if lost else str(evaluation.n)


def _ceiling(result: Audit) -> str:
    ceiling = result.ceiling
    parts: Mapping[str, tuple[float | None, str | None]] = {
        "success": (ceiling.success, ceiling.successful),
        "mean reward": (ceiling.reward, ceiling.paid),
    }
    maxima = [f"{name} {value:.3f} ({agent})" for name, (value, agent) in parts.items() if value is not None]
    return "exploit ceiling: " + (", ".join(maxima) or "nothing was judged or scored")
