"""Awaiting with time limits and cancellation, and sync code in threads; no task is left behind."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)
T = TypeVar("T")
P = ParamSpec("P")

MAX_THREADS = 256
"""Most sync calls of user code at once; further ones wait for a free thread."""
_IDLE_SECONDS = 5.0
_GRACE_SECONDS = 1.0
"""Time that cancelled work has for its clean-up. After that nobody waits for it."""
_abandoned: set[asyncio.Future[Any]] = set()
"""Tasks that still run after they were cancelled. The reference keeps them from garbage collection."""


async def gather_or_cancel(work: Iterable[Awaitable[T]]) -> list[T]:
    """Results in order. When one raises, cancel the others, wait until they end, and raise its exception."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def with_timeout(seconds: float | None, work: Awaitable[T], late: Exception) -> T:
    """The result of `work`; raises `late` if that takes longer than `seconds` (None: no limit).

    `work` is cancelled at the limit, and when the caller is cancelled. User code may ignore that: after one
    more second nobody waits for it, and a warning is logged. If `work` ends as cancelled though nobody
    cancelled it, that is a RuntimeError: as a cancellation it would end the whole training.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await end_task(task)
        raise
    if task.cancelled():
        raise RuntimeError(
            "it let out a CancelledError that nobody asked for: catch it where you await what you cancelled"
        )
    if done:
        return task.result()
    await end_task(task)
    raise late


async def end_task(task: asyncio.Future[Any]) -> None:
    """Cancel it and wait for its end: a second at the most, after which a warning says that it goes on."""
    _abandoned.add(task)  # before the wait: another cancellation may end it
    task.add_done_callback(_forget)
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=_GRACE_SECONDS)
    finally:  # or asyncio.run waits for one that never ends
        asyncio.tasks._unregister_task(task)  # type: ignore[arg-type]  # any future may be given
    if not task.done():
        _log.warning(
            "a user's, tool's or reward's async function goes on though it was cancelled, and is left to "
            "itself: let asyncio.CancelledError through where you catch exceptions"
        )


def _forget(task: asyncio.Future[Any]) -> None:
    """Drop an abandoned task and its exception."""
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


class Deadline:
    """A time limit of the work that it bounds; it may be moved while work is under way.

    >>> async with Deadline(30.0).bound(EnvironmentTimeout("30 s are over")):
    ...     await work()

    A sync function that the work waits for cannot be stopped: it runs on in its thread.
    """

    def __init__(self, seconds: float | None) -> None:
        """`seconds` from now, in a running event loop; None: no limit."""
        self._time = asyncio.get_running_loop().time
        self._when = None if seconds is None else self._time() + seconds
        self._open: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def bound(self, late: Exception) -> AsyncIterator[None]:
        """Cancel the body at the deadline and raise `late`."""
        limit = asyncio.timeout_at(self._when)
        self._open.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():  # the body raised it
                raise
            raise late from error
        finally:
            self._open.discard(limit)

    def set(self, seconds: float) -> None:
        """Move it to `seconds` from now."""
        self._move(self._time() + seconds)

    def extend(self, seconds: float) -> None:
        """Move it `seconds` away, where there is a limit that has not passed yet."""
        if self._when is not None and self._open and not any(limit.expired() for limit in self._open):
            self._move(self._when + seconds)

    def _move(self, when: float) -> None:
        self._when = when
        for limit in self._open:
            if not limit.expired():
                limit.reschedule(when)


class ActiveWork:
    """Work under way that can be waited for, and cut where it takes too long."""

    def __init__(self) -> None:
        self._limits: set[asyncio.Timeout] = set()
        """The time limit of each piece of work; it is infinite until the work is cut."""
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def under_way(self, cut: Callable[[], Exception]) -> AsyncIterator[None]:
        """The body is work under way. `cut` makes the error that is raised where it is cut."""
        limit = asyncio.timeout(None)
        self._limits.add(limit)
        self._idle.clear()
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():  # the body raised it
                raise
            raise cut() from error
        finally:
            self._limits.discard(limit)
            if not self._limits:
                self._idle.set()

    async def ended(self) -> None:
        """Wait until no work is under way."""
        await self._idle.wait()

    def cut(self) -> int:
        """Cancel all work under way; returns how many pieces it was."""
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)  # a time in the past: it expires now
        return len(self._limits)


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, even if the caller is cancelled meanwhile; then raise the cancellation.

    `asyncio.shield` returns at the cancellation; this waits. An exception of `work` is raised first.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


class LoopShare:
    """Short work of many tasks on the event loop, spread so that everything else goes on in between."""

    def __init__(self, seconds: float) -> None:
        """After about so long, further work waits for the loop's next round."""
        self._seconds = seconds
        self._spent = 0.0
        self._until: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        """The loop whose time is spent, and the beginning of its next round."""

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which is called as soon as there is time for it."""
        loop = asyncio.get_running_loop()
        while self._until is not None and self._until[0] is loop:
            await self._until[1].wait()
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._spent += time.perf_counter() - start
            if self._spent >= self._seconds:
                self._spent, next_round = 0.0, asyncio.Event()
                self._until = loop, next_round
                loop.call_soon(self._begin_round, next_round)

    def _begin_round(self, round: asyncio.Event) -> None:
        if self._until is not None and self._until[1] is round:
            self._until = None
        round.set()


async def in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a user's sync function, without blocking the event loop.

    asyncio.to_thread has cores + 4 threads for the whole process, so 16 judges that take a second each would
    queue on a small machine. Here each call has a thread. The threads are daemons: a function that hangs
    blocks neither other calls nor the end of the program. When the call is cancelled nobody waits for it any
    more. Python cannot stop the function: it runs on, and its thread no longer counts.
    """
    work = partial(contextvars.copy_context().run, partial(function, *args, **kwargs))
    job = _threads.submit(work)
    try:
        return await asyncio.wrap_future(job)
    except asyncio.CancelledError:
        _threads.give_up(job)
        raise


class _Threads:
    """A pool: a thread starts when none is free and ends after being idle for a while."""

    def __init__(self) -> None:
        self._running: set[Future[Any]] = set()
        """Jobs that run and that somebody waits for."""
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = 0
        self._num_idle = 0
        """Threads without a job, except those that a queued job is meant for."""
        self._num_waiting = 0
        """Queued jobs that no thread is meant for yet."""
        self._has_warned = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            starts = self._num_idle == 0 and self._num_threads < MAX_THREADS
            if self._num_idle:
                self._num_idle -= 1
            elif starts:
                self._num_threads += 1
            else:
                self._num_waiting += 1
            warns = self._num_waiting == 1 and not self._has_warned
            self._has_warned |= warns
            self._jobs.put((future, work))
        if warns:
            _log.warning(
                f"{MAX_THREADS} calls of sync tools, rewards or callbacks are under way and further ones "
                "wait: if they hang, give what they wait for a time limit of its own"
            )
        if starts:
            threading.Thread(target=self._serve, name="user-code", daemon=True).start()
        return future

    def give_up(self, job: Future[Any]) -> None:
        """Nobody waits for this job any more. Another thread takes the place of its thread."""
        with self._lock:
            if job not in self._running:
                return
            self._running.remove(job)
            starts = self._num_waiting > 0
            if starts:
                self._num_waiting -= 1
            else:
                self._num_threads -= 1
        if starts:
            threading.Thread(target=self._serve, name="user-code", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                future, work = self._jobs.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._num_idle:  # else a job is meant for this thread
                        self._num_idle -= 1
                        self._num_threads -= 1
                        return
                continue
            given_up = False
            with self._lock:
                is_wanted = future.set_running_or_notify_cancel()
                if is_wanted:
                    self._running.add(future)
            if is_wanted:
                try:
                    future.set_result(work())
                except StopIteration as error:  # asyncio refuses it (PEP 479)
                    future.set_exception(RuntimeError(f"StopIteration: {error}"))
                except BaseException as error:  # the caller must get it, whatever it is
                    future.set_exception(error)
                with self._lock:
                    given_up = future not in self._running
                    self._running.discard(future)
            del future, work  # or an idle thread would keep them alive
            if given_up:
                return
            with self._lock:
                if self._num_waiting:
                    self._num_waiting -= 1
                else:
                    self._num_idle += 1


_threads = _Threads()


Piece = TypeVar("Piece")


async def reported(work: Callable[[Callable[[Piece], None]], Awaitable[T]]) -> AsyncGenerator[Piece | T]:
    """The pieces that `work` passes to its callback, and at the end its result.

    Leaving the loop early cancels the work and waits for its end.
    """
    pieces: asyncio.Queue[Piece | None] = asyncio.Queue()

    async def run() -> T:
        return await work(pieces.put_nowait)

    task = asyncio.create_task(run())
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        yield task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


_T = TypeVar("_T")


class Worker:
    """Runs blocking work while the event loop goes on. It cannot be started again once stopped."""

    def __init__(self) -> None:
        import torch

        self._is_stopped = False
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="update",
            initializer=torch.set_num_threads,  # torch keeps one number per thread
            initargs=(torch.get_num_threads(),),
        )

    def refuse_stopped(self) -> None:
        """Raises ConfigurationError after `stop`."""
        if self._is_stopped:
            raise ConfigurationError(
                "the trainer was stopped: make a new one, with run=trainer.run and load_checkpoint() to go on"
            )

    async def run(self, work: Callable[..., _T], *arguments: Any) -> _T:
        """The result of `work(*arguments)`."""
        self.refuse_stopped()
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def stop(self) -> None:
        """Wait for the work under way and end the thread; stopping twice does nothing."""
        self._is_stopped = True
        await asyncio.to_thread(self._thread.shutdown)
