"""The settings of an update's passes through the model, whatever the loss; fine-tuning has them, too."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stateset_agents.training.settings.lora import LoraSettings
from stateset_agents.types.settings import Settings


class PassSettings(Settings):
    """How the rows of an update go through the model, and what of it trains."""

    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens, padding included, in one forward; longer passes are split. Two passes side "
        "by side, as bf16 has them on several threads of a CPU, have no more together. None: 16384 on a GPU; "
        "on a CPU as many as keep a gigabyte of activations, from 512 to 2048, and eight times that where "
        "rows of one conversation share them. A row that is longer goes alone, and so does a conversation "
        "whose loss takes one ratio of all its rows.",
    )
    row_layout: Literal["auto", "packed", "padded"] = Field(
        default="auto",
        description="How conversations lie in an update's forward: packed behind one another, what several "
        "rows begin with computed once, or padded side by side. auto packs where the model, tried at the "
        "start, gives the same hidden states that way; the run's log says which.",
    )
    fast_linears: bool = Field(
        default=True,
        description="The update's fp32 matrix products by oneDNN on AMD processors, where torch's own take "
        "twice as long; and on a CPU in bf16 packed rows through the layers of Llama, Mistral and Qwen2 by "
        "hand. Both are compared at the start, and elsewhere nothing changes.",
    )
    lora: LoraSettings | None = Field(
        default=None,
        description="Train an adapter of these settings and leave the model's own weights alone, see "
        "docs/lora.md. Unset: all weights.",
    )
    freeze_vision: bool = Field(
        default=False,
        description="Leave the vision encoder of a vision-language model as it is: the projection of its "
        "features and the text model train.",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Autocast of the update, master weights stay fp32; auto is bf16 on GPUs that have it "
        "and, for models of 100 million parameters and more, on CPUs with AMX, else fp32. The aliases "
        "bf16=True, fp16=True and use_amp are accepted.",
    )
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations to save memory.")
    dropout: bool = Field(
        default=False,
        description="Leave the model's own dropout on in updates. Rollouts have none, so the ratio of the "
        "first pass is then not 1 and may be clipped.",
    )
