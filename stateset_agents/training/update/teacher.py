"""A teacher beside the learner: its log-probs of the tokens that the student sampled become advantages.

Called between credit and update. The student's own log-probs are those that were stored as each token was
drawn.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stateset_agents.algorithms.distillation import teacher_advantages, teacher_signal
from stateset_agents.backends.base import Backend, SavableBackend, Tokenizer, TrainableBackend
from stateset_agents.backends.loading import load_backend
from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.plain_template import PlainTemplate
from stateset_agents.core.chat.template import ChatTemplate
from stateset_agents.runs.checkpoint_files import fingerprint
from stateset_agents.runtime.tasks import gather_or_cancel, in_thread
from stateset_agents.training.estimators import tokens_per_turn
from stateset_agents.training.processes import ProcessGroup
from stateset_agents.training.settings.update import DistillationSettings
from stateset_agents.training.update.batch import CreditedBatch, Sample, trained_turns
from stateset_agents.types.errors import BackendError, ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.trajectory import Row

_log = get_logger(__name__)
_ASKED_AT_ONCE = 32
"""Rows that a server is asked for at once; a model in this process takes one after another."""


class Teacher:
    """A frozen model that scores what the student said; made by `load_teacher`."""

    def __init__(
        self,
        backend: Backend,
        settings: DistillationSettings,
        *,
        group: ProcessGroup | None = None,
        weights: str | None = None,
    ) -> None:
        """`backend` is started. `group`: the processes that train together, each of which asks for its share;
        `weights`: the fingerprint of the teacher's."""
        self.settings = settings
        self.weights = weights
        self._backend = backend
        self._group = group
        self._places = asyncio.Semaphore(_ASKED_AT_ONCE)

    @property
    def identity(self) -> dict[str, Any]:
        """The teacher's name and weights, for events and for a run that goes on."""
        return {"model": self.settings.teacher, "weights": self.weights}

    async def close(self) -> None:
        """End its thread, or the connection."""
        await self._backend.close()

    async def logprobs(self, sample: Sample, *, temperature: float = 1.0) -> list[float]:
        """[N] the teacher's log-prob of each of the sample's agent tokens, in order of turns.

        Raises BackendError where it cannot be had.
        """
        completions = [turn.completion for turn in sample.trajectory.turns]
        if any(completion.constraint or completion.sampling_mask for completion in completions):
            raise ConfigurationError(
                "a teacher scores over the whole vocabulary, without a reply's grammar or truncation: distil "
                "without constrain, first_reply, answer_schema, top_k and top_p"
            )
        by_turn: list[Sequence[float]] = [()] * len(sample.trajectory.turns)

        async def score(row: Row) -> None:
            async with self._places:
                scores = await self._backend.score(row.token_ids, temperature=temperature)
            for number, turn, start in trained_turns(row):
                by_turn[number] = scores[start - 1 : start - 1 + len(turn.completion.token_ids)]

        await gather_or_cancel(map(score, sample.rows))
        values = [value for part in by_turn for value in part]
        if any(math.isnan(value) or value > 1e-3 for value in values):  # rounding may go a little above 0
            raise BackendError(
                f"the teacher {self.settings.teacher!r} gave log-probs that are none: look at its weights"
            )
        return values

    async def guide(
        self, batch: CreditedBatch, *, temperature: float = 1.0
    ) -> tuple[CreditedBatch, dict[str, float]]:
        """The batch with `weight` times the teacher's word and `reward_weight` times the reward's as their
        advantages; and metrics.

        - kl/teacher: the mean of log pi_S - log pi_T over the sampled tokens, in nats: an estimate of the
          reverse KL of a token;
        - time/teacher: seconds that the student waited.
        """
        began = time.perf_counter()
        samples, settings = batch.samples, self.settings
        teacher_logprobs = await self._of_all(samples, temperature)
        guided: list[Sample] = []
        total = 0.0
        for sample, logprobs in zip(samples, teacher_logprobs, strict=True):
            completions = [turn.completion for turn in sample.trajectory.turns]
            student_logprobs = [value for completion in completions for value in completion.logprobs]
            signal = teacher_signal(logprobs, student_logprobs)
            total -= math.fsum(signal)
            gains = teacher_advantages(signal, tokens_per_turn(sample.trajectory), settings.credit)
            advantages = tuple(
                settings.reward_weight * reward + settings.weight * gain
                for reward, gain in zip(sample.advantages, gains, strict=True)
            )
            guided.append(replace(sample, advantages=advantages))
        credit = batch.by_member([sample.advantages for sample in guided])
        metrics = {"time/teacher": time.perf_counter() - began}
        if count := sum(len(sample.advantages) for sample in guided):
            metrics["kl/teacher"] = total / count
        return replace(batch, samples=guided, advantages=credit), metrics

    async def _of_all(self, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
        """[samples][N_i] of each; with several processes each asks for its share."""

        async def score(part: Sequence[Sample]) -> list[list[float]]:
            return await gather_or_cancel(self.logprobs(sample, temperature=temperature) for sample in part)

        if self._group is None or self._group.processes.is_alone:
            return await score(samples)
        part = samples[self._group.processes.slice_of(len(samples))]
        shares = await self._group.gather_results("the teacher", score(part))
        return [logprobs for share in shares for logprobs in share]


async def load_teacher(
    settings: DistillationSettings, student: MultiTurnAgent, *, group: ProcessGroup | None = None
) -> Teacher:
    """The teacher, loaded and started, for an initialised student.

    Raises ConfigurationError for one that cannot be loaded, has another vocabulary, or holds shorter
    conversations than the student; BackendError for a server that does not answer.
    """
    name = settings.teacher
    backend = await load_backend(name, device=settings.device, dtype=settings.dtype)
    check_vocabulary(student.backend.tokenizer, backend.tokenizer, name=name)
    if backend.context_length < student.context_length:
        raise ConfigurationError(
            f"the teacher {name!r} reads {backend.context_length} tokens and the student's conversations may "
            f"have {student.context_length}: set agent.max_context_tokens to {backend.context_length}"
        )
    if _speaks_otherwise(backend.tokenizer, student.template):
        _log.warning(
            "the teacher's chat template is another than the student's, whose rendering it is shown: look at "
            "kl/teacher of the first step",
            teacher=name,
        )
    weights = await in_thread(weights_of, backend)
    await backend.start()
    return Teacher(backend, settings, group=group, weights=weights)


def check_vocabulary(student: Tokenizer, teacher: Tokenizer, *, name: str) -> None:
    """Compare what each id stands for. The teacher may know more tokens than the student, which never says
    those.

    Raises ConfigurationError for a token of the student's that is another one of the teacher's, or none.
    """
    tokens = _vocabulary(teacher)
    for id, token in sorted(_vocabulary(student).items()):
        if tokens.get(id) != token:
            raise ConfigurationError(
                f"the teacher {name!r} has another vocabulary than the student (token {id} is {token!r} here "
                f"and {tokens.get(id)!r} there): take a teacher of the student's family, or let it write "
                "traces, with a section traces in place of training.distillation"
            )


def _vocabulary(tokenizer: Tokenizer) -> dict[int, str]:
    """{id: token} with the added ones; empty for a tokenizer that is not transformers'."""
    hf = getattr(tokenizer, "hf", None)
    return {} if hf is None else {id: token for token, id in hf.get_vocab().items()}


def weights_of(backend: Backend) -> str | None:
    """The fingerprint of a model's weights; None where they are elsewhere. Blocking."""
    if isinstance(backend, SavableBackend) and isinstance(backend, TrainableBackend):
        return fingerprint(backend.model_to_quantize().state_dict())
    return None


def _speaks_otherwise(teacher: Tokenizer, template: ChatTemplate) -> bool:
    """True where the teacher's chat template is another than its student's; a base model's is the plain
    one."""
    raw = getattr(teacher, "hf", None)
    if raw is None or not raw.chat_template:
        return raw is not None and not isinstance(template, PlainTemplate)
    return bool(raw.chat_template != template.written())
