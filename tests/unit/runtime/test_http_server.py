"""What every HTTP server of the package waits for, and for how long."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from stateset_agents.environments.programs import rollout_endpoint
from stateset_agents.runtime.http_server import listen

HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 900\r\n\r\n"


async def dripped(port: int, path: str, end: bytes) -> bytes:
    """The answer, up to `end`, to a body of which a byte comes every 20 ms."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD % path.encode())
    answer = asyncio.create_task(reader.readuntil(end))
    async with asyncio.timeout(5):
        while not answer.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
    writer.close()
    return answer.result()


async def test_a_body_that_drips_is_refused_by_every_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    app = web.Application()
    app.router.add_post("/", echo)
    runner = await listen(app, "127.0.0.1", 0, read_timeout=0.3)
    answer = await dripped(runner.addresses[0][1], "/", b"the body did not come within 0.3 seconds")
    assert answer.startswith(b"HTTP/1.1 408")
    await runner.cleanup()

    monkeypatch.setattr(rollout_endpoint, "_READ_TIMEOUT", 0.3)
    server = rollout_endpoint.RolloutServer()
    rollout = await server.open()
    _, _, address = rollout.url.partition("127.0.0.1:")
    port, _, path = address.partition("/")
    answer = await dripped(int(port), f"/{path}/chat/completions", b'"code": "request_timeout"')
    assert answer.startswith(b"HTTP/1.1 408")
    await server.close(rollout)
    assert caplog.text == ""
