"""What a reader of the package index sees says what the package is."""

from __future__ import annotations

import re
import tomllib

import yaml
from repository_paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_extra_is_explained() -> None:
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    cells = {
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.M) for name in re.findall(r"`([^`]+)`", row)
    }
    assert cells == set(PROJECT["optional-dependencies"])


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert [author["name"] for author in citation["authors"]] == [one["name"] for one in PROJECT["authors"]]


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 120
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
