"""The aiohttp example over a real loopback connection: chat, progress, pause, resume, stop, clean ends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request

import aiohttp
from aiohttp import web
from repository_paths import ROOT
from tiny_training import make_trainer
from warm_python import warm_python

from stateset_agents.runs.checkpoint_files import latest_checkpoint, load_checkpoint

EXAMPLE = ROOT / "examples" / "aiohttp_app.py"


def example():
    spec = importlib.util.spec_from_file_location("aiohttp_app", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Client:
    """Talks to the application as another program would."""

    def __init__(self, session, port):
        self.session, self.base = session, f"http://127.0.0.1:{port}"

    async def get(self, path):
        async with self.session.get(self.base + path) as answer:
            assert answer.status == 200
            return await answer.json()

    async def post(self, path, body=None):
        async with self.session.post(self.base + path, json=body or {}) as answer:
            assert answer.status == 200
            return await answer.json()

    async def step_reached(self, step):
        for _ in range(2000):
            if (now := await self.get("/progress"))["step"] >= step:
                return now
            await asyncio.sleep(0.01)
        raise AssertionError(f"step {step} was never reached: {now}")


@contextlib.asynccontextmanager
async def served(trainer):
    """The application on a free port; its end is the application's own clean-up."""
    runner = web.AppRunner(example().create_app(trainer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Client(session, runner.addresses[0][1])
    finally:
        await runner.cleanup()


HELLO = {"messages": [{"role": "user", "content": "hi"}]}


async def test_it_answers_holds_goes_on_and_stops_while_it_trains(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=10_000, save_steps=0, log_rollouts=False)
    async with served(trainer) as client:
        assert (await client.step_reached(1))["state"] == "running"
        assert isinstance((await client.post("/chat", HELLO))["reply"], str)
        assert await client.post("/pause") == {"state": "paused"}
        held = (await client.get("/progress"))["step"]
        assert isinstance((await client.post("/chat", HELLO))["reply"], str)
        assert (await client.get("/progress"))["step"] == held
        assert await client.post("/resume") == {"state": "running"}
        await client.step_reached(held + 1)
        assert await client.post("/stop") == {"state": "stopped"}
        ended = await client.get("/progress")
        assert ended["why"] == f"stopped as asked after step {ended['step']} of 10000"
        assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == ended["step"]
        assert isinstance((await client.post("/chat", HELLO))["reply"], str)


async def test_the_end_of_the_application_finishes_the_step_and_leaves_no_thread(tmp_path):
    before = {thread for thread in threading.enumerate() if thread.name.startswith(("update", "generation"))}
    trainer = make_trainer(tmp_path, max_steps=10_000, save_steps=0)
    async with served(trainer) as client:
        await client.step_reached(2)
    assert load_checkpoint(latest_checkpoint(trainer.run.checkpoints)).step == trainer.step_number >= 2
    assert json.loads(trainer.run.summary.read_text())["ended"] == "stopped"
    assert trainer.run.report.is_file()
    now = {thread for thread in threading.enumerate() if thread.name.startswith(("update", "generation"))}
    assert now <= before


def step_of(address):
    with urllib.request.urlopen(address, timeout=10) as answer:
        return json.load(answer)["step"]


def test_the_program_ends_cleanly_on_ctrl_c(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with subprocess.Popen(
        [*warm_python(), str(EXAMPLE), "--port", str(port)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            step = 0
            while step < 1 and time.monotonic() < deadline and process.poll() is None:
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    step = step_of(f"http://127.0.0.1:{port}/progress")
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert step >= 1, said
    assert process.returncode == 0, said
    assert "Traceback" not in said
    run = tmp_path / "runs" / "latest"
    assert latest_checkpoint(run / "checkpoints") is not None
    assert json.loads((run / "summary.json").read_text())["ended"] == "stopped"
    assert (run / "report.html").is_file()


async def test_a_page_of_another_site_can_neither_pause_nor_stop_a_training(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=10_000, save_steps=0, log_rollouts=False)
    async with served(trainer) as client:
        for path in ("/pause", "/stop", "/resume", "/chat"):
            for headers in (
                {"Host": "evil.example", "Content-Type": "application/json"},
                {"Origin": "https://evil.example", "Content-Type": "text/plain"},
                {"Origin": "https://evil.example", "Content-Type": "application/x-www-form-urlencoded"},
                {"Origin": "https://evil.example"},
            ):
                body = b"{}" if "Content-Type" in headers else None
                async with client.session.post(client.base + path, data=body, headers=headers) as answer:
                    assert answer.status in (403, 415)
            async with client.session.options(client.base + path) as answer:
                assert answer.status == 405
        assert (await client.get("/progress"))["state"] == "running"


async def test_a_chat_that_cannot_be_read_is_the_client_s_fault(tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1, save_steps=0)
    headers = {"Content-Type": "application/json"}
    bodies = ["{", "{}", "[]", "5", '{"messages": []}', '{"messages": 5}', '{"messages": {"role": "user"}}']
    bodies += ['{"messages": [{"role": "customer", "content": "hi"}]}', '{"messages": [5]}', "[" * 100_000]
    bodies += [json.dumps({"messages": "where is it " * 2000})]
    async with served(trainer) as client:
        for body in bodies:
            async with client.session.post(client.base + "/chat", data=body, headers=headers) as answer:
                assert answer.status == 400, body[:60]
                assert len((await answer.text()).splitlines()) == 1
        packed = {**headers, "Content-Encoding": "gzip", "Connection": "close"}
        async with client.session.post(client.base + "/chat", data=b"no gzip", headers=packed) as answer:
            assert answer.status == 400
        await client.post("/chat", HELLO)
