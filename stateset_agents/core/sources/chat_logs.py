"""Logged conversations in OpenAI's chat format as scenarios: openings, users' words, what tools gave.

{"messages": [{"role": "user", "content": "where is K27?"}, ...], "tools": [...], "rating": 5}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stateset_agents.core.sources.scenario_files import load_scenarios
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, calls_answered
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive

__all__ = ["chat_scenarios", "read_chats", "scenario_of_chat", "with_shares"]

_HELD_OUT: tuple[Split, ...] = ("validation", "test")
_OURS = ("id", "family", "topic", "split", "context")


def scenario_of_chat(chat: Mapping[str, Any]) -> Scenario:
    """One logged conversation as a scenario.

    The opening is the user's first message. The context gets, where the log has it:

    - `system`: what stood before;
    - `script`: the user's later messages, which `default_user` says again;
    - `recorded`: every tool call with its result, [{"name", "arguments", "content"}, ...];
    - `reference`: the last words of the assistant, for `similarity` or a judge;
    - `tools`: the schemas;
    - what else the line holds (`success`, a rating) as it stands, and the keys of its own `context`.

    `id`, `family` (or `topic`) and `split` are the scenario's. Raises ConfigurationError for what is no
    conversation.
    """
    if not isinstance(chat, Mapping) or not isinstance(chat.get("messages"), Sequence):
        raise ConfigurationError(
            'a logged conversation must be {"messages": [...]}, with the OpenAI chat format'
        )
    messages = [Message.from_openai(message) for message in chat["messages"]]
    user_turns = [index for index, message in enumerate(messages) if message.role == "user"]
    if not user_turns:
        raise ConfigurationError("a logged conversation needs a message of the user")
    system = [message.content for message in messages[: user_turns[0]] if message.role == "system"]
    answers = [message.content for message in messages if message.role == "assistant" and message.content]
    found: dict[str, Any] = {
        "system": "\n\n".join(system),
        "script": [messages[index].content for index in user_turns[1:]],
        "recorded": _recorded(messages),
        "reference": answers[-1] if answers else "",
        "tools": list(chat.get("tools") or ()),
    }
    context = {key: value for key, value in found.items() if value or key == "script"}
    context |= {key: value for key, value in chat.items() if key not in (*_OURS, "messages", "tools")}
    context |= dict(chat.get("context") or {})
    return Scenario.from_dict(
        {
            "id": str(chat.get("id") or _content_id(chat["messages"])),
            "family": str(chat.get("family") or chat.get("topic") or "default"),
            "opening": messages[user_turns[0]].content,
            "split": chat.get("split") or "train",
            "context": context,
        }
    )


def _recorded(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Each call with the content of the tool message that answered it."""
    calls: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not message.tool_calls:
            continue
        answers = []
        for answer in messages[index + 1 :]:
            if answer.role != "tool":
                break
            answers.append(answer)
        numbers = calls_answered(message.tool_calls, answers)
        results = dict(zip(numbers, (answer.content for answer in answers), strict=True))
        calls += [
            {"name": call.name, "arguments": dict(call.arguments), "content": results.get(number)}
            for number, call in enumerate(message.tool_calls)
        ]
    return calls


def _content_id(messages: Any) -> str:
    text = json.dumps([dict(message) for message in messages], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=6).hexdigest()


def read_chats(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; errors name file and line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ConfigurationError(f"cannot read logged conversations from {str(path)!r}: {why}") from error
    chats = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                chats.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ConfigurationError(f"{path}, line {number}: not JSON: {line[:60]!r}") from error
    return chats


def chat_scenarios(
    logs: str | Path | Sequence[Mapping[str, Any]], *, shares: Mapping[str, float] | None = None
) -> list[Scenario]:
    """Scenarios of logged conversations: a JSONL file's, or those given.

    `shares` holds some out, {"validation": 0.1, "test": 0.2}: of the conversations that name no split, about
    that share, chosen by id, the same in every run. Raises ConfigurationError naming the one that cannot be
    read.
    """
    if isinstance(logs, str | Path):
        chats: Sequence[Mapping[str, Any]] = read_chats(logs)
        where = f"{logs}, conversation"
    else:
        chats, where = logs, "conversation"
    if not chats:
        raise ConfigurationError("there is no logged conversation: give at least one")
    scenarios = []
    for number, chat in enumerate(chats, start=1):
        try:
            scenarios.append(scenario_of_chat(chat))
        except ConfigurationError as error:
            raise ConfigurationError(f"{where} {number}: {error}") from error
    named = [isinstance(chat, Mapping) and bool(chat.get("split")) for chat in chats]
    return load_scenarios(with_shares(scenarios, shares or {}, named))


def with_shares(
    scenarios: Sequence[Scenario], shares: Mapping[str, float], named: Sequence[bool]
) -> list[Scenario]:
    """The same scenarios, about these shares of them held out; those that are `named` keep their split."""
    for split, share in shares.items():
        if split not in _HELD_OUT:
            raise ConfigurationError(f"shares are of validation and test, got {split!r}")
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ConfigurationError(f"the share of {split} must be at least 0 and below 1, got {share!r}")
    if sum(shares.values()) >= 1:
        raise ConfigurationError(
            f"the shares {dict(shares)} leave nothing to train on: take less than 1 in all"
        )
    made = []
    for scenario, has_split in zip(scenarios, named, strict=True):
        position = derive(0, "split", scenario.id) / 2**63
        below = 0.0
        for split in _HELD_OUT:
            share = shares.get(split, 0.0)
            if not has_split and below <= position < below + share:
                scenario = replace(scenario, split=split)
            below += share
        made.append(scenario)
    return made
