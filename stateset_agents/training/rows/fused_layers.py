"""Llama's layers in bf16 on packed rows, forward and backward by hand; called by `training.update.policy`.

Under autocast a CPU spends more time on casts, norms and sums, each over all of memory, than on products.
Here a layer is three functions,

    q, k, v = rotate(norm(x) W_qkv')
    a       = attention(q, k, v)
    x'      = m + (silu(n W_gate') * (n W_up')) W_down',    m = x + a W_out',    n = norm(m)

of which the backward passes of the first and the last are written down. Their products have bf16 operands,
gradients of weights are summed in fp32, and residuals, norms, attention and the activation are in fp32.
Query, key and value are one product, gate and up another. What is no product goes through blocks of rows that
fit the processor's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stateset_agents.backends.linears import fp32_forwards, wide_product
from stateset_agents.training.rows.layout import Layout, packed_layouts
from stateset_agents.training.rows.packed_attention import Packing, packed_attention, use_packed_attention

_TRUNKS = {"LlamaModel", "MistralModel", "Qwen2Model"}
_CACHED_ELEMENTS = 2**17
"""Elements of [rows, width]: what is read and written of them stays in the processor's cache from one
operation to the next."""


def why_not_fused(trunk: Any) -> str | None:
    """The reason why `fused_hidden` cannot compute this trunk's hidden states; None where it can."""
    if type(trunk).__name__ not in _TRUNKS or not type(trunk).__module__.startswith("transformers."):
        return f"{type(trunk).__name__} is none of {', '.join(sorted(_TRUNKS))}"
    if not next(trunk.parameters()).is_cpu:
        return "it is not on a CPU"
    if next(trunk.parameters()).dtype != torch.float32:
        return "its weights are not in fp32"
    if trunk.config.hidden_act != "silu":
        return f"its activation is {trunk.config.hidden_act}"
    if getattr(trunk.config, "attention_dropout", 0.0):
        return "its attention has dropout"
    for module in trunk.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        if any(hooks) or any((module._backward_hooks, module._backward_pre_hooks)):
            return "it has hooks"
        if "forward" in vars(module):
            return "a forward of it was replaced"
    for layer in trunk.layers:
        attention, feed = layer.self_attn, layer.mlp
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        if any(type(part).__module__ != type(trunk).__module__ for part in (layer, attention, feed, *norms)):
            return "some of its layers are of another kind"
        inner = (attention.q_proj, attention.k_proj, attention.v_proj)
        plain = (attention.o_proj, feed.gate_proj, feed.up_proj, feed.down_proj)
        if any(type(linear) is not nn.Linear for linear in (*inner, *plain)):
            return "some of its linear layers are of another kind"
        if (
            any(linear.bias is not None for linear in plain)
            or len({linear.bias is None for linear in inner}) > 1
        ):
            return "some of its linear layers have a bias"
    return None


def changes_frequencies(trunk: Any) -> bool:
    """True where a forward leaves other rotary frequencies in the trunk: those of dynamic and long RoPE
    follow the longest row."""
    kind = getattr(trunk.rotary_emb, "rope_type", "default")
    return "dynamic" in kind or kind == "longrope"


def fused_hidden(trunk: Any, layout: Layout, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[T, H] a trunk's last hidden states of packed rows, with gradient where it is enabled.

    `dtype`: of the operands of products.
    """
    assert layout.packing is not None
    with torch.autocast("cpu", enabled=False):
        hidden = _hidden(trunk, layout.input_ids.clamp_min(0), layout.packing, dtype)
    if not torch.is_grad_enabled():  # else the backward pass needs them
        layout.forget_masks()
    return hidden


def _hidden(trunk: Any, input_ids: Tensor, packing: Packing, dtype: torch.dtype) -> Tensor:
    x: Tensor = trunk.embed_tokens(input_ids)[0]
    cos, sin = (table[0, :, None] for table in trunk.rotary_emb(x, packing.positions))
    for layer in trunk.layers:
        attention, feed = layer.self_attn, layer.mlp
        linears = (attention.q_proj, attention.k_proj, attention.v_proj)
        weights = [linear.weight for linear in linears]
        states = _QueryKeyValue.apply(  # type: ignore[no-untyped-call]  # torch
            x,
            (cos, sin),
            layer.input_layernorm.variance_epsilon,
            _operand(weights, dtype),
            layer.input_layernorm.weight,
            *weights,
            *(linear.bias for linear in linears),
        )
        q, k, v = (part.transpose(0, 1)[None] for part in states)
        attended, _ = packed_attention(
            attention,
            *(q, k, v, None),
            packing=packing,
            scaling=attention.scaling,
            sliding_window=_window(attention),
        )
        norm, out = layer.post_attention_layernorm, attention.o_proj.weight
        gate, up, down = feed.gate_proj.weight, feed.up_proj.weight, feed.down_proj.weight
        x = _FeedForward.apply(  # type: ignore[no-untyped-call]  # torch
            x,
            attended[0].flatten(1),
            norm.variance_epsilon,
            (_operand([out], dtype), _operand([gate, up], dtype), _operand([down], dtype)),
            *(norm.weight, out, gate, up, down),
        )
    hidden: Tensor = trunk.norm(x)
    return hidden


def _window(attention: Any) -> int | None:
    """The number of keys a query attends to; Mistral's layers leave it to the config."""
    holder = attention.config if type(attention).__name__ == "MistralAttention" else attention
    return getattr(holder, "sliding_window", None)


@torch.no_grad()
def _operand(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[sum of N, K] weights below one another."""
    rounded = [weight.to(dtype) for weight in weights]
    return torch.cat(rounded) if len(rounded) > 1 else rounded[0]


class _QueryKeyValue(torch.autograd.Function):
    """[T, H] -> [T, heads, D] queries and keys, rotated, and values, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        epsilon: float,
        operand: Tensor,
        norm: Tensor,
        *linears: Tensor,
    ) -> tuple[Tensor, ...]:
        """`angles`: cosines and sines [T, 1, D]; `operand`: the weights."""
        cos, sin = angles
        weights, biases = linears[:3], linears[3:]
        normed, scale = _rms_norm(x, norm, epsilon, operand.dtype)
        projected = F.linear(normed, operand)
        bias = None if biases[0] is None else torch.cat(biases)
        ctx.save_for_backward(x, scale, norm, normed, cos, sin, operand)
        ctx.sizes, ctx.has_bias = [len(weight) for weight in weights], bias is not None
        size = cos.shape[-1]
        counts = [width // size for width in ctx.sizes]
        q, k, v = (x.new_empty(len(x), count, size) for count in counts)
        for rows in _blocks(projected):
            part = projected[rows].float() if bias is None else projected[rows] + bias
            queries, keys, values = part.view(len(part), -1, size).split_with_sizes(counts, 1)
            _rotate(queries, cos[rows], sin[rows], q[rows])
            _rotate(keys, cos[rows], sin[rows], k[rows])
            v[rows] = values
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_q: Tensor, by_k: Tensor, by_v: Tensor) -> tuple[Any, ...]:
        x, scale, norm, normed, cos, sin, operand = ctx.saved_tensors
        counts = [width // cos.shape[-1] for width in ctx.sizes]
        joined = operand.new_empty(len(x), sum(counts), cos.shape[-1])
        q, k, v = joined.split_with_sizes(counts, 1)
        for rows in _blocks(x):
            q[rows] = _rotate(by_q[rows], cos[rows], -sin[rows])
            k[rows] = _rotate(by_k[rows], cos[rows], -sin[rows])
            v[rows] = by_v[rows]
        by_projected = joined.flatten(1)
        by_weights: Sequence[Tensor | None] = [None] * 3
        if any(ctx.needs_input_grad[5:8]):
            by_weights = _weight_gradient(by_projected, normed).split_with_sizes(ctx.sizes)
        by_biases = (
            by_projected.sum(0, dtype=x.dtype).split_with_sizes(ctx.sizes) if ctx.has_bias else [None] * 3
        )
        by_x, by_norm = _rms_norm_backward(F.linear(by_projected, operand.t()), x, scale, norm)
        return by_x, None, None, None, by_norm, *by_weights, *by_biases


class _FeedForward(torch.autograd.Function):
    """The part of a layer that follows attention."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        attended: Tensor,
        epsilon: float,
        operands: tuple[Tensor, Tensor, Tensor],
        norm: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        """`operands`: the weights out, gate above up, and down."""
        out, wide, down = operands
        attended = attended.to(out.dtype)
        middle = x + F.linear(attended, out)
        normed, scale = _rms_norm(middle, norm, epsilon, out.dtype)
        both = F.linear(normed, wide)
        gated = wide.new_empty(len(x), wide.shape[0] // 2)
        for rows in _blocks(both):
            gates, ups = both[rows].float().chunk(2, dim=1)
            torch.mul(F.silu(gates), ups, out=gated[rows])
        ctx.save_for_backward(attended, middle, scale, norm, normed, both, gated, *operands)
        return middle + F.linear(gated, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        attended, middle, scale, norm, normed, both, gated, out, wide, down = ctx.saved_tensors
        by_output = upstream.to(out.dtype)
        needs_out, needs_gate, needs_up, needs_down = ctx.needs_input_grad[5:]
        by_down = _weight_gradient(by_output, gated) if needs_down else None
        by_gated = F.linear(by_output, down.t())
        by_both = torch.empty_like(both)
        for rows in _blocks(both):
            gates, ups = both[rows].float().chunk(2, dim=1)
            into_gates, into_ups = by_both[rows].chunk(2, dim=1)
            above = by_gated[rows].float()
            torch.mul(F.silu(gates), above, out=into_ups)
            into_gates.copy_(torch.ops.aten.silu_backward(above.mul_(ups), gates))
        by_gate = by_up = None
        if needs_gate or needs_up:
            by_gate, by_up = _weight_gradient(by_both, normed).chunk(2)
        by_middle, by_norm = _rms_norm_backward(F.linear(by_both, wide.t()), middle, scale, norm, upstream)
        by_sum = by_middle.to(out.dtype)
        by_out = _weight_gradient(by_sum, attended) if needs_out else None
        by_attended = F.linear(by_sum, out.t()).float()
        return by_middle, by_attended, None, None, by_norm, by_out, by_gate, by_up, by_down


def _blocks(x: Tensor) -> Iterator[slice]:
    rows = max(1, _CACHED_ELEMENTS // x.shape[1])
    for start in range(0, len(x), rows):
        yield slice(start, start + rows)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, into: Tensor | None = None) -> Tensor:
    """Each pair (x[i], x[i + size/2]) rotated by its angle, of [B, heads, D]."""
    half = x.shape[-1] // 2
    rotated = torch.mul(x, cos, out=into)
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return rotated


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, H] the normed, as an operand, and [T, 1] by what its rows were multiplied."""
    normed = torch.empty_like(x, dtype=dtype)
    scale = x.new_empty(len(x), 1)
    for rows in _blocks(x):
        size = torch.linalg.vector_norm(x[rows], dim=1, keepdim=True)
        torch.rsqrt(size.square_().div_(x.shape[1]).add_(epsilon), out=scale[rows])
        torch.mul(x[rows] * scale[rows], weight, out=normed[rows])
    return normed, scale


def _rms_norm_backward(
    upstream: Tensor, x: Tensor, scale: Tensor, weight: Tensor, beside: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients by [T, H] x, plus `beside`, and by the weight."""
    by_x, by_weight = torch.empty_like(x), torch.zeros_like(weight)
    for rows in _blocks(x):
        above = upstream[rows].float()
        unit = x[rows] * scale[rows]
        by_unit = above * weight
        by_weight += above.mul_(unit).sum(0)
        along = torch.linalg.vecdot(by_unit, unit)[:, None].div_(x.shape[1])
        by_unit.addcmul_(unit, along, value=-1)
        if beside is None:
            torch.mul(by_unit, scale[rows], out=by_x[rows])
        else:
            torch.addcmul(beside[rows], by_unit, scale[rows], out=by_x[rows])
    return by_x, by_weight


def _weight_gradient(upstream: Tensor, x: Tensor) -> Tensor:
    """[N, K] in fp32 from [T, N] and [T, K]."""
    if x.dtype is torch.float32:
        return F.linear(upstream.t(), x.t())
    return wide_product(upstream.t(), x.t())


# Is what a model computes for packed rows what it computes for each alone? The policy tries it before it
# trains.

_TOLERANCE = 2e-5
"""Largest difference, as a share of a hidden state's largest entry. Another order of sums moves it by 3e-7; a
leak from one row into the next moves it by a tenth in trained weights, and by 1e-4 in untrained ones."""


@torch.no_grad()
def why_not_packed(trunk: Any) -> str | None:
    """The reason against packing; None where the trunk's hidden states of packed rows are those of plain
    forwards, row by row.

    The rows share a prompt and are longer than any window within which the model attends.
    """
    config = trunk.config.get_text_config()
    if config._attn_implementation in (None, "eager"):
        return f"{type(trunk).__name__} runs with eager attention"
    modes = [(module, module.training) for module in trunk.modules()]
    trunk.eval()
    try:
        dtype = next(trunk.parameters()).dtype
        is_half = dtype in (torch.bfloat16, torch.float16)  # both would round, each in its own way
        with fp32_forwards(trunk, dtype) if is_half else contextlib.nullcontext():
            difference = max(_differences(trunk, _rows(config), lambda layout: _forwarded(trunk, layout)))
    except Exception as error:  # the model's own code, called in a way that it may not know
        return f"{type(trunk).__name__} refuses them: {type(error).__name__}"
    finally:
        for module, training in modes:
            module.training = training
    if difference < _TOLERANCE:
        return None
    return f"{type(trunk).__name__} would see other hidden states, by up to {difference:.1g} of their size"


@torch.no_grad()
def is_fused_exactly(trunk: Any) -> bool:
    """True where the hidden states of `fused_hidden`, with nothing rounded, are those of plain forwards. The
    installed release of transformers may compute something else than the one it was written for."""
    if why_not_fused(trunk) is not None:
        return False
    config = trunk.config.get_text_config()
    try:
        differences = _differences(
            trunk, _rows(config), lambda layout: fused_hidden(trunk, layout, dtype=torch.float32)
        )
    except Exception:  # the model's own code, called in a way that it may not know
        return False
    return max(differences) < _TOLERANCE


def _rows(config: Any) -> list[list[int]]:
    """Three rows, two of which share a prompt longer than any window; one of two tokens."""
    windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
    longest = getattr(config, "max_position_embeddings", None) or 2**20
    prompt = min(max([24, *(size + 8 for size in windows if isinstance(size, int))]), max(2, longest - 8))
    ids = [(7 * position + position**2) % (config.vocab_size - 1) for position in range(prompt + 8)]
    other = [(token + 1) % (config.vocab_size - 1) for token in ids[prompt:]]
    return [ids, ids[:prompt] + other[:5], ids[1:3]]


def _forwarded(trunk: Any, layout: Layout) -> Tensor:
    with use_packed_attention(trunk):
        states: Tensor = trunk(**layout.forward_arguments(next(trunk.parameters()).device)).last_hidden_state
    return states[0]


def _differences(trunk: Any, rows: list[list[int]], hidden: Callable[[Layout], Tensor]) -> list[float]:
    """Differences of each row's `hidden` states [T, H] in one layout from those alone, relative to the
    largest entry."""
    device = next(trunk.parameters()).device
    (layout,) = packed_layouts(rows, max_rows=len(rows), max_tokens=sum(map(len, rows)))
    packed = hidden(layout)
    differences = []
    for index, flat in zip(layout.rows, layout.flat, strict=True):
        row = torch.tensor([rows[index]], device=device)
        alone: Tensor = trunk(input_ids=row, use_cache=False).last_hidden_state[0]
        differences.append(float((packed[flat.to(device)] - alone).abs().max() / alone.abs().max()))
    return differences
