"""Settings of runs side by side: flat, and those that differ. For `compare` and the page of many runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_IDENTITY = frozenset({"training.run_name", "training.output_dir"})
"""Settings that say which run it is, not what it does."""


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`training.seed`, `0` and so on, in the file's order."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Setting -> its value in each config, where not all agree; None where one does not have it.

    >>> differing_settings([{"training": {"beta": 0.1}}, {"training": {"beta": 0.0, "seed": 1}}])
    {'training.beta': ['0.1', '0.0'], 'training.seed': [None, '1']}
    """
    flat = [dict(flat_settings(config)) for config in configs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    values = {name: [settings.get(name) for settings in flat] for name in names}
    return {name: found for name, found in values.items() if len(set(found)) > 1}


def is_identity(name: str) -> bool:
    """Does the setting say which run it is: a seed, its name, its folder?

    Runs that differ in nothing else are the same experiment.
    """
    return name in _IDENTITY or name.rpartition(".")[2] == "seed"
