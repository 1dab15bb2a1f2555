"""The dashboard's addresses under what a hostile page or client sends; it has no schema to be asked by."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from deployment_journals import SimulatedDeployment
from report_runs import finished_run

from stateset_agents.deployment.views.dashboard_data import Deployments
from stateset_agents.deployment.views.dashboard_live import serve_dashboard
from stateset_agents.reporting.report import write_report

MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
PATHS = ("/", "/events", "/metrics", "/plotly.js", "/x/report.html")


@contextlib.asynccontextmanager
async def dashboard(folder: Path) -> AsyncIterator[int]:
    """Its port; a run and a deployment whose every text is markup."""
    deployment = SimulatedDeployment(folder / "d.sqlite", candidate=MARKUP)
    deployment.talk(60)
    deployment.controller.assign(MARKUP)
    deployment.controller.roll_back(who=MARKUP, why=MARKUP)
    write_report(finished_run(folder / "runs", steps=1).path)
    (folder / "report.html").write_text("secret")
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = serve_dashboard(
        folder / "runs", Deployments(deployment.path), port=0, on_ready=address.set_result
    )
    task = asyncio.create_task(serving)
    hashes = deployment.controller.hashes
    try:
        yield int(re.findall(r"\d+", await address)[-1])
        assert not task.done()  # it serves on
        assert deployment.controller.hashes == hashes
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def raw(port: int, request: bytes, answers: int = 1) -> list[int]:
    """Statuses of so many answers to bytes as they are; 0 where the connection was closed instead."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    statuses = []
    try:
        for _ in range(answers):
            head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode("latin-1")
            statuses.append(int(head.split()[1]))
            length = re.search(r"(?i)content-length: (\d+)", head)
            await asyncio.wait_for(reader.readexactly(int(length[1]) if length else 0), 10)
    except (asyncio.IncompleteReadError, ConnectionError):
        statuses.append(0)
    finally:
        writer.close()
    return statuses


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode("latin-1")


async def test_no_hostile_request_is_served_or_breaks_it(tmp_path: Path) -> None:
    bomb = gzip.compress(bytes(20_000_000))
    packed = ("Content-Encoding: gzip", f"Content-Length: {len(bomb)}", "Connection: close")
    refused: list[tuple[bytes, set[int]]] = [
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}),
        (b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}),
        (b"GET /events HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", {403}),
        (b"GET / HTTP/1.1\r\n\r\n", {400, 403}),
        (b"\x00\x01\x02\r\n\r\n", {400}),
        (get("/" + "a" * 100_000), {400, 414}),
        (get("/", "X-Long: " + "a" * 100_000), {400}),
        (get("/", "Content-Length: 5", "Transfer-Encoding: chunked") + b"0\r\n\r\nGET", {400}),
        (get("/", "Content-Length: -1"), {400}),
        (get("/\x7f\xff"), {400, 404}),
        (get("/%00/report.html"), {404}),
        (get("/%0d%0aX:%20y/report.html"), {404}),
        *((get(f"/{up}/report.html"), {404}) for up in ("..", "%2e%2e", "..%2f..", "%252e%252e", "....//..")),
        *((request.replace(b"GET", b"POST", 1), {405}) for request in (get("/"), get("/events"))),
        (get("/", "Origin: https://evil.example").replace(b"GET", b"POST", 1), {403, 405, 415}),
        (get("/", *packed).replace(b"GET", b"POST", 1) + bomb, {405, 413, 415}),
        (get("/", "Upgrade: websocket", "Connection: Upgrade"), {200}),
        (get("/", *packed) + bomb, {200, 400, 413}),
    ]
    async with dashboard(tmp_path) as port:
        for request, allowed in refused:
            [status, *_] = await raw(port, request)
            assert status in allowed, request[:80]
        assert await raw(port, get("/x/report.html") * 5, answers=5) == [404] * 5
        for name in ("LOCALHOST", "localhost.", "[::1]", "127.0.0.1"):
            assert await raw(port, f"GET / HTTP/1.1\r\nHost: {name}\r\n\r\n".encode()) == [200]


async def test_half_sent_requests_and_open_streams_hold_nobody_up(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
        for number, (_, writer) in enumerate(opened):
            writer.write(get("/events") if number % 2 else b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\nx")
        streams = [reader for number, (reader, _) in enumerate(opened) if number % 2]
        statuses = [(await asyncio.wait_for(reader.readline(), 30)).split()[1] for reader in streams]
        assert sorted(statuses) == [b"200"] * 64 + [b"503"] * 36
        async with asyncio.timeout(10):
            assert await raw(port, get("/metrics")) == [200]
        for _, writer in opened:
            writer.transport.abort()
        async with asyncio.timeout(10):
            assert await raw(port, get("/")) == [200]


async def test_what_others_wrote_is_text_on_the_page_in_the_events_and_in_the_metrics(tmp_path: Path) -> None:
    async with (
        dashboard(tmp_path) as port,
        aiohttp.ClientSession(base_url=f"http://127.0.0.1:{port}/") as client,
    ):
        for path in PATHS:
            async with client.get(path) as response:
                assert "Access-Control-Allow-Origin" not in response.headers
        async with client.get("/") as page:
            text = await page.text()
        assert "<script>alert(1)" not in text
        assert "<img src=x" not in text
        async with client.get("/events") as stream:
            while not (line := await asyncio.wait_for(stream.content.readline(), 20)).startswith(b"data:"):
                pass
            [shown] = json.loads(line[5:])["data"]
        assert shown["candidate"] == shown["journal"][0]["why"] == MARKUP
        async with client.get("/metrics") as metrics:
            assert (
                'stateset_deployment_mode{deployment="0001",mode="rolled_back"} 1.0' in await metrics.text()
            )


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
async def test_it_has_nothing_but_reading(tmp_path: Path, method: str) -> None:
    async with dashboard(tmp_path) as port:
        for path in PATHS:
            [status] = await raw(port, get(path).replace(b"GET", method.encode(), 1))
            assert status == 405, path
