"""Loads the English by which claims are read (`english.yaml`): patterns, word lists and operators.

An operator takes words out of what a text asserts: denial, doubt, supposition, plans, retraction.
`statements.py` applies them, and a test reads the example of each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stateset_agents.runtime.yaml_files import read_yaml

Sign = Literal["denied", "doubted", "supposed", "planned", "past"]
Scope = Literal["next words", "rest of clause", "clause", "rest of sentence", "sentence", "condition"]
"""The words that an operator acts on: those after it, or those around it.

A sentence ends at an adversative; a condition has its main clause.
"""


class PatternFile:
    """Patterns of plain words in a YAML file, by section and name.

    A pattern stands on as many lines as it needs: each is stripped, and they are joined without anything
    between them. `{name}` stands for one of the file's `parts`, or of those that the caller gives.
    """

    def __init__(self, path: Path, **parts: str) -> None:
        self.sections: Mapping[str, Any] = read_yaml(path)
        self._parts = {**self.sections["parts"], **parts}

    def compiled(self, text: str) -> re.Pattern[str]:
        """The regular expression `text`, with the lists that it names in it."""
        return re.compile(self._filled(text))

    def patterns(self, section: str) -> dict[str, re.Pattern[str]]:
        """The compiled patterns of a section, by name."""
        return {name: self.compiled(text) for name, text in self.sections[section].items()}

    def alternatives(self, part: str) -> list[str]:
        """The words of a part that is nothing but words, in order."""
        return self._filled(self._parts[part]).split("|")

    def _filled(self, text: str) -> str:
        line = "".join(map(str.strip, text.splitlines()))
        return re.sub(r"\{([a-z_]+)\}", lambda name: f"(?:{self._filled(self._parts[name[1]])})", line)


ENGLISH = PatternFile(Path(__file__).with_name("english.yaml"))


class Patterns:
    """The compiled patterns of a section of a file, each an attribute."""

    def __init__(self, section: str, file: PatternFile = ENGLISH) -> None:
        vars(self).update(file.patterns(section))

    def __getattr__(self, name: str) -> re.Pattern[str]:
        raise AttributeError(f"there is no pattern {name!r} in this section")


def word_list(name: str) -> frozenset[str]:
    """The words of one of the lists of English."""
    return frozenset(ENGLISH.sections["words"][name].split())


def word_table(name: str) -> Mapping[str, str]:
    """One of the tables of English: a name -> words, or a pattern of them."""
    table: Mapping[str, str] = ENGLISH.sections["tables"][name]
    return table


@dataclass(frozen=True, slots=True)
class Operator:
    """A phrase and what it does to the words in its scope."""

    sign: Sign
    scope: Scope
    pattern: re.Pattern[str]
    example: str


OPERATORS = tuple(
    Operator(**{**operator, "pattern": ENGLISH.compiled(operator["pattern"])})
    for operator in ENGLISH.sections["operators"]
)
