"""The dashboard over HTTP: what its addresses answer, to whom, and what its events say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest
from deployment_journals import SimulatedDeployment, alter
from live_pages import next_event, served
from report_runs import finished_run

from stateset_agents.cli.main import main
from stateset_agents.deployment.views.dashboard_data import Deployments
from stateset_agents.deployment.views.dashboard_live import serve_dashboard
from stateset_agents.reporting.report import write_report


async def next_data(response: aiohttp.ClientResponse, name: str) -> Any:
    """Data of the next event of this name."""
    while True:
        found, data = await next_event(response)
        if found == name:
            return data


def outcomes(event: Any) -> int:
    return int(event["data"][0]["status"]["evidence"]["outcomes"])


async def test_what_another_process_writes_comes_as_an_event(tmp_path: Path) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(60)
    async with (
        served(serve_dashboard, tmp_path / "runs", Deployments(deployment.path)) as client,
        client.get("/events", timeout=aiohttp.ClientTimeout(total=None)) as stream,
    ):
        first = await next_data(stream, "deployments")
        assert outcomes(first) == deployment.controller.ledger.evidence.num_outcomes
        deployment.talk(30)
        later = await next_data(stream, "deployments")
        while outcomes(later) < deployment.controller.ledger.evidence.num_outcomes:
            later = await next_data(stream, "deployments")
        log_wealth = deployment.controller.status()["evidence"]["promote"]["log_wealth"]
        assert later["data"][0]["evidence"]["log_wealth_promote"][-1] == log_wealth
        SimulatedDeployment(deployment.path, candidate="runs/0009")
        newest = await next_data(stream, "deployments")
        assert [one["id"] for one in newest["data"]] == ["0002"]  # the other one has nothing new


async def test_an_altered_journal_is_said_and_not_shown(tmp_path: Path) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(40)
    alter(deployment.path, "UPDATE outcomes SET success = 1 - success")
    async with served(serve_dashboard, tmp_path / "runs", Deployments(deployment.path)) as client:
        async with client.get("/") as page:
            assert page.status == 500
            assert "was altered: outcomes of deployment 0001" in await page.text()
        async with client.get("/metrics") as metrics:
            assert metrics.status == 500
        async with client.get("/events") as stream:
            assert "was altered" in (await next_data(stream, "trouble"))["text"]


async def test_it_shows_and_changes_nothing_and_answers_this_machine_alone(tmp_path: Path) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(40)
    run = finished_run(tmp_path / "runs", steps=1)
    write_report(run.path)
    before = deployment.controller.hashes
    async with served(serve_dashboard, tmp_path / "runs", Deployments(deployment.path)) as client:
        for host, status in [("evil.example", 403), ("localhost:9", 200)]:
            async with client.get("/", headers={"Host": host}) as page:
                assert page.status == status
        async with client.get("/") as page:
            assert "default-src 'none'" in (await page.text()).replace("&#39;", "'")
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            async with client.request(method, "/", json={"mode": "full"}) as refused:
                assert refused.status == 405
        async with client.get(f"/{run.path.name}/report.html") as report:
            assert report.status == 200
            assert "run report" in await report.text()
        for path in (
            "/../report.html",
            "/%2e%2e/report.html",
            "/..%2f..%2fetc/report.html",
            "/x/report.html",
        ):
            async with client.get(path) as missing:
                assert missing.status == 404
        async with client.get("/metrics") as metrics:
            assert 'stateset_deployment_share{deployment="0001"}' in await metrics.text()
    assert deployment.controller.hashes == before
    assert deployment.controller.status()["moves"] == 1


async def test_a_folder_without_runs_waits_for_them(tmp_path: Path) -> None:
    async with served(serve_dashboard, tmp_path / "runs", None) as client, client.get("/events") as stream:
        assert (await next_data(stream, "runs"))["data"] is None
        run = finished_run(tmp_path / "runs", steps=1)
        assert (await next_data(stream, "runs"))["data"]["runs"][0]["name"] == run.path.name


def test_the_verb_writes_the_page_and_refuses_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = SimulatedDeployment(tmp_path / "d.sqlite")
    deployment.talk(40)
    run = finished_run(tmp_path / "runs", steps=1)
    out = tmp_path / "page.html"
    runs, journal = str(tmp_path / "runs"), str(deployment.path)
    assert main(["dashboard", runs, "--deployments", journal, "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert out.stat().st_size > 10_000
    for arguments, said in [
        ([str(tmp_path / "none")], "is no folder: give one of runs"),
        (
            [str(run.path)],
            f"is a single run: give the folder around it, or stateset-agents report {run.path}",
        ),
        ([runs, "--conversations", "x.jsonl"], "--conversations is for deployments"),
        ([runs, "--out", str(out), "--port", "0"], "--port is for the live page"),
        ([runs, "--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        ([runs, "--deployments", str(tmp_path / "none.sqlite"), "--out", str(out)], "there is no journal"),
        ([runs, "--deployments", str(run.path / "metrics.jsonl"), "--out", str(out)], "cannot be used"),
    ]:
        assert main(["dashboard", *arguments]) == 1
        assert said in capsys.readouterr().err
