"""Settings of on-policy distillation: who the teacher is, and what its word counts beside the reward's."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from stateset_agents.algorithms.distillation import TeacherCredit
from stateset_agents.types.settings import Settings

__all__ = ["DistillationSettings"]


class DistillationSettings(Settings):
    """On-policy distillation: a teacher's log-probs of the student's own tokens become their advantages."""

    teacher: str = Field(
        description="A model as `agent.model_name` names one, or a vLLM server (vllm:http://...); with the "
        "student's vocabulary."
    )
    weight: float = Field(
        default=1.0,
        gt=0.0,
        description="What log pi_T - log pi_S of a token, in nats, counts in its advantage.",
    )
    reward_weight: float = Field(
        default=0.0,
        ge=0.0,
        description="What the reward's advantage counts beside it; 0: the reward is measured and teaches "
        "nothing.",
    )
    credit: TeacherCredit = Field(
        default="token",
        description="What of the teacher's word a token gets: its own, its own and all later ones' (to_go), "
        "or its turn's sum or mean; see docs/distillation.md.",
    )
    device: str = Field(default="auto", description="Of the teacher: auto, cpu, cuda or cuda:N.")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        default="auto",
        description="Of the teacher's weights; auto is fp32 on CPU, bf16 on GPUs that have it.",
    )

    @field_validator("teacher")
    @classmethod
    def _teacher_is_named(cls, name: str) -> str:
        if not name.strip():
            raise ValueError("name a model, a run folder or vllm:URL")
        return name

    @property
    def is_served(self) -> bool:
        """Does the teacher run on a server?"""
        return self.teacher.startswith("vllm:")
