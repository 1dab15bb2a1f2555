"""`stateset-agents evaluate` and `compare`: the success of models on an environment's held-out scenarios."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.algorithms.intervals import interval_text
from stateset_agents.cli import numeric
from stateset_agents.cli.output import (
    OPTIONS,
    add_arguments,
    check_writable,
    display_path,
    exclusions,
    floors,
    percent,
    print_result,
    rate,
    verdict_line,
)
from stateset_agents.cli.run_settings import is_control, overrides
from stateset_agents.runtime import event_loop
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import table
from stateset_agents.types.settings import expect_that

if TYPE_CHECKING:
    from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
    from stateset_agents.evaluation.comparison import Comparison, Paired
    from stateset_agents.evaluation.evaluator import Evaluation
    from stateset_agents.evaluation.kept_conversations import KeptConversations
    from stateset_agents.training.experiment import ExperimentConfig


# ------------------------------------------------------------------------------ a model behind an endpoint

_ENDPOINT: Mapping[str, Mapping[str, Any]] = OPTIONS["of a model behind an endpoint"]["arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One endpoint as the options describe it."""

    url: str
    model: str
    api_key_env: str
    timeout: float
    prices: tuple[float, float] | None
    """The prices of a million tokens read, and of a million written."""
    send_thoughts: bool
    conversations: str | None
    """The file, where one is named."""

    def agent(self, config: ExperimentConfig, max_concurrent: int) -> EndpointAgent:
        """The model as an agent with the persona, prompt and limits of the file's agent; it sends as many
        requests at once as there are conversations."""
        from stateset_agents.backends.openai.client import ChatClient
        from stateset_agents.core.rollout.endpoint_agent import EndpointAgent

        client = ChatClient(
            self.url,
            self.model,
            api_key_env=self.api_key_env,
            timeout=self.timeout,
            max_concurrent=max_concurrent,
        )
        return EndpointAgent(client, config.agent, send_thoughts=self.send_thoughts)

    def file(self, agent: EndpointAgent, played: Mapping[str, Any]) -> Path:
        """The file that keeps the conversations; unless it is named, one for each way of playing them."""
        if self.conversations is not None:
            return Path(self.conversations)
        identity = json.dumps({**agent.identity, **played}, sort_keys=True, default=str)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.model).strip("-.") or "model"
        return Path("evaluations") / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}.jsonl"

    def summary(self, agent: EndpointAgent, kept: KeptConversations) -> dict[str, Any]:
        """The requests, tokens and costs of all calls that wrote the file, as JSON has them."""
        spent = kept.spent
        summary: dict[str, Any] = {"url": agent.client.url, **asdict(spent)}
        if self.prices is not None:
            price_in, price_out = self.prices
            cost = spent.cost(price_in, price_out)
            summary |= {"price_in": price_in, "price_out": price_out, "cost": round(cost, 6)}
        return {**summary, "conversations": display_path(kept.path), "num_played_before": kept.num_found}


def add_options(
    parser: argparse.ArgumentParser, sides: Sequence[str] = ("",), without: Sequence[str] = ()
) -> None:
    """Register the options of a measurement, and of models behind endpoints, `without` some.

    `sides`: "-a" and "-b" of two models, whose help is short.
    """
    measured = OPTIONS["of evaluate and compare"]["arguments"]
    add_arguments(parser, {name: words for name, words in measured.items() if name not in without})
    options = ", ".join(f"{name}-a" for name in _ENDPOINT if name != "--endpoint")
    is_short = len(sides) > 1
    group = parser.add_argument_group(
        "a model behind an endpoint", f"with {options} as of evaluate, and -b likewise" if is_short else None
    )
    for side in sides:
        for name, settings in _ENDPOINT.items():
            hidden = {"help": argparse.SUPPRESS} if is_short and name != "--endpoint" else {}
            if name not in without:
                add_arguments(group, {f"{name}{side}": {**settings, **hidden}})


def endpoint_of(args: argparse.Namespace, model: str | None, side: str = "") -> Endpoint | None:
    """The endpoint of the options; None without `--endpoint`.

    Raises ConfigurationError for options that need it, and for one without a model.
    """
    options = {name: getattr(args, f"{name}{side}"[2:].replace("-", "_")) for name in _ENDPOINT}
    url = options.pop("--endpoint")
    if url is None:
        for name, value in options.items():
            if value is not None:
                raise ConfigurationError(f"{name}{side} is of an endpoint: give --endpoint{side} URL too")
        return None
    if model is None:
        raise ConfigurationError(f"--endpoint {url} needs --model NAME, the model as the endpoint calls it")
    prices = options["--price-in"], options["--price-out"]
    if (prices[0] is None) is not (prices[1] is None):
        raise ConfigurationError(f"a cost needs both prices: give --price-in{side} and --price-out{side}")
    for name in ("--price-in", "--price-out"):
        if options[name] is not None and not 0 <= options[name] < float("inf"):
            raise ConfigurationError(f"{name}{side} must be a number from 0 on, got {options[name]}")
    out = (
        None
        if args.out is None
        else str(Path(args.out).with_suffix(f"{side.replace('-', '.')}.conversations.jsonl"))
    )
    return Endpoint(
        url=url,
        model=model,
        api_key_env=options["--api-key-env"] or "OPENAI_API_KEY",
        timeout=300.0 if options["--timeout"] is None else options["--timeout"],
        prices=None if prices[0] is None else prices,
        send_thoughts=not options["--drop-thoughts"],
        conversations=options["--conversations"] or out,
    )


def endpoint_lines(result: Mapping[str, Any]) -> list[str]:
    """Lines on the endpoint's requests and on where its conversations are; empty without an endpoint."""
    spent = result.get("endpoint")
    if spent is None:
        return []
    estimated = f" ({spent['num_estimated']} answers estimated)" if spent["num_estimated"] else ""
    cost = f", cost {spent['cost']:.4f}" if "cost" in spent else ""
    before = f", {spent['num_played_before']} of them from before" if spent["num_played_before"] else ""
    lines = [
        f"{spent['url']}: {spent['num_requests']:,} requests, {spent['prompt_tokens']:,} tokens read, "
        f"{spent['completion_tokens']:,} written{estimated}{cost}",
        f"conversations: {spent['conversations']}{before}",
    ]
    if result["num_unanswered"]:
        lines.append("the same command plays again what was not answered")
    return lines


def run_evaluate(args: argparse.Namespace) -> int:
    """Exit code 0 when it could be measured."""
    if is_control(args.config):
        return numeric.evaluate(args)
    of_run = args.config if Path(args.config).is_dir() else None
    endpoint = endpoint_of(args, args.model)
    config = experiment(args, None if endpoint else args.model or of_run)
    check_writable(args.out)
    args.keeps = endpoint is not None
    result = event_loop.run(play(config, temperature(args), endpoint))[1]
    print_result(result, args, "\n".join(_lines(result)))
    return 0


def experiment(args: argparse.Namespace, model: str | None) -> ExperimentConfig:
    """The experiment of the file and the options, with `model` where it is given."""
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
    """The temperature of the options. Raises ConfigurationError for one below 0."""
    if args.temperature is None:
        return 1.0
    expect_that(args.temperature >= 0, "--temperature", "be at least 0 (greedy)", args.temperature)
    return float(args.temperature)


def measurement(config: ExperimentConfig, temperature: float) -> partial[Coroutine[Any, Any, Evaluation]]:
    """`evaluator.evaluate` of an agent on the file's held-out scenarios; its keywords say with what."""
    from stateset_agents.evaluation.evaluator import evaluate, held_out
    from stateset_agents.training.components import make_environment, make_reward
    from stateset_agents.training.experiment import EvaluationConfig

    settings = config.evaluation or EvaluationConfig()
    environment = make_environment(config.environment)
    return partial(
        evaluate,
        environment=environment,
        reward_fn=make_reward(config.reward),
        scenarios=held_out(environment, settings.split, settings.episodes),
        tries=settings.tries,
        temperature=temperature,
        seed=settings.seed,
        limits=replace(config.training.rollout_limits(), max_concurrent=settings.max_concurrent),
    )


async def play(
    config: ExperimentConfig, temperature: float, endpoint: Endpoint | None = None
) -> tuple[Evaluation, dict[str, Any]]:
    """The agent, or the endpoint's model, on the held-out scenarios; the second is what JSON has of it."""
    from stateset_agents.core.agent import MultiTurnAgent
    from stateset_agents.evaluation.audit import with_floors
    from stateset_agents.evaluation.kept_conversations import KeptConversations

    measured = measurement(config, temperature)
    with_what = measured.keywords
    if endpoint is None:
        async with MultiTurnAgent(config.agent) as local:
            evaluation = await measured(local)
        model, usage = config.agent.model_name, {}
    else:
        agent = endpoint.agent(config, with_what["limits"].max_concurrent)
        split = "test" if config.evaluation is None else config.evaluation.split
        played = {"environment": dict(config.environment), "split": split}
        how = {name: with_what[name] for name in ("seed", "temperature", "tries")}
        file = endpoint.file(agent, {**played, **how})
        with KeptConversations(file, identity=played, usage=lambda: agent.usage) as store:
            evaluation = await measured(agent, kept=store)
        model, usage = endpoint.model, {"endpoint": endpoint.summary(agent, store)}
    of_floors = {name: with_what[name] for name in ("environment", "scenarios", "seed", "limits")}
    evaluation = await with_floors(evaluation, **of_floors)
    return evaluation, {"model": model, **evaluation.summary(), **usage}


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
        rows.append(("user_miss", f"{miss['value']:.2f}{interval_text(miss['interval'], '.2f')}", miss["n"]))
    if result["mean_reward"] is not None and result["success"] is not None:
        reward = f"{result['mean_reward']:.3f}{interval_text(result['reward_interval'], '.3f')}"
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
    suffix = f"  ({', '.join(got)})" if got else ""
    return f"{result[kind][name]['n']}{suffix}"


# ------------------------------------------------------------------------------ compare
#
# Two run folders are compared by what they recorded, and nothing is played.

SIDES = ("-a", "-b")
_ENDS = ("_a", "_b")
"""The ends of the endpoints' options among the arguments."""
_ONE_SEED = "one seed each: another seed may differ"


def run_compare(args: argparse.Namespace) -> int:
    """Exit code 0 when both could be measured."""
    from stateset_agents.evaluation.comparison import compare

    if is_control(args.config):
        return numeric.compare(args)
    if args.b is None:  # two runs
        args.a, args.b = numeric.two_runs(args, "models")
        if not args.replay and all((Path(run) / "metrics.jsonl").is_file() for run in (args.a, args.b)):
            return _compare_recorded(args)
    elif args.replay:
        raise ConfigurationError("--replay is for two run folders; with a file both models are played anyway")
    check_writable(args.out)
    args.keeps = bool(args.endpoint_a or args.endpoint_b)
    (a, measured_a), (b, measured_b) = event_loop.run(_evaluate_both(args))
    result = compare(a, b)
    a_side, b_side = {**measured_a, "model": args.a}, {**measured_b, "model": args.b}
    summary = {"a": a_side, "b": b_side, "comparison": result.summary()}
    print_result(
        summary,
        args,
        "\n".join([*side_lines("A", a_side), *side_lines("B", b_side), *comparison_lines(result)]),
    )
    return 0


def _compare_recorded(args: argparse.Namespace) -> int:
    """Two runs by the held-out conversations in their folders."""
    from stateset_agents.evaluation.comparison import compare_runs
    from stateset_agents.tracking.run_log import RunLog, differing_settings

    options = ("temperature", "episodes", "tries", "seed", "set")
    played = [name for name in options if getattr(args, name) not in (None, [])]
    played += [name.replace("_", "-") for name, value in vars(args).items() if name[-2:] in _ENDS and value]
    if played:
        raise ConfigurationError(
            f"--{played[0]} is for models that are played: leave it out, or add --replay"
        )
    check_writable(args.out)
    logs = [RunLog.open(args.a), RunLog.open(args.b)]
    result = compare_runs(*logs)
    sides, lines = [], []
    for label, log, name in zip("AB", logs, (args.a, args.b), strict=True):
        with damage_named(log.folder.path):
            sides.append({**log.summary()["after"], "model": name})
            lines += side_lines(label, sides[-1])
    settings = differing_settings([log.config() for log in logs])
    summary = {"a": sides[0], "b": sides[1], "comparison": result.summary(), "settings": settings}
    lines += [*comparison_lines(result), _ONE_SEED, *_setting_lines(settings)]
    print_result(summary, args, "\n".join(lines))
    return 0


def side_lines(label: str, side: Mapping[str, Any]) -> list[str]:
    """Lines on one of two that are compared."""
    line = "; ".join([f"{label}  {side['model']}: {rate(side)}", *floors(side), *exclusions(side)])
    return [line, *(f"   {line}" for line in endpoint_lines(side))]


def _setting_lines(settings: Mapping[str, Sequence[str | None]]) -> list[str]:
    """Lines on the settings that differ, and a warning where the runs are measured by them."""
    if not settings:
        return ["the two runs have the same settings"]
    lines = ["settings that differ, A -> B:"]
    lines += [f"  {name}: {a or 'not set'} -> {b or 'not set'}" for name, (a, b) in settings.items()]
    for section in ("environment", "reward"):
        if any(name.partition(".")[0] == section for name in settings):
            lines.append(f"the {section} differs, so success and reward may not mean the same in both")
    return lines


async def _evaluate_both(args: argparse.Namespace) -> list[tuple[Evaluation, dict[str, Any]]]:
    sides = []
    for model, side in zip((args.a, args.b), SIDES, strict=True):  # both are read before one is played
        endpoint = endpoint_of(args, model, side)
        sides.append((experiment(args, None if endpoint else model), endpoint))
    return [await play(config, temperature(args), endpoint) for config, endpoint in sides]


def comparison_lines(result: Comparison) -> list[str]:
    """Lines on the difference of two, and the verdict."""
    lines = []
    if result.success is not None:
        success = result.success
        p = "p < 0.0001" if success.p_value < 1e-4 else f"p = {success.p_value:.4f}"
        lines.append(f"B - A: success {_change(success)}, sign flips {p}")
        lines.append(
            f"B wins {success.wins}, loses {success.losses}, ties {success.ties} of {success.n} scenarios"
        )
    if result.reward is not None:
        lines.append(
            f"B - A: mean reward {result.reward:+.3f}{interval_text(result.reward_interval, '+.3f')}"
        )
    lines.append(verdict_line(result.verdict, result.reason))
    if result.num_left_out:
        lines.append(f"left out: {result.num_left_out} scenarios that one of them could not play")
    lines += [
        f"  {name:16} {paired.a:6.1%} -> {paired.b:6.1%}  {_change(paired)}  (n = {paired.n})"
        for name, paired in result.families.items()
    ]
    return lines


def _change(paired: Paired) -> str:
    low, high = paired.interval
    return f"{100 * paired.difference:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"
