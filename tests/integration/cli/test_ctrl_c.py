import subprocess

import pytest
from helpers.servers.warm_python import warm_python

HEARD_BY_ANOTHER_THREAD = """
import asyncio, signal, threading, time
from stateset_agents.runtime import event_loop

def interrupt():
    time.sleep(0.2)  # by now the main thread sleeps in the wait for events; this signal does not end that
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

async def asleep():
    threading.Thread(target=interrupt).start()
    await asyncio.Event().wait()

try:
    event_loop.run(asleep())
except KeyboardInterrupt:
    print("interrupted", end="")
"""


def test_ctrl_c_ends_a_loop_that_sleeps_for_good_though_the_signal_does_not_end_its_sleep() -> None:
    command = [*warm_python(), "-c", HEARD_BY_ANOTHER_THREAD]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted", "")


def test_a_loop_of_asyncio_run_sleeps_on() -> None:  # so the test above can fail
    code = HEARD_BY_ANOTHER_THREAD.replace("event_loop.run", "asyncio.run")
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([*warm_python(), "-c", code], capture_output=True, timeout=3)
