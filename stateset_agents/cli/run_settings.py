"""The settings of a file, of a run, and of the run that a model belongs to, as verbs name them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stateset_agents.runtime.yaml_files import parse_yaml, read_sections, read_yaml
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import nearest

_KINDS = ("control",)


def overrides(items: list[str], named: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name: `items` are NAME=VALUE with YAML values, `named` what options gave."""
    settings = {name: value for name, value in named.items() if value is not None}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals:
            raise ConfigurationError(f"--set takes NAME=VALUE such as training.beta=0.02, got {item!r}")
        settings[name.strip()] = parse_yaml(text, of=f"--set {item!r}: the value")
    return settings


def is_control(name: str) -> bool:
    """True if this YAML file, run folder or checkpoint is of a numeric policy: `kind: control`.

    Raises ConfigurationError for another kind; what cannot be read is left to who loads it.
    """
    path = Path(name)
    if path.is_dir():
        path = (enclosing_run(name) or path) / "config.yaml"
    if not path.is_file():
        return False
    data = read_yaml(path)
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind is not None and kind not in _KINDS:
        raise ConfigurationError(
            f"{path}: kind must be control or left out, got {kind!r}{nearest(str(kind), _KINDS)}"
        )
    return kind == "control"


def run_and_checkpoint(name: str) -> tuple[RunFolder, Path | None]:
    """The run folder, and its checkpoint if `name` is one."""
    path = Path(name).resolve()
    if path.parent.name == "checkpoints":
        return RunFolder.open(path.parent.parent), path
    return RunFolder.open(name), None


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
        data = read_sections(run / "config.yaml")
    except ConfigurationError as error:
        raise ConfigurationError(
            f"cannot read {run / 'config.yaml'} of {model!r}: give hf:{model} for its weights alone"
        ) from error
    names = ["agent"] if data.get("made_by") == "program" else ["agent", "environment"]
    return {name: data[name] for name in names if data.get(name) is not None}
