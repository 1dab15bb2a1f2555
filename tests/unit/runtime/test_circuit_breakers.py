"""Circuit breakers: by hand, against every order of events, and with work that waits for them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.runtime.circuit_breakers import (
    Breaker,
    FaultPolicy,
    FaultTolerance,
    admitted,
    wait_before,
)
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure

LAST = r"\(last: OSError: away \(at test_circuit_breakers\.py:\d+\)\)"
"""What broke last, and the line of the caller's code that did."""


class Clock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        await asyncio.sleep(0)


def worked(breaker: Breaker) -> Breaker:
    ticket = breaker.admit()
    assert ticket is not None
    breaker.succeeded(ticket)
    return breaker


def fail(breaker: Breaker, times: int = 1) -> None:
    for _ in range(times):
        ticket = breaker.admit()
        assert ticket is not None
        breaker.failed(ticket, "away")


def test_it_opens_after_failures_in_a_row_lets_one_probe_through_and_closes_when_that_succeeds() -> None:
    clock = Clock()
    breaker = Breaker("shop", failures=3, pause=5.0, clock=clock)
    fail(breaker, 2)
    worked(breaker)  # the count begins anew
    fail(breaker, 3)
    assert (breaker.state, breaker.admit(), breaker.seconds_to_wait) == ("open", None, 5.0)
    clock.now = 5.0
    probe = breaker.admit()
    assert probe is not None
    assert (breaker.state, breaker.admit()) == ("half-open", None)
    breaker.succeeded(probe)
    assert (breaker.state, breaker.seconds_down) == ("closed", 0.0)


def test_a_probe_that_fails_doubles_the_pause_up_to_a_minute() -> None:
    clock = Clock()
    breaker = Breaker("shop", failures=1, pause=5.0, clock=clock)
    fail(breaker)
    pauses = []
    for _ in range(6):
        pauses.append(breaker.seconds_to_wait)
        clock.now += breaker.seconds_to_wait
        fail(breaker)
    assert pauses == [5, 10, 20, 40, 60, 60]
    clock.now += 60
    worked(breaker)
    fail(breaker)
    assert breaker.seconds_to_wait == 5


def test_calls_that_began_before_it_opened_change_nothing() -> None:
    clock = Clock()
    breaker = Breaker("shop", failures=1, pause=5.0, clock=clock)
    early = [ticket for ticket in (breaker.admit() for _ in range(4)) if ticket is not None]
    fail(breaker)
    clock.now = 4.0
    breaker.succeeded(early[0])
    breaker.failed(early[1], "late")
    assert (breaker.state, breaker.seconds_to_wait, breaker.seconds_down) == ("open", 1.0, 4.0)
    clock.now = 5.0
    probe = breaker.admit()
    breaker.succeeded(early[2])
    breaker.failed(early[3], "late")
    assert (breaker.state, breaker.cause, breaker.admit()) == ("half-open", "away", None)
    assert probe is not None
    breaker.succeeded(probe)
    assert breaker.state == "closed"


def test_after_an_abandoned_probe_the_next_call_is_one() -> None:
    clock = Clock()
    breaker = Breaker("shop", failures=1, pause=5.0, clock=clock)
    fail(breaker)
    clock.now = 5.0
    probe = breaker.admit()
    assert probe is not None
    breaker.abandoned(probe)
    assert breaker.admit() is not None


@given(
    failures=st.integers(0, 4),
    events=st.lists(
        st.one_of(
            st.just(("ask", 0.0)),
            st.tuples(st.sampled_from(["succeed", "fail", "abandon", "wait"]), st.floats(0, 0.999)),
        ),
        max_size=60,
    ),
)
def test_whatever_happens_one_probe_at_most_is_out_and_none_is_asked_before_its_time(
    failures: int, events: list[tuple[str, float]]
) -> None:
    clock = Clock()
    breaker = Breaker("shop", failures=failures, pause=1.0, clock=clock)
    out: list[int] = []
    failed_in_a_row = 0
    """Of calls in a closed state, begun since it closed."""
    for event, where in events:
        if event == "wait":
            clock.now += 3 * where
        elif event == "ask":
            was, due = breaker.state, breaker.seconds_to_wait
            ticket = breaker.admit()
            assert (ticket is not None) == (was == "closed" or (was == "open" and due == 0))
            if ticket is not None:
                out.append(ticket)
        elif out:
            ticket, was = out.pop(int(where * len(out))), breaker.state
            is_current = ticket == breaker._ticket
            {
                "succeed": breaker.succeeded,
                "fail": lambda one: breaker.failed(one, "away"),
                "abandon": breaker.abandoned,
            }[event](ticket)
            if not is_current:
                assert breaker.state == was
            elif was == "half-open":
                assert breaker.state == ("closed" if event == "succeed" else "open")
                failed_in_a_row = 0
            elif was == "closed":
                failed_in_a_row = {"succeed": 0, "fail": failed_in_a_row + 1}.get(event, failed_in_a_row)
                assert (breaker.state == "open") == (0 < failures <= failed_in_a_row)
        if breaker.state == "half-open":  # exactly one of the calls under way can decide
            assert sum(ticket == breaker._ticket for ticket in out) == 1


@given(first=st.floats(0, 100), attempt=st.integers(1, 1000), stream=st.integers(0, 2**62))
def test_waits_are_bounded_drawn_from_the_upper_half_and_alike_in_every_run(
    first: float, attempt: int, stream: int
) -> None:
    longest = min(30.0, first * 2.0 ** min(attempt - 1, 60))
    wait = wait_before(attempt, first=first, stream=stream)
    assert longest / 2 <= wait <= longest
    assert wait == wait_before(attempt, first=first, stream=stream)


# ------------------------------------------------------------------------------ work that waits


def dependencies(clock: Clock, **policy: float) -> FaultTolerance:
    settings = {"breaker_failures": 3, "breaker_pause": 5.0, "outage_patience": 60.0, **policy}
    return FaultTolerance(FaultPolicy(**settings), sleep=clock.sleep, clock=clock)  # type: ignore[arg-type]  # whole


def answering(up: Callable[[], bool]) -> Callable[[], Awaitable[str]]:
    async def call() -> str:
        await asyncio.sleep(0)
        if not up():
            raise OSError("away")
        return "ok"

    return call


async def ask(asked: FaultTolerance, up: Callable[[], bool]) -> str:
    try:
        return await asked.ask("shop", answering(up), down=EnvironmentFailure)
    except (OSError, EnvironmentFailure) as error:
        return str(error)


async def test_work_waits_for_an_outage_to_pass_and_goes_on_together() -> None:
    clock = Clock()
    asked = dependencies(clock)
    events: list[tuple[str, str]] = []
    asked.on_event = lambda name, **fields: events.append((name, fields["state"]))
    assert await ask(asked, lambda: True) == "ok"
    assert [await ask(asked, lambda: False) for _ in range(3)] == ["away"] * 3
    # it is back after 12 s: the probe after 5 s fails, that after 15 s succeeds, and the others follow it
    later = await asyncio.gather(*(ask(asked, lambda: clock.now > 12) for _ in range(5)))
    assert sorted(later) == ["away", "ok", "ok", "ok", "ok"]
    assert 15 <= clock.now < 20
    states = ["open", "half-open", "open", "half-open", "closed"]
    assert events == [("breaker", state) for state in states]
    metrics = asked.metrics()
    assert (metrics["faults/outages"], metrics["breaker/shop"]) == (1.0, 0.0)
    assert metrics["faults/waited"] > 10
    assert not asked.repeatable
    assert asked.metrics()["faults/outages"] == 0.0  # since the last time


async def test_an_outage_that_lasts_is_waited_for_once_and_then_fails_everybody_at_once() -> None:
    clock = Clock()
    asked = dependencies(clock)
    await ask(asked, lambda: True)
    for _ in range(3):
        await ask(asked, lambda: False)
    said = await asyncio.gather(*(ask(asked, lambda: False) for _ in range(20)))
    assert 60 <= clock.now < 75
    line = rf"shop failed {3 + said.count('away')} times in a row {LAST}, and was waited for 60 s"
    assert re.fullmatch(line, [one for one in said if one != "away"][-1])
    before = clock.now
    assert re.fullmatch(f"away|{line}", await ask(asked, lambda: False))
    assert clock.now == before
    assert asked.is_given_up("shop")


async def test_of_two_clients_of_one_name_the_worse_is_told() -> None:
    asked = dependencies(Clock())
    clients = [worked(Breaker("endpoint judge", failures=1, pause=5.0)) for _ in range(2)]
    with asked.watched():
        for breaker in clients:
            async with admitted(breaker, patience=1.0, down=EnvironmentFailure):
                pass
        fail(clients[1])
    assert asked.metrics()["breaker/endpoint_judge"] == 1.0


async def test_what_has_never_worked_is_not_waited_for() -> None:
    clock = Clock()
    asked = dependencies(clock)
    for _ in range(3):
        assert await ask(asked, lambda: False) == "away"
    assert re.fullmatch(f"shop failed 3 times in a row {LAST}", await ask(asked, lambda: True))
    assert clock.now == 0


async def test_a_mistake_is_no_outage_and_a_cancelled_call_says_nothing() -> None:
    clock = Clock()
    asked = dependencies(clock, breaker_failures=1)

    async def mistaken() -> None:
        raise TypeError("a mistake")

    async def hangs() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TypeError, match="a mistake"):
        await asked.ask("shop", mistaken, down=EnvironmentFailure)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked.ask("shop", hangs, down=EnvironmentFailure), 0.01)
    assert asked.breaker("shop").state == "closed"
    assert asked.repeatable


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"turn_retries": -1}, "turn_retries must be a whole number from 0 on, got -1"),
        ({"breaker_failures": 1.5}, "breaker_failures must be a whole number from 0 on, got 1.5"),
        ({"outage_patience": float("nan")}, "outage_patience must be seconds from 0 on, got nan"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        FaultPolicy(**settings)  # type: ignore[arg-type]  # wrong on purpose
