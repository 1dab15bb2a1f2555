"""Passes of an update side by side, each in a thread of its own; called by the learner and its objective.

A model's layer in bf16 on a CPU is hundreds of short operations. Spread over several threads, each of them
ends with a wait. Two passes that have half of the threads each wait for nothing but one another's gradients:
docs/evidence/step-times.md has the times.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ParallelPasses:
    """Threads for passes. They live as long as this, for each keeps the kernels that it has compiled."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: as many as passes side by side may have together."""
        self._max_tokens = max_tokens
        self._pool: ThreadPoolExecutor | None = None
        self._made_for = (0, 0)

    def run(
        self,
        work: Callable[[_Item], _Result],
        items: Sequence[_Item],
        tokens: Sequence[int],
        *,
        at_once: int,
        parameters: Sequence[Tensor] = (),
    ) -> list[_Result]:
        """The results of `work` for each item, `at_once` side by side; where that is 1, or where these may
        have too many tokens together: in the caller's thread, one by one.

        `tokens`: of each item. `parameters`: those whose gradients `work` adds to. They are added in the
        order of the items, so that the sums are the same every time. The first error of an item, in their
        order, is raised once no other item is under way.
        """
        if at_once == 1 or len(items) < 2 or sum(heapq.nlargest(at_once, tokens)) > self._max_tokens:
            return [work(item) for item in items]
        threads = torch.get_num_threads()
        pool = self._threads(at_once, threads)
        order = _Order(len(items), parameters)
        try:
            passes = [pool.submit(order.run, number, work, item) for number, item in enumerate(items)]
            errors = [done.exception() for done in passes]  # waits for all
        finally:
            order.close()
            torch.set_num_threads(threads)  # for threads that begin later, the last call counts
        for error in errors:
            if error is not None:
                raise error
        return [done.result() for done in passes]

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None

    def _threads(self, at_once: int, threads: int) -> ThreadPoolExecutor:
        if self._pool is None or self._made_for != (at_once, threads):
            self.close()
            share = max(1, threads // at_once)  # torch keeps one number per thread
            self._made_for = (at_once, threads)
            self._pool = ThreadPoolExecutor(
                at_once, "pass", initializer=torch.set_num_threads, initargs=(share,)
            )
        return self._pool


class _Order:
    """Passes add to a parameter's gradient one after the other, however far each of them is."""

    def __init__(self, num_passes: int, parameters: Sequence[Tensor]) -> None:
        self._changed = threading.Condition()
        self._added: dict[int, set[int]] = {number: set() for number in range(num_passes)}
        """The parameters that each pass has added to; without the passes that are over."""
        self._this = threading.local()
        self._hooks: list[Any] = []
        leaf: Any
        for index, leaf in enumerate(parameters):
            self._hooks.append(leaf.register_hook(partial(self._wait, index)))
            self._hooks.append(leaf.register_post_accumulate_grad_hook(partial(self._note, index)))

    def run(self, number: int, work: Callable[[_Item], _Result], item: _Item) -> _Result:
        """`work(item)` as that pass."""
        self._this.number = number
        try:
            return work(item)
        finally:
            with self._changed:
                del self._added[number]
                self._changed.notify_all()

    def _wait(self, index: int, _: Tensor) -> None:
        """Wait, before the pass of this thread adds to a parameter's gradient, for the earlier passes."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_next(index))

    def _is_next(self, index: int) -> bool:
        earlier = (number for number in self._added if number < self._this.number)
        return all(index in self._added[number] for number in earlier)

    def _note(self, index: int, _: Tensor) -> None:
        """Note that the pass of this thread has added to it."""
        with self._changed:
            self._added[self._this.number].add(index)
            self._changed.notify_all()

    def close(self) -> None:
        """Every pass is over."""
        for hook in self._hooks:
            hook.remove()


# How many tokens go through a model in one pass, where nobody says; called by the learner.

_ON_GPU = 16384
"""Tokens that fill a GPU."""
_MOST_ON_CPU = 2048
"""A CPU's caches hold no more of the smallest models."""
_LEAST_ON_CPU = 512
"""Matrix products of fewer rows take longer."""
_ACTIVATIONS = 2**30
"""Bytes that a pass on a CPU may keep for its backward: what a model of 135 million parameters needs for 750
tokens, or 1,400 in fused layers; 2048 would take more than its weights, gradients and moments together."""


def default_pass_tokens(model: Any, device: torch.device, *, fused: bool = False) -> int:
    """Tokens of a pass, padding included; `fused`: through the layers of `fused_layers.py`."""
    if device.type != "cpu":
        return _ON_GPU
    return max(_LEAST_ON_CPU, min(_MOST_ON_CPU, _ACTIVATIONS // activation_bytes(model, fused=fused)))


def activation_bytes(model: Any, *, fused: bool = False) -> int:
    """About what a layered model keeps of one token for its backward pass: of each layer ten times its width
    (norms, queries, keys, values, attention, residuals) and four times that of its feed-forward, in fp32;
    fused, where operands are in bf16, as much as seven and one and a half times in fp32.

    1 for a model whose config names no layers.
    """
    config = model.config.get_text_config()
    width, layers = getattr(config, "hidden_size", None), getattr(config, "num_hidden_layers", None)
    if not width or not layers:
        return 1
    inner = getattr(config, "intermediate_size", None) or 4 * width
    inner *= getattr(config, "num_experts_per_tok", None) or 1
    return int(4 * layers * (7 * width + 1.5 * inner if fused else 10 * width + 4 * inner))
