"""What the dashboard shows of a deployment is what its journal and its controller say, to the bit."""

from __future__ import annotations

import html
import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from deployment_journals import PLAN, SimulatedDeployment, alter

from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan
from stateset_agents.deployment.sequential import Evidence
from stateset_agents.deployment.views.dashboard_data import Deployments
from stateset_agents.deployment.views.dashboard_live import prometheus_page
from stateset_agents.deployment.views.dashboard_page import write_dashboard
from stateset_agents.deployment.views.history import DeploymentHistory, EvidencePoint, ThinnedPoints
from stateset_agents.types.errors import ConfigurationError, JournalError


def history_of(path: Path, deployment: str = "0001") -> DeploymentHistory:
    journal = Journal(path, create=False)
    history = DeploymentHistory(journal, journal.record(deployment))
    with journal.snapshot():
        history.read()
    return history


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory: pytest.TempPathFactory) -> SimulatedDeployment:
    deployment = SimulatedDeployment(tmp_path_factory.mktemp("journal") / "d.sqlite", outcome_timeout=3000)
    deployment.talk(700, candidate=0.5)
    return deployment


def test_the_history_ends_where_the_controller_stands(rolled_back: SimulatedDeployment) -> None:
    history, controller = history_of(rolled_back.path), rolled_back.controller
    assert controller.state.mode == "rolled_back"
    assert history.ledger.evidence == controller.ledger.evidence
    assert history.ledger.state == controller.state
    assert history.points()[-1] == EvidencePoint.of(
        controller.ledger.evidence.snapshot(controller.plan.alpha)
    )


def test_every_point_is_the_shipped_step_over_the_journal_s_rows(rolled_back: SimulatedDeployment) -> None:
    rows = sqlite3.connect(rolled_back.path)
    line = rows.execute(
        "SELECT a.arm, a.probability, o.success FROM assignments a LEFT JOIN outcomes o "
        "ON o.assignment = a.number WHERE a.probability > 0 AND a.probability < 1 ORDER BY a.number"
    ).fetchall()
    evidence, expected = Evidence(margin=DeploymentPlan(**PLAN).margin), {}
    for arm, probability, success in line:
        if success is None:
            break
        evidence = evidence.step(is_candidate=arm == "candidate", probability=probability, outcome=success)
        expected[evidence.num_outcomes] = EvidencePoint.of(evidence.snapshot(0.05))
    points = history_of(rolled_back.path).points()
    assert len(points) > 100
    assert all(point == expected[point.outcomes] for point in points)


def test_the_point_of_a_move_is_what_the_journal_keeps_with_it(rolled_back: SimulatedDeployment) -> None:
    history = history_of(rolled_back.path)
    found = {point.outcomes: point for point in history.points()}
    moves = rolled_back.controller.moves()
    assert [move.mode for move in moves] == ["gradual", "rolled_back"]
    last = moves[-1].evidence
    point = found[int(last["outcomes"] or 0)]
    assert point.log_wealth_roll_back == last["log_wealth_roll_back"]
    assert point.log_wealth_promote == last["log_wealth_promote"]
    assert point == EvidencePoint.of(moves[-1].evidence)
    assert math.exp(point.log_wealth_roll_back) >= 25 - 1e-9  # what alpha .04 needs


def test_reading_on_comes_to_the_same_as_reading_anew(tmp_path: Path) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite", outcome_timeout=900)
    deployments = Deployments(deployment.path)
    shown: list[dict[str, Any]] = []
    before = deployments.changes()
    for _ in range(6):
        deployment.talk(60)
        shown = deployments.data()
    assert deployments.changes() != before
    assert shown[0]["status"]["evidence"]["outcomes"] > 200
    assert json.dumps(shown) == json.dumps(Deployments(deployment.path).data())
    status = deployment.controller.status()
    assert {**shown[0]["status"], "seconds": 0} == {**status, "seconds": 0}  # at the last row, at the clock


def test_many_points_are_thinned_and_the_last_stays() -> None:
    points: ThinnedPoints[int] = ThinnedPoints(most=100)
    for number in range(1, 12_346):
        points.add(number)
        assert points.listed()[-1] == number
        assert len(points.listed()) <= 102
    assert len(points.listed()) >= 50
    assert len({b - a for a, b in zip(points.listed()[:-1], points.listed()[1:-1], strict=False)}) == 1


def test_arms_guards_violations_and_conversations_are_the_journal_s(tmp_path: Path) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    saved = tmp_path / "talks.jsonl"
    deployment.talk(300, saved=saved)
    [shown] = Deployments(deployment.path, conversations=saved).data()
    rows = sqlite3.connect(deployment.path)

    def one(query: str) -> Any:
        return rows.execute(query).fetchone()[0]

    latency = "SELECT count(*) FROM answers WHERE arm = 'candidate' AND violations LIKE '%\"latency\"%'"
    guards = {guard["name"]: guard for guard in shown["guards"]}
    assert (guards["latency"]["limit"], guards["latency"]["count"]) == (4.0, one(latency))
    answers = one("SELECT count(*) FROM answers WHERE arm = 'candidate'")
    assert guards["latency"]["rate"] == one(latency) / answers
    worst = rows.execute(
        "SELECT seconds FROM answers WHERE arm = 'baseline' ORDER BY seconds DESC"
    ).fetchall()
    p95 = shown["arms"]["baseline"]["seconds"]["p95"]
    assert sum(value > p95 for (value,) in worst) / len(worst) == pytest.approx(0.05, abs=0.01)
    unsafe = "SELECT a.conversation FROM answers w JOIN assignments a ON a.number = w.assignment "
    unsafe += "WHERE w.arm = '{}' AND w.violations != '[]' ORDER BY w.number DESC LIMIT 20"
    for arm in ("candidate", "baseline"):
        names = [name for (name,) in rows.execute(unsafe.format(arm))]
        assert [answer["conversation"] for answer in shown["violations"][arm]] == names
        assert names or arm == "baseline"
        newest = f"SELECT conversation FROM assignments WHERE arm = '{arm}' ORDER BY number DESC LIMIT 12"
        assert [talk["id"] for talk in shown["conversations"][arm]] == [
            name for (name,) in rows.execute(newest)
        ]
        for talk in shown["conversations"][arm]:
            found = rows.execute("SELECT success FROM outcomes WHERE assignment = ?", [talk["number"]])
            assert talk["success"] == next((value for (value,) in found), None)
    words = shown["conversations"]["candidate"][0]["messages"]
    assert [message["role"] for message in words] == ["user", "assistant"]
    assert words[0]["text"].endswith("My mail is [mail 1].")
    assert "example.org" not in json.dumps(shown)


def test_a_rollback_by_hand_and_a_forced_promotion_say_so(tmp_path: Path) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.controller.promote(who="bob", why="in a hurry", force=True)
    deployment.controller.roll_back(who="bob", why="a complaint")
    SimulatedDeployment(tmp_path / "d.sqlite", candidate="runs/0008", start=deployment.now + 1)
    newest, first = Deployments(deployment.path).data()
    assert (newest["id"], newest["journal"]) == ("0002", [])
    assert [(move["mode"], move["who"], move["forced"]) for move in first["journal"]] == [
        ("rolled_back", "bob", False),
        ("gradual", "bob", True),
    ]
    assert [step["mode"] for step in first["modes"]] == ["shadow", "gradual", "rolled_back"]


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"there is no journal .*none.sqlite"):
        Deployments(tmp_path / "none.sqlite")
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(5)
    alter(deployment.path, "UPDATE outcomes SET success = 1 - success")
    with pytest.raises(JournalError, match="was altered: outcomes of deployment 0001, row 1"):
        Deployments(deployment.path).data()
    saved = tmp_path / "talks.jsonl"
    saved.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    other = SimulatedDeployment(tmp_path / "e.sqlite")
    with pytest.raises(ConfigurationError, match=r'a line must be \{"conversation": "ID"'):
        Deployments(other.path, conversations=saved).data()


def test_metrics_are_the_status_in_prometheus_s_format(rolled_back: SimulatedDeployment) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    text, content_type = prometheus_page(Deployments(rolled_back.path).statuses())
    assert content_type.startswith("text/plain")
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }
    own = ("deployment", "0001")
    status = rolled_back.controller.status()
    prefix = "stateset_deployment"
    assert values[f"{prefix}_mode", own, ("mode", "rolled_back")] == 1
    assert values[f"{prefix}_mode", own, ("mode", "full")] == 0
    assert values[f"{prefix}_moves_total", own] == status["moves"]
    outcomes = status["arms"]["candidate"]["outcomes"]
    assert values[f"{prefix}_outcomes_total", ("arm", "candidate"), own] == outcomes
    log_wealth = status["evidence"]["roll_back"]["log_wealth"]
    assert values[f"{prefix}_log_wealth", ("decision", "roll_back"), own] == log_wealth
    assert values[f"{prefix}_needed_wealth", ("decision", "roll_back"), own] == 25
    agreement = status["agreement"]
    assert values[f"{prefix}_compared_shadow_answers_total", own] == agreement["answers"] > 0
    for same in ("calls", "reply"):
        found = values[f"{prefix}_agreeing_shadow_answers_total", own, ("same", same)]
        assert found == agreement[f"same_{same}"] > 0


def test_the_page_is_one_file_that_names_nothing_outside(tmp_path: Path) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(40)
    (tmp_path / "runs").mkdir()
    path = write_dashboard(tmp_path / "runs", Deployments(deployment.path), tmp_path / "page.html")
    text = html.unescape(path.read_text())
    assert "connect-src 'none'" in text
    assert '<script src="' not in text
    assert "default-src 'none'" in text
    with pytest.raises(ConfigurationError, match=r"no/.?page\.html"):
        write_dashboard(tmp_path / "runs", None, tmp_path / "no" / "page.html")
