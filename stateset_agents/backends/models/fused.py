"""A fused inference forward for models made of Llama's or GPT-2's blocks, with a slot store.

It computes the same as transformers' own forward, from the same weights, with less overhead. The tokens of
all rows are packed without padding. Query, key and value are one product, gate and up are another. Keys and
values are written in place. Logits are computed only for each row's last token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.pytorch_utils import Conv1D

from stateset_agents.backends.adapters import Adapter
from stateset_agents.backends.linears import MatmulPrecision, PackedLinear
from stateset_agents.backends.models.slot_store import HeadShape, PackedRows, SlotStore
from stateset_agents.backends.models.slots import Plan
from stateset_agents.types.errors import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LLAMAS = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_GPT2 = "GPT2LMHeadModel"
_FIXED_ROPES = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings whose angles depend only on the position, not on the length of the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """A layer: x + out(attention(norm(x))), then x + down(act(up(norm(x))))."""

    attention_norm: nn.Module
    query_key_value: PackedLinear
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    scaling: float
    out: PackedLinear
    feed_norm: nn.Module
    up: PackedLinear
    """The layer's upward product; gate and up side by side in a gated layer."""
    is_gated: bool
    activation: Callable[[Tensor], Tensor]
    down: PackedLinear


class FusedModel(SlotStore):
    """Llama, Mistral, Qwen2, Qwen3 and GPT-2 with a slot store; a `CachedModel`.

    It uses the weights of the transformers model. If linear layers are packed (linears.py), it has a
    second copy of theirs, of `copied_bytes`, from the first forward after a `refresh` on.
    """

    def __init__(self, model: PreTrainedModel, *, fast_linears: bool = True) -> None:
        """Raises BackendError, with the reason, for a model that it cannot run."""
        self.model = model
        self._packed = fast_linears
        self._layers: dict[PackedLinear, Sequence[nn.Module]] = {}
        """The model's layers that each product stands for."""
        config: Any = model.config
        name = type(model).__name__
        if name not in _LLAMAS and name != _GPT2:
            raise BackendError(f"{name} is none of {', '.join(sorted(_LLAMAS))} and {_GPT2}")
        kinds, extras = get_layer_types_and_kwargs(config)
        if not set(kinds) <= {"full_attention", "sliding_attention"}:
            raise BackendError(f"{name} has layers of type {', '.join(sorted(set(kinds)))}")
        windows = [int(extra.get("sliding_window") or 0) for extra in extras]
        heads = config.num_attention_heads
        shape = HeadShape(
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )
        inner: Any = model.base_model
        self._rotary: nn.Module | None = None
        self._learned: Tensor | None = None
        """[positions, hidden] position embeddings that are added."""
        if name == _GPT2:
            self._embedding: Tensor = inner.wte.weight
            self._learned, self._norm = inner.wpe.weight, inner.ln_f
            self._blocks = [_gpt2_block(block, self._stacked) for block in inner.h]
        else:
            rope = config.rope_parameters["rope_type"]
            if rope not in _FIXED_ROPES:
                raise BackendError(f"{name} has a rotary embedding of type {rope}, which changes with length")
            self._embedding, self._rotary, self._norm = (
                inner.embed_tokens.weight,
                inner.rotary_emb,
                inner.norm,
            )
            self._blocks = [_llama_block(layer, self._stacked) for layer in inner.layers]
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]  # transformers' own
        self._head = self._stacked(head, wide=True)
        super().__init__(shape, windows, model.dtype, model.device)

    @property
    def copied_bytes(self) -> int:
        """Bytes of the packed copies of weights."""
        return sum(linear.copied_bytes for linear in self._linears())

    def forward(self, plan: Plan) -> Tensor:
        rows = PackedRows.of(plan, self.device)
        self.begin(plan, rows)
        hidden = F.embedding(rows.tokens, self._embedding)
        if self._learned is not None:
            hidden = hidden + F.embedding(rows.positions, self._learned)
        rotations = [angle.index_select(0, rows.positions) for angle in self._angles]
        last = None if rows.count == len(plan.slots) else rows.last
        for layer, block in enumerate(self._blocks):
            hidden = self._layer(
                layer, block, hidden, rotations, last if layer == len(self._blocks) - 1 else None
            )
        return self._head(_normed(self._norm, hidden))[: len(plan.slots)]

    def _layer(
        self, layer: int, block: _Block, hidden: Tensor, rotations: list[Tensor], last: Tensor | None
    ) -> Tensor:
        """The output of a block on [M, hidden]; with `last`, its second half is for these rows only."""
        heads, kv_heads, size = self._shape.num_heads, self._shape.num_kv_heads, self._shape.size
        projected = block.query_key_value(_normed(block.attention_norm, hidden)).view(
            hidden.shape[0], -1, size
        )
        query_key, value = projected[:, : heads + kv_heads], projected[:, heads + kv_heads :]
        if block.query_norm is not None and block.key_norm is not None:
            query, key = (
                _normed(block.query_norm, query_key[:, :heads]),
                _normed(block.key_norm, query_key[:, heads:]),
            )
            query_key = torch.cat([query, key], dim=1)
        if rotations:
            query_key = _rotated(query_key, *rotations)
        query, key = query_key[:, :heads], query_key[:, heads:]
        attended = self.attend(layer, query, key, value, block.scaling)
        if last is not None:
            hidden, attended = hidden.index_select(0, last), attended.index_select(0, last)
        hidden = block.out(attended).add_(hidden)
        wide = block.up(_normed(block.feed_norm, hidden))
        if block.is_gated:
            gate, wide = wide.chunk(2, dim=-1)
            wide = block.activation(gate).mul_(wide)
        else:
            wide = block.activation(wide)
        return block.down(wide).add_(hidden)

    def resize(self, num_slots: int, num_columns: int, keep: list[int]) -> None:
        """Change the size of the cache, and compute the angles of its positions."""
        super().resize(num_slots, num_columns, keep)
        self._angles = self._make_angles()

    def set_matmul_precision(self, precision: MatmulPrecision) -> None:
        super().set_matmul_precision(precision)
        if self.model.dtype is not torch.float32:  # products of half precision stay as they are
            return
        for linear in self._linears():
            linear.precision = "highest" if linear is self._head else precision
        self.refresh()

    def refresh(self) -> None:
        """Drop the packed weights; the next forward packs them again."""
        for linear in self._linears():
            linear.refresh()

    def _linears(self) -> Iterable[PackedLinear]:
        return self._layers

    def _stacked(self, *layers: Any, wide: bool = False) -> PackedLinear:
        """The product of linear layers with the same input."""
        weights = [layer.weight.t() if isinstance(layer, Conv1D) else layer.weight for layer in layers]
        linear = PackedLinear(weights, [layer.bias for layer in layers], packed=self._packed, wide=wide)
        self._layers[linear] = layers
        return linear

    def set_adapter(self, adapter: Adapter) -> None:
        names = {layer: name for name, layer in self.model.named_modules()}
        for linear, layers in self._layers.items():
            parts = [adapter.get(names[layer]) for layer in layers]
            linear.set_adapter([None if part is None else (part.a, part.b * part.scaling) for part in parts])

    def _make_angles(self) -> list[Tensor]:
        """Cosines and sines [columns, 1, size] of every position, by the model's own rotary embedding."""
        if self._rotary is None:
            return []
        positions = torch.arange(max(self.num_columns, 1), device=self.device)[None]
        return [table[0, :, None] for table in self._rotary(self._embedding[:1], positions)]


def _normed(norm: Any, x: Tensor) -> Tensor:
    """LayerNorm, or RMSNorm as Llama has it: the mean square in fp32, the weight in the model's dtype; on a
    GPU that is rounded after the weight."""
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    if not x.is_cpu:  # one launch instead of nine, in torch that has the kernel
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = size.square_().div_(x.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    normed: Tensor = (wide * scale).to(x.dtype).mul_(norm.weight)
    return normed


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (x[i], x[i + size/2]) rotated by its angle."""
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return rotated


def _llama_block(layer: Any, stacked: Callable[..., PackedLinear]) -> _Block:
    attention, feed = layer.self_attn, layer.mlp
    return _Block(
        attention_norm=layer.input_layernorm,
        query_key_value=stacked(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        scaling=attention.scaling,
        out=stacked(attention.o_proj),
        feed_norm=layer.post_attention_layernorm,
        up=stacked(feed.gate_proj, feed.up_proj),
        is_gated=True,
        activation=feed.act_fn,
        down=stacked(feed.down_proj),
    )


def _gpt2_block(block: Any, stacked: Callable[..., PackedLinear]) -> _Block:
    return _Block(
        attention_norm=block.ln_1,
        query_key_value=stacked(block.attn.c_attn),
        query_norm=None,
        key_norm=None,
        scaling=block.attn.scaling,
        out=stacked(block.attn.c_proj),
        feed_norm=block.ln_2,
        up=stacked(block.mlp.c_fc),
        is_gated=False,
        activation=block.mlp.act,
        down=stacked(block.mlp.c_proj),
    )
