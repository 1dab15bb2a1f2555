"""Relative paths of a settings file become absolute, so that a run can be resumed from anywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["resolve_paths"]

_CODE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def resolve_paths(data: dict[str, Any], base: Path) -> None:
    """Make the paths in a settings file's data absolute, in place; `base` is the folder they start from.

    Paths are an existing folder or GGUF file in `agent.model_name` and the same of a teacher ("hf:" before
    it or not), a text in `environment.scenarios` and `environment.logs`, and however deep they stand
    in agent, environment and reward, texts that start with ./ or ../, and names of code such as "shop:make"
    where `base` holds shop.py.
    `training.output_dir` stays: runs go where the command is given.
    """
    for name in ("agent", "environment", "reward"):
        section = data.get(name)
        if isinstance(section, dict):
            for field, value in section.items():
                section[field] = _resolved(f"{name}.{field}", value, base)
        elif isinstance(section, str) and _is_code(section, base):  # `reward: shop:tips`
            data[name] = _resolved("", section, base)
    training, traces = data.get("training"), data.get("traces")
    distillation = training.get("distillation") if isinstance(training, dict) else None
    shown = traces.get("teacher") if isinstance(traces, dict) else None
    for section, field in ((distillation, "teacher"), (traces, "teacher"), (shown, "model_name")):
        if isinstance(section, dict) and isinstance(section.get(field), str):
            section[field] = _resolved("agent.model_name", section[field], base)


def _resolved(name: str, value: Any, base: Path) -> Any:
    if isinstance(value, list):
        return [_resolved("", item, base) for item in value]
    if isinstance(value, dict):
        return {key: _resolved("", item, base) for key, item in value.items()}
    if not isinstance(value, str) or "\n" in value:
        return value
    prefix = "hf:" if name == "agent.model_name" and value.startswith("hf:") else ""
    path = value.removeprefix(prefix)
    is_path = (
        path.startswith(("./", "../"))
        or (name in ("environment.scenarios", "environment.logs") and not path.startswith("~"))
        or (name == "agent.model_name" and path and _is_model(base / path))
        or _is_code(path, base)
    )
    return f"{prefix}{(base / path).resolve()}" if is_path else value


def _is_model(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")


def _is_code(name: str, base: Path) -> bool:
    """Is "package.module:attribute" a file below `base`?"""
    if not _CODE.fullmatch(name):
        return False
    file = base.joinpath(*name.partition(":")[0].split("."))
    return file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()
