"""The LM head, its softmax and a loss of log-probs, a few hundred tokens at a time; called by the policy.

The logits of a step's N trained tokens, [N, V], are its largest tensor by far. Here they live for one chunk
of tokens only, and so does what a backward pass would keep of them: the gradient is formed in the forward
pass, chunk by chunk. For one token with hidden state h, target y and probabilities p at temperature T,

    logprob = (W_y h + b_y) / T - logsumexp    d logprob / dh = (W_y - sum_v p_v W_v) / T
                                               d logprob / dW_v = ([v = y] - p_v) h / T

so that three matrix products (logits, p W, and p' times the weighted hidden states) make both gradients, and
nothing is computed twice. The weight of a token's log-prob in the loss is known with its chunk's log-probs,
since the loss is a sum over tokens; only where it is not, all chunks are computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from stateset_agents.backends.linears import (
    MatmulPrecision,
    Rounded,
    add_product,
    is_available,
    product,
    rounded,
    transposed,
    wide_product,
)
from stateset_agents.training.rows.token_masks import TokenMasks

_CHUNK_ELEMENTS = 2**23
"""Elements of a chunk's [C, V]: 32 MB in fp32. Matrix products of fewer rows take longer."""
_CHUNK_ROWS = (128, 1024)
_CACHED_ELEMENTS = 2**19
"""Elements of [rows, V]: 2 MB in fp32, which stay in the processor's cache while they are read several times;
whole chunks take twice as long."""


class TokenScores(NamedTuple):
    """The scores of the trained tokens under the policy."""

    logprobs: Tensor
    """[N] at the sampling temperature."""
    entropy: Tensor
    """[N] of their distributions, exact, in nats."""


_M = TypeVar("_M")
LossOf = Callable[[TokenScores, slice], tuple[Tensor, _M]]
"""(scores, which of the N tokens they are of) -> these tokens' share of the loss, and what was measured."""


@dataclass(frozen=True, slots=True)
class Head:
    """logits = (hidden W' + b) / temperature"""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    """[V]"""
    temperature: float
    precision: MatmulPrecision = "highest"
    """Precision of the gradient's products."""
    rounds_logits: bool = False
    """True where hidden states and weight are rounded to bf16 for the logits, too. Only where
    products of bf16 are summed in fp32; `precision` is "medium" then."""


@torch.no_grad()
def chunked_scores(
    hidden: Tensor, head: Head, targets: Tensor, masks: TokenMasks | None = None
) -> TokenScores:
    """Scores of [N] targets that follow [N, H] hidden states, without gradient. `masks`: which tokens each
    was chosen among; None: all."""
    weight = rounded(head.weight, "medium") if head.rounds_logits else head.weight
    scores = [
        _distributions(hidden[part], head, weight, targets[part], masks and masks[part])[1]
        for part in _chunks(hidden, head)
    ]
    return TokenScores(*map(torch.cat, zip(*scores, strict=True)))


def chunked_loss(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    loss_of: LossOf[_M],
    *,
    masks: TokenMasks | None = None,
    additive: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, list[_M]]:
    """The loss that `loss_of` makes of the scores of [N] targets, with its gradient to `hidden` and `head`;
    and what it measured, in order of the tokens.

    `additive`: `loss_of` is called on one chunk of tokens at a time and its values are summed; otherwise it
    is called once, on all, and the head computed twice. `entropy_gradient`: entropies carry gradient, too.
    `masks` as of `chunked_scores`.
    """
    arguments = (hidden, head.weight, head.bias, head, targets, loss_of, masks, additive, entropy_gradient)
    loss, measured = _ChunkedLoss.apply(*arguments)  # type: ignore[no-untyped-call]  # torch
    return loss, measured


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        loss_of: LossOf[_M],
        masks: TokenMasks | None,
        additive: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, list[_M]]:
        """The loss, and what each call of `loss_of` measured. `weight` and `bias`: the head's."""
        sums = _Gradients(hidden, head, ctx.needs_input_grad)
        operand = sums.weight if head.rounds_logits else weight
        total, measured, whole = hidden.new_zeros(()), [], None
        if not additive:
            scores = chunked_scores(hidden, head, targets, masks)
            whole, figures = _derivatives(loss_of, scores, slice(0, len(hidden)), entropy_gradient)
            total = whole.loss
            measured.append(figures)
        for part in _chunks(hidden, head):
            p, scores = _distributions(hidden[part], head, operand, targets[part], masks and masks[part])
            if whole is None:
                derivatives, figures = _derivatives(loss_of, scores, part, entropy_gradient)
                measured.append(figures)
                total = total + derivatives.loss
            else:
                by_entropy = None if whole.by_entropy is None else whole.by_entropy[part]
                derivatives = _Derivatives(whole.loss, whole.by_logprob[part], by_entropy)
            sums.add(*_residual(p, targets[part], scores.entropy, derivatives), part)
            del p  # else two chunks would be in memory at once
        ctx.save_for_backward(sums.by_hidden, sums.by_weight, sums.by_bias)
        return total, measured

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        by_hidden, by_weight, by_bias = ctx.saved_tensors
        is_one = grad_output.is_cpu and float(grad_output) == 1.0
        if by_weight is not None and not is_one:  # in the weight's memory format, or autograd would copy it
            out = torch.empty_like(by_weight, memory_format=torch.contiguous_format)
            by_weight = torch.mul(by_weight, grad_output, out=out)
        by_bias = None if by_bias is None else grad_output * by_bias
        return grad_output * by_hidden, by_weight, by_bias, *(None,) * 6


class _Derivatives(NamedTuple):
    loss: Tensor
    by_logprob: Tensor
    """[N]"""
    by_entropy: Tensor | None
    """[N]"""


def _derivatives(
    loss_of: LossOf[_M], scores: TokenScores, part: slice, entropy_gradient: bool
) -> tuple[_Derivatives, _M]:
    """The loss of these tokens with its derivatives by log-probs and entropies; and what it measured."""
    logprobs = scores.logprobs.detach().requires_grad_()
    entropy = scores.entropy.detach().requires_grad_(entropy_gradient)
    with torch.enable_grad():
        loss, measured = loss_of(TokenScores(logprobs, entropy), part)
    inputs = (logprobs, entropy) if entropy_gradient else (logprobs,)
    gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return _Derivatives(loss.detach(), gradients[0], gradients[1] if entropy_gradient else None), measured


def _distributions(
    hidden: Tensor, head: Head, weight: Tensor | Rounded, targets: Tensor, masks: TokenMasks | None
) -> tuple[Tensor, TokenScores]:
    """[C, V] probabilities of C tokens, and the scores of their targets. `weight`: the head's, rounded where
    `rounds_logits`."""
    bias = None if head.bias is None else head.bias / head.temperature
    if isinstance(weight, Tensor):
        logits = F.linear(hidden / head.temperature, weight, bias)
    else:
        if head.weight.dtype is torch.bfloat16:  # hidden states come in bf16, as the sampler multiplies them
            logits = wide_product(hidden.bfloat16(), weight[0]).div_(head.temperature)
        else:
            logits = wide_product((hidden / head.temperature).bfloat16(), weight[0])
        logits = logits if bias is None else logits.add_(bias)
    if masks is not None:
        masks.apply(logits)
    scores = []
    size = _cached_rows(logits)
    for rows, row_targets in zip(torch.split(logits, size), torch.split(targets, size), strict=True):
        p = torch.softmax(rows, dim=-1)
        # logsumexp by the likeliest token: its p is no smaller than 1 / V, so its logarithm is safe.
        log_total = rows.amax(dim=-1) - p.amax(dim=-1).log()
        logprobs = rows.gather(1, row_targets[:, None]).squeeze(1) - log_total
        scores.append(TokenScores(logprobs, log_total - torch.linalg.vecdot(p, rows)))
        rows.copy_(p)  # into the logits' memory: a second [C, V] would double the peak
    return logits, TokenScores(*map(torch.cat, zip(*scores, strict=True)))


def _residual(
    p: Tensor, targets: Tensor, entropy: Tensor, derivatives: _Derivatives
) -> tuple[Tensor, Tensor]:
    """[C, V] and [C, 1]: minus their product is the loss's derivative by the logits over the temperature.

    d logprob / d logit_v = [v = y] - p_v, and d entropy / d logit_v = -p_v (log p_v + entropy).
    Overwrites `p`, the distributions of the [C] targets.
    """
    scale = derivatives.by_logprob[:, None]
    if derivatives.by_entropy is None:
        return p.scatter_add_(1, targets[:, None], -torch.ones_like(scale)), scale
    columns = (targets[:, None], entropy[:, None], scale, derivatives.by_entropy[:, None])
    size = _cached_rows(p)
    for rows, y, mean, by_logprob, by_entropy in zip(
        *(torch.split(tensor, size) for tensor in (p, *columns)), strict=True
    ):
        of_entropy = (rows * mean).sub_(torch.special.entr(rows))
        rows.scatter_add_(1, y, -torch.ones_like(by_logprob))
        rows.mul_(by_logprob).add_(of_entropy.mul_(by_entropy))
    return p, torch.ones_like(scale)


def _cached_rows(logits: Tensor) -> int:
    """Rows of [C, V] that are read several times from the processor's cache."""
    return max(1, _CACHED_ELEMENTS // logits.shape[1] if logits.is_cpu else len(logits))


class _Gradients:
    """Gradients of the loss, summed over chunks; None where it is not needed."""

    def __init__(self, hidden: Tensor, head: Head, needed: Sequence[bool]) -> None:
        """`needed`: for hidden states, weight and bias."""
        weight = head.weight
        self._hidden = hidden
        self._head = head
        self._is_transposed = weight.is_cpu and (
            head.precision == "high" or (head.precision == "highest" and is_available())
        )
        """True where the weight's gradient is made as [H, V]. By oneDNN's fp32 products that takes three
        quarters of the time, by MKL's it takes longer."""
        self.weight = _operand(weight, head)
        self.by_hidden = torch.empty_like(hidden)
        self.by_weight = self.by_bias = None
        make = torch.empty_like if weight.is_cpu else torch.zeros_like  # on a CPU the first chunk fills it
        if needed[1] and self._is_transposed:
            self.by_weight = make(weight.T, memory_format=torch.contiguous_format).T
        elif needed[1]:
            self.by_weight = make(weight, memory_format=torch.contiguous_format)
        if head.bias is not None and needed[2]:
            self.by_bias = torch.zeros_like(head.bias)

    def add(self, residual: Tensor, scale: Tensor, part: slice) -> None:
        """Add a chunk's gradients, by its `residual` [C, V]: into the weight's [V, H] go residual' states."""
        scale = -scale / self._head.temperature
        operand, total, is_first = _operand(residual, self._head), self.by_weight, part.start == 0
        self.by_hidden[part] = scale * _product(operand, _transposed(self.weight))
        states = scale * self._hidden[part]
        if self.by_bias is not None:
            self.by_bias.addmv_(residual.T, scale.squeeze(1))
        if total is None:
            return
        if not residual.is_cpu:
            total.addmm_(residual.T, states)
        elif self._is_transposed:
            gradient = _product(_transposed(_operand(states, self._head)), _transposed(operand))
            total.T.copy_(gradient) if is_first else total.T.add_(gradient)
        elif isinstance(operand, Tensor):
            total.addmm_(operand.t(), states, beta=0 if is_first else 1)  # with 0 nothing is read of `total`
        else:
            add_product(total, operand[0].t(), states.bfloat16().t(), is_first=is_first)


def _operand(x: Tensor, head: Head) -> Tensor | Rounded:
    """A matrix as an operand of the gradient's products."""
    return x if head.precision == "highest" else rounded(x, head.precision)


def _product(a: Tensor | Rounded, b: Tensor | Rounded) -> Tensor:
    """a b' of two operands, by `F.linear` in fp32, which may run by oneDNN."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        return F.linear(a, b)
    assert not isinstance(b, Tensor)
    return product(a, b)


def _transposed(operand: Tensor | Rounded) -> Tensor | Rounded:
    return operand.T if isinstance(operand, Tensor) else transposed(operand)


def _chunks(hidden: Tensor, head: Head) -> list[slice]:
    """Slices of the N tokens; one empty slice where there are none."""
    smallest, largest = _CHUNK_ROWS
    size, count = min(largest, max(smallest, _CHUNK_ELEMENTS // len(head.weight))), len(hidden)
    return [slice(start, min(start + size, count)) for start in range(0, max(1, count), size)]
