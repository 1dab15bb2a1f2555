"""`--endpoint`: a chat model behind a URL in the place of one that runs here; `evaluate`, `compare`."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stateset_agents.cli.output import display_path
from stateset_agents.types.errors import ConfigurationError

if TYPE_CHECKING:
    from stateset_agents.core.rollout.endpoint_agent import EndpointAgent
    from stateset_agents.evaluation.kept_conversations import KeptConversations
    from stateset_agents.training.experiment import EvaluationConfig, ExperimentConfig


_OPTIONS: Sequence[tuple[str, dict[str, Any]]] = (
    (
        "--api-key-env",
        {"metavar": "NAME", "help": "environment variable of its key (default OPENAI_API_KEY)"},
    ),
    ("--timeout", {"type": float, "metavar": "SECONDS", "help": "for one try of an answer (default 300)"}),
    ("--price-in", {"type": float, "metavar": "P", "help": "of a million tokens that it reads"}),
    ("--price-out", {"type": float, "metavar": "P", "help": "of a million tokens that it writes"}),
    ("--conversations", {"metavar": "FILE", "help": "where what it said is kept, to go on from"}),
    (
        "--drop-thoughts",
        {"action": "store_true", "default": None, "help": "do not send its thoughts back to it"},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What the options say of one endpoint."""

    url: str
    model: str
    api_key_env: str
    timeout: float
    prices: tuple[float, float] | None
    """Of a million tokens read, and of a million written."""
    send_thoughts: bool
    conversations: str | None
    """The file, where one is named."""

    def agent(self, config: ExperimentConfig, settings: EvaluationConfig) -> EndpointAgent:
        """With persona, prompt and limits of the file's agent, and as many requests at once as
        conversations."""
        from stateset_agents.backends.openai.client import ChatClient
        from stateset_agents.core.rollout.endpoint_agent import EndpointAgent

        client = ChatClient(
            self.url,
            self.model,
            api_key_env=self.api_key_env,
            timeout=self.timeout,
            max_concurrent=settings.max_concurrent,
        )
        return EndpointAgent(client, config.agent, send_thoughts=self.send_thoughts)

    def file(self, agent: EndpointAgent, played: Mapping[str, Any]) -> Path:
        """Where the conversations are kept; unless it is named, one file for each way of playing them."""
        if self.conversations is not None:
            return Path(self.conversations)
        identity = json.dumps({**agent.identity, **played}, sort_keys=True, default=str)
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.model).strip("-.") or "model"
        return Path("evaluations") / f"{name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}.jsonl"

    def summary(self, agent: EndpointAgent, kept: KeptConversations) -> dict[str, Any]:
        """As JSON has it: what was asked for, over all calls that wrote the file."""
        spent = kept.spent
        summary: dict[str, Any] = {"url": agent.client.url, **asdict(spent)}
        if self.prices is not None:
            price_in, price_out = self.prices
            cost = spent.cost(price_in, price_out)
            summary |= {"price_in": price_in, "price_out": price_out, "cost": round(cost, 6)}
        return {**summary, "conversations": display_path(kept.path), "num_played_before": kept.num_found}


def add_endpoint_options(parser: argparse.ArgumentParser, *sides: str) -> None:
    """`--endpoint` and what belongs to it; `sides`: "-a" and "-b" of two models, whose help is short."""
    names = ", ".join(f"{name}-a" for name, _ in _OPTIONS)
    group = parser.add_argument_group(
        "a model behind an endpoint", f"with {names} as of evaluate, and -b likewise" if sides else None
    )
    for side in sides or ("",):
        group.add_argument(
            f"--endpoint{side}",
            metavar="URL",
            help="OpenAI-compatible, the part before /chat/completions; the model is as it calls it",
        )
        for name, settings in _OPTIONS:
            group.add_argument(f"{name}{side}", **settings | ({"help": argparse.SUPPRESS} if side else {}))


def endpoint_of(args: argparse.Namespace, model: str | None, side: str = "") -> Endpoint | None:
    """What the options say; None without `--endpoint`.

    Raises ConfigurationError for options that need it, and for one without a model.
    """
    given = {name: getattr(args, f"{name}{side}"[2:].replace("-", "_")) for name, _ in _OPTIONS}
    url = getattr(args, f"endpoint{side}".replace("-", "_"))
    if url is None:
        for name, value in given.items():
            if value is not None:
                raise ConfigurationError(f"{name}{side} is of an endpoint: give --endpoint{side} URL too")
        return None
    if model is None:
        raise ConfigurationError(f"--endpoint {url} needs --model NAME, the model as the endpoint calls it")
    prices = given["--price-in"], given["--price-out"]
    if (prices[0] is None) is not (prices[1] is None):
        raise ConfigurationError(f"a cost needs both prices: give --price-in{side} and --price-out{side}")
    for name in ("--price-in", "--price-out"):
        if given[name] is not None and not 0 <= given[name] < float("inf"):
            raise ConfigurationError(f"{name}{side} must be a number from 0 on, got {given[name]}")
    out = (
        None
        if args.out is None
        else str(Path(args.out).with_suffix(f"{side.replace('-', '.')}.conversations.jsonl"))
    )
    return Endpoint(
        url=url,
        model=model,
        api_key_env=given["--api-key-env"] or "OPENAI_API_KEY",
        timeout=300.0 if given["--timeout"] is None else given["--timeout"],
        prices=None if prices[0] is None else prices,
        send_thoughts=not given["--drop-thoughts"],
        conversations=given["--conversations"] or out,
    )


def endpoint_lines(result: Mapping[str, Any]) -> list[str]:
    """What was asked of the endpoint and where its conversations are; or nothing."""
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


def how_to_go_on(argv: Sequence[str]) -> str:
    """For who has interrupted it."""
    command = shlex.join(["stateset-agents", *argv])
    return f"interrupted; what had ended is kept, and is not played again by: {command}"
