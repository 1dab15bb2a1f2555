"""transformers' own forward with our attention and a slot store; selected by model_selection.py.

This runs any attention-only model that takes its attention from transformers' AttentionInterface. The tokens
of all conversations are packed into one row without padding. In each layer our function stores the new keys
and values, and every token attends to its own slot (slot_store.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from stateset_agents.backends.linears import fast_linears, head_weight, wide_logits
from stateset_agents.backends.models.slot_store import HeadShape, PackedRows, SlotStore
from stateset_agents.backends.models.slots import Plan, layer_windows
from stateset_agents.types.errors import BackendError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_NAME = "stateset-slots"
_IGNORED = {"position_ids", "cache_position", "position_embeddings"}
_serving = threading.local()
"""`store` while a BatchedModel's forward runs in this thread."""


class BatchedModel(SlotStore):
    """A causal transformers model that runs its own forward on packed tokens; a `CachedModel`."""

    def __init__(self, model: PreTrainedModel, *, fast_linears: bool = True) -> None:
        """Raises BackendError for chunked attention and for layer types whose masks are unknown."""
        self.model = model
        self._fast_linears = fast_linears
        config: Any = model.config.get_text_config()
        kinds = layer_windows(config, type(model).__name__)
        if any(kind == "chunked_attention" for kind, _ in kinds):
            raise BackendError(f"{type(model).__name__} attends in chunks")
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        shape = HeadShape(num_heads=heads, num_kv_heads=kv_heads, size=size)
        super().__init__(shape, [window for _, window in kinds], model.dtype, model.device)
        unused = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.device)  # so the model makes no mask
        types = {kind for kind, _ in kinds}
        self._masks = dict.fromkeys(types, unused) if len(types) > 1 else unused

    def forward(self, plan: Plan) -> Tensor:
        rows = PackedRows.of(plan, self.device)
        self.begin(plan, rows)
        linears = fast_linears(self._fast_linears, self.precision, wide=head_weight(self.model))
        with _attending(self.model, self), linears, wide_logits(self.model):
            output = self.model(
                input_ids=rows.tokens[None],
                position_ids=rows.positions[None],
                attention_mask=self._masks,
                use_cache=False,
                logits_to_keep=rows.last,
            )
        logits: Tensor = output.logits[0]
        return logits


@contextlib.contextmanager
def _attending(model: PreTrainedModel, store: SlotStore) -> Iterator[None]:
    """Inside, the model's attention is `_attend`, with this store."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = _NAME
    _serving.store = store
    try:
        yield
    finally:
        _serving.store = None
        config._attn_implementation = before


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1, heads, M, size] in, [1, M, heads, size] out."""
    store: SlotStore | None = getattr(_serving, "store", None)
    if store is None:  # a copy of the model that was made while our forward ran
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **extra
        )
    unsupported = {name for name, value in extra.items() if isinstance(value, Tensor)} - _IGNORED
    unsupported |= {name for name in ("softcap", "s_aux", "position_bias") if extra.get(name) is not None}
    if unsupported:
        raise ValueError(f"attention with {', '.join(sorted(unsupported))}")
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return store.attend(module.layer_idx, query, key, value, scale).view(1, *query.shape), None


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, sdpa_mask)
