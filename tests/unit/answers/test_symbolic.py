"""math-verify in its process: limits by processor time, ends that are told apart, nothing left behind."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from neighbours import neighbours

from stateset_agents.answers import symbolic
from stateset_agents.answers.expressions import read
from stateset_agents.answers.symbolic import SymbolicWorker, latex_of, symbolically_equal
from stateset_agents.types.errors import RewardTimeout

ENDLESS = r"(x+1)^{90} \cdot (x+2)^{90} \cdot (y+3)^{99}"
SAME = r"\sin(x)^{2}+\cos(x)^{2}"


@pytest.fixture
def worker():
    made = SymbolicWorker()
    yield made
    made.close()


def test_expressions_are_compared_in_one_process(worker: SymbolicWorker) -> None:
    assert worker.are_equal(SAME, "1")
    pid = worker.pid
    assert not worker.are_equal(r"\sin(x)", "1")
    assert worker.pid == pid


@pytest.mark.long
def test_too_much_processor_time_is_wrong_and_the_next_answer_has_a_process_again(
    worker: SymbolicWorker,
) -> None:
    assert worker.are_equal(SAME, "1")
    pid = worker.pid
    begun = time.monotonic()
    assert not worker.are_equal(rf"\sin({ENDLESS})", r"\sin(x)")
    assert time.monotonic() - begun < symbolic.WALL_SECONDS
    assert worker.are_equal(SAME, "1")
    assert worker.pid != pid
    with pytest.raises(ProcessLookupError):  # reaped: a zombie could still be signalled
        os.kill(pid or 0, 0)


@pytest.mark.long
def test_a_process_that_has_answered_for_long_beside_a_neighbour_has_its_whole_time() -> None:
    """Ticks run ahead of what it takes then, after some seconds by more than the two that are allowed."""
    worker = SymbolicWorker()
    with neighbours("yielding", 1):
        assert worker.are_equal(SAME, "1")
        process_clock = ~(worker.pid or 0) << 3 | 2  # CPUCLOCK_SCHED of it
        for letter, number in itertools.product("abcdhkmnpqrstuvwxyz", range(1, 20)):
            angle = f"{number}{letter}"
            assert worker.are_equal(rf"\sin({angle})^{{2}}+\cos({angle})^{{2}}", "1"), angle
            if time.clock_gettime(process_clock) > 8:
                break
        assert time.clock_gettime(process_clock) > 8
    worker.close()


@pytest.mark.long
def test_a_machine_without_time_leaves_the_answer_unscored(worker: SymbolicWorker) -> None:
    assert worker.are_equal(SAME, "1")
    slow = SymbolicWorker(wall_seconds=4.0)
    assert slow.are_equal(SAME, "1")
    os.kill(slow.pid or 0, signal.SIGSTOP)  # gets no processor time, as on a machine that is busy elsewhere
    with pytest.raises(
        RewardTimeout, match="less than 2 s of processor time in 4 s: the machine is overloaded"
    ):
        slow.are_equal(SAME, "1")
    assert slow.are_equal(SAME, "1")  # asked again
    slow.close()


def test_a_process_that_somebody_ends_leaves_the_answer_unscored(worker: SymbolicWorker) -> None:
    assert worker.are_equal(SAME, "1")
    stopped = worker.pid or 0
    os.kill(stopped, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (stopped, signal.SIGKILL)).start()
    with pytest.raises(ChildProcessError, match="ended from outside: status -9"):
        worker.are_equal(SAME, "1")


def test_a_process_that_ended_between_two_answers_begins_again(worker: SymbolicWorker) -> None:
    assert worker.are_equal(SAME, "1")
    os.kill(worker.pid or 0, signal.SIGKILL)
    time.sleep(0.2)
    assert worker.are_equal(SAME, "1")


def test_threads_get_their_own_answers(worker: SymbolicWorker) -> None:
    found: dict[int, bool] = {}

    def ask(number: int) -> None:
        found[number] = worker.are_equal(
            rf"\log_{{2}}({2**number})", str(number if number % 2 else number + 1)
        )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: number % 2 == 1 for number in range(1, 7)}


@pytest.mark.parametrize(
    "text",
    [
        *("2003^{2002^{2001}}", "9**9**9", "x^{999x}", "99!", "x!", "[1, 2]", "x = 3", "(x!)!"),
        *("((1+x)^99+y)^99", "sin((1+x)^90*(2+x)^90*(y+3)^99)"),
    ],
)
def test_what_may_be_huge_is_never_asked(text: str) -> None:
    assert latex_of(read(text)) is None


@pytest.mark.parametrize("text", ["(1+x)^99", "(x+y)^39/(x-y)^39", "sin((x+1)^2)*(1+cos(x))^8"])
def test_what_has_few_terms_is_asked(text: str) -> None:
    assert latex_of(read(text)) is not None


def test_without_math_verify_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(symbolic, "has_math_verify", lambda: False)
    assert symbolically_equal(read(r"\sin x"), read(r"\sin x")) is None
