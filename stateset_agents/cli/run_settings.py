"""The settings of the run that a model belongs to; `chat` and `serve` take an agent as it was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.types.errors import ConfigurationError

__all__ = ["enclosing_run", "settings_of_run"]


def enclosing_run(name: str) -> Path | None:
    """The folder itself if it is a run, or the run that contains it as a checkpoint."""
    path = Path(name).expanduser().resolve()
    return next(
        (folder for folder in (path, *path.parents[:3]) if (folder / "metrics.jsonl").is_file()), None
    )


def settings_of_run(model: str | None) -> dict[str, Any]:
    """The sections `agent` and `environment` of the run that a model belongs to.

    Empty for other models; without `environment` for a run that a program started.
    """
    if model is None or not Path(model).expanduser().is_dir():
        return {}
    run = enclosing_run(model)
    if run is None:
        return {}
    try:
        data = read_yaml(run / "config.yaml")
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(
            f"cannot read {run / 'config.yaml'}, the settings of {model!r}: give hf:{model} for its weights "
            "alone"
        ) from error
    names = ["agent"] if data.get("made_by") == "program" else ["agent", "environment"]
    return {name: data[name] for name in names if data.get(name) is not None}
