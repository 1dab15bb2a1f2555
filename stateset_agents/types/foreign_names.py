"""Names of settings and reward arguments in other libraries, and ours; for "did you mean" hints.

The table is foreign_names.json; `docs/evidence/foreign-names.md` shows it. A test compares TRL's names with
the installed GRPOConfig, and ours with our settings.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class ForeignName(NamedTuple):
    """One name of another library, or one that several use."""

    origin: str
    """The library, TRL or verifiers; "common" where several have the name."""
    here: str
    """Our setting, with its section: "training.clip_ratio"; empty where there is none."""
    note: str
    """A remark, in a few words."""


def _by_name(rows: list[dict[str, Any]]) -> Mapping[str, ForeignName]:
    return {
        name: ForeignName(row["origin"], row["here"], row["note"]) for row in rows for name in row["names"]
    }


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SETTINGS = _by_name(_TABLES["settings"])
"""Our settings by their name in other libraries. A name that one of our sections has, too, is for the other
sections."""
ARGUMENTS = _by_name(_TABLES["arguments"])
"""Arguments of reward functions, by name in other libraries."""

_CLASSES = {"TrainingConfig": "training", "AgentConfig": "agent", "EvaluationConfig": "evaluation"}


def setting_hint(name: str, section: str = "") -> str | None:
    """` (did you mean 'learning_rate'?)` for a name of another library; None for one that is not known.

    `section`: the class that was given it; empty for the top of a file, where every name needs its section.
    """
    entry = SETTINGS.get(name)
    if entry is None:
        return None
    note = f"; {entry.note}" if entry.note else ""
    if not entry.here:
        return f" (of {entry.origin}; {entry.note})"
    home, _, field = entry.here.partition(".")
    if home == _CLASSES.get(section):
        return f" (did you mean {field!r}?{note})"
    return f" (did you mean {entry.here!r}?{note})"


def argument_hint(name: str, offered: Collection[str]) -> str:
    """` (of TRL; here it is 'replies')`, or nothing where that is not offered."""
    entry = ARGUMENTS.get(name)
    if entry is None or entry.here not in offered:
        return ""
    return f" (of {entry.origin}; here it is {entry.here!r}{f'; {entry.note}' if entry.note else ''})"
