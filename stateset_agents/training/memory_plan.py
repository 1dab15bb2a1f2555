"""What a training needs of a GPU's memory, phase by phase, before anything is loaded; and the settings that
fit."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stateset_agents.backends.pretrained.loading import (
    load_config,
    model_folder,
    reads_pictures,
    recommended_settings,
)
from stateset_agents.core.agent_config import MOST_CACHED, AgentConfig
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.memory_simulation import SimulatedTraining, Workload
from stateset_agents.types.errors import BackendError, ConfigurationError

GB = 10**9
UTILIZATION = 0.92
"""Part of a GPU's memory that a plan gives away; the allocator's rounding takes some of the rest."""
CONTEXT_BYTES = 1_200_000_000
"""What CUDA's context and its kernels take; estimated."""
_ENOUGH_TOKENS = 8192
"""A pass of fewer tokens is slower than one that recomputes its activations."""
_MOST_TOKENS = 32_768
_MULTIPLE = 64
_LAYERS, _TOKENS = (2, 4), (4160, 8256)
"""Small simulations, from which a pass of any size is extrapolated: memory is affine in layers and tokens."""
_PREFILL_TOKENS = 8192
_ROW_TOKENS = 2048
"""Tokens of a planned conversation, where the context allows more."""


_UNFIT = (BackendError, RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""Raised by a model whose code reads numbers, or that is no causal language model."""


_BY_HAND = "set micro_batch_tokens and gradient_checkpointing by hand"


class NoPlan(ConfigurationError):
    """The memory of a model's training cannot be simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The memory of one phase of a training."""

    name: str
    bytes: int
    """The peak, with all that stays from the phases before."""
    what: str
    """What the memory is for."""
    mend: str
    """The settings that would lower it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The phases of a training on a GPU, and the settings that they were planned with."""

    title: str
    """Model, adapter and GPU."""
    usable: int
    """Bytes that tensors may take."""
    phases: Sequence[Phase]
    host_bytes: int
    """Bytes of main memory that a checkpoint's largest tensor takes, the files on disk apart."""
    gradient_checkpointing: bool
    micro_batch_tokens: int
    max_cached_tokens: int

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return max(phase.bytes for phase in self.phases)

    @property
    def too_large(self) -> Sequence[Phase]:
        """The phases that do not fit."""
        return [phase for phase in self.phases if phase.bytes > self.usable]

    def lines(self) -> Iterator[str]:
        """The plan for people."""
        yield f"plan: {self.title}, {self.usable / GB:.1f} GB usable"
        for phase in self.phases:
            left = self.usable - phase.bytes
            verdict = "" if left >= 0 else f"  {-left / GB:.1f} GB too much: {phase.mend}"
            yield f"  {phase.name:<12}{phase.bytes / GB:>8.1f} GB   {phase.what}{verdict}"
        yield f"  {'checkpoint':<12}{self.host_bytes / GB:>8.1f} GB   of main memory, one tensor at a time"

    def as_json(self) -> Mapping[str, Any]:
        """The plan for programs; bytes as integers."""
        return {
            "title": self.title,
            "usable_bytes": self.usable,
            "fits": not self.too_large,
            "phases": {phase.name: {"bytes": phase.bytes, "what": phase.what} for phase in self.phases},
            "host_bytes": self.host_bytes,
            "settings": {
                "gradient_checkpointing": self.gradient_checkpointing,
                "micro_batch_tokens": self.micro_batch_tokens,
                "max_cached_tokens": self.max_cached_tokens,
            },
        }

    def adopted(self, agent: AgentConfig, training: TrainingConfig) -> tuple[AgentConfig, TrainingConfig]:
        """The settings with those that the plan chose, so that a resumed run has the same on any GPU."""
        choices = {
            "gradient_checkpointing": self.gradient_checkpointing,
            "micro_batch_tokens": self.micro_batch_tokens,
        }
        bound = {"max_cached_tokens": self.max_cached_tokens}
        return agent.model_copy(update=bound), training.model_copy(update=choices)

    def expect_fitting(self) -> None:
        """Raises ConfigurationError where a phase does not fit, with the settings that would make it."""
        for phase in self.too_large:
            raise ConfigurationError(
                f"{phase.name} takes {phase.bytes / GB:.1f} of {self.usable / GB:.1f} usable GB: {phase.mend}"
            )


def parse_memory(text: str) -> int:
    """Bytes of `24GB`, `24GiB` or `80`; a GPU's nominal gigabytes are 2^30 bytes.

    Raises ConfigurationError for anything else.
    """
    number = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:gi?b?)?\s*", text.lower())
    size = float(number[1]) if number else 0.0
    if not 0 < size < 10_000:
        raise ConfigurationError(f"a GPU's memory is given as 24GB, got {text!r}")
    return int(size * 2**30)


def plan_memory(
    model_config: Any,
    agent: AgentConfig,
    training: TrainingConfig,
    *,
    name: str,
    total: int,
    others: int = 0,
    teacher_config: Any = None,
) -> MemoryPlan:
    """The plan of a training of this model on a GPU of `total` bytes, of which `others` are taken.

    `training.gradient_checkpointing` auto and `micro_batch_tokens` unset are chosen: without recomputing
    where a pass of 8,192 tokens fits, at most 32,768 tokens, as many as fit. So is `agent.max_cached_tokens`
    unset: what an update of 8,192 tokens leaves, or all with `rollout_sleep`. `teacher_config`: of a teacher
    on the same GPU. Blocking: about half a minute of processor time for a model of 36 layers.
    """
    usable = int(UTILIZATION * (total - others - CONTEXT_BYTES))
    if usable <= 0:
        raise ConfigurationError(
            f"of the GPU's {total / GB:.1f} GB others have {others / GB:.1f}, and CUDA takes "
            f"{CONTEXT_BYTES / GB:.1f}: free it, or take a larger one"
        )
    planner = _Planner(model_config, agent, training, usable, teacher_config)
    cache, rollouts = planner.rollouts
    reserve = 0 if training.rollout_sleep else rollouts if training.max_staleness else cache
    recomputes, tokens, update, least = planner.choose(usable - reserve)
    full = planner.full
    start, hand_over = full.start, full.hand_over()
    lora = training.lora
    adapter = "all weights" if lora is None else f"LoRA r{lora.rank}"
    shared = "one base copy, shared with the sampler" if planner.shares else "the sampler's, and what trains"
    if lora is not None and lora.quantization is not None:
        shared = f"the sampler's, and a copy in {lora.quantization}"
    if full.teacher is not None:
        shared += ", and the teacher"
    conversations, columns = planner.load.conversations, planner.load.row_tokens
    less_cache = "lower agent.max_context_tokens, max_concurrent or agent.max_cached_tokens"
    smaller = "train an adapter (lora)" if lora is None else "take a smaller model, or lora.quantization 4bit"
    no_reference = (
        ", or beta: 0, which needs no reference" if training.uses_reference and lora is None else ""
    )
    short_passes_fit = least <= usable - reserve
    long_step = planner.full.critic is not None and training.gradient_accumulation_steps > 1
    options = {
        "rollout_sleep: true": reserve and not training.rollout_sleep and not training.max_staleness,
        "gradient_checkpointing: true": not recomputes,
        "lower gradient_accumulation_steps": long_step and not short_passes_fit,
        "lower micro_batch_tokens": short_passes_fit,
    }
    lower = [option for option, helps in options.items() if helps]
    smaller_update = ", ".join(lower) + ", or " * bool(lower) + smaller + no_reference
    how = "recomputed" if recomputes else "kept"
    how += f", values of {training.advantage_estimator}" if full.critic is not None else ""
    processes = f", each of {training.num_processes} processes" if training.num_processes > 1 else ""
    phases = (
        Phase(name="start", bytes=start, what=shared, mend=smaller + no_reference),
        Phase(
            name="rollouts",
            bytes=start + rollouts,
            what=f"{conversations} conversations x {columns:,} tokens: cache {cache / GB:.1f}",
            mend=less_cache,
        ),
        Phase(
            name="update",
            bytes=update + reserve,
            what=f"passes of {tokens:,} tokens, activations {how}",
            mend=smaller_update,
        ),
        Phase(name="hand-over", bytes=hand_over + reserve, what="the sampler's new weights", mend=smaller),
    )
    largest = max(parameter.numel() for parameter in full.policy.model.parameters())
    return MemoryPlan(
        title=f"{name}, {adapter}, GPU of {total / 2**30:.0f} GiB{processes}",
        usable=usable,
        phases=phases,
        host_bytes=4 * largest,
        gradient_checkpointing=recomputes,
        micro_batch_tokens=tokens,
        max_cached_tokens=planner.cached_tokens,
    )


def plan_training(agent: AgentConfig, training: TrainingConfig, *, total: int, others: int = 0) -> MemoryPlan:
    """`plan_memory` of the agent's model, of which only the config is read, with what its card recommends.

    Blocking. Raises ConfigurationError for a model that is not there, or is a server's, and `NoPlan` for
    settings and models that cannot be simulated.
    """
    if agent.model_name == "scripted":
        raise ConfigurationError("a scripted agent has no weights to train, and nothing to plan")
    training, _ = training.with_recommended(recommended_settings(model_folder(agent.model_name)))
    config = load_config(agent.model_name)
    distillation, teacher = training.distillation, None
    if distillation is not None and distillation.device in ("auto", "cuda", agent.device):
        teacher = None if distillation.is_served else load_config(distillation.teacher)
    for is_there, part in (
        (reads_pictures(config), f"a {config.model_type}, which reads pictures,"),
        (training.parallelism == "fsdp2", "shards (parallelism fsdp2)"),
        (agent.engine == "plain", "the engine plain"),
    ):
        if is_there:
            raise NoPlan(f"the memory of {part} cannot be planned: {_BY_HAND}")
    try:
        return plan_memory(
            config,
            agent,
            training,
            name=agent.model_name,
            total=total,
            others=others,
            teacher_config=teacher,
        )
    except ConfigurationError:  # it says itself what to do
        raise
    except _UNFIT as error:  # the model's own code, on tensors without data
        reason = (str(error).splitlines() or [""])[0]
        raise NoPlan(
            f"a {config.model_type} cannot be planned ({type(error).__name__}: {reason:.120}): {_BY_HAND}"
        ) from error


class _Planner:
    """Simulations of one training, each made once."""

    def __init__(
        self,
        model_config: Any,
        agent: AgentConfig,
        training: TrainingConfig,
        usable: int,
        teacher_config: Any,
    ) -> None:
        self._model_config, self._training = model_config, training
        limit = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 2**20
        context = min(limit, agent.max_context_tokens or limit)
        group = training.num_generations
        scenarios = training.per_device_train_batch_size * training.gradient_accumulation_steps
        at_once = min(training.max_concurrent, scenarios * group)
        row = min(context, _ROW_TOKENS)
        self.load = Workload(
            conversations=at_once,
            row_tokens=row,
            prompt_tokens=min(row // 4, 256),
            pass_tokens=_TOKENS[-1],
            prefill_tokens=_PREFILL_TOKENS,
            step_tokens=training.episodes_per_step() * group * (row - min(row // 4, 256)),
        )
        names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "auto": torch.bfloat16}
        self._dtype = names[agent.dtype]
        self._teacher = None
        if teacher_config is not None and training.distillation is not None:
            self._teacher = teacher_config, names[training.distillation.dtype]
        computed = names[training.precision]
        self._autocast = None if computed is torch.float32 else computed
        self.full = self._simulated(None, recomputes=False)
        self._lines: dict[bool, _Line] = {}
        self.cached_tokens = agent.max_cached_tokens or self._room(usable)
        """The bound of the cache in tokens."""
        cached = max(1, min(at_once, self.cached_tokens // row))
        self.load = replace(self.load, conversations=cached)
        self.rollouts = self.full.rollouts(self.load)

    @property
    def shares(self) -> bool:
        """True where what trains stands on the sampler's own weights."""
        ours = {id(part) for part in self.full.speaker.parameters()}
        return any(id(part) in ours for part in self.full.policy.model.parameters())

    @property
    def _ways(self) -> list[bool]:
        """Whether activations may be recomputed: the quicker way first."""
        setting = self._training.gradient_checkpointing
        return [False, True] if setting == "auto" else [setting]

    def _room(self, usable: int) -> int:
        """Tokens of the cache that fit beside what else a phase takes, in whole conversations."""
        cache, peak = self.full.rollouts(self.load)
        other = self.full.start + peak - cache
        if not self._training.rollout_sleep:
            least = self._training.micro_batch_tokens or max(self.load.row_tokens, _ENOUGH_TOKENS)
            other = max(other, min(int(self._line(way).at(least)) for way in self._ways))
        row = self.load.row_tokens
        bytes_of_row = max(1, cache // self.load.conversations)
        return max(row, min(MOST_CACHED, (usable - other) // bytes_of_row * row))

    def _simulated(self, layers: int | None, *, recomputes: bool) -> SimulatedTraining:
        config = copy.deepcopy(self._model_config)
        if layers is not None:
            text = config.get_text_config()
            text.num_hidden_layers = layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
        training = self._training.model_copy(update={"gradient_checkpointing": recomputes})
        return SimulatedTraining(
            config, training, dtype=self._dtype, autocast=self._autocast, teacher=self._teacher
        )

    def choose(self, usable: int) -> tuple[bool, int, int, int]:
        """Whether activations are recomputed, the tokens of a pass, the peak of an update with them, and
        where that does not fit, of one with passes of 64 tokens."""
        training, tokens = self._training, self._training.micro_batch_tokens or 0
        for recomputes in self._ways:
            is_last = recomputes == self._ways[-1]
            if is_last and training.micro_batch_tokens is not None:
                break
            line = self._line(recomputes)
            tokens = training.micro_batch_tokens or line.fitting(usable)
            is_large = training.micro_batch_tokens is not None or tokens >= _ENOUGH_TOKENS
            if is_last or (is_large and line.at(tokens) <= usable):
                break
        full = self.full if not recomputes else self._simulated(None, recomputes=True)
        if tokens > _MOST_TOKENS:  # by the line: to simulate them takes minutes
            peak = int(self._line(recomputes).at(tokens))
        else:
            peak = full.update(self._load(tokens))
        while training.micro_batch_tokens is None and peak > usable and tokens > _MULTIPLE:
            tokens = max(
                _MULTIPLE, min(tokens - _MULTIPLE, int(tokens * usable / peak)) // _MULTIPLE * _MULTIPLE
            )
            if tokens < self.load.row_tokens:
                break
            peak = full.update(self._load(tokens))
        return recomputes, tokens, peak, peak if peak <= usable else full.update(self._load(_MULTIPLE))

    def _load(self, tokens: int) -> Workload:
        return replace(self.load, row_tokens=min(self.load.row_tokens, tokens), pass_tokens=tokens)

    def _peaks(self, layers: int | None, recomputes: bool) -> list[int]:
        simulated = self._simulated(layers, recomputes=recomputes)
        return [simulated.update(self._load(tokens)) for tokens in _TOKENS]

    def _line(self, recomputes: bool) -> _Line:
        if recomputes not in self._lines:
            self._lines[recomputes] = self._fitted(recomputes)
        return self._lines[recomputes]

    def _fitted(self, recomputes: bool) -> _Line:
        count, (few, many) = self._model_config.get_text_config().num_hidden_layers, _LAYERS
        if count <= many:
            here, there = self._peaks(None, recomputes)
        else:
            pairs = zip(self._peaks(few, recomputes), self._peaks(many, recomputes), strict=True)
            here, there = (low + (high - low) * (count - few) / (many - few) for low, high in pairs)
        slope = (there - here) / (_TOKENS[1] - _TOKENS[0])
        return _Line(base=here - slope * _TOKENS[0], slope=slope, least=self.load.row_tokens)


@dataclass(frozen=True, slots=True)
class _Line:
    """Bytes of an update by the tokens of its passes."""

    base: float
    slope: float
    least: int

    def at(self, tokens: int) -> float:
        return self.base + self.slope * tokens

    def fitting(self, usable: int) -> int:
        """The most tokens that fit, at least those of one conversation."""
        most = int((usable - self.base) / self.slope) if self.slope > 0 else _MOST_TOKENS
        return max(self.least, min(_MOST_TOKENS, most // _MULTIPLE * _MULTIPLE))
