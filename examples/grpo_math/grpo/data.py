"""Problems from a file: their text, and what is right."""

from __future__ import annotations

from pathlib import Path

from stateset_agents.environments.problems import ProblemFiles


def problems(path: str | Path) -> ProblemFiles:
    """The problems of a JSON file, in the splits that it names; no instruction is put before them."""
    return ProblemFiles(path, system_prompt="")
