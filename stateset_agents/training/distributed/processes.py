"""The processes that train together: who they are, what they tell each other, how they end together.

Every process runs the same program. Between two steps, and before and after what they do together, all of
them *exchange* a value, in the same order; a process that cannot go on gives its reason in place of a value,
so that the others hear of it where they would have waited for ever. One that breaks in the middle of an
update, where the others wait for its gradient, leaves its reason in the launcher's store and hangs up.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from stateset_agents.runtime.devices import local_gpu
from stateset_agents.types.errors import ConfigurationError, TrainingStopped

__all__ = ["PeerFailed", "Processes", "num_launched", "worst_of"]

_T = TypeVar("_T")
_PATIENCE = timedelta(days=7)
"""How long one process may play while the others wait; one that is gone is noticed at once."""
_BUCKET = 2**24
"""Elements that are summed at once: 64 MB in fp32."""


class PeerFailed(TrainingStopped):
    """Another process of this training cannot go on."""

    def __init__(self, message: str, *, is_stop: bool = False) -> None:
        super().__init__(message)
        self.is_stop = is_stop
        """It was interrupted, and nothing is wrong."""


@dataclass(frozen=True, slots=True)
class _Value(Generic[_T]):
    what: str
    value: _T


@dataclass(frozen=True, slots=True)
class _Left:
    why: str
    is_stop: bool


@dataclass(slots=True)
class _Connection:
    """Made once in a process's life."""

    group: Any
    """Of gloo, for what is no tensor; None once it has hung up: nothing else may hold it open."""
    store: Any
    """Where a reason is left; None where the program itself had connected the processes."""


_connection: _Connection | None = None


def num_launched() -> int:
    """How many processes torchrun, accelerate or the program itself started; 1 without any of them.

    Raises ConfigurationError for a WORLD_SIZE that is no number.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    said = os.environ.get("WORLD_SIZE", "1")
    if not said.isdecimal():
        raise ConfigurationError(f"WORLD_SIZE must be a number of processes, got {said!r}: unset it")
    return int(said)


class Processes:
    """All processes of one training, seen from one of them; `Processes()` is one alone."""

    def __init__(self, rank: int = 0, count: int = 1, connection: _Connection | None = None) -> None:
        self.rank = rank
        """Which of them this is, from 0."""
        self.count = count
        self._connection = connection
        self._is_broken = False
        """Did this process break where the others do not listen?"""
        self._has_reported = False
        """Do the others know of what goes wrong now?"""
        self._is_lost = False

    @classmethod
    def join(cls, wanted: int) -> Processes:
        """Meet the others, `wanted` in all.

        Raises ConfigurationError where the launcher started another number. Blocking.
        """
        launched = num_launched()
        if launched != wanted:
            raise ConfigurationError(_why_not(launched, wanted))
        for plugin in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            if os.environ.get(f"ACCELERATE_USE_{plugin}") == "true":
                raise ConfigurationError(
                    f"accelerate's configuration asks for {plugin}, and this training cuts the model by its "
                    "own setting: leave that out there, and set training.parallelism"
                )
        if wanted == 1:
            return cls()
        return cls(dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"]), wanted, _connect())

    @property
    def is_first(self) -> bool:
        """Is it this one that writes the run folder and calls callbacks?"""
        return self.rank == 0

    @property
    def has_lost_others(self) -> bool:
        """Were there others, and can nothing be done together any more?"""
        return self._is_lost

    @property
    def is_alone(self) -> bool:
        """Is there no other one, or none any more?"""
        return self.count == 1 or self._is_lost

    # ------------------------------------------------------------------------------ what each of them does

    def part_of(self, number: int) -> slice:
        """This one's part of `number` things in a row; the parts differ by one at most."""
        return slice(number * self.rank // self.count, number * (self.rank + 1) // self.count)

    def share_of(self, sizes: Sequence[int]) -> slice:
        """This one's part of things of these sizes, in a row, so that the parts weigh alike.

        A thing goes to the process in whose part of the whole its middle lies.
        """
        whole, before = sum(sizes), 0
        own = []
        for place, size in enumerate(sizes):
            middle = 2 * before + size
            if 2 * whole * self.rank <= middle * self.count < 2 * whole * (self.rank + 1):
                own.append(place)
            before += size
        return slice(own[0], own[-1] + 1) if own else slice(0, 0)

    # ------------------------------------------------------------------------------ what they say

    def gather(self, what: str, value: _T) -> list[_T]:
        """Every process's value, by rank. Blocking; all of them call it, each for the same `what`.

        Raises PeerFailed where one of them cannot go on, is gone, or is at something else.
        """
        if self.count == 1:
            return [value]
        self._has_reported = False
        return [answer.value for answer in self._checked(self._exchange(_Value(what, value)))]

    def total(self, what: str, numbers: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each number added up over the processes that have it."""
        return self._merged(what, numbers, sum)

    def worst(self, what: str, numbers: Mapping[str, float | Tensor]) -> dict[str, float]:
        """Each number's largest; NaN where one of them is."""
        return self._merged(what, numbers, worst_of)

    def _merged(
        self, what: str, numbers: Mapping[str, float | Tensor], merge: Callable[[list[float]], float]
    ) -> dict[str, float]:
        parts = self.gather(what, {name: float(number) for name, number in numbers.items()})
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: merge([part[name] for part in parts if name in part]) for name in names}

    def part(self, error: BaseException) -> None:
        """Tell the others why this one cannot go on; they are told once. Blocking."""
        if self.is_alone or self._has_reported:
            return
        self._has_reported = True
        why = _reason(error)
        if not self._is_broken:
            with contextlib.suppress(PeerFailed, RuntimeError):
                self._exchange(why)
        if self._is_broken:
            self._hang_up(why)

    def _exchange(self, mine: _Value[_T] | _Left) -> list[Any]:
        found: list[Any] = [None] * self.count
        try:
            with self._connected():
                assert self._connection is not None
                dist.all_gather_object(found, mine, group=self._connection.group)
        except RuntimeError:
            self._is_broken = True  # the others may have theirs
            raise
        return found

    def _checked(self, answers: Sequence[_Value[_T] | _Left]) -> list[_Value[_T]]:
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Left):
                self._has_reported = True
                raise PeerFailed(f"process {rank} {answer.why}", is_stop=answer.is_stop)
        values = cast(list[_Value[_T]], list(answers))
        for rank, answer in enumerate(values):
            if answer.what != values[0].what:
                self._has_reported = True
                raise PeerFailed(
                    f"process 0 is at {values[0].what}, process {rank} at {answer.what}: every process has "
                    "to make the same calls"
                )
        return values

    # ------------------------------------------------------------------------------ updates

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """What breaks in here breaks where the others wait for a part of this one's gradient or weights; but
        a TrainingStopped comes of numbers that all of them have, and each raises it."""
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
            self.part(error)
            raise

    @contextlib.contextmanager
    def giving(self, what: str) -> Iterator[None]:
        """In here all of them give each other their shards; none begins before all are at `what`."""
        self.gather(what, None)
        with self.updating():
            yield

    def sum_gradients(self, parameters: Sequence[nn.Parameter | Tensor]) -> None:
        """Add up the gradients of all processes, in each of them; what has none anywhere stays without."""
        if self.count == 1:
            return
        with self._connected():
            assert self._connection is not None
            present = torch.tensor(
                [parameter.grad is not None for parameter in parameters], dtype=torch.uint8
            )
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=self._connection.group)
            moved = [one for one, bit in zip(parameters, present.tolist(), strict=True) if bit]
            for bucket in _buckets(moved):
                flat = torch.cat([_gradient(one).reshape(-1) for one in bucket])
                dist.all_reduce(flat)
                pieces = torch.split(flat, [one.numel() for one in bucket])
                for one, piece in zip(bucket, pieces, strict=True):
                    one.grad = piece.view_as(one)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Raises PeerFailed for an error that says that one of the others is gone."""
        if self._is_lost:
            raise PeerFailed("the other processes are gone")
        try:
            yield
        except RuntimeError as error:
            if self._is_lost:  # it has hung up itself, in here
                raise
            words = self._last_words()
            if words is None and not _is_of_connection(error):
                raise
            self._has_reported = self._is_lost = True
            raise PeerFailed(words or self._untold()) from error

    def _untold(self) -> str:
        gone = f"process {1 - self.rank}" if self.count == 2 else "another process"
        return f"{gone} is gone, without a reason: look at what the launcher says of it"

    def _hang_up(self, why: _Left) -> None:
        self._is_lost = True
        assert self._connection is not None
        with contextlib.suppress(RuntimeError):
            if self._connection.store is not None:
                self._connection.store.set("left", f"process {self.rank} {why.why}")
            self._connection.group = None
            dist.destroy_process_group()

    def _last_words(self) -> str | None:
        store = self._connection.store if self._connection is not None else None
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check(["left"]):
                return cast(str, store.get("left").decode())
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
            atexit.register(_disconnect)
        _connection = _Connection(dist.new_group(backend="gloo", timeout=_PATIENCE), store)
    return _connection


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _reason(error: BaseException) -> _Left:
    if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)):
        return _Left("was interrupted", is_stop=True)
    return _Left(f"failed: {' '.join(str(error).split()) or type(error).__name__}", is_stop=False)


def worst_of(numbers: Iterable[float]) -> float:
    """The largest, NaN where one is: in whatever order they come."""
    return max(numbers, key=lambda number: (math.isnan(number), number))


def _is_of_connection(error: RuntimeError) -> bool:
    """torch has no kind of its own for a connection that broke."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)


def _why_not(launched: int, wanted: int) -> str:
    if launched == 1:
        return (
            f"num_processes is {wanted} and one process was started: start them with torchrun "
            f"--nproc-per-node {wanted} -m stateset_agents train ..., or accelerate launch --multi_gpu "
            f"--num_processes {wanted} -m stateset_agents train ... (which starts one without --multi_gpu)"
        )
    return (
        f"{launched} processes were started and num_processes is {wanted}: set it to {launched} (--set "
        f"training.num_processes={launched}), or start {wanted}"
    )


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """In order, each of one kind of number and of about `_BUCKET` elements."""
    bucket: list[Tensor] = []
    for one in parameters:
        full = sum(other.numel() for other in bucket) + one.numel() > _BUCKET
        if bucket and (full or bucket[0].dtype != one.dtype or bucket[0].device != one.device):
            yield bucket
            bucket = []
        bucket.append(one)
    if bucket:
        yield bucket


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
