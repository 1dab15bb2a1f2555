"""Relative paths of a settings file become absolute, so that a run can be resumed from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stateset_agents.runtime.named_code import is_code_below
from stateset_agents.runtime.yaml_files import absolute_paths


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
        elif isinstance(section, str) and is_code_below(section, base):  # `reward: shop:tips`
            data[name] = _resolved("", section, base)
    training, traces = data.get("training"), data.get("traces")
    distillation = training.get("distillation") if isinstance(training, dict) else None
    teacher = traces.get("teacher") if isinstance(traces, dict) else None
    for section, field in ((distillation, "teacher"), (traces, "teacher"), (teacher, "model_name")):
        if isinstance(section, dict) and isinstance(section.get(field), str):
            section[field] = _resolved("agent.model_name", section[field], base)


def _resolved(name: str, value: Any, base: Path) -> Any:
    if not isinstance(value, str) or "\n" in value:
        return absolute_paths(value, base)
    prefix = "hf:" if name == "agent.model_name" and value.startswith("hf:") else ""
    path = value.removeprefix(prefix)
    is_path = (name in ("environment.scenarios", "environment.logs") and not path.startswith("~")) or (
        name == "agent.model_name" and path and _is_model(base / path)
    )
    return f"{prefix}{(base / path).resolve() if is_path else absolute_paths(path, base)}"


def _is_model(path: Path) -> bool:
    return path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")
