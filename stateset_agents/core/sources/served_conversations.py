"""Conversations that were served, as scenarios of the next training and as examples to imitate.

    (what a server saved, how it ended)  ->  one line in the format of `chat_logs`, without personal text

The opening, the user's later words and what tools gave are the scenario. The replies in it were sampled by
other weights: they are no on-policy samples, and no training takes them as such. `success` stands in a line
only where somebody reported it.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stateset_agents.core.sources.personal_text import Redactor
from stateset_agents.core.sources.row_shapes import read_json
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall

SOURCE = "served"
"""Value of `source` in each line; it says that personal text was taken out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedOutcome:
    """The outcome of one conversation in a deployment."""

    deployment: str
    arm: str
    """baseline or candidate: who answered."""
    success: float | None
    """0 to 1; None where nobody reported it, in time or at all."""
    reward: float | None = None
    is_moved: bool = False
    """The candidate began it, and the baseline went on after a rollback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Harvest:
    """The scenarios made of a file of served conversations, with counts."""

    scenarios: tuple[dict[str, Any], ...]
    removed: Mapping[str, int]
    """Number of replacements by kind of personal text."""
    left_out: Mapping[str, int]
    """Number of conversations that were left out, by reason."""


def scenarios_from(
    conversations: Iterable[tuple[str, Sequence[Message], Sequence[Mapping[str, Any]]]],
    outcomes: Mapping[str, ServedOutcome],
) -> Harvest:
    """Each conversation (id, messages, tools) that `outcomes` knows, as a scenario.

    Left out are those that no deployment shared out, those without words of a user, and those with pictures,
    of which nobody can say what they show.
    """
    scenarios: list[dict[str, Any]] = []
    removed: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for name, messages, tools in conversations:
        outcome = outcomes.get(name)
        if outcome is None:
            left_out["not shared out by a deployment"] += 1
        elif any(message.images for message in messages):
            left_out["with pictures"] += 1
        elif not all(words := [message.content.strip() for message in messages if message.role == "user"]):
            left_out["with a blank message of a user"] += 1
        elif not words:
            left_out["without words of a user"] += 1
        else:
            redactor = Redactor()
            scenarios.append(_scenario(name, messages, tools, outcome, redactor))
            removed += redactor.counts
    return Harvest(scenarios=tuple(scenarios), removed=dict(removed), left_out=dict(left_out))


def warm_start(scenarios: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for `sft`: conversations that succeeded and were answered by one arm from first turn to last.

    Their messages end with the last reply that says or calls something.
    """
    rows = []
    for scenario in scenarios:
        messages = through_last_reply(scenario["messages"])
        if scenario.get("success") is True and not scenario.get("moved") and messages:
            row = {"messages": messages, "source": SOURCE}
            rows.append({**row, "tools": scenario["tools"]} if "tools" in scenario else row)
    return rows


def through_last_reply(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages up to the last reply that says or calls something."""
    kept = list(messages)
    while kept and not (
        kept[-1]["role"] == "assistant" and (kept[-1]["content"].strip() or kept[-1].get("tool_calls"))
    ):
        kept.pop()
    return kept


def expect_served(lines: Sequence[Mapping[str, Any]], of: str) -> None:
    """Raises ConfigurationError unless all lines are of `scenarios_from`."""
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, Mapping) or line.get("source") != SOURCE:
            raise ConfigurationError(
                f"{of}, conversation {number} is not as `import --as served` writes it, which takes "
                "out personal text: give it the file first"
            )


def _scenario(
    name: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    outcome: ServedOutcome,
    redactor: Redactor,
) -> dict[str, Any]:
    scenario: dict[str, Any] = {
        "id": f"served-{hashed_id(f'{outcome.deployment} {name}')}",
        "family": SOURCE,
        "source": SOURCE,
        "deployment": outcome.deployment,
        "arm": outcome.arm,
        "messages": [
            redacted(message, redactor).to_record() | ({} if message.is_example else {"weight": 0})
            for message in messages
        ],
    }
    if tools:
        scenario["tools"] = redactor.value([dict(tool) for tool in tools])
    if outcome.success in (0.0, 1.0):
        scenario["success"] = outcome.success == 1.0
    elif outcome.success is not None:
        scenario["reported_success"] = outcome.success
    if outcome.reward is not None:
        scenario["reported_reward"] = outcome.reward
    if outcome.is_moved:
        scenario["moved"] = True
    return scenario


def hashed_id(name: str) -> str:
    """A digest of an id, which may be a person's name."""
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()


def redacted(message: Message, redactor: Redactor) -> Message:
    """The message without personal text, in its words, thoughts, calls and results."""

    def text(given: str | None) -> Any:
        return given and redactor.text(given)

    def clean(call: ToolCall) -> ToolCall:
        arguments = redactor.value(dict(call.arguments))
        return replace(call, arguments=arguments, error=text(call.error), written=text(call.written))

    content, reasoning = _content(message.content, redactor), text(message.reasoning)
    name, calls = text(message.name), tuple(map(clean, message.tool_calls))
    return replace(message, content=content, reasoning=reasoning, name=name, tool_calls=calls)


def _content(text: str, redactor: Redactor) -> str:
    """The text without personal text. Results of tools are often JSON: a field that is named as a secret
    goes there, too."""
    value = read_json(text)
    if value is text:
        return redactor.text(text)
    clean = redactor.value(value)
    return text if clean == value else json.dumps(clean, ensure_ascii=False)
