"""Turns that wait for the worker, and the logical clock that says when it may go on; for backend.py.

Under deterministic scheduling a step starts only when every lane (one per concurrent conversation) waits for
a turn. What stands in a batch is then a function of what was said, not of how long anyone took to say it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from stateset_agents.backends.local.request import Key, Turn
from stateset_agents.types.errors import BackendError

__all__ = ["Clock", "Job", "Scheduling", "Ticket", "Work", "call", "deliver", "fail"]

Scheduling: TypeAlias = Literal["deterministic", "throughput"]


@dataclass(slots=True, eq=False)
class _Lane:
    clock: Clock
    in_flight: int = 0


_lanes: ContextVar[tuple[_Lane, ...]] = ContextVar("lanes", default=())


@dataclass(slots=True, kw_only=True, eq=False)
class Ticket:
    """One caller's wait for one turn."""

    turn: Turn
    lane: _Lane | None
    future: asyncio.Future[None]
    admitted: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Something that runs between steps as soon as it can: scoring, new weights."""

    run: Callable[[], Any]
    future: asyncio.Future[Any]


@dataclass(slots=True, kw_only=True)
class Work:
    """What the worker does next: jobs, then cache changes, then one step of `tickets`."""

    jobs: list[Job] = field(default_factory=list)
    cancelled: list[Turn] = field(default_factory=list)
    changes: list[Callable[[], None]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)


class Clock:
    """Between the event loop's callers and the one worker thread. Every method is safe from any thread."""

    def __init__(self, scheduling: Scheduling) -> None:
        self._deterministic = scheduling == "deterministic"
        self._changed = threading.Condition()
        self._lanes: set[_Lane] = set()
        self._num_busy = 0
        """Lanes that wait for no turn: the deterministic clock stands while there are any."""
        self._tickets: list[Ticket] = []
        self._cancelled: list[Turn] = []
        self._jobs: list[Job] = []
        self._changes: list[tuple[str, Key, Callable[[], None]]] = []
        self._events = self._seen = 0
        self._end: str | None = "the backend is not started; await backend.start() first"
        self._cause: BaseException | None = None

    def open(self) -> None:
        """Accept turns from now on."""
        with self._changed:
            self._end = self._cause = None

    def stop(self, reason: str, cause: BaseException | None = None) -> None:
        """Accept nothing more; whoever waits, and whoever comes later, gets a BackendError that says so."""
        with self._changed:
            self._end, self._cause = reason, cause
            futures: list[asyncio.Future[Any]] = [ticket.future for ticket in self._tickets]
            futures += [job.future for job in self._jobs]
            for ticket in self._tickets:
                self._leave(ticket)
            self._tickets, self._jobs, self._changes = [], [], []
            self._notify(at_once=True)
        for future in futures:
            fail(future, self._error(reason))

    @contextmanager
    def lane(self) -> Iterator[None]:
        """Join the clock for the calls made inside; see `Backend.lane`."""
        lane = _Lane(self)
        with self._changed:
            self._lanes.add(lane)
            self._num_busy += 1
        token = _lanes.set((*_lanes.get(), lane))
        try:
            yield
        finally:
            _lanes.reset(token)
            with self._changed:
                self._lanes.discard(lane)
                self._num_busy -= lane.in_flight == 0
                self._notify()

    async def turn(self, turn: Turn) -> None:
        """Wait until the worker has sampled this turn; a cancelled wait takes the turn back."""
        lane = next((lane for lane in reversed(_lanes.get()) if lane.clock is self), None)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._check()
            if any(ticket.turn.key == turn.key for ticket in self._tickets):
                raise BackendError(
                    f"session {turn.key[1:]} already has a turn in flight; await it before the next"
                )
            ticket = Ticket(turn=turn, lane=lane, future=future)
            self._tickets.append(ticket)
            if lane is not None:
                self._num_busy -= lane.in_flight == 0
                lane.in_flight += 1
            self._notify(at_once=lane is None)
        try:
            await future
        except asyncio.CancelledError:
            with self._changed:
                if ticket in self._tickets:
                    self._tickets.remove(ticket)
                    self._cancelled.append(turn)
                    self._leave(ticket)
                self._notify(at_once=True)
            raise

    async def job(self, run: Callable[[], Any]) -> Any:
        """Run something in the worker thread, between two steps."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._check()
            self._jobs.append(Job(run=run, future=future))
            self._notify(at_once=True)
        return await future

    def change(self, kind: Literal["fork", "release", "rest"], key: Key, run: Callable[[], None]) -> None:
        """Change the cache before the next step: forks, then releases, each in key order, then a rest."""
        with self._changed:
            self._changes.append((kind, key, run))
            self._notify()

    def next(self, progress: bool) -> Work | None:
        """Block until there is work; None when stopped. Called by the worker only.

        Without `progress` (nothing of the last work could move) it waits for some change first.
        """
        with self._changed:
            while self._end is None:
                if progress or self._events != self._seen:
                    self._seen = self._events
                    work = self._take()
                    if work is not None:
                        return work
                progress = False
                self._changed.wait()
            return None

    def done(self, tickets: list[Ticket]) -> None:
        """These turns have ended: their lanes go on, and the clock waits for their next word."""
        with self._changed:
            finished = [ticket for ticket in tickets if ticket in self._tickets]
            for ticket in finished:
                self._tickets.remove(ticket)
                self._leave(ticket)
        by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
        for ticket in finished:
            by_loop.setdefault(ticket.future.get_loop(), []).append(ticket.future)
        for loop, futures in by_loop.items():  # waking a loop is dear, so once for all of them
            call(loop, _set_done, futures)

    def refuse(self, ticket: Ticket, error: BackendError) -> None:
        """This turn can't be served; its caller hears why."""
        with self._changed:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
                self._leave(ticket)
        fail(ticket.future, error)

    def _notify(self, at_once: bool = False) -> None:
        """Wake the worker, if there is something `at_once`, or the clock may go on."""
        self._events += 1
        if at_once or not self._deterministic or self._num_busy == 0:
            self._changed.notify_all()

    def _take(self) -> Work | None:
        full = not self._deterministic or self._num_busy == 0
        work = Work(jobs=self._jobs, cancelled=self._cancelled)
        self._jobs, self._cancelled = [], []
        if full:
            ordered = sorted(self._changes, key=lambda change: change[:2])
            work.changes = [run for _, _, run in ordered]
            self._changes = []
        work.tickets = [ticket for ticket in self._tickets if full or ticket.lane is None]
        if self._deterministic:
            work.tickets.sort(key=lambda ticket: ticket.turn.key)
        if work.jobs or work.cancelled or work.changes or work.tickets:
            return work
        return None

    def _leave(self, ticket: Ticket) -> None:
        if ticket.lane is not None:
            ticket.lane.in_flight -= 1
            self._num_busy += ticket.lane.in_flight == 0 and ticket.lane in self._lanes

    def check(self) -> None:
        """Raises BackendError, with what broke as its cause, where no turn is accepted any more."""
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self._end is not None:
            raise self._error(self._end)

    def _error(self, reason: str) -> BackendError:
        error = BackendError(reason)
        error.__cause__ = self._cause
        return error


def deliver(future: asyncio.Future[Any], result: Any) -> None:
    """Hand a result to a future of another thread's event loop."""
    _call(future, lambda: future.set_result(result))


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Hand an error to a future of another thread's event loop."""
    _call(future, lambda: future.set_exception(error))


def _set_done(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _call(future: asyncio.Future[Any], act: Callable[[], None]) -> None:
    def unless_cancelled() -> None:
        if not future.done():
            act()

    call(future.get_loop(), unless_cancelled)


def call(loop: asyncio.AbstractEventLoop, act: Callable[..., None], *arguments: Any) -> None:
    """Let another thread's event loop call something, in the order in which we ask."""
    with suppress(RuntimeError):  # nobody waits on a loop that has ended
        loop.call_soon_threadsafe(act, *arguments)
