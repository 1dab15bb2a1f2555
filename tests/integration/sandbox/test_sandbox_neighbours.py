"""A verdict is the same beside other work on the core: a limit that was reached is 0, and every program has
its whole limit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from neighbours import NEIGHBOURS, neighbours

from stateset_agents.sandbox import Job, Limits
from stateset_agents.sandbox.levels import choose_walls
from stateset_agents.sandbox.local import run_job

PROGRAMS = {
    "a slow right program": """
import time
def f(n):
    while time.process_time() < @SECONDS@: pass
    return n
""",
    "an endless loop": """
def f(n):
    while True: pass
""",
    "an allocation loop": """
def f(n):
    while True: data = bytearray(50 << 20)
""",
}
PATIENT = 600.0
"""Seconds: what else the machine does must decide nothing here."""


def expect_the_verdict_of_an_idle_core(program: str, cpu_seconds: int) -> None:
    """The right one uses .95 of the limit."""
    text = PROGRAMS[program].replace("@SECONDS@", str(0.95 * cpu_seconds))
    claims = run_job(
        Job(program=text, entry_point="f", arguments=((7,),)),
        limits=Limits(cpu_seconds=cpu_seconds, wall_seconds=PATIENT),
        walls=choose_walls("auto"),
    )
    if program == "a slow right program":
        assert (claims.ending, claims.agree(0, 7)) == ("finished", True)
        assert 0.95 * cpu_seconds <= claims.cpu_seconds < cpu_seconds
    else:
        assert (claims.ending, claims.claimed) == ("cpu limit", {})
        assert cpu_seconds <= claims.cpu_seconds < cpu_seconds + 0.2


def test_beside_a_neighbour_that_yields_a_limit_is_reached_and_not_before() -> None:
    with neighbours("yielding", 1), ThreadPoolExecutor() as threads:  # bound as this one
        programs = ("a slow right program", "an endless loop")
        list(threads.map(expect_the_verdict_of_an_idle_core, programs, (1, 1)))


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("kind", "count"), [("yielding", 0), *((kind, count) for kind in NEIGHBOURS for count in (1, 2, 4))]
)
def test_neighbours_change_no_verdict_at_the_default_limit(kind: str, count: int, program: str) -> None:
    with neighbours(kind, count):
        expect_the_verdict_of_an_idle_core(program, Limits().cpu_seconds)
