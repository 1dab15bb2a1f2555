"""The processes that train together: ranks, gathered values, summed gradients, and how they fail together.

Every process runs the same program. Between two steps, and before and after collective work, all of them
gather a value, in the same order; a process that cannot go on sends its reason in place of a value, so that
the others do not wait for ever. One that fails in the middle of an update, where the others wait for its
gradient, writes its reason into the launcher's store and destroys the process group.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stateset_agents.evaluation.evaluator import PlayPart
from stateset_agents.runtime.machine import local_gpu
from stateset_agents.runtime.tasks import Worker, shielded
from stateset_agents.types.errors import ConfigurationError, TrainingStopped
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Span, Trajectory, TrajectoryGroup

_T = TypeVar("_T")
_TIMEOUT = timedelta(days=7)
"""Time that one process may play while the others wait; one that has ended is noticed at once."""
_BUCKET = 2**24
"""Elements that are summed at once: 64 MB in fp32."""


class PeerFailed(TrainingStopped):
    """Another process of this training cannot go on."""

    def __init__(self, message: str, *, is_stop: bool = False) -> None:
        super().__init__(message)
        self.is_stop = is_stop
        """True where it was interrupted, so that nothing is wrong."""


@dataclass(frozen=True, slots=True)
class _Answer(Generic[_T]):
    operation: str
    value: _T


@dataclass(frozen=True, slots=True)
class _Failure:
    reason: str
    is_stop: bool


@dataclass(slots=True)
class _Connection:
    """Made once in a process's life."""

    group: Any
    """A group of gloo, for what is no tensor; None once it is closed: nothing else may hold it open."""
    store: Any
    """The store in which a reason is written; None where the program itself had connected the processes."""


_connection: _Connection | None = None


def num_launched() -> int:
    """The number of processes that torchrun, accelerate or the program itself started; 1 without any of them.

    Raises ConfigurationError for a WORLD_SIZE that is no number.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    world_size = os.environ.get("WORLD_SIZE", "1")
    if not world_size.isdecimal():
        raise ConfigurationError(f"WORLD_SIZE must be a number of processes, got {world_size!r}: unset it")
    return int(world_size)


class Processes:
    """The processes of one training, as one of them sees them; `Processes()` is one alone."""

    def __init__(self, rank: int = 0, count: int = 1, connection: _Connection | None = None) -> None:
        self.rank = rank
        """Index of this process, from 0."""
        self.is_first = rank == 0
        """True in the process that writes the run folder and calls callbacks."""
        self.count = count
        self._connection = connection
        self._is_broken = False
        """True once this process failed where the others do not gather."""
        self._has_reported = False
        """True where the others know of the present failure."""
        self.has_lost_others = False
        """True once the connection to the other processes is gone."""

    @classmethod
    def join(cls, num_processes: int) -> Processes:
        """Connect to the others. Blocking.

        Raises ConfigurationError where the launcher started another number.
        """
        launched = num_launched()
        if launched != num_processes:
            raise ConfigurationError(_why_not(launched, num_processes))
        for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            if os.environ.get(f"ACCELERATE_USE_{plugin}") == "true":
                raise ConfigurationError(
                    f"accelerate's configuration asks for {plugin}, and this training cuts the model by its "
                    "own setting: leave that out there, and set training.parallelism"
                )
        if num_processes == 1:
            return cls()
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])
        return cls(rank, num_processes, _connect())

    @property
    def is_alone(self) -> bool:
        """True where there are no other processes, or none any more."""
        return self.count == 1 or self.has_lost_others

    # ------------------------------------------------------------------------------ shares of the work

    def slice_of(self, number: int) -> slice:
        """This process's part of `number` things in a row; the parts differ by one at most."""
        return slice(number * self.rank // self.count, number * (self.rank + 1) // self.count)

    def balanced_slice(self, sizes: Sequence[int]) -> slice:
        """This process's part of things of these sizes, in a row, so that all parts are about as large.

        A thing goes to the process in whose part of the sum its middle lies.
        """
        total, end = sum(sizes), 0
        indices = []
        for index, size in enumerate(sizes):
            middle = 2 * end + size
            if 2 * total * self.rank <= middle * self.count < 2 * total * (self.rank + 1):
                indices.append(index)
            end += size
        return slice(indices[0], indices[-1] + 1) if indices else slice(0, 0)

    # ------------------------------------------------------------------------------ gathered values

    def gather(self, operation: str, value: _T) -> list[_T]:
        """Every process's value, by rank. Blocking; all of them call it, each for the same `operation`.

        Raises PeerFailed where one of them cannot go on, has ended, or is at another operation.
        """
        if self.count == 1:
            return [value]
        self._has_reported = False
        answers = self._exchange(_Answer(operation, value))
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Failure):
                self._has_reported = True
                raise PeerFailed(f"process {rank} {answer.reason}", is_stop=answer.is_stop)
        first = answers[0].operation
        for rank, answer in enumerate(answers):
            if answer.operation != first:
                self._has_reported = True
                raise PeerFailed(
                    f"process 0 is at {first}, process {rank} at {answer.operation}: make the same calls"
                )
        return [answer.value for answer in answers]

    def reduce(
        self, operation: str, numbers: Mapping[str, float | Tensor], merge: Callable[[list[float]], float]
    ) -> dict[str, float]:
        """Each number merged over the processes that have it, by `sum` or `max_or_nan`."""
        parts = self.gather(operation, {name: float(number) for name, number in numbers.items()})
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: merge([part[name] for part in parts if name in part]) for name in names}

    def abort(self, error: BaseException) -> None:
        """Tell the others, once, why this process cannot go on. Blocking."""
        if self.is_alone or self._has_reported:
            return
        self._has_reported = True
        if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
            failure = _Failure("was interrupted", is_stop=True)
        else:
            text = " ".join(str(error).split()) or type(error).__name__
            failure = _Failure(f"failed: {text}", is_stop=False)
        if not self._is_broken:
            with contextlib.suppress(PeerFailed, RuntimeError):
                self._exchange(failure)
        if self._is_broken:
            self._disconnect_after(failure)

    def _exchange(self, answer: _Answer[_T] | _Failure) -> list[Any]:
        answers: list[Any] = [None] * self.count
        try:
            with self._connected():
                assert self._connection is not None
                dist.all_gather_object(answers, answer, group=self._connection.group)
        except RuntimeError:
            self._is_broken = True  # the others may have got this answer
            raise
        return answers

    # ------------------------------------------------------------------------------ updates

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """A context for work in which the others wait for this process's gradient or weights: an error breaks
        the connection. But a TrainingStopped comes of numbers that all of them have, and each raises it."""
        if self.count == 1:
            yield
            return
        try:
            with self._connected():
                yield
        except TrainingStopped:
            raise
        except BaseException as error:
            self._is_broken = True
            self.abort(error)
            raise

    @contextlib.contextmanager
    def collective(self, operation: str) -> Iterator[None]:
        """A context for an exchange of shards; no process begins before all are at this `operation`."""
        self.gather(operation, None)
        with self.updating():
            yield

    def sum_gradients(self, parameters: Sequence[nn.Parameter | Tensor]) -> None:
        """Sum the gradients of all processes in place; a parameter without any gradient keeps None."""
        if self.count == 1:
            return
        with self._connected():
            assert self._connection is not None
            present = torch.tensor(
                [parameter.grad is not None for parameter in parameters], dtype=torch.uint8
            )
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self._connection.group)
            # AdamW passes over a parameter without a gradient: where all have none it stays so, and where one
            # process has one the others add zeros.
            moved = [parameter for parameter, bit in zip(parameters, present.tolist(), strict=True) if bit]
            for bucket in buckets(moved):
                gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
                dist.all_reduce(flat)
                for p, gradient in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
                    p.grad = gradient.view_as(p)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Raises PeerFailed in place of an error that says that another process is gone."""
        if self.has_lost_others:
            raise PeerFailed("the other processes are gone")
        try:
            yield
        except RuntimeError as error:
            if self.has_lost_others:  # this process has disconnected in here
                raise
            reason = self._stored_reason()
            # torch has no class of its own for a connection that broke
            lost = isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)
            if reason is None and not lost:
                raise
            self._has_reported = self.has_lost_others = True
            peer = f"process {1 - self.rank}" if self.count == 2 else "another process"
            reason = reason or f"{peer} is gone, without a reason: look at what the launcher says of it"
            raise PeerFailed(reason) from error

    def _disconnect_after(self, failure: _Failure) -> None:
        self.has_lost_others = True
        assert self._connection is not None
        with contextlib.suppress(RuntimeError):
            if self._connection.store is not None:
                self._connection.store.set("failure", f"process {self.rank} {failure.reason}")
            self._connection.group = None
            dist.destroy_process_group()

    def _stored_reason(self) -> str | None:
        store = self._connection.store if self._connection is not None else None
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check(["failure"]):
                return cast(str, store.get("failure").decode())
        return None


def _connect() -> _Connection:
    global _connection
    if _connection is not None and not dist.is_initialized():
        raise ConfigurationError("the processes have lost each other: start all of them again")
    if _connection is None:
        store = None
        if not dist.is_initialized():
            first, rank, count = next(rendezvous("env://"))
            store = PrefixStore("stateset", first)
            backend = "gloo"
            if torch.cuda.is_available():
                backend = "cpu:gloo,cuda:nccl"
                torch.cuda.set_device(local_gpu() or 0)
            dist.init_process_group(backend, store=first, rank=rank, world_size=count)
            atexit.register(_destroy_process_group)
        _connection = _Connection(dist.new_group(backend="gloo", timeout=_TIMEOUT), store)
    return _connection


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def max_or_nan(numbers: Iterable[float]) -> float:
    """The largest, NaN where one is: in whatever order they come."""
    return max(numbers, key=lambda number: (math.isnan(number), number))


def _why_not(launched: int, num_processes: int) -> str:
    if launched == 1:
        return (
            f"num_processes is {num_processes} and one process was started: start them with torchrun "
            f"--nproc-per-node {num_processes} -m stateset_agents train ..., or accelerate launch "
            f"--multi_gpu --num_processes {num_processes} -m stateset_agents train ... (which starts one "
            "without --multi_gpu)"
        )
    return (
        f"{launched} processes were started and num_processes is {num_processes}: set it to {launched} "
        f"(--set training.num_processes={launched}), or start {num_processes}"
    )


def buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Buckets of parameters in order, each of one kind of number and of about `_BUCKET` elements."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        full = sum(other.numel() for other in bucket) + parameter.numel() > _BUCKET
        if bucket and (full or bucket[0].dtype != parameter.dtype or bucket[0].device != parameter.device):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket


# The event loop's side of `processes.Processes`: waits for all processes, and ends with them.
#
# The exchanges block, so they run in the worker thread.

_SAME_CLOCK = 0.1
"""Seconds between two readings of one clock."""


class ProcessGroup:
    """Alone until it joins the others. Exchanges wait in `worker`, one after the other."""

    def __init__(self, worker: Worker) -> None:
        self.processes = Processes()
        """The processes that train together."""
        self._worker = worker
        self._clock_offsets = [0.0]
        """Seconds to add to each process's monotonic clock for the first one's."""

    async def join(self, number: int) -> None:
        """Raises ConfigurationError where the launcher started another number of processes."""
        self.processes = await self._worker.run(Processes.join, number)
        clocks = await self.barrier("the clocks", time.time() - time.monotonic())
        self._clock_offsets = [clock - clocks[0] for clock in clocks]

    async def barrier(self, operation: str, value: Any = None) -> list[Any]:
        """Wait until every process is at this `operation`; returns the value of each, by rank.

        Raises PeerFailed where one cannot go on. A process that has lost the others is alone.
        """
        if self.processes.is_alone:
            return [value]
        return await self._worker.run(self.processes.gather, operation, value)

    async def gather_results(self, operation: str, work: Awaitable[_T]) -> list[_T]:
        """The result of every process's `work`, by rank; where one fails or is cancelled all of them stop.

        An error of this process's own work is raised rather than the failure of another.
        """
        if self.processes.is_alone:
            return [await work]
        try:
            result = await work
        except (Exception, asyncio.CancelledError) as error:
            await self.abort(error)
            raise
        return await shielded(self.barrier(operation, result))

    async def abort(self, error: BaseException) -> None:
        """Tell the others, once, that this process cannot go on."""
        if not self.processes.is_alone:
            await shielded(self._worker.run(self.processes.abort, error))

    async def divide(
        self, scenarios: Sequence[Scenario], play: PlayPart, operation: str = "an evaluation"
    ) -> list[TrajectoryGroup]:
        """The groups of all scenarios, in order; each process plays its part of them."""
        part = self.processes.slice_of(len(scenarios))
        operation = f"{operation} ({len(scenarios)} scenarios)"
        played = await self.gather_results(operation, play(scenarios[part], scenarios[: part.start]))
        return [
            group if abs(offset) < _SAME_CLOCK else _on_first_clock(group, offset)
            for groups, offset in zip(played, self._clock_offsets, strict=True)
            for group in groups
        ]


def _on_first_clock(group: TrajectoryGroup, seconds: float) -> TrajectoryGroup:
    def moved(trajectory: Trajectory) -> Trajectory:
        spans = (Span(span.doing, span.begin + seconds, span.end + seconds) for span in trajectory.spans)
        return replace(trajectory, spans=tuple(spans))

    branches = tuple(replace(branch, trajectory=moved(branch.trajectory)) for branch in group.branches)
    return replace(group, trajectories=tuple(map(moved, group.trajectories)), branches=branches)
