"""Decides when the generation worker may run: requests that wait for it, and the turn barrier; for
backend.py.

Under deterministic scheduling a decode step starts only when every participant (one for each conversation
that is played at the same time) waits for a request. So the content of a batch is a function of what was
said, not of how long anyone took to say it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stateset_agents.backends.local.slot_table import GenerationRequest, Key
from stateset_agents.types.errors import BackendError

Scheduling: TypeAlias = Literal["deterministic", "throughput"]


@dataclass(slots=True, eq=False)
class _Participant:
    """A conversation that the deterministic scheduler waits for; see `Backend.participate`."""

    scheduler: Scheduler
    num_pending: int = 0
    """Number of its requests that wait for the worker. Without any it is busy elsewhere: with a user or a
    tool."""


_participants: ContextVar[tuple[_Participant, ...]] = ContextVar("participants", default=())
"""Participants of the current task, the innermost last; a task may take part in several backends."""


@dataclass(slots=True, kw_only=True, eq=False)
class PendingRequest:
    """A request, and the caller that waits for it."""

    request: GenerationRequest
    participant: _Participant | None
    future: asyncio.Future[None]
    is_admitted: bool = False
    """True once it has a slot of the cache."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerJob:
    """A function that the worker calls between two steps, as soon as it can: scoring, new weights."""

    run: Callable[[], Any]
    future: asyncio.Future[Any]


@dataclass(slots=True, kw_only=True)
class Work:
    """The worker's next work: jobs, then cancellations, then cache changes, then one step of `pending`."""

    jobs: list[WorkerJob] = field(default_factory=list)
    cancelled: list[GenerationRequest] = field(default_factory=list)
    changes: list[Callable[[], None]] = field(default_factory=list)
    pending: list[PendingRequest] = field(default_factory=list)


class Scheduler:
    """Hands requests of event loops to the one worker thread. Every method is safe from any thread.

    Consumes: requests, jobs and cache changes of callers. Waits for: work, and under deterministic scheduling
    for all participants. Unblocked by: a new request, job or change, a cancellation, or a participant that
    leaves. Produces: a `Work` for the worker.
    """

    def __init__(self, scheduling: Scheduling) -> None:
        self._is_deterministic = scheduling == "deterministic"
        self._changed = threading.Condition()
        self._participants: set[_Participant] = set()
        self._num_busy = 0
        """Participants without a pending request: deterministic decoding stands still while there are any."""
        self._pending: list[PendingRequest] = []
        self._cancelled: list[GenerationRequest] = []
        self._jobs: list[WorkerJob] = []
        self._changes: list[tuple[str, Key, Callable[[], None]]] = []
        self._num_events = self._num_seen = 0
        """Events so far, and how many of them the worker has seen."""
        self._end: str | None = "the backend is not started; await backend.start() first"
        self._cause: BaseException | None = None

    def open(self) -> None:
        """Accept requests from now on."""
        with self._changed:
            self._end = self._cause = None

    def stop(self, reason: str, cause: BaseException | None = None) -> None:
        """Accept nothing more. All callers that wait or come later get a BackendError with this reason."""
        with self._changed:
            self._end, self._cause = reason, cause
            futures: list[asyncio.Future[Any]] = [pending.future for pending in self._pending]
            futures += [job.future for job in self._jobs]
            for pending in self._pending:
                self._note_end(pending)
            self._pending, self._jobs, self._changes = [], [], []
            self._notify(at_once=True)
        for future in futures:
            resolve([future], error=self._error(reason))

    @contextmanager
    def participate(self) -> Iterator[None]:
        """Take part in deterministic scheduling with the requests made inside; see `Backend.participate`."""
        participant = _Participant(self)
        with self._changed:
            self._participants.add(participant)
            self._num_busy += 1
        token = _participants.set((*_participants.get(), participant))
        try:
            yield
        finally:
            _participants.reset(token)
            with self._changed:
                self._participants.discard(participant)
                self._num_busy -= participant.num_pending == 0
                self._notify()

    async def generate(self, request: GenerationRequest) -> None:
        """Wait until the worker has filled in the request; a caller that is cancelled takes it back."""
        participants = reversed(_participants.get())
        participant = next((item for item in participants if item.scheduler is self), None)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            self.check()
            if any(pending.request.key == request.key for pending in self._pending):
                raise BackendError(
                    f"session {request.key[1:]} already has a turn in flight; await it before the next"
                )
            pending = PendingRequest(request=request, participant=participant, future=future)
            self._pending.append(pending)
            if participant is not None:
                self._num_busy -= participant.num_pending == 0
                participant.num_pending += 1
            self._notify(at_once=participant is None)
        try:
            await future
        except asyncio.CancelledError:
            with self._changed:
                if pending in self._pending:
                    self._pending.remove(pending)
                    # Only the worker touches slots: it drops this one before its next step.
                    self._cancelled.append(request)
                    self._note_end(pending)
                self._notify(at_once=True)
            raise

    async def run_job(self, run: Callable[[], Any]) -> Any:
        """The result of a function that the worker calls between two steps."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._changed:
            self.check()
            self._jobs.append(WorkerJob(run=run, future=future))
            self._notify(at_once=True)
        return await future

    def change_cache(
        self, kind: Literal["fork", "release", "sleep"], key: Key, run: Callable[[], None]
    ) -> None:
        """Change the cache before the next step: all forks, then all releases, each by key, then a sleep."""
        with self._changed:
            self._changes.append((kind, key, run))
            self._notify()

    def next_work(self, progress: bool) -> Work | None:
        """Block until there is work; None once stopped. Only the worker calls this.

        Without `progress` (no part of the last work could be done) it first waits for a new event.
        """
        with self._changed:
            while self._end is None:
                if progress or self._num_events != self._num_seen:
                    self._num_seen = self._num_events
                    may_step = not self._is_deterministic or self._num_busy == 0
                    work = Work(jobs=self._jobs, cancelled=self._cancelled)
                    self._jobs, self._cancelled = [], []
                    if may_step:
                        ordered = sorted(self._changes, key=lambda change: change[:2])
                        work.changes = [run for _, _, run in ordered]
                        self._changes = []
                    work.pending = [item for item in self._pending if may_step or item.participant is None]
                    if self._is_deterministic:  # the order of a batch must not say who came first
                        work.pending.sort(key=lambda pending: pending.request.key)
                    if work.jobs or work.cancelled or work.changes or work.pending:
                        return work
                progress = False
                self._changed.wait()
            return None

    def finish(self, ended: list[PendingRequest], error: BackendError | None = None) -> None:
        """Wake the callers of requests that are filled in, or that cannot be served: these get `error`.

        Their participants are busy again.
        """
        with self._changed:
            ended = [pending for pending in ended if pending in self._pending]
            for pending in ended:
                self._pending.remove(pending)
                self._note_end(pending)
        resolve([pending.future for pending in ended], error=error)

    def _notify(self, at_once: bool = False) -> None:
        """Count an event, and wake the worker if it may act on it now.

        Events are counted even where they wake nobody: `next_work` without progress waits for a new one, and
        one that came while the worker was busy must not be lost.
        """
        self._num_events += 1
        if at_once or not self._is_deterministic or self._num_busy == 0:
            self._changed.notify_all()

    def _note_end(self, pending: PendingRequest) -> None:
        """A request no longer waits: its participant may be busy now."""
        participant = pending.participant
        if participant is not None:
            participant.num_pending -= 1
            self._num_busy += participant.num_pending == 0 and participant in self._participants

    def check(self) -> None:
        """Raises BackendError, with its cause, if no request is accepted any more."""
        with self._changed:  # reentrant, so that callers may hold it
            if self._end is not None:
                raise self._error(self._end)

    def _error(self, reason: str) -> BackendError:
        error = BackendError(reason)
        error.__cause__ = self._cause
        return error


def resolve(
    futures: Iterable[asyncio.Future[Any]], result: Any = None, error: BaseException | None = None
) -> None:
    """Give futures of other threads' event loops their result, or their error."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[Any]]] = {}
    for future in futures:
        by_loop.setdefault(future.get_loop(), []).append(future)
    for loop, group in by_loop.items():  # waking a loop is slow, so once for all its futures
        call(loop, _resolve, group, result, error)


def _resolve(futures: list[asyncio.Future[Any]], result: Any, error: BaseException | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def call(loop: asyncio.AbstractEventLoop, act: Callable[..., None], *arguments: Any) -> None:
    """Let another thread's event loop call a function; calls keep their order."""
    with suppress(RuntimeError):  # the loop has ended, so nobody waits on it
        loop.call_soon_threadsafe(act, *arguments)
