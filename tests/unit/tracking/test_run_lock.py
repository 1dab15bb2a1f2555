"""One process writes a run folder, and a killed one holds nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stateset_agents.tracking.run_folder import RunFolder, RunLock
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.errors import ConfigurationError

HOLD = """
import sys, time
from pathlib import Path
from stateset_agents.tracking.run_folder import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_that_was_released_can_be_taken_again(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    with pytest.raises(ConfigurationError, match="another trainer is writing"):
        RunLock(tmp_path)
    first.release()
    first.release()
    RunLock(tmp_path).release()


def test_two_trackers_do_not_write_one_run(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder), pytest.raises(ConfigurationError, match="another trainer is writing"):
        JsonlTracker(folder)
    JsonlTracker(folder).close()


def test_another_process_holds_it_until_it_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigurationError, match="another trainer is writing"):
            RunLock(tmp_path)
        holder.kill()
        holder.wait()
        RunLock(tmp_path).release()


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot write in .*No such file or directory"):
        RunLock(tmp_path / "gone")
