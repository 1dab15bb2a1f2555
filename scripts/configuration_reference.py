"""Write docs/configuration.md from the settings models; `--check` only says whether it is up to date."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from stateset_agents.core.agent import AgentConfig
from stateset_agents.numeric.experiment import ControlFile, MeasurementConfig, PolicyConfig
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.training.config import PROFILES, TrainingConfig
from stateset_agents.training.experiment import EvaluationConfig, ExperimentConfig
from stateset_agents.training.settings.curriculum import Stage
from stateset_agents.training.settings.update import DistillationSettings, LoraSettings, TraceSettings
from stateset_agents.training.trl.settings import TrlSettings
from stateset_agents.types.settings import OneOf, Settings

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"

INTRODUCTION = """# Configuration

<!-- Written by scripts/configuration_reference.py from the settings models; edit those. -->

## Thirteen that matter

All of them stand in `training`; most trainings need no other. How many members and scenarios a step:
[getting-started.md](getting-started.md#6-train).

THIRTEEN
`stateset-agents train FILE --explain` says for every setting what it is in that training and who set it: you,
the model's card, the loss, a teacher, the estimator, the profile, or the field's default.

## Files and paths

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

WANTED: Mapping[str, tuple[str, ...]] = {
    "learn faster": (
        "learning_rate",
        "num_generations",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_iterations",
    ),
    "stay near the model you began with": ("beta", "clip_ratio", "max_grad_norm"),
    "fit in memory": ("lora", "micro_batch_tokens", "gradient_checkpointing"),
    "get the same run again": ("seed", "scheduling"),
}
"""What one wants -> the settings of `training` that give it."""


def reference() -> str:
    """The whole page."""
    parts = [INTRODUCTION.replace("THIRTEEN\n", _thirteen())]
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


def _thirteen() -> str:
    rows = ["| to | setting | default | what it does |", "|---|---|---|---|"]
    for aim, names in WANTED.items():
        for name, row in zip(names, _rows(TrainingConfig, names), strict=True):
            rows.append(f"| {aim if name == names[0] else ''} {row}")
    return "\n".join(rows) + "\n\n"


def _table(model: type[Settings]) -> str:
    own_first = sorted(model.model_fields, key=lambda name: name not in model.__annotations__)
    rows = ["| field | default | what it does |", "|---|---|---|", *_rows(model, own_first)]
    return "\n".join(rows) + "\n"


def _rows(model: type[Settings], settings: Iterable[str]) -> Iterator[str]:
    for name in settings:
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
        description = model.descriptions()[name].replace("|", r"\|")
        yield f"| `{name}` | {shown} | {description}{one_of}{also} |"


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
