"""The trainable policy: master weights, log-probs of what was sampled, and the frozen reference.

Called by the learner, in the trainer's worker thread.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stateset_agents.backends.linears import (
    MatmulPrecision,
    fast_linears,
    head_weight,
    is_usable,
    multiplies_wide,
    sums_in_fp32,
)
from stateset_agents.backends.pretrained.pictures import stacked
from stateset_agents.backends.sampling import NEVER
from stateset_agents.core.value_function import trunk_of
from stateset_agents.training.rows.chunked_head import Head, LossOf, TokenScores, chunked_loss, chunked_scores
from stateset_agents.training.rows.fused_layers import (
    changes_frequencies,
    fused_hidden,
    is_fused_exactly,
    why_not_fused,
    why_not_packed,
)
from stateset_agents.training.rows.layout import Layout, packed_layouts, padded_layouts
from stateset_agents.training.rows.packed_attention import recompute_contexts, use_packed_attention
from stateset_agents.training.update.batch import MicroBatch, micro_batch
from stateset_agents.training.update.lora import base_of
from stateset_agents.training.update.sharding import shard
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.trajectory import Row

RowLayout = Literal["auto", "packed", "padded"]
_M = TypeVar("_M")
_SIDE_BY_SIDE = 2
"""Passes at once; more have not been measured."""


class Policy:
    """A causal language model with weights in fp32 (or wider), forwarded under autocast. Frozen weights below
    an adapter may be in less.

    Hidden states are selected at the positions that predict a trained token before the LM head, and the
    head goes through them in chunks, so the [R, T, V] logits of a batch never exist. Logits and softmax are
    never in half precision; under bf16 autocast on a CPU with bf16 units the head's gradients are products of
    bf16 operands, and with AMX, where such products are summed in fp32, so are the logits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        autocast: torch.dtype | None = None,
        row_layout: RowLayout = "auto",
        fast: bool = True,
        precision: MatmulPrecision = "highest",
        place_id: int | None = None,
    ) -> None:
        """`fast`: fp32 linears by oneDNN where `onednn_linear` takes it; `precision`: of fp32 products, but
        for logits; `place_id`: the token that stands for a picture, which as in rollouts no reply can have;
        None for rows without pictures.

        Raises ConfigurationError where rows must be packed and the model cannot.
        """
        first = next(model.parameters())
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self.device = first.device
        self.model: Any = model if hasattr(model, "peft_config") else model.to(self.dtype)
        self.temperature = temperature
        self.autocast = autocast
        self.fast = fast
        self.precision = precision
        is_half = autocast is torch.bfloat16 and is_usable("medium", self.device)
        self._head_precision: MatmulPrecision = "medium" if is_half else precision
        """Precision of the head's gradients."""
        if self.dtype != torch.float32:
            self._head_precision = "highest"
        on_cpu = self.device.type == "cpu" and self.dtype == torch.float32
        self._rounds_logits = is_half and on_cpu and sums_in_fp32()
        """True where the operands of the head's logits are in bf16, too."""
        weight = head_weight(self.model)
        if weight is not None and multiplies_wide(weight):
            self._head_precision, self._rounds_logits = "medium", True
        self._recomputes = False
        self._adapter_disabled = False
        """True where the adapter is switched off while this policy scores."""
        self.is_sharded = False
        """True where all processes score and learn together, and sum their gradients in the backward pass."""
        self._run: Any = operator.call
        """Calls work that forwards the model, with its shards gathered where it is sharded."""
        self._place_id = place_id
        self.trunk = _trunk(self.model)
        self.selects = self.trunk is not None and self._head_is_linear()
        """True where the head is applied to selected hidden states; else the model's own logits are used."""
        self.packs, self.why = self._packing(row_layout)
        """True where rows are packed behind one another and share their prefixes; and the reason."""
        self._fuses = self.packs and fast and autocast is torch.bfloat16 and is_fused_exactly(self.trunk)

    def _packing(self, row_layout: RowLayout) -> tuple[bool, str]:
        if row_layout == "padded":
            return False, "row_layout is padded"
        if self._place_id is not None:
            reason, problem = "the model reads pictures", "reads pictures, whose rows cannot be packed"
        else:
            hindrance = why_not_packed(self.trunk) if self.selects else "its logits are not a linear head's"
            if hindrance is None:
                return True, "packed rows give the model's own hidden states"
            reason, problem = hindrance, f"cannot be trained on packed rows ({hindrance})"
        if row_layout == "packed":
            name = type(self.model).__name__
            raise ConfigurationError(f"{name} {problem}: set row_layout to auto or padded")
        return False, reason

    @property
    def fuses(self) -> bool:
        """True where packed rows go through the layers of `fused_layers.py`, which are for bf16 on a CPU."""
        if not self._fuses or self._recomputes or self._adapter_disabled or self.is_sharded:
            return False
        return why_not_fused(self.trunk) is None  # since then, a hook or an adapter may have been put into it

    @property
    def passes_at_once(self) -> int:
        """The number of passes that are faster side by side: those of fused layers, where they leave the
        model as it is."""
        if not self.fuses or torch.get_num_threads() < _SIDE_BY_SIDE or changes_frequencies(self.trunk):
            return 1
        return _SIDE_BY_SIDE

    def recompute_activations(self) -> None:
        """Keep no activations of the layers for the backward pass. Raises ConfigurationError for a model that
        cannot."""
        options = {"use_reentrant": False, "context_fn": recompute_contexts(self.trunk, self._linears)}
        try:
            self.model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
            self._recomputes = True
        except ValueError as error:
            raise ConfigurationError(
                f"{type(self.model).__name__} cannot recompute activations: set gradient_checkpointing false"
            ) from error

    def shard(self, count: int) -> None:
        """Keep one of `count` shards of the model. All processes do it, and from then on score and learn on
        the same number of micro-batches."""
        self._run, self.is_sharded = shard(self.model, count), True

    def empty_batch(self) -> MicroBatch:
        """A batch for a process that has fewer micro-batches than another."""
        (layout,) = self.layouts([[0, 0]], max_rows=1, max_tokens=2)
        return micro_batch([], layout).to(self.device)

    def reference(self, model: nn.Module | None = None) -> Policy:
        """A frozen copy of the policy as it is now; or `model` itself, frozen, forwarded as the policy is.

        Raises ConfigurationError for a model whose parameters are not of the policy's shapes.
        """
        if model is not None:
            _check_same_shape(model, self.model)
            model = model.to(device=self.device, dtype=self.dtype)
        reference = copy.copy(self)
        frozen: Any = copy.deepcopy(self.model) if model is None else model
        reference.model = frozen.eval().requires_grad_(False)
        reference.trunk = _trunk(reference.model)
        return reference

    def round_operands(self) -> None:
        """Keep the layers' weights as the fused layers round them: of a frozen policy, whose scores stay the
        same, half of that memory."""
        assert self.fuses
        for module in self.trunk.layers.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)

    def without_adapter(self) -> Policy:
        """This policy on the same model, scored with its adapter switched off."""
        reference = copy.copy(self)
        reference._adapter_disabled = True
        return reference

    def layouts(
        self,
        rows: Sequence[Sequence[int]],
        *,
        max_rows: int,
        max_tokens: int,
        units: Sequence[Sequence[int]] | None = None,
        at_once: int = 1,
    ) -> list[Layout]:
        """The layouts in which these rows of tokens go through the model; arguments as of `packed_layouts`,
        and of `padded_layouts`, which are never side by side."""
        bounds = {"max_rows": max_rows, "max_tokens": max_tokens}
        if not self.packs:
            return padded_layouts(rows, units=units, **bounds)
        return packed_layouts(rows, units=units, at_once=at_once, **bounds)

    def with_pixels(self, layout: Layout, rows: Sequence[Row]) -> Layout:
        """The layout with the pictures of its rows; `rows` are all that it numbers."""
        pixels = [item for index in layout.rows for item in rows[index].pixels]
        return replace(layout, pixels=stacked(pixels, base_of(self.model), self.device)) if pixels else layout

    def hidden(self, layout: Layout) -> Tensor:
        """[R * T, H] last hidden states, under autocast."""
        assert self.trunk is not None
        if layout.packing and self.fuses:
            return fused_hidden(self.trunk, layout)
        with self._forwarding(layout):
            output = self.trunk(**layout.forward_arguments(self.device)).last_hidden_state
        states: Tensor = output.flatten(0, 1)
        return states

    @torch.no_grad()
    def score(self, batch: MicroBatch) -> TokenScores:
        """Log-probs of the trained tokens and their distributions' entropies, without gradient."""

        def work() -> TokenScores:
            if not self.selects:
                return _scores(self._logits(batch), batch.targets)
            hidden = self.hidden(batch.layout).index_select(0, batch.positions).to(self.dtype)
            with fast_linears(self.fast):
                return chunked_scores(hidden, self._head(), batch.targets, batch.masks)

        scores: TokenScores = self._run(work)
        return scores

    def loss(
        self, batch: MicroBatch, loss_of: LossOf[_M], *, additive: bool = True, entropy_gradient: bool = False
    ) -> tuple[Tensor, list[_M]]:
        """The loss that `loss_of` makes of the trained tokens' scores, with gradient where it is enabled; and
        what it measured, in order of the tokens. See `chunked_head.chunked_loss`."""
        if not torch.is_grad_enabled():
            share, figures = loss_of(self.score(batch), slice(0, len(batch.targets)))
            return share, [figures]

        def work() -> tuple[Tensor, list[_M]]:
            if self.selects:
                hidden = self.hidden(batch.layout).index_select(0, batch.positions).to(self.dtype)
                with fast_linears(self.fast):
                    return chunked_loss(
                        hidden,
                        self._head(),
                        batch.targets,
                        loss_of,
                        masks=batch.masks,
                        additive=additive,
                        entropy_gradient=entropy_gradient,
                    )
            scores = _scores(self._logits(batch), batch.targets)
            if not entropy_gradient:
                scores = scores._replace(entropy=scores.entropy.detach())
            share, figures = loss_of(scores, slice(0, len(batch.targets)))
            return share, [figures]

        total, measured = self._run(work)
        return total, measured

    def _logits(self, batch: MicroBatch) -> Tensor:
        """[N, V] as the model itself computes them, over the temperature."""
        with self._forwarding(batch.layout), _full_precision_head(self.model.get_output_embeddings()):
            output: Tensor = self.model(**batch.layout.forward_arguments(self.device)).logits
        logits = output.flatten(0, 1).index_select(0, batch.positions).to(self.dtype)
        if self._place_id is not None:
            column = torch.tensor([self._place_id], device=logits.device)
            logits = logits.index_fill(1, column, NEVER)
        logits = logits / self.temperature
        if batch.masks is not None:
            batch.masks.apply(logits)
        return logits

    @contextlib.contextmanager
    def _forwarding(self, layout: Layout) -> Iterator[None]:
        attention = use_packed_attention(self.trunk) if layout.packing else contextlib.nullcontext()
        adapter = self.model.disable_adapter() if self._adapter_disabled else contextlib.nullcontext()
        with adapter, attention, self._autocast(), self._linears():
            yield
        if not torch.is_grad_enabled():  # else the backward pass may forward it again
            layout.forget_masks()

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None)

    def _linears(self) -> AbstractContextManager[None]:
        """The context in which a forward of the model computes fp32 linears."""
        return fast_linears(self.fast, self.precision, wide=head_weight(self.model))

    def _head(self) -> Head:
        head = self.model.get_output_embeddings()
        bias = head.bias
        if self._place_id is not None:
            bias = head.weight.new_zeros(len(head.weight)) if bias is None else bias
            bias = bias.index_fill(0, torch.tensor([self._place_id], device=bias.device), NEVER)
        weight = head.weight
        if weight.dtype != self.dtype and not self._rounds_logits:  # frozen, below an adapter
            weight = weight.to(self.dtype)
        return Head(weight, bias, self.temperature, self._head_precision, self._rounds_logits)

    @torch.no_grad()
    def _head_is_linear(self) -> bool:
        """True where the model's logits are its output embedding, applied to the last hidden state.

        Some models scale or cap their logits (Cohere, Gemma 2); for those the model's own are used. A cap
        hardly shows on small logits, so the head's input is scaled up for the comparison.
        """
        head = self.model.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return False
        assert self.trunk is not None
        ids = torch.arange(min(4, head.weight.shape[0]), device=self.device)[None]
        training = self.model.training
        self.model.eval()
        hook = head.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 1000, *inputs[1:]))
        try:
            logits = self.model(input_ids=ids, use_cache=False).logits
        finally:
            hook.remove()
        hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state
        self.model.train(training)
        return torch.allclose(logits, F.linear(hidden * 1000, head.weight, head.bias), atol=1e-2, rtol=1e-4)


def _check_same_shape(model: nn.Module, policy: nn.Module) -> None:
    """Raise ConfigurationError for another architecture: what was found of the policy, such as how its rows
    are packed, must hold of the reference."""
    shapes = {name: parameter.shape for name, parameter in policy.named_parameters()}
    for name, parameter in model.named_parameters():
        if shapes.pop(name, None) != parameter.shape:
            raise ConfigurationError(f"the reference is another architecture than the policy: {name} differs")
    if shapes:
        raise ConfigurationError(f"the reference is another architecture: it has no {next(iter(shapes))}")


def _trunk(model: Any) -> Any:
    """The part below the head, None where there is none to read hidden states from."""
    try:
        return trunk_of(model)
    except ConfigurationError:
        return None


def _scores(logits: Tensor, targets: Tensor) -> TokenScores:
    logprobs = torch.log_softmax(logits, dim=-1)
    token_logprobs = logprobs.gather(1, targets[:, None]).squeeze(1)
    return TokenScores(token_logprobs, -(logprobs.exp() * logprobs).sum(dim=-1))


@contextlib.contextmanager
def _full_precision_head(head: nn.Module) -> Iterator[None]:
    """The model's own head computes, while this is open, in its weights' dtype, whatever autocast says."""

    def recompute(linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not isinstance(linear, nn.Linear):
            return output
        with torch.autocast(output.device.type, enabled=False):
            return F.linear(inputs[0].to(linear.weight.dtype), linear.weight, linear.bias)

    hook = head.register_forward_hook(recompute)
    try:
        yield
    finally:
        hook.remove()


# Dropout of an update: on or off, and drawn from a random stream of its own. The learners call it.


def set_mode(model: nn.Module, *, dropout: bool) -> None:
    """Training mode, or evaluation mode in which layers with gradient checkpointing still recompute.

    transformers' layers recompute in training mode only: without dropout only these layers are put into it,
    and the dropout rates that they apply themselves are set to 0.
    """
    model.train(dropout)
    if dropout:
        return
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True
            clear_dropout_rates(module)


def clear_dropout_rates(module: nn.Module) -> None:
    """Set to 0 the rates that a layer hands to `F.dropout` itself."""
    for name, value in list(vars(module).items()):
        if "drop" in name and isinstance(value, float):
            setattr(module, name, 0.0)


@contextlib.contextmanager
def seeded_rng(key: int, device: torch.device) -> Iterator[None]:
    """Torch draws, while this is open, from a generator seeded by `key`; the process's generators stay as
    they were."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(key)
        yield
