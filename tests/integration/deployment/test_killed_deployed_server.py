"""kill -9 of a serving process between any two statements: a client that asks again loses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import killed_deployed_server
import pytest


@pytest.mark.long
@pytest.mark.parametrize(
    ("kills", "conversations"), [(6, 20), pytest.param(200, 400, marks=pytest.mark.long)]
)
def test_a_killed_server_answers_and_counts_as_one_that_was_not(
    tmp_path: Path, kills: int, conversations: int
) -> None:
    command = [sys.executable, killed_deployed_server.__file__, str(tmp_path), str(kills), str(conversations)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["kills"] == kills
    assert said["killed"] == said["whole"]
    assert said["whole"]["rows"]["outcomes"] == conversations - 4
    assert said["whole"]["rows"]["assignments"] == conversations
    assert said["whole"]["rows"]["answers"] == 2 * conversations - 4
    if conversations == 400:
        assert said["whole"]["moves"][-1] == "rolled_back 0"
        assert said["whole"]["rows"]["reassigned"] > 0
