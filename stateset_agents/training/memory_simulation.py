"""The memory of a training on a GPU, found by running its own code on tensors without data.

Device `meta` has shapes, dtypes and no memory, and it is no CPU, so the code takes its branches for a GPU.
The storages that live are counted. Two things are stood in for: autocast, which refuses `meta`, and
attention, whose kernel on a GPU keeps its output and log-sum and no scores. What a policy finds out by trying
(are its rows packed, is its head linear) is taken as it is for nearly all models.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers.pytorch_utils import Conv1D

from stateset_agents.algorithms.losses import Denominators, value_loss
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.backends.linears import wide_logits
from stateset_agents.backends.models.batched import BatchedModel
from stateset_agents.backends.models.fused import FusedModel
from stateset_agents.backends.models.slots import CachedModel, Plan
from stateset_agents.backends.pretrained.load_lock import loading
from stateset_agents.core.value_function import ValueHead
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import buckets
from stateset_agents.training.rows.layout import Layout
from stateset_agents.training.rows.parallel_passes import ParallelPasses
from stateset_agents.training.update.batch import MicroBatch
from stateset_agents.training.update.critic import make_critic
from stateset_agents.training.update.lora import adapter_of, add_adapter
from stateset_agents.training.update.objective import Objective
from stateset_agents.training.update.policy import Policy, set_mode
from stateset_agents.types.errors import BackendError

_QUANTIZED = {"4bit": 0.516, "8bit": 1.0}
"""Bytes of a weight: NF4 in blocks of 64 whose scales are in 8 bits, and LLM.int8."""
_TOKEN_LOSS = next(name for name, loss in LOSSES.items() if loss.level == "token")
_TURN_TOKENS = 32
"""Tokens of a turn; a critic of turns reads two hidden states of each."""
_SCORE_TOKENS = 128
"""Tokens whose log-softmax a teacher computes at once."""


class StorageCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch
    """Counts the bytes of the storages that are made inside and still live, and of those that it is told
    of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch
        self.live = 0
        self.peak = 0
        self._counted: set[int] = set()

    def add(self, tensor: Tensor) -> None:
        """Count the tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted:
            return
        self._counted.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.live -= size

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result


class _AsOnGPU(TorchFunctionMode):
    """Casts the operands of products as autocast does there, and stands in for attention."""

    _PRODUCTS = frozenset(
        {
            *(F.linear, torch.addmm, torch.matmul, torch.mm, torch.bmm, torch.baddbmm),
            *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm, Tensor.addmm),
        }
    )

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._casts: dict[Tensor, Tensor] = {}
        """Of trained weights, which autocast keeps until it ends."""

    def _cast(self, value: Any) -> Any:
        dtype = self._dtype
        if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        if value.dtype in (dtype, torch.float64):
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(dtype)
        if value not in self._casts:
            self._casts[value] = value.to(dtype)
        return self._casts[value]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _Attention.apply(*map(self._cast, args[:3]))  # type: ignore[no-untyped-call]  # torch
        if func in self._PRODUCTS:
            args = tuple(map(self._cast, args))
        return func(*args, **kwargs)


class _OfOneRow(_AsOnGPU):
    """Answers, too, what transformers asks of a mask: nothing is padded or packed."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func is Tensor.__bool__ or super().__torch_function__(func, types, args, kwargs)


class _Attention(torch.autograd.Function):
    """The tensors that a fused kernel makes and keeps for queries, keys and values [B, heads, T, D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sum = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, log_sum = ctx.saved_tensors
        by_query, wide = torch.empty_like(query), torch.empty_like(query, dtype=torch.float32)
        delta = torch.empty_like(log_sum)
        # Before heads that share keys are summed.
        by_head = key.new_empty(2, *query.shape[:2], *key.shape[2:])
        del wide, delta, by_head
        return by_query, torch.empty_like(key), torch.empty_like(value)


class _SimulatedPolicy(Policy):
    def _head_is_linear(self) -> bool:
        return True

    def _packing(self, row_layout: Any) -> tuple[bool, str]:
        is_packed = row_layout != "padded" and self._place_id is None
        return is_packed, "the plan takes it as given"

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.device.type == "meta":
            return _AsOnGPU(self.autocast)
        real = contextlib.ExitStack()
        real.enter_context(super()._autocast())
        real.enter_context(_AsOnGPU(None))
        return real

    @contextlib.contextmanager
    def _linears(self) -> Iterator[None]:
        with self._autocast(), super()._linears():  # a recomputed layer enters this alone
            yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The sizes that decide a training's memory."""

    conversations: int
    """Number of conversations that are played at once."""
    row_tokens: int
    """Tokens of a conversation."""
    prompt_tokens: int
    """Tokens that the conversations of a group begin with."""
    pass_tokens: int
    """Tokens of one pass of an update, a prompt that rows share counted once."""
    prefill_tokens: int
    """Tokens of one prefill."""
    step_tokens: int
    """Trained tokens of one step, over all processes."""


class SimulatedTraining:
    """The models of a training, as the learner factory makes them; every phase can be run."""

    def __init__(
        self,
        model_config: Any,
        config: TrainingConfig,
        *,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        teacher: tuple[Any, torch.dtype] | None = None,
        device: str = "meta",
    ) -> None:
        """`dtype`: the rollouts'; `autocast`: the update's; `teacher`: config and dtype of one on the same
        GPU. On another device than `meta` real tensors are counted, by the same branches.

        Raises BackendError for a model that is not of attention alone.
        """
        if LOSSES[config.loss_type].level == "sequence":
            # Its sums over conversations are taken of no meta tensor; they are some numbers a token.
            config = config.model_copy(update={"loss_type": _TOKEN_LOSS})
        self._config, self._device = config, device
        self.counter = StorageCounter()
        with loading(), self.counter, torch.device(device):
            self.speaker = self._frozen(model_config, dtype)
            self.engine = _engine(self.speaker)
            self.teacher = None if teacher is None else self._frozen(*teacher)
            computed = autocast or torch.float32
            shares = config.lora is not None and torch.promote_types(computed, dtype) is dtype
            if config.lora is not None and config.lora.quantization is not None:
                self._quantized = self._quantized_bytes(config.lora.quantization)
            self.policy = self._policy(shares, autocast)
            self.reference = self._reference()
            self.critic = make_critic(
                self.policy.model, config, layouts=lambda rows: [], hidden=self.policy.hidden
            )
        self.start = self.counter.live

    def _frozen(self, model_config: Any, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        with loading():  # the lock is ours already
            model: Any = AutoModelForCausalLM.from_config(model_config, dtype=dtype)  # type: ignore[no-untyped-call]  # transformers
        for tensor in (*model.parameters(), *model.buffers()):
            self.counter.add(tensor)
        return model.eval().requires_grad_(False)

    def _quantized_bytes(self, bits: str) -> Tensor:
        """A stand-in for the copy in few bits, beside the sampler's dequantised weights, and for the layer
        that is dequantised while it multiplies."""
        head = self.speaker.get_output_embeddings()
        layers = [layer for layer in self.speaker.modules() if isinstance(layer, (nn.Linear, Conv1D))]
        sizes = [layer.weight.numel() for layer in layers if layer is not head]
        others = sum(part.numel() for part in self.speaker.parameters()) - sum(sizes)
        whole = (max(sizes) + others) * self.speaker.dtype.itemsize
        size = sum(sizes) * _QUANTIZED[bits] + whole
        return torch.empty(int(size), dtype=torch.uint8, device=self._device)

    def _policy(self, shares: bool, autocast: torch.dtype | None) -> Policy:
        config, speaker = self._config, self.speaker
        tensors = (*speaker.parameters(), *speaker.buffers())
        memo = {id(part): part for part in tensors} if shares else {}
        model: Any = copy.deepcopy(speaker, memo)
        if not shares:
            wide = torch.promote_types(speaker.dtype, torch.float32)
            model = model.to(wide).requires_grad_(config.lora is None)
        if config.lora is not None:
            model = add_adapter(model, config.lora)
        policy = _SimulatedPolicy(model, autocast=autocast, row_layout=config.row_layout, fast=False)
        if config.gradient_checkpointing is True:
            policy.recompute_activations()
        return policy

    def _reference(self) -> Policy | None:
        if not self._config.uses_reference:
            return None
        return self.policy.without_adapter() if self._config.lora is not None else self.policy.reference()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.counter.peak = self.counter.live
        with self.counter:
            yield

    def rollouts(self, load: Workload) -> tuple[int, int]:
        """Bytes of the cache, and the peak of a prefill and of a decode step above what was there."""
        engine, begin = self.engine, self.counter.live
        columns = -(-load.row_tokens // 32) * 32
        with self._counted(), torch.inference_mode():
            engine.resize(load.conversations, columns, [])
            cache = self.counter.live - begin
            rows = max(1, min(load.conversations, load.prefill_tokens // load.row_tokens))
            new = min(load.row_tokens - 1, load.prefill_tokens)
            engine.forward(_plan(rows, 0, new))
            engine.forward(_plan(load.conversations, load.row_tokens - 1, 1)).float().softmax(-1)
            peak = self.counter.peak
            engine.resize(0, 0, [])
        return cache, peak - begin

    def update(self, load: Workload) -> int:
        """The peak of a step's credit, of a pass, of the sum over processes and of what a critic learns, once
        the optimisers have their moments."""
        policy, config = self.policy, self._config
        with self._counted():
            trained = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
            head = [] if self.critic is None else list(self.critic.value_function.head.parameters())
            moments = [torch.empty_like(part) for part in (*trained, *head) for _ in range(2)]
            layout, batch = self._batch(load)
            values = self._predicted(layout, load)
            self._teach(load)
            for parameter in trained:  # of the passes before
                parameter.grad = torch.empty_like(parameter)
            set_mode(policy.model, dropout=config.dropout)
            objective = Objective(
                policy, self.reference, config, exact_logprobs=False, passes=ParallelPasses(load.pass_tokens)
            )
            denominators = Denominators.of(
                [load.row_tokens] * len(layout.rows), max_length=config.loss_length
            )
            with torch.no_grad():
                batch = objective._scored(batch)
            others = self._other_batches(batch, load)
            output = objective.loss(batch, denominators, config.beta)
            torch.autograd.backward(output.loss)
            layout.forget_masks()
            del output, batch, others
            for bucket in buckets(trained) if config.num_processes > 1 else ():
                sums = torch.cat([part.grad.reshape(-1) for part in bucket if part.grad is not None])
                del sums
            for parameter in trained:
                parameter.grad = None
            self._learn_values(values)
            peak = self.counter.peak
            del moments, values
        return peak

    @torch.no_grad()
    def _predicted(self, layout: Layout, load: Workload) -> Tensor | None:
        """[values, H] the hidden states that the critic keeps of a step, as `Critic.predict` makes them."""
        if self.critic is None:
            return None
        turns = -(-load.step_tokens // _TURN_TOKENS)
        count = turns + (load.step_tokens if self.critic.per == "token" else turns)
        self.policy.model.eval()
        states = self.policy.hidden(layout)
        read = [states.new_empty(count, states.shape[-1])]
        hidden = torch.cat(read)
        _values(self.critic.value_function.head.eval(), torch.cat([hidden]))
        return hidden

    def _learn_values(self, hidden: Tensor | None) -> None:
        """As `Critic.learn`."""
        if self.critic is None or hidden is None:
            return
        head = self.critic.value_function.head.train()
        every = torch.cat([hidden])
        counted = every.clone()
        returns = torch.empty(len(hidden), device=hidden.device)
        ids = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
        clip = self.critic.value_function.value_clip
        loss = value_loss(
            _values(head, counted), returns, returns, ids, Denominators.of([len(hidden)]), value_clip=clip
        ).loss
        torch.autograd.backward(loss)
        head.zero_grad()

    @torch.inference_mode()
    def _teach(self, load: Workload) -> None:
        """A teacher scores a conversation."""
        if self.teacher is not None:
            row = torch.zeros(1, load.row_tokens, dtype=torch.long, device=self._device)
            with _OfOneRow(None), wide_logits(self.teacher):
                logits = self.teacher(input_ids=row, use_cache=False).logits[0, :-1]
            (logits[:_SCORE_TOKENS].float() / 1.0).logsumexp(-1)

    def _other_batches(self, batch: MicroBatch, load: Workload) -> Tensor:
        """A stand-in for the trained tokens of the step's other passes, which are there all the time."""
        columns = {
            id(part): part.nbytes
            for field in fields(batch)
            if isinstance(part := getattr(batch, field.name), Tensor)
        }
        count = len(batch.targets)
        others = max(0, load.step_tokens // self._config.num_processes - count)
        size = sum(columns.values()) // max(1, count) * others
        return torch.empty(size, dtype=torch.uint8, device=self._device)

    def hand_over(self) -> int:
        """The peak while an adapter is handed to the sampler; all weights are copied into its own."""
        with self._counted(), torch.inference_mode():
            if self._config.lora is not None:
                adapter = adapter_of(self.policy.model)
                copies = [torch.empty_like(part) for layer in adapter.values() for part in (layer.a, layer.b)]
                self.engine.set_adapter(adapter)
                del copies
            return self.counter.peak

    def _batch(self, load: Workload) -> tuple[Layout, MicroBatch]:
        """A pass of whole groups, all of whose tokens behind the prompts train."""
        size = self._config.num_generations
        prompt, length = load.prompt_tokens, load.row_tokens
        rows: list[list[int]] = []
        left = load.pass_tokens
        while left > 0:
            group, member = divmod(len(rows), size)
            own = length - (prompt if member else 0)
            added = min(own, left)
            head = [group] * prompt if member or added > prompt else [group] * added
            rows.append(head + [member] * (added - (len(head) if not member else 0)))
            left -= added
        bounds = {"max_rows": len(rows), "max_tokens": sum(map(len, rows))}
        (layout,) = self.policy.layouts(rows, units=[list(range(len(rows)))], **bounds)
        count = sum(max(0, len(row) - prompt) for row in rows)

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=self._device)

        batch = MicroBatch(
            layout=layout,
            positions=column(torch.long),
            targets=column(torch.long),
            trajectory_ids=column(torch.long),
            places=column(torch.long),
            old_logprobs=column(torch.float32),
            advantages=column(torch.float32),
        )
        return layout, batch


def _engine(model: Any) -> CachedModel:
    """The engine that runs it on a GPU, without the check against full forwards.

    Raises BackendError where none does: a recurrent model's forward goes token by token, which would take
    hours here.
    """
    for make in (FusedModel, BatchedModel):
        with contextlib.suppress(BackendError, AttributeError, KeyError, TypeError):
            return make(model, fast_linears=False)
    raise BackendError(f"{type(model).__name__} is no model of attention alone")


def _values(head: ValueHead, hidden: Tensor) -> Tensor:
    """As `ValueHead.forward`, which switches off an autocast that `meta` does not have."""
    values: Tensor = head.outer(head.dropout(torch.relu(head.inner(hidden.float())))).squeeze(-1)
    return values


def _plan(rows: int, start: int, length: int) -> Plan:
    return Plan(
        slots=np.arange(rows),
        starts=np.full(rows, start, np.int64),
        lengths=np.full(rows, length, np.int64),
        tokens=np.zeros(rows * length, np.int64),
    )
