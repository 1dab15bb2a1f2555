"""Sync user code in threads of its own: enough of them, reused, and in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from builders import trajectory

from stateset_agents.core.reward import reward_function, score_trajectories
from stateset_agents.runtime import tasks as waiting
from stateset_agents.runtime.event_loop import measure_loop_lag
from stateset_agents.runtime.tasks import LoopShare, in_thread, with_timeout
from stateset_agents.types.errors import RewardTimeout


async def test_it_gives_the_result_and_raises_what_the_function_raised():
    def divide(one, *, by):
        return one / by

    assert await in_thread(divide, 6, by=3) == 2
    with pytest.raises(ZeroDivisionError):
        await in_thread(divide, 6, by=0)


async def test_an_exhausted_iterator_is_an_error_and_no_hang():
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(in_thread(next, iter([])), 5)


async def test_many_calls_run_at_once_whatever_the_number_of_cores():
    together = threading.Barrier(100)  # breaks unless all hundred are inside it at the same time
    await asyncio.gather(*(in_thread(together.wait, 10) for _ in range(100)))


async def test_calls_beyond_the_limit_wait_for_a_free_thread_and_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "MAX_THREADS", 2)
    monkeypatch.setattr(waiting, "_threads", waiting._Threads())
    inside, peak = [], []

    def work(number):
        inside.append(number)
        peak.append(len(inside))
        time.sleep(0.001)
        inside.remove(number)
        return number

    assert await asyncio.gather(*(in_thread(work, n) for n in range(20))) == list(range(20))
    assert max(peak) == 2
    assert caplog.text.count("2 calls of sync tools, rewards or callbacks are under way") == 1


async def test_threads_are_used_again_and_end_when_idle(monkeypatch):
    monkeypatch.setattr(waiting, "_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(waiting, "_threads", waiting._Threads())
    thread = await in_thread(threading.current_thread)
    for _ in range(100):  # it is free again a moment after its result is there
        if await in_thread(threading.current_thread) is thread:
            break
    else:
        raise AssertionError("each call started a thread")
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


async def test_context_variables_are_seen():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(3)
    assert await in_thread(variable.get) == 3


async def test_a_call_that_hangs_is_given_up_and_the_others_go_on():
    release = threading.Event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(in_thread(release.wait), 0.01)
    assert await in_thread(int, "5") == 5
    release.set()


def test_a_function_that_never_returns_does_not_keep_the_program_alive():
    program = (
        "import asyncio, threading\n"
        "from stateset_agents.runtime.tasks import in_thread\n"
        "async def main():\n"
        "    await asyncio.wait_for(in_thread(threading.Event().wait), 0.01)\n"
        "try: asyncio.run(main())\n"
        "except TimeoutError: print('given up')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "given up\n"


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_sixteen_judges_of_a_tenth_of_a_second_take_less_than_three_tenths(kind):
    def judge(messages):
        time.sleep(0.1)
        return 1.0

    async def async_judge(messages):
        await asyncio.sleep(0.1)
        return 1.0

    reward = reward_function(judge if kind == "sync" else async_judge)
    group = [replace(trajectory(), member=member) for member in range(16)]
    took = []
    for _ in range(3):  # the best of three, for the machine may be busy
        started = time.perf_counter()
        results = await score_trajectories(reward, group)
        took.append(time.perf_counter() - started)
    assert [result.score for result in results] == [1.0] * 16
    assert min(took) < 0.3


async def test_calls_that_hang_for_ever_do_not_use_the_threads_up(monkeypatch):
    monkeypatch.setattr(waiting, "MAX_THREADS", 2)
    monkeypatch.setattr(waiting, "_threads", waiting._Threads())
    release = threading.Event()
    hanging = [asyncio.create_task(in_thread(release.wait, 60)) for _ in range(2)]
    queued = asyncio.create_task(in_thread(int, "5"))  # both threads are taken
    _, waits = await asyncio.wait([queued], timeout=0.1)
    assert waits
    for task in hanging:
        task.cancel()
    assert await asyncio.wait_for(queued, 10) == 5
    assert await asyncio.wait_for(asyncio.gather(*(in_thread(int, "6") for _ in range(9))), 10) == [6] * 9
    release.set()


# ------------------------------------------------------------------------------ what will not end


async def test_work_that_swallows_its_cancellation_is_left_to_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "_GRACE_SECONDS", 0.05)
    go_on = asyncio.Event()

    async def stubborn() -> None:
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()

    # Not wait_for: it waits for what it cancels, and that would not end where the package does not leave it.
    late = asyncio.create_task(with_timeout(0.05, stubborn(), RewardTimeout("too late")))
    await asyncio.wait([late], timeout=10)
    in_time = late.done()
    outer = asyncio.create_task(with_timeout(None, stubborn(), RewardTimeout("too late")))
    await asyncio.sleep(0.01)
    outer.cancel()
    await asyncio.wait([outer], timeout=10)
    are_done = in_time, outer.done()
    num_abandoned = len(waiting._abandoned)
    go_on.set()
    with pytest.raises(RewardTimeout, match="too late"):
        await late
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert are_done == (True, True)
    assert "left to itself" in caplog.text
    assert num_abandoned == 2
    await asyncio.sleep(0.01)
    assert not waiting._abandoned


@pytest.mark.parametrize("outer", [0.1, 30.0])
def test_work_that_never_ends_does_not_keep_the_event_loop_alive(
    monkeypatch: pytest.MonkeyPatch, outer: float
) -> None:
    monkeypatch.setattr(waiting, "_GRACE_SECONDS", 0.2)

    async def stubborn() -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1000)

    async def main() -> None:
        late = RewardTimeout("too late")
        with contextlib.suppress(RewardTimeout):
            await with_timeout(outer, with_timeout(0.05, stubborn(), late), late)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    waiting._abandoned.clear()


async def test_a_second_cancellation_leaves_nothing_unnoted() -> None:
    go_on = asyncio.Event()

    async def stubborn() -> None:
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()

    outer = asyncio.create_task(with_timeout(None, stubborn(), RewardTimeout("too late")))
    for _ in range(2):
        await asyncio.sleep(0.01)
        outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(outer, 10)
    assert len(waiting._abandoned) == 1
    go_on.set()
    await asyncio.sleep(0.01)
    assert not waiting._abandoned


async def test_what_is_in_time_is_given_and_what_it_raises_too() -> None:
    async def value(error: Exception | None = None) -> int:
        if error is not None:
            raise error
        return 3

    late = RewardTimeout("too late")
    assert await with_timeout(5.0, value(), late) == await with_timeout(None, value(), late) == 3
    with pytest.raises(TimeoutError, match="its own"):
        await with_timeout(5.0, value(TimeoutError("its own")), late)


async def cancels_a_part_of_itself():
    part = asyncio.create_task(asyncio.sleep(9))
    part.cancel()
    await part


async def test_work_that_cancels_itself_has_failed_and_nobody_else_is_cancelled():
    with pytest.raises(RuntimeError, match="that nobody asked for"):
        await with_timeout(None, cancels_a_part_of_itself(), TimeoutError())
    [result] = await score_trajectories(
        reward_function(lambda trajectory: cancels_a_part_of_itself(), name="mine"), [trajectory()], seconds=5
    )
    assert "reward mine failed: RuntimeError: it let out a CancelledError" in str(result)


async def test_work_of_many_tasks_leaves_the_loop_time_for_others():
    share, done = LoopShare(0.01), []

    def work(number):
        time.sleep(0.005)
        done.append(number)
        return number

    async with measure_loop_lag(interval=0.005) as lag:
        results = await asyncio.gather(*(share.run(lambda n=n: work(n)) for n in range(60)))
    assert results == done == list(range(60))  # 0.3 seconds
    assert lag.longest < 0.15


def test_a_loop_that_ended_amid_its_work_keeps_nobody_waiting():
    share = LoopShare(0.0)
    for _ in range(3):
        loop = asyncio.new_event_loop()
        task = loop.create_task(share.run(lambda: "done"))
        while not task.done():
            loop.call_soon(loop.stop)
            loop.run_forever()
        assert task.result() == "done"
        loop.close()
