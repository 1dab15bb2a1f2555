"""The page of a run that goes on: what its addresses answer, to whom, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from aiohttp import web
from live_pages import next_event, served
from report_runs import finished_run, log_step
from warm_python import warm_python

from stateset_agents.cli.main import main
from stateset_agents.reporting import live
from stateset_agents.reporting.live import serve
from stateset_agents.reporting.report import page_data
from stateset_agents.runtime.http_server import listen
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.tracking.tracker import JsonlTracker


async def test_the_page_holds_the_run_and_fetches_its_conversations(tmp_path: Path) -> None:
    async with served(serve, RunLog(finished_run(tmp_path, steps=2))) as client:
        async with client.get("/") as page, client.get("/plotly.js") as script:
            assert "<title>0001-demo" in await page.text()
            assert "plotly.js (cartesian - minified) v" in await script.text()
        async with client.get("/conversations.json") as response:
            assert (await response.json())["total"] == 2 * 8 + 2 * 10


async def test_the_conversations_of_some_steps_are_there_for_the_asking(tmp_path: Path) -> None:
    async with served(serve, RunLog(finished_run(tmp_path, steps=3)), conversations=1) as client:
        async with client.get("/conversations.json") as response:
            assert (await response.json())["conversations"] == []
        async with client.get("/steps.json?stage=train&first=2&last=3") as response:
            found = await response.json()
            assert [one["step"] for one in found["conversations"]] == [2] * 10 + [3] * 10
            assert found["tokens"]["3"] == " look"
        async with client.get("/steps.json?first=two") as response:
            assert (response.status, await response.text()) == (400, "first and last are steps, such as 104")


async def test_changes_are_sent_as_events(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=2)
    async with served(serve, RunLog(folder)) as client, client.get("/events") as stream:
        name, data = await next_event(stream)
        assert (name, data["curves"][0]["series"][0]["steps"]) == ("page", [1, 2])
        assert await next_event(stream) == ("conversations", {})
        with JsonlTracker(folder) as tracker:
            log_step(tracker, 3)
        seen = dict([await next_event(stream) for _ in range(2)])
        assert seen["page"]["curves"][0]["series"][0]["steps"][-1] == 3
        async with client.get("/conversations.json") as response:
            assert (await response.json())["total"] == 2 * 8 + 3 * 10


async def test_another_site_that_points_its_name_here_is_refused(tmp_path: Path) -> None:
    async with served(serve, RunLog(finished_run(tmp_path, steps=1))) as client:
        for host, status in [("evil.example", 403), ("localhost:9", 200), ("[::1]:9", 200)]:
            async with client.get("/", headers={"Host": host}) as response:
                assert response.status == status


def test_a_taken_port_is_one_line_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = finished_run(tmp_path, steps=1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["report", str(folder.path), "--live", "--port", str(port)]) == 1
    text = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: " in text
    assert "--port" in text


def test_the_command_says_its_address_in_one_line_and_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=1)
    command = [
        *warm_python(),
        "-m",
        "stateset_agents.cli.main",
        "report",
        str(folder.path),
        "--live",
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("0001-demo live at http://127.0.0.1:")
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out.strip(), err) == (0, "", "")


async def test_hundreds_of_streams_that_never_read_keep_nobody_from_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 took it 15 s, as each had its page computed: of 200 here, 64 are served by one computation."""
    computed: list[RunLog] = []
    monkeypatch.setattr(live, "page_data", lambda log: computed.append(log) or page_data(log))
    async with (
        served(serve, RunLog(finished_run(tmp_path, steps=2))) as client,
        contextlib.AsyncExitStack() as streams,
    ):
        url = client._base_url
        assert url is not None
        readers = []
        for _ in range(200):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            streams.callback(writer.close)
            writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            readers.append(reader)
        async with asyncio.timeout(10), client.get("/") as page:
            assert page.status == 200
        statuses = [await reader.readline() for reader in readers]
        assert statuses.count(b"HTTP/1.1 200 OK\r\n") == 64
        assert statuses.count(b"HTTP/1.1 503 Service Unavailable\r\n") == 136
        async with client.get("/events") as response:
            assert "\n" not in await response.text()
        assert len(computed) <= 2  # of the events, and of the page


async def test_files_that_are_damaged_while_the_page_is_shown_are_named_on_it(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=2)
    async with served(serve, RunLog(folder)) as client, client.get("/events") as stream:
        assert (await next_event(stream))[0] == "page"
        whole = folder.summary.read_text()
        folder.summary.write_text(whole[:40])
        assert (await next_event(stream))[0] == "conversations"
        name, data = await next_event(stream)
        assert name == "trouble"
        assert "summary.json: not JSON" in data["text"]
        async with client.get("/") as page:
            assert (page.status, await page.text()) == (500, data["text"])
        folder.summary.write_text(whole)
        assert (await next_event(stream))[0] == "page"


async def test_a_page_that_is_closed_before_its_stream_begins_is_one_connection_error() -> None:
    errors: list[Exception] = []

    async def events(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        try:
            async with live.event_stream(request) as response:
                return response
        except Exception as error:
            errors.append(error)
            raise

    app = web.Application()
    app.router.add_get("/events", events)
    streams = app[live._STREAMS] = []
    runner = await listen(app, "127.0.0.1", 0, read_timeout=5)
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
    writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    with contextlib.suppress(ConnectionResetError):
        await reader.read()
    writer.close()
    await runner.cleanup()
    [error] = errors
    assert isinstance(error, ConnectionResetError)
    assert streams == []
