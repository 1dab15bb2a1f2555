"""kill -9 between any two statements changes no share, wealth or arm, and no outcome is lost or doubled."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import killed_deployments
import pytest


@pytest.mark.parametrize(
    ("kills", "conversations"), [(20, 60), pytest.param(200, 400, marks=pytest.mark.long)]
)
def test_a_killed_deployment_ends_with_the_bits_of_one_that_was_not(
    tmp_path: Path, kills: int, conversations: int
) -> None:
    command = [sys.executable, killed_deployments.__file__, str(tmp_path), str(kills), str(conversations)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert said["kills"] == kills
    assert said["killed"] == said["whole"]  # the hashes cover every bit of every row
    assert said["whole"]["outcomes"] > 20
    assert said["whole"]["rows"]["assignments"] == conversations
    if conversations == 400:
        assert said["whole"]["moves"] == ["gradual 0.3", "gradual 0.6", "rolled_back 0"]
        assert said["whole"]["rows"]["reassigned"] > 0
