"""`deploy`, `status`, `promote`, `rollback` and `serve --deployment`: what they say, and their exit codes."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from command_line import the_line

from stateset_agents.cli import serve
from stateset_agents.cli.main import command_parser, main
from stateset_agents.deployment.controller import DeploymentController
from stateset_agents.deployment.conversations import Deployed
from stateset_agents.deployment.journal import Journal

PLAN = "stages: [0.5]\nshadow_answers: 0\nhold_seconds: 0\nhold_outcomes: 1000\nsalt: of the test\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text(PLAN)
    return tmp_path


def begin(*words: str) -> int:
    return main(["deploy", "embedded:reasoner", "--baseline", "embedded:desk", "--plan", "plan.yaml", *words])


def outcomes(folder: Path, count: int) -> None:
    """Conversations of which only the candidate's fail, until it is decided."""
    with Journal(folder / "deployments.sqlite") as journal:
        controller = DeploymentController(journal, "0001")
        for number in range(count):
            arm = controller.assign(f"c{number}").arm
            controller.report_outcome(f"c{number}", success=arm == "baseline")
            if controller.state.mode == "rolled_back":
                return


def test_a_deployment_is_begun_moved_by_hand_and_ended(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin() == 0
    said = capsys.readouterr().out
    assert "deployment 0001 of embedded:reasoner in place of embedded:desk begins in shadow" in said
    assert "stateset-agents serve --deployment deployments.sqlite" in said
    again = the_line(begin(), capsys.readouterr().err)
    assert again == (
        "deployment 0001 of embedded:reasoner is shadow: promote it to 1, roll it back, or give another "
        "--deployments FILE"
    )
    assert begin("--deployments", "another.sqlite") == 0
    outcomes(folder, 10)
    capsys.readouterr()
    assert main(["status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["mode"], status["share"], status["evidence"]["outcomes"]) == ("gradual", 0.5, 10)
    refused = the_line(main(["promote", "--to", "1", "--why", "now"]), capsys.readouterr().err)
    assert "is against the evidence (evidence to promote is" in refused
    assert main(["promote", "--to", "1", "--why", "now", "--force"]) == 0
    assert "deployment 0001 is full, share 1: now (against the evidence:" in capsys.readouterr().out
    assert main(["status", "--watch"]) == 0
    assert " full 1, 10 outcomes, to promote " in capsys.readouterr().out
    assert main(["rollback", "0001", "--why", "enough"]) == 0
    assert main(["status", "0001"]) == 3
    page = capsys.readouterr().out
    assert "rolled_back, share 0, since" in page
    assert "enough" in page
    with Journal(folder / "deployments.sqlite") as journal:
        moves = DeploymentController(journal, "0001").moves()
        assert [(move.mode, move.forced) for move in moves] == [
            ("gradual", False),
            ("full", True),
            ("rolled_back", False),
        ]
        assert {move.who for move in moves[1:]} != {"stateset-agents"}
    assert begin() == 0  # another try is another deployment
    assert main(["status"]) == 0
    assert "deployment 0002" in capsys.readouterr().out


def test_a_script_waits_for_the_end_and_learns_it_by_the_exit_code(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begin() == 0
    capsys.readouterr()

    def later() -> None:
        time.sleep(0.3)
        outcomes(folder, 1000)

    thread = threading.Thread(target=later)
    thread.start()
    assert main(["status", "--watch", "--json"]) == 3
    thread.join()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (lines[0]["mode"], lines[-1]["mode"]) == ("shadow", "rolled_back")
    assert lines[-1]["why"].startswith("success is lower")
    assert main(["status"]) == 3
    page = capsys.readouterr().out
    assert "0.0%" in page
    assert "100.0%" in page


def test_what_cannot_be_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in [
        ("status", "there is no journal 'deployments.sqlite'"),
        ("serve --deployment none.sqlite", "there is no journal 'none.sqlite'"),
        ("deploy a --baseline a", "candidate and baseline are both 'a'"),
        ("status", "'deployments.sqlite' has no deployment yet"),
        ("deploy a --baseline b --plan none.yaml", "cannot read none.yaml"),
        ("rollback 0007 --why x", "has no deployment '0007'"),
    ]:
        assert message in the_line(main(words.split()), capsys.readouterr().err)
    for words in ("serve", "serve a --deployment b", "promote", "rollback", "deploy a"):
        with pytest.raises(SystemExit) as left:
            main(words.split())
        assert left.value.code == 2


def test_a_run_is_deployed_by_its_own_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs" / "0007").mkdir(parents=True)
    (folder / "runs" / "latest").symlink_to("0007")
    assert main(["deploy", "runs/latest", "--baseline", "embedded:desk"]) == 0
    assert f"deployment 0001 of {folder / 'runs' / '0007'} in place" in capsys.readouterr().out


async def test_serve_has_both_agents_of_the_last_deployment(folder: Path) -> None:
    assert begin() == 0
    parser = command_parser()
    words = ["serve", "--deployment", "deployments.sqlite", "--system", "Be brief."]
    async with serve._agents(parser.parse_args(words)) as (deployed, said):
        assert said == "embedded:desk, and embedded:reasoner by deployment 0001 (shadow), answer"
        assert isinstance(deployed, Deployed)
        baseline, candidate = deployed.agents
        assert (baseline.config.model_name, candidate.config.model_name) == (
            "embedded:desk",
            "embedded:reasoner",
        )
        assert {agent.config.system_prompt for agent in (baseline, candidate)} == {"Be brief."}
        assert await candidate.generate_response("1 + 1")
