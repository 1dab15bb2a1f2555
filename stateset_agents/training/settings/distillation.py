"""Settings of distillation: a teacher that scores what the student says, or one that shows how it is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from stateset_agents.algorithms.distillation import TeacherCredit
from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.types.settings import Settings


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
        description="Of the teacher's weights; auto as for the agent's.",
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


class TraceSettings(Settings):
    """What a teacher shows the student: its replies to train scenarios, where the reward verifies them."""

    teacher: AgentConfig = Field(description="Who it is: a model's name, or settings as `agent` has them.")
    endpoint: str | None = Field(
        default=None,
        description="OpenAI-compatible URL, the part before /chat/completions; `teacher.model_name` is then "
        "as it calls the model. Unset: the teacher is loaded here.",
    )
    api_key_env: str = Field(
        default="OPENAI_API_KEY", description="Environment variable with the endpoint's key."
    )
    episodes: int | None = Field(
        default=None, ge=1, description="Train scenarios, one of each family in turn; all when unset."
    )
    samples: int = Field(
        default=1, ge=1, description="Replies to each; with more than one set a temperature of about 1."
    )
    temperature: float = Field(default=0.1, ge=0.0, description="Of the teacher's replies; 0 is greedy.")
    max_new_tokens: int = Field(default=4096, ge=1, description="Most tokens of one reply of the teacher.")
    min_reward: float = Field(default=1.0, description="Replies that earn less are not shown.")
    in_format: bool = Field(
        default=True,
        description="Show only replies with one thought and one answer in their tags, see docs/reasoning.md.",
    )
    seed: int = Field(default=0, ge=0, description="Of the teacher's sampling.")

    @field_validator("teacher", mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        settings = {"model_name": value} if isinstance(value, str) else value
        if isinstance(settings, Mapping) and "max_new_tokens" in settings:
            raise ValueError("max_new_tokens stands beside it, in traces: move it there")
        return settings
