"""Logged conversations as scenarios: openings, users' words, what tools gave.

{"messages": [{"role": "user", "content": "where is K27?"}, ...], "tools": [...], "rating": 5}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stateset_agents.core.sources.datasets import expect_dataset, located_rows
from stateset_agents.core.sources.rows.files import Located, read_rows
from stateset_agents.core.sources.scenario_files import located_scenarios
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive

Chats = str | Path | Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""A file of conversations, or these, in any shape of `rows.shapes`; or where they are, by the arguments of
`dataset_scenarios`: {"dataset": FILE, "columns": {"messages": "turns"}}."""
_HELD_OUT: tuple[Split, ...] = ("validation", "test")


def located_chats(logs: Chats) -> list[Located]:
    """Conversations, each with its place. Raises ConfigurationError where there is none."""
    if isinstance(logs, str | Path):
        located = [(f"{logs}, {where}", row) for where, row in read_rows(logs, of="conversations")]
        of = f"{logs} holds"
    elif isinstance(logs, Mapping):
        expect_dataset(logs, "conversations")
        return located_rows(**logs, is_numbered=False)
    else:
        if isinstance(logs, Mapping) or not isinstance(logs, Iterable):
            raise ConfigurationError(f"conversations must be a file or a list of rows, got {logs!r:.60}")
        located = [(f"conversation {number}", row) for number, row in enumerate(logs, start=1)]
        of = "there is"
    if not located:
        raise ConfigurationError(f"{of} no conversation: give at least one")
    return located


def chat_scenarios(
    logs: Chats, *, shares: Mapping[str, float] | None = None, keep_duplicates: bool = False
) -> list[Scenario]:
    """Scenarios of logged conversations: a file's, or those given.

    `shares` holds some out, {"validation": 0.1, "test": 0.2}: of the conversations that name no split, about
    that share, chosen by id, the same in every run. Two that are equal, word by word, are refused unless
    `keep_duplicates`. Raises ConfigurationError naming the one that cannot be read.
    """
    located = located_chats(logs)
    of = str(logs) if isinstance(logs, str | Path) else "logs"
    scenarios = located_scenarios(located, of=of, needs_chat=True, keep_duplicates=keep_duplicates)
    return with_shares(scenarios, shares or {}, [bool(row.get("split")) for _, row in located])


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
