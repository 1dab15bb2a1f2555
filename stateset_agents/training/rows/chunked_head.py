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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

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
    """Are hidden states and weight rounded to bf16 for the logits, too? Only where products of bf16 are
    summed in fp32; `precision` is "medium" then."""

    def logits(self, hidden: Tensor, weight: Tensor | Rounded) -> Tensor:
        """[C, V] over the temperature; `weight`: the head's, rounded where `rounds_logits`."""
        bias = None if self.bias is None else self.bias / self.temperature
        if isinstance(weight, Tensor):
            return F.linear(hidden / self.temperature, weight, bias)
        if self.weight.dtype is torch.bfloat16:  # hidden states come in bf16, as the sampler has them
            logits = wide_product(hidden.bfloat16(), weight[0]).div_(self.temperature)
        else:
            logits = wide_product((hidden / self.temperature).bfloat16(), weight[0])
        return logits if bias is None else logits.add_(bias)

    def gradient_operand(self, x: Tensor) -> Tensor | Rounded:
        """A matrix as an operand of the gradient's products."""
        return x if self.precision == "highest" else rounded(x, self.precision)

    @staticmethod
    def gradient_product(a: Tensor | Rounded, b: Tensor | Rounded) -> Tensor:
        """a b' of two operands, by `F.linear` in fp32, which may run by oneDNN."""
        if isinstance(a, Tensor):
            assert isinstance(b, Tensor)
            return F.linear(a, b)
        assert not isinstance(b, Tensor)
        return product(a, b)

    @property
    def gradient_is_transposed(self) -> bool:
        """Is the weight's gradient made as [H, V]? By oneDNN's fp32 products that takes three quarters of the
        time, by MKL's it takes longer."""
        return self.weight.is_cpu and (
            self.precision == "high" or (self.precision == "highest" and is_available())
        )

    def add_gradient(
        self, into: Tensor, residual: Tensor | Rounded, states: Tensor, *, is_first: bool
    ) -> None:
        """into [V, H] += residual' [C, V] states [C, H], on a CPU; the first makes `into`."""
        if self.gradient_is_transposed:
            operand = _transposed(self.gradient_operand(states))
            gradient = self.gradient_product(operand, _transposed(residual))
            into.T.copy_(gradient) if is_first else into.T.add_(gradient)
        elif isinstance(residual, Tensor):
            into.addmm_(residual.t(), states, beta=0 if is_first else 1)  # with 0 nothing is read of `into`
        else:
            add_product(into, residual[0].t(), states.bfloat16().t(), is_first=is_first)


@torch.no_grad()
def chunked_scores(hidden: Tensor, head: Head, targets: Tensor) -> TokenScores:
    """Scores of [N] targets that follow [N, H] hidden states, without gradient."""
    weight = rounded(head.weight, "medium") if head.rounds_logits else head.weight
    return _concatenate(
        [_Chunk.of(hidden[part], head, weight, targets[part]).scores for part in _chunks(hidden, head)]
    )


def chunked_loss(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    loss_of: LossOf[_M],
    *,
    additive: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, list[_M]]:
    """The loss that `loss_of` makes of the scores of [N] targets, with its gradient to `hidden` and `head`;
    and what it measured, in order of the tokens.

    `additive`: `loss_of` is called on one chunk of tokens at a time and its values are summed; otherwise it
    is called once, on all, and the head computed twice. `entropy_gradient`: entropies carry gradient, too.
    """
    task = _Task(head, targets, loss_of, additive, entropy_gradient)
    loss, measured = _ChunkedLoss.apply(hidden, head.weight, head.bias, task)  # type: ignore[no-untyped-call]  # torch
    return loss, measured


@dataclass(frozen=True, slots=True)
class _Task(Generic[_M]):
    head: Head
    targets: Tensor
    loss_of: LossOf[_M]
    additive: bool
    entropy_gradient: bool

    def derivatives(self, scores: TokenScores, part: slice) -> tuple[_Derivatives, _M]:
        """The loss of these tokens with its derivatives by log-probs and entropies; and what it measured."""
        logprobs = scores.logprobs.detach().requires_grad_()
        entropy = scores.entropy.detach().requires_grad_(self.entropy_gradient)
        with torch.enable_grad():
            loss, measured = self.loss_of(TokenScores(logprobs, entropy), part)
        inputs = (logprobs, entropy) if self.entropy_gradient else (logprobs,)
        gradients = torch.autograd.grad(loss, inputs, materialize_grads=True)
        by_entropy = gradients[1] if self.entropy_gradient else None
        return _Derivatives(loss.detach(), gradients[0], by_entropy), measured


@dataclass(frozen=True, slots=True)
class _Derivatives:
    loss: Tensor
    by_logprob: Tensor
    """[N]"""
    by_entropy: Tensor | None
    """[N]"""

    def __getitem__(self, part: slice) -> _Derivatives:
        by_entropy = None if self.by_entropy is None else self.by_entropy[part]
        return _Derivatives(self.loss, self.by_logprob[part], by_entropy)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """[C] tokens and their distributions."""

    targets: Tensor
    p: Tensor
    """[C, V]"""
    scores: TokenScores

    @classmethod
    def of(cls, hidden: Tensor, head: Head, weight: Tensor | Rounded, targets: Tensor) -> _Chunk:
        logits = head.logits(hidden, weight)
        scores = [_softmax_in_place(logits[rows], targets[rows]) for rows in _cached_rows(logits)]
        return cls(targets, logits, _concatenate(scores))

    def residual(self, derivatives: _Derivatives) -> tuple[Tensor, Tensor]:
        """[C, V] and [C, 1]: minus their product is the loss's derivative by the logits over the temperature.

        d logprob / d logit_v = [v = y] - p_v, and d entropy / d logit_v = -p_v (log p_v + entropy).
        Overwrites `p`.
        """
        scale = derivatives.by_logprob[:, None]
        if derivatives.by_entropy is None:
            return self.p.scatter_add_(1, self.targets[:, None], -torch.ones_like(scale)), scale
        for rows in _cached_rows(self.p):
            p = self.p[rows]
            of_entropy = (p * self.scores.entropy[rows, None]).sub_(torch.special.entr(p))
            p.scatter_add_(1, self.targets[rows, None], -torch.ones_like(scale[rows]))
            p.mul_(scale[rows]).add_(of_entropy.mul_(derivatives.by_entropy[rows, None]))
        return self.p, torch.ones_like(scale)


def _concatenate(scores: Sequence[TokenScores]) -> TokenScores:
    return TokenScores(*(torch.cat(parts) for parts in zip(*scores, strict=True)))


def _softmax_in_place(logits: Tensor, targets: Tensor) -> TokenScores:
    """Scores of [R] targets; the logits [R, V] become probabilities."""
    p = torch.softmax(logits, dim=-1)
    log_total = logits.amax(dim=-1) - p.amax(dim=-1).log()  # the largest p is no smaller than 1 / V
    chosen = logits.gather(1, targets[:, None]).squeeze(1)
    entropy = log_total - torch.linalg.vecdot(p, logits)
    logits.copy_(p)
    return TokenScores(chosen - log_total, entropy)


def _cached_rows(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows of [C, V]; one empty slice where there are none."""
    rows = _CACHED_ELEMENTS // logits.shape[1] if logits.is_cpu else len(logits)
    return _slices(len(logits), max(1, rows))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, task: _Task[Any]
    ) -> tuple[Tensor, list[Any]]:
        """The loss, and what each call of `loss_of` measured."""
        head = task.head
        sums = _Gradients.begin(hidden, head, ctx.needs_input_grad)
        of_all, measured = None, []
        if not task.additive:
            scores = chunked_scores(hidden, head, task.targets)
            of_all, figures = task.derivatives(scores, slice(0, len(hidden)))
            measured.append(figures)
        operand = sums.weight if head.rounds_logits else weight
        total = hidden.new_zeros(()) if of_all is None else of_all.loss
        for part in _chunks(hidden, head):
            chunk = _Chunk.of(hidden[part], head, operand, task.targets[part])
            if of_all is None:
                derivatives, figures = task.derivatives(chunk.scores, part)
                measured.append(figures)
                total = total + derivatives.loss
            else:
                derivatives = of_all[part]
            sums.add(*chunk.residual(derivatives), part)
            del chunk  # else two chunks would be in memory at once
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
        return grad_output * by_hidden, by_weight, None if by_bias is None else grad_output * by_bias, None


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients of the loss, summed over chunks; None where it is not needed."""

    hidden: Tensor
    head: Head
    weight: Tensor | Rounded
    """The head's, as an operand of products."""
    by_hidden: Tensor
    by_weight: Tensor | None
    by_bias: Tensor | None

    @classmethod
    def begin(cls, hidden: Tensor, head: Head, needed: Sequence[bool]) -> _Gradients:
        by_weight = by_bias = None
        make = torch.empty_like if head.weight.is_cpu else torch.zeros_like
        if needed[1] and head.gradient_is_transposed:
            by_weight = make(head.weight.T, memory_format=torch.contiguous_format).T
        elif needed[1]:
            by_weight = make(head.weight, memory_format=torch.contiguous_format)
        if head.bias is not None and needed[2]:
            by_bias = torch.zeros_like(head.bias)
        weight = head.gradient_operand(head.weight)
        return cls(hidden, head, weight, torch.empty_like(hidden), by_weight, by_bias)

    def add(self, residual: Tensor, scale: Tensor, part: slice) -> None:
        """Add a chunk's gradients, by its `residual`."""
        scale = -scale / self.head.temperature
        head = self.head
        operand = head.gradient_operand(residual)
        self.by_hidden[part] = scale * head.gradient_product(operand, _transposed(self.weight))
        states = scale * self.hidden[part]
        if self.by_weight is not None and residual.is_cpu:
            head.add_gradient(self.by_weight, operand, states, is_first=part.start == 0)
        elif self.by_weight is not None:
            self.by_weight.addmm_(residual.T, states)
        if self.by_bias is not None:
            self.by_bias.addmv_(residual.T, scale.squeeze(1))


def _transposed(operand: Tensor | Rounded) -> Tensor | Rounded:
    return operand.T if isinstance(operand, Tensor) else transposed(operand)


def _chunks(hidden: Tensor, head: Head) -> Iterator[slice]:
    """Slices of the N tokens; one empty slice where there are none."""
    smallest, largest = _CHUNK_ROWS
    return _slices(len(hidden), min(largest, max(smallest, _CHUNK_ELEMENTS // len(head.weight))))


def _slices(count: int, size: int) -> Iterator[slice]:
    for start in range(0, max(1, count), size):
        yield slice(start, min(start + size, count))
