"""Settings of a LoRA adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from stateset_agents.types.settings import Settings


class LoraSettings(Settings):
    """An adapter's size and place."""

    rank: int = Field(default=16, ge=1, description="Columns of A and B: how much each layer may change.")
    alpha: float = Field(default=32.0, gt=0.0, description="The adapter counts alpha / rank times.")
    target_modules: Literal["all-linear"] | tuple[str, ...] = Field(
        default="all-linear",
        description="Names of the layers that get one, such as q_proj; all-linear is every linear layer but "
        "the output head.",
    )

    quantization: Literal["4bit", "8bit"] | None = Field(
        default=None,
        description="Hold the trainer's copy of the model's own linear layers, which are not trained, in so "
        "many bits by bitsandbytes (QLoRA), see docs/lora.md. Unset: as they are.",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_few_bits(cls, given: Any) -> Any:
        for name in ("load_in_4bit", "load_in_8bit", "quantization_config"):
            if isinstance(given, Mapping) and name in given:
                raise ValueError(f"write quantization: 4bit or quantization: 8bit instead of {name}")
        return given
