"""An executor elsewhere, in SandboxFusion's words: a server on this machine that runs what it is sent."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from stateset_agents.rewards import create_code_reward
from stateset_agents.sandbox import Job, Limits, Sandbox, SandboxFailure

ADD = Job(program="def add(a, b): return a + b", entry_point="add", arguments=((1, 2), ((1.5,), (None,))))
Answer = Callable[[dict[str, Any]], Awaitable[Any]]


async def executed(body: dict[str, Any]) -> dict[str, Any]:
    """As SandboxFusion does: the code in a process of its own, and what it printed."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-", stdin=-1, stdout=-1, stderr=-1)
    try:
        async with asyncio.timeout(body["run_timeout"]):
            stdout, stderr = await process.communicate(body["code"].encode())
    except TimeoutError:
        process.kill()
        await process.communicate()
        late = {
            "status": "TimeLimitExceeded",
            "execution_time": body["run_timeout"],
            "stdout": "",
            "stderr": "",
        }
        return {"status": "Failed", "message": "", "run_result": {**late, "return_code": None}}
    result = {
        "status": "Finished",
        "return_code": process.returncode,
        "stdout": stdout.decode(),
        "stderr": stderr.decode(),
    }
    status = "Success" if process.returncode == 0 else "Failed"
    return {"status": status, "message": "", "compile_result": None, "run_result": result}


class Executor:
    """A server on this machine; `answer` may be set to something that fails."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.answer: Answer = executed

    async def run_code(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        answer = await self.answer(self.bodies[-1])
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


@pytest.fixture
async def executor() -> AsyncIterator[Executor]:
    made = Executor()
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/run_code", made.run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def test_a_function_and_a_program_run_elsewhere(executor: Executor) -> None:
    sandbox = Sandbox(executor.url)
    claims = await sandbox.run(ADD)
    assert claims.agree(0, 3)
    assert claims.agree(1, (1.5, None))
    assert (claims.ending, claims.level) == ("finished", executor.url)
    printed = await sandbox.run(Job(program="print(int(input()) * 2); exit(0)", stdin=("21", "4")))
    assert (printed.claimed[0], printed.claimed[1]) == ("42\n", "8\n")
    assert {"code", "language", "run_timeout"} == executor.bodies[0].keys()


async def test_the_reward_sends_no_expected_value(executor: Executor) -> None:
    from builders import trajectory

    tests = {"entry_point": "f", "cases": [{"arguments": [17], "expected": 987654321}]}
    talk = trajectory("Write f.", "```python\ndef f(n): return 987654320 + 1\n```", context={"tests": tests})
    reward = create_code_reward(sandbox=executor.url)
    assert (await reward.score(talk)).score == 1.0
    assert "987654321" not in executor.bodies[0]["code"]


@pytest.mark.parametrize(
    ("program", "ending"),
    [
        ("import os\nos._exit(3)", "ended early"),
        ("def add(a, b):\n    while True: pass", "ended early"),  # its processor time is limited there, too
        ("import time\ndef add(a, b): time.sleep(100)", "wall limit"),
        (
            "import os\nfor fd in range(3, 20):\n    try: os.write(fd, b'x')\n    except OSError: pass",
            "malformed",
        ),
        ("def add(a, b): return 'x' * 3_000_000", "output limit"),
    ],
    ids=["exit", "loop", "sleep", "forged", "flood"],
)
async def test_what_the_program_does_wrong_elsewhere_is_its_own(
    executor: Executor, program: str, ending: str
) -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=30 if ending != "wall limit" else 3)
    job = Job(program=program, entry_point="add", arguments=((1, 2),))
    claims = await Sandbox(executor.url, limits=limits).run(job)
    assert (claims.ending, claims.agree(0, 3)) == (ending, False)


async def _status_500(_: dict[str, Any]) -> Any:
    return web.Response(status=500, text="no workers")


async def _sandbox_error(_: dict[str, Any]) -> Any:
    return {"status": "SandboxError", "message": "no disk", "run_result": None}


async def _no_python(_: dict[str, Any]) -> Any:
    result = {"status": "Finished", "return_code": 127, "stdout": "", "stderr": "python: not found"}
    return {"status": "Failed", "message": "", "run_result": result}


async def _no_json(_: dict[str, Any]) -> Any:
    return web.Response(text="<html>")


async def _elsewhere(_: dict[str, Any]) -> Any:
    raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/run_code")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_status_500, "answered 500: b'no workers'"),
        (_sandbox_error, "failed: .*no disk"),
        (_no_python, "did not start the program: python: not found"),
        (_no_json, "gave no answer"),
        (_elsewhere, "answered 307"),
    ],
)
async def test_what_the_executor_does_wrong_leaves_a_program_unscored(
    executor: Executor, answer: Answer, message: str
) -> None:
    executor.answer = answer
    with pytest.raises(SandboxFailure, match=message):
        await Sandbox(executor.url).run(ADD)


async def test_an_executor_that_is_not_there_leaves_a_program_unscored() -> None:
    with pytest.raises(SandboxFailure, match="gave no answer"):
        await Sandbox("http://127.0.0.1:1").run(ADD)
