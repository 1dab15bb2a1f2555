"""Write docs/configuration.md from the settings models; `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stateset_agents.core.agent import AgentConfig
from stateset_agents.numeric.experiment import ControlFile, MeasurementConfig, PolicyConfig
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.training.config import PROFILES, TrainingConfig
from stateset_agents.training.experiment import EvaluationConfig, ExperimentConfig
from stateset_agents.training.settings.distillation import DistillationSettings, TraceSettings
from stateset_agents.training.settings.lora import LoraSettings
from stateset_agents.training.settings.stages import Stage
from stateset_agents.training.trl.settings import TrlSettings
from stateset_agents.types.settings import OneOf, Settings

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"

INTRODUCTION = """# Configuration

<!-- Written by scripts/configuration_reference.py from the settings models; edit those. -->

A YAML file has the sections of `ExperimentConfig`; the command line changes any of them with
`--set training.beta=0.02`. In a program, make the models yourself: `TrainingConfig.from_profile("balanced",
num_generations=16)`. An unknown field is an error that names the nearest one.

Paths in the file start from the file's own folder: `environment.scenarios`, an existing folder in
`agent.model_name`, every value in agent, environment and reward that starts with `./` or `../`,
and the module of a name such as `shop:make`, where it lies beside the file.
Paths given with `--set` start from the working directory, and so do runs (`training.output_dir`). A run's
`config.yaml` holds them absolute, so that `--resume` works from anywhere.

A file with the line `kind: control` trains a numeric policy and has the sections at the end of this page
([control.md](control.md)).
"""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, model in (
        ("The file", ExperimentConfig),
        ("`agent`", AgentConfig),
        ("`training`", TrainingConfig),
        ("`training.lora`", LoraSettings),
        ("`training.stages`", Stage),
        ("`training.distillation`", DistillationSettings),
        ("`evaluation`", EvaluationConfig),
        ("`traces`", TraceSettings),
        ("`trl`", TrlSettings),
        ("A file of `kind: control`", ControlFile),
        ("`policy` of `kind: control`", PolicyConfig),
        ("`training` of `kind: control`", ControlConfig),
        ("`evaluation` of `kind: control`", MeasurementConfig),
    ):
        parts.append(f"## {title}\n\n{(model.__doc__ or '').strip()}\n\n{_table(model)}")
    parts.append(f"## Profiles\n\n{_profiles()}")
    return "\n".join(parts)


def _table(model: type[Settings]) -> str:
    rows = ["| field | default | what it does |", "|---|---|---|"]
    own_first = sorted(model.model_fields, key=lambda name: name not in model.__annotations__)
    for name in own_first:
        field, names = model.model_fields[name], [name]
        if field.validation_alias is not None:
            choices = getattr(field.validation_alias, "choices", [])
            names += [str(choice) for choice in choices if choice != name]
        default = field.get_default(call_default_factory=True)
        if default is PydanticUndefined:
            shown = "required"
        elif isinstance(default, Settings):
            shown = "its own defaults"
        else:
            shown = f"`{default}`"
        also = f" Also: {', '.join(f'`{alias}`' for alias in names[1:])}." if names[1:] else ""
        choices = ", ".join(f"`{choice}`" for choice in _choices(field))
        one_of = f" One of {choices}." if choices else ""
        description = (field.description or "").replace("|", r"\|")
        rows.append(f"| `{name}` | {shown} | {description}{one_of}{also} |")
    return "\n".join(rows) + "\n"


def _choices(field: FieldInfo) -> tuple[str, ...]:
    """Every value that a field may have, where they are counted."""
    if get_origin(field.annotation) is Literal:
        return get_args(field.annotation)
    return tuple(name for part in field.metadata if isinstance(part, OneOf) for name in part.registry)


def _profiles() -> str:
    fields = sorted({name for table in PROFILES.values() for name in table})
    rows = ["| field | " + " | ".join(PROFILES) + " |", "|---" * (len(PROFILES) + 1) + "|"]
    for name in fields:
        values = [table.get(name, TrainingConfig.model_fields[name].default) for table in PROFILES.values()]
        rows.append(f"| `{name}` | " + " | ".join(f"`{value}`" for value in values) + " |")
    return "\n".join(rows) + "\n"


def main() -> int:
    """0 when the page is (now) up to date."""
    text = reference()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.name} is out of date: run python scripts/configuration_reference.py", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
