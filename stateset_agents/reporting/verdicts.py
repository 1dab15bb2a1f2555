"""What `audit` and `rescore` found, where their JSON stands in the run's folder: tables of the report.

stateset-agents audit runs/latest --out runs/latest/audit.json
stateset-agents rescore runs/latest --reward REWARD --out runs/latest/rescore.json
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stateset_agents.tracking.jsonl import read_json
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import ConfigurationError

_MAX_FLIPS = 20


def verdict_tables(folder: RunFolder) -> dict[str, Any]:
    """`audit` and `rescore` as the page shows them; None of what was not written.

    Raises ConfigurationError for a file of that name that the command did not write.
    """
    return {
        "audit": _read(folder.audit, "audit", _audit),
        "rescore": _read(folder.rescore, "rescore", _rescore),
    }


def _read(file: Path, command: str, shape: Any) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = shape(read_json(file))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{file} is not what `{command} --out` writes: remove it, or write it again"
        ) from error
    return found


def _audit(result: Mapping[str, Any]) -> dict[str, Any]:
    policies = {**result["policies"], **({"honest": result["honest"]} if result["honest"] else {})}
    return {
        "agents": [
            {
                "name": name,
                "success": side["success"],
                "interval": side["interval"],
                "reward": side["mean_reward"],
                "n": side["n"],
            }
            for name, side in policies.items()
        ],
        "over": [*result.get("over", ()), *result.get("lost", ())],
    }


def _rescore(result: Mapping[str, Any]) -> dict[str, Any]:
    rows = [("all", result["all"]), *result["families"].items()]
    return {
        "rows": list(_changes(rows)),
        "num_groups": result["num_groups"],
        "flips": result["flips"][:_MAX_FLIPS],
        "num_flips": len(result["flips"]),
    }


def _changes(rows: list[tuple[str, Mapping[str, Any]]]) -> Iterator[dict[str, Any]]:
    for name, change in rows:
        fields = ("n", "old_mean", "new_mean", "rank_correlation", "within_groups", "flipped")
        yield {"name": name, **{field: change[field] for field in fields}}
