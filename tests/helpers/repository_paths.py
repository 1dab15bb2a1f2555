"""Where the repository's folders stand: `from repository_paths import ROOT`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["HELPERS", "ROOT"]

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"
