"""What the papers' pages let one play with, as plain functions of numbers. learn.math.js has each, too.

A test compares them to 1e-9. None of it is used in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from stateset_agents.algorithms.advantages import group_advantages

Vector = Sequence[float]


def expected_gradient(p: float, size: int, *, baseline: str, scaling: str) -> float:
    """Expected GRPO gradient by the logit of a policy that succeeds (reward 1) with probability `p`.

    Over every number of successes in a group of `size`; the true gradient is p (1 - p).
    """
    total = 0.0
    for wins in range(size + 1):
        group = [1.0] * wins + [0.0] * (size - wins)
        (own,) = group_advantages([group], baseline=baseline, scaling=scaling)  # type: ignore[arg-type]  # a name
        mean = math.fsum((a or 0.0) * (r - p) for a, r in zip(own, group, strict=True)) / size
        total += math.comb(size, wins) * p**wins * (1 - p) ** (size - wins) * mean
    return total


def pcgrad(
    gradients: Sequence[Vector], order: Sequence[int] | None = None
) -> tuple[list[list[float]], list[float]]:
    """Gradient surgery (https://arxiv.org/abs/2001.06782, algorithm 1): each gradient without what conflicts
    with the others, taken in `order` (the paper: random), and the sum of the projected ones.

    >>> pcgrad([[1.0, 0.0], [-1.0, 1.0]])
    ([[0.5, 0.5], [0.0, 1.0]], [0.5, 1.5])
    """
    vectors = [np.asarray(gradient, dtype=np.float64) for gradient in gradients]
    projected = []
    for i, vector in enumerate(vectors):
        own = vector
        for j in range(len(vectors)) if order is None else order:
            other, size = vectors[j], float(vectors[j] @ vectors[j])
            along = float(own @ other)
            if j != i and along < 0 and size > 0:
                own = own - along / size * other
        projected.append(own)
    return [own.tolist() for own in projected], np.sum(projected, axis=0).tolist()


def softmax(values: Vector, temperature: float = 1.0) -> list[float]:
    """Shares that sum to 1."""
    raised = [math.exp((value - max(values)) / temperature) for value in values]
    return [value / math.fsum(raised) for value in raised]


@dataclass(frozen=True, slots=True)
class Modules:
    """Modules that several tasks share, and who uses which."""

    slopes: tuple[float, ...]  # [M] each module multiplies its input
    logits: tuple[tuple[float, ...], ...]  # [tasks][M]


def module_step(
    modules: Modules, targets: Vector, *, rate: float, temperature: float = 1.0, routed: bool = True
) -> tuple[Modules, float]:
    """A step of gradient descent, and the loss before it: half the squared error, over tasks.

    Each task mixes the modules by softmax(logits / temperature), as soft modularization
    (https://arxiv.org/abs/2003.13661) mixes those of a layer, and wants its target. `routed`: do
    logits learn?
    """
    slopes = np.array(modules.slopes)
    weights = np.array([softmax(own, temperature) for own in modules.logits])  # [tasks, M]
    outputs = weights @ slopes
    errors = outputs - np.asarray(targets)
    turned = np.array(modules.logits)
    if routed:
        turned = turned - rate * errors[:, None] * weights * (slopes - outputs[:, None]) / temperature
    after = Modules(tuple(slopes - rate * (errors @ weights)), tuple(map(tuple, turned.tolist())))
    return after, float(errors @ errors) / 2


@dataclass(frozen=True, slots=True)
class Process:
    """A Gaussian process with an RBF kernel."""

    length: float
    signal: float
    noise: float


def gp_predict(xs: Vector, ys: Vector, x: float, process: Process) -> tuple[float, float]:
    """Mean and variance of a new observation at `x`, noise included, after those at `xs`."""
    prior = process.signal**2 + process.noise**2
    if not xs:
        return 0.0, prior
    at = np.asarray(xs, dtype=np.float64)
    kernel = process.signal**2 * np.exp(-((at[:, None] - at) ** 2) / (2 * process.length**2))
    covariance = kernel + process.noise**2 * np.eye(len(at))
    towards = process.signal**2 * np.exp(-((at - x) ** 2) / (2 * process.length**2))
    solved = np.linalg.solve(covariance, np.stack([np.asarray(ys, dtype=np.float64), towards], axis=1))
    return float(towards @ solved[:, 0]), prior - float(towards @ solved[:, 1])


def restaurant(counts: Sequence[int], last: int | None, *, alpha: float, beta: float) -> list[float]:
    """A sticky Chinese restaurant: the chance of each component with `counts` points, and last of a new one.

    `alpha` is the concentration; `beta` is added to the component of the point before.
    """
    seats = [count + (beta if k == last else 0.0) for k, count in enumerate(counts)] + [alpha]
    return [seat / math.fsum(seats) for seat in seats]


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where a point of the stream went."""

    prior: list[float]
    posterior: list[float]
    chosen: int


@dataclass(slots=True)
class _Expert:
    xs: list[float] = field(default_factory=list)
    ys: list[float] = field(default_factory=list)


def mixture(
    stream: Sequence[tuple[float, float]],
    process: Process,
    *,
    alpha: float,
    beta: float,
    most: int | None = None,
) -> list[Assignment]:
    """Each point (x, y) goes to its likeliest component, one after the other, or opens a new one.

    After the infinite mixture of Gaussian processes (https://arxiv.org/abs/2006.11441), whose online
    variational inference, with merging and pruning, we replace by the likeliest choice. `most` bounds the
    components.
    """
    experts: list[_Expert] = []
    steps: list[Assignment] = []
    last: int | None = None
    for x, y in stream:
        prior = restaurant([len(own.xs) for own in experts], last, alpha=alpha, beta=beta)
        scores = []
        for share, own in zip(prior, [*experts, _Expert()], strict=True):
            mean, variance = gp_predict(own.xs, own.ys, x, process)
            scores.append(
                math.log(share) - 0.5 * (math.log(2 * math.pi * variance) + (y - mean) ** 2 / variance)
            )
        full = most is not None and experts and len(experts) >= most
        posterior = softmax(scores[:-1] if full else scores)
        last = posterior.index(max(posterior))
        if last == len(experts):
            experts.append(_Expert())
        experts[last].xs.append(x)
        experts[last].ys.append(y)
        steps.append(Assignment(prior, posterior, last))
    return steps
