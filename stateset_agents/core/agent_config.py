"""The settings of an agent: its model, prompts, sampling and limits. `core/agent.py` reads them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from datetime import date
from typing import Any, Literal, Self

from pydantic import AliasChoices, Field, field_validator, model_validator

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import Settings

HistoryMode = Literal["template", "keep", "compact", "slide"]
_log = get_logger(__name__)
MOST_CACHED = 262_144
"""Tokens of the generation cache, where nothing bounds it."""


class AgentConfig(Settings):
    """Which model speaks, and how."""

    model_name: str = "gpt2"
    """ "embedded:desk" (which knows the retail desk only), "package:smollm2" (once it is fetched), a hub
    name, a local folder, or a GGUF file."""
    persona: str | None = None
    """Who the agent is: "Mia, a patient clerk" begins the system message with "You are Mia, a patient
    clerk.", in rollouts too."""
    system_prompt: str | None = None
    """Stands before the environment's own system message."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Most tokens of one agent turn."""
    max_context_tokens: int | None = Field(default=None, ge=2)
    """Most tokens of one conversation; the model's own limit when unset."""
    history: HistoryMode = "template"
    """What the agent reads of its own earlier turns, in rollouts, chats and serve. template: what its chat
    template renders; where that is not what stands in the row (many drop earlier thoughts), the turn opens a
    new row of the same conversation. keep: everything, as it was sampled. compact: as template, and when the
    context is nearly full the agent writes a summary, which is trained like any turn, and goes on from it.
    slide: as template, without the oldest exchanges once the context is full."""
    compact_room: int | None = Field(default=None, ge=1)
    """With history compact: a summary is asked for where fewer tokens are left; more than max_new_tokens, for
    a reply must fit. Unset: twice max_new_tokens, or a quarter of the context if that is more."""
    compact_prompt: str = "Summarize our conversation so far: everything that you need to go on without it."
    """With history compact: what a user says who asks for the summary."""
    context_window: Literal["refuse", "sliding"] = "refuse"
    """Older name: sliding is history slide."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, in rollouts too: the answer ends before them, their tokens are kept and trained
    as they were sampled."""
    constrain: Literal["off", "calls", "strict"] = "off"
    """Replies under a grammar, which is masked before sampling and again in the update (needs the extra
    grammar). calls: where tools are offered, what opens a call becomes a valid one. strict: calls, and an
    environment may require a call or JSON of a schema. off: no grammar, and an environment that asks for one
    is refused; a request's own tool_choice and response_format always hold."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Of generate_response; 0 is greedy."""
    top_k: int = Field(default=0, ge=0)
    """Tokens are drawn from so many likeliest ones, in rollouts too, whose update renormalises over the same
    (at most 512 there); 0 keeps every token."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """The same by their mass; 1 keeps every token. A vLLM server needs a top_k beside it."""
    chat_template: str | None = None
    """Jinja text, "chatml" for ChatML with tools, or "plain" for role-prefixed lines; unset: the tokenizer's
    own."""
    allow_hidden_tools: bool = False
    """Offer tools though the chat template does not list them to the model: the system prompt names them, or
    it knows them by heart. Else that is an error before the first turn."""
    chat_template_kwargs: Mapping[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("chat_template_kwargs", "template_arguments")
    )
    """Switches of the chat template, such as {enable_thinking: false}; see its own text. They stand in the
    template that a training writes, so whoever loads its model need not give them."""
    template_date: date | None = None
    """The day that chat templates tell the model. Unset: a training tells the day on which it began, resumed
    or not, and whatever loads the model that it wrote tells that day again; a template that no training wrote
    tells the day on which it is loaded."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the rollout weights; auto is bf16 on GPUs that have it and, for models of 100 million parameters and
    more, on CPUs with AMX, else fp32."""
    engine: Literal["auto", "lean", "general", "plain"] = "auto"
    """How the model is run for generation: the first of lean (Llama, Mistral, Qwen2, Qwen3, GPT-2), general
    (attention only) and plain (any, one conversation at a time) that reproduces its full forwards, or the one
    named here."""
    fast_linears: bool = True
    """Generate by a packed copy of the weights where products are faster so: in fp32 by oneDNN on AMD's
    processors and by MKL on Intel's, in bf16 by oneDNN on both if they have units for it. False leaves
    products to torch."""
    matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """Of fp32 matrix products on a CPU, in rollouts and in a training of the agent: medium rounds operands
    and results to bf16 (relative error 3e-3; AVX512-BF16 or AMX), high multiplies sums of two bf16 numbers
    (5e-6; AMX). Logits stay in fp32, the update takes its own log-probs anew, and torch's own setting is not
    touched. Where the processor has no such units a warning says so."""
    max_cached_tokens: int | None = Field(default=None, ge=32)
    """Bound of the generation cache, in tokens: conversations times columns of the longest. The longest idle
    ones make room and are read again when they go on. A token takes 2 x layers x key-value heads x head size
    numbers: 2 KiB for embedded:desk, 12 KiB for Qwen2.5-0.5B in bf16 (18 on an x86 CPU, where keys stay in
    fp32). None: 262144, or less where a training on a GPU leaves less."""
    seed: int = 0
    """Of generate_response's sampling."""

    def summary_room(self, context_length: int) -> int:
        """The `compact_room` in a context of so many tokens: unset, one for the longest reply and for the
        summary that is asked for then."""
        return self.compact_room or max(context_length // 4, 2 * self.max_new_tokens)

    @model_validator(mode="before")
    @classmethod
    def _sliding_is_a_history(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("context_window") != "sliding":
            return data
        if data.get("history", "slide") != "slide":
            raise ValueError(
                f"context_window 'sliding' and history {data['history']!r} differ: leave out context_window"
            )
        _warn_of_context_window()
        return {**data, "history": "slide"}

    @model_validator(mode="after")
    def _a_reply_leaves_room_for_a_summary(self) -> Self:
        room, reply = self.compact_room, self.max_new_tokens
        if self.history == "compact" and room is not None and room <= reply:
            raise ValueError(
                f"compact_room {room} must be more than max_new_tokens {reply}, for one reply would fill the "
                "context before a summary can be asked for: raise it or leave it out"
            )
        return self

    @field_validator("model_name")
    @classmethod
    def _model_is_named(cls, name: str) -> str:
        if not name.strip():
            raise ValueError('give a model, for example "embedded:desk"')
        return name

    @field_validator("persona")
    @classmethod
    def _persona_completes_you_are(cls, persona: str | None) -> str | None:
        if persona is not None and persona.strip().lower().startswith("you are"):
            raise ValueError('persona goes on from "You are", which is added: leave it out')
        return persona

    @field_validator("chat_template")
    @classmethod
    def _chat_template_is_no_file(cls, template: str | None) -> str | None:
        if template is not None and "{" not in template and template.endswith((".jinja", ".jinja2", ".j2")):
            raise ValueError(
                f"{template!r} looks like a file, and the template's text is wanted: give what stands in it"
            )
        return template

    @field_validator("constrain", mode="before")
    @classmethod
    def _yaml_s_off_is_a_word(cls, constrain: object) -> object:
        return "off" if constrain is False else constrain

    @field_validator("stop", mode="before")
    @classmethod
    def _one_text_is_one_stop(cls, stop: object) -> object:
        return (stop,) if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _stop_is_not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if not all(stop):
            raise ValueError("a stop string must hold at least one character")
        return stop


def check_context(config: AgentConfig, model_length: int) -> None:
    """Warn of settings that have no effect, or hardly one, in a model's context of so many tokens.

    Raises ConfigurationError where summaries would be asked for before each turn.
    """
    context = min(model_length, config.max_context_tokens or model_length)
    if (config.max_context_tokens or 0) > model_length:
        _log.warning(
            f"max_context_tokens {config.max_context_tokens} is more than the model's context of "
            f"{model_length} tokens, which is the limit: lower it or leave it out"
        )
    if config.max_new_tokens >= context:
        _log.warning(
            f"max_new_tokens {config.max_new_tokens} is not less than the context of {context} tokens: "
            "replies are cut where the context ends; lower it"
        )
    if config.history != "compact":
        for name in ("compact_room", "compact_prompt"):
            if getattr(config, name) != AgentConfig.model_fields[name].default:
                _log.warning(
                    f"{name} has no effect with history {config.history}: leave it out, or set compact"
                )
        return
    room = config.summary_room(context)
    if room >= context:
        fix = "leave it out" if config.compact_room else f"lower max_new_tokens {config.max_new_tokens}"
        raise ConfigurationError(
            f"compact_room {room} does not fit into the context of {context} tokens: a summary would be "
            f"asked for before each turn; {fix}, or raise max_context_tokens"
        )
    if room > context / 2:
        _log.warning(
            f"compact_room {room} is more than half of the context of {context} tokens: once a conversation "
            f"has {context - room} tokens, a summary is asked for after nearly each reply; lower it or leave "
            "it out"
        )


@functools.cache
def _warn_of_context_window() -> None:
    """Once per process."""
    _log.warning('context_window "sliding" is now AgentConfig(history="slide"): write that')
