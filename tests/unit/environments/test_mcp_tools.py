"""Tools of real MCP servers: a subprocess over stdio, and one over streamable HTTP on loopback."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from loopback import free_port, serving
from repository_paths import HELPERS

from stateset_agents.core.environment import Conversation
from stateset_agents.environments.mcp import session as mcp_session
from stateset_agents.environments.mcp.session import McpServer
from stateset_agents.environments.mcp.tools import McpEnvironment
from stateset_agents.training.settings.paths import resolve_paths
from stateset_agents.types.errors import ConfigurationError, EnvironmentFailure, EnvironmentTimeout
from stateset_agents.types.messages import Message, ToolCall

SHOP = HELPERS / "servers" / "mcp_shop.py"
STDIO: dict[str, Any] = {"command": sys.executable, "args": [str(SHOP)]}


def shop(server: Any = None, **settings: Any) -> McpEnvironment:
    scenarios = [{"id": name, "opening": f"{name} wants tea"} for name in ("ann", "bob")]
    return McpEnvironment(scenarios, {"shop": server or STDIO}, **settings)


async def begin(environment: McpEnvironment, number: int = 0) -> Conversation:
    return await environment.start(environment.scenarios("train")[number], 0)


async def ask(conversation: Conversation, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """What the tools answer to one reply."""
    made = tuple(ToolCall(name=name, arguments=arguments, id=name) for name, arguments in calls)
    seen = await conversation.step(Message(role="assistant", content="", tool_calls=made))
    assert [message.tool_call_id for message in seen.messages] == [call.id for call in made]
    return [message.content for message in seen.messages]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def pid_of(conversation: Conversation) -> int:
    [answer] = await ask(conversation, ("whoami", {}))
    return int(answer.split()[0])


@pytest.fixture
def web_shop() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    with serving(SHOP, port) as process:
        yield f"http://127.0.0.1:{port}/mcp", process


async def test_a_conversation_has_a_process_of_its_own_that_ends_with_it_or_dies_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NAME_OF_IT", "ida")
    environment = shop(
        {**STDIO, "env": {"SHOPKEEPER": "${NAME_OF_IT}"}, "only": ["put", "price", "photo", "whoami", "burn"]}
    )
    ann, bob = await asyncio.gather(begin(environment, 0), begin(environment, 1))
    assert ann.opening[-1].content == "ann wants tea"
    assert [tool["function"]["name"] for tool in ann.tools] == ["put", "price", "photo", "whoami", "burn"]
    put = ann.tools[0]["function"]
    assert put["description"] == "Put something into the basket."
    assert put["parameters"]["required"] == ["item"]
    assert put["parameters"]["properties"]["times"] == {
        "default": 1, "description": "How many.", "minimum": 1, "type": "integer",
    }  # fmt: skip

    # one after another, in the order asked for
    answers = await ask(ann, ("put", {"item": "tea"}), ("put", {"item": "milk", "times": 2}))
    assert answers == ["in the basket: tea", "in the basket: tea, milk, milk"]
    assert await ask(bob, ("put", {"item": "rice"})) == ["in the basket: rice"]

    # what the server says of a call is for the agent
    price, missing, wrong, photo, unknown = await ask(
        ann,
        ("price", {"item": "tea"}),
        ("price", {"item": "ham"}),
        ("put", {"times": 0}),
        ("photo", {}),
        ("nap", {}),
    )
    assert price.split() == ["{", '"price":', "2.5", "}"]
    assert missing == "error: Error executing tool price: there is no ham"
    assert wrong.startswith("error: ")
    assert "item\n  Field required" in wrong
    assert photo == "[image, which is no text, was left out]"
    assert unknown == "error: unknown tool 'nap'; there are: put, price, photo, whoami, burn"

    [who] = await ask(ann, ("whoami", {}))
    assert who.split()[1] == "ida"
    pids = [int(who.split()[0]), await pid_of(bob)]
    assert pids[0] != pids[1]
    with pytest.raises(ConfigurationError, match=r"cannot be forked.*session: shared"):
        ann.fork()

    with pytest.raises(EnvironmentFailure, match="MCP server 'shop' is gone, saying: the shop is on fire"):
        await ask(bob, ("burn", {}))
    with pytest.raises(EnvironmentFailure, match="is gone"):
        await ask(bob, ("whoami", {}))
    assert await ask(ann, ("put", {"item": "jam"})) == ["in the basket: tea, milk, milk, jam"]
    await asyncio.gather(ann.close(), bob.close())
    assert not any(map(is_running, pids))
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.long
async def test_a_shared_session_is_one_for_all_and_opened_anew_when_it_was_lost() -> None:
    async with shop({**STDIO, "timeout": 2.0}, session="shared") as environment:
        ann, bob = await asyncio.gather(begin(environment, 0), begin(environment, 1))
        pid = await pid_of(ann)
        assert await pid_of(bob) == pid
        await ann.close()
        fork = bob.fork()
        assert await pid_of(fork) == pid
        with pytest.raises(EnvironmentFailure, match="is gone"):
            await ask(bob, ("burn", {}))
        again = await begin(environment)
        assert (other := await pid_of(again)) != pid
        with pytest.raises(
            EnvironmentTimeout, match=r"tool nap of MCP server 'shop' took longer than 2\.0 s"
        ):
            await ask(again, ("nap", {"seconds": 30}))
    assert not is_running(other)  # although it was in the middle of its nap
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_loop_that_ends_takes_the_sessions_with_it() -> None:
    environment = shop(session="shared")

    async def once() -> int:
        return await pid_of(await begin(environment))

    pids = [asyncio.run(once()), asyncio.run(once())]
    assert pids[0] != pids[1]  # another loop, another session
    assert not any(map(is_running, pids))  # and nobody closed them


async def test_a_server_over_http_and_its_death(
    web_shop: tuple[str, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, process = web_shop
    monkeypatch.setattr(mcp_session, "_PING_SECONDS", 0.1)
    environment = shop(McpServer(url=url, headers={"X-Shop": "a"}))
    conversation = await begin(environment)
    assert await ask(conversation, ("put", {"item": "tea"})) == ["in the basket: tea"]
    await conversation.close()
    assert process.poll() is None  # it is not ours to end

    conversation = await begin(environment)
    assert await ask(conversation, ("nap", {"seconds": 0.5})) == ["rested"]  # a busy server is not a dead one
    with pytest.raises(EnvironmentFailure, match="MCP server 'shop' is gone"):
        await ask(conversation, ("burn", {}))
    with pytest.raises(EnvironmentFailure, match="MCP server 'shop' is gone"):
        await ask(conversation, ("whoami", {}))
    await conversation.close()
    assert process.wait(timeout=10) == 3
    with socket.socket() as nobody:  # else a server of another test may get the free port
        nobody.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        nobody.bind(("127.0.0.1", urlsplit(url).port))
        with pytest.raises(EnvironmentFailure, match="MCP server 'shop' cannot be reached"):
            await begin(environment)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("server", "error", "told"),
    [
        (
            {"command": "no-such-program"},
            ConfigurationError,
            "cannot be run: No such file.*'no-such-program'",
        ),
        (
            {"command": sys.executable, "args": ["-c", "raise SystemExit('closed today')"]},
            EnvironmentFailure,
            r"'shop' cannot be reached: \w+.*, saying: closed today",
        ),
        (
            {"command": "sleep", "args": ["30"], "start_timeout": 0.2},
            EnvironmentTimeout,
            r"did not list its tools within 0\.2 s",
        ),
        ({**STDIO, "only": ["pit"]}, ConfigurationError, "has no tool pit; it has: put, price"),
        (
            {**STDIO, "env": {"KEY": "${NOT_SET_AT_ALL}"}},
            ConfigurationError,
            "variable NOT_SET_AT_ALL: set it",
        ),
    ],
)
async def test_a_server_that_cannot_be_had(server: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        await begin(shop(server))
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_machine_that_is_full_fails_a_conversation_and_not_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def full(*args: Any, **settings: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("anyio.open_process", full)
    with pytest.raises(EnvironmentFailure, match=r"MCP server 'shop' cannot be run: Too many open files$"):
        await begin(shop())


@pytest.mark.parametrize("lists", [True, False])
async def test_a_server_that_no_longer_answers_is_left_behind(
    lists: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens a session, and hangs when it is asked to end it (and before, when asked for its tools)."""
    monkeypatch.setattr(mcp_session, "_CLOSE_SECONDS", 0.2)
    farewells = 0

    async def post(request: web.Request) -> web.Response:
        asked = await request.json()
        found: dict[str, Any] = {"tools": [{"name": "nap", "inputSchema": {"type": "object"}}]}
        if asked["method"] == "initialize":
            version = asked["params"]["protocolVersion"]
            found = {
                "protocolVersion": version,
                "capabilities": {},
                "serverInfo": {"name": "x", "version": "1"},
            }
        elif asked["method"].startswith("notifications/"):
            return web.Response(status=202)
        elif not lists:
            await asyncio.sleep(60)
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": found}
        return web.json_response(answer, headers={"Mcp-Session-Id": "s1"})

    async def delete(request: web.Request) -> web.Response:
        nonlocal farewells
        farewells += 1
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_post("/mcp", post)
    app.router.add_delete("/mcp", delete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server = {"url": f"http://127.0.0.1:{runner.addresses[0][1]}/mcp", "start_timeout": 30 if lists else 1.0}
    before = asyncio.all_tasks()
    async with asyncio.timeout(20):
        if lists:
            conversation = await begin(shop(server))
            await conversation.close()
        else:
            with pytest.raises(EnvironmentTimeout, match="did not list its tools"):
                await begin(shop(server))
    assert farewells == 1
    assert not [task for task in asyncio.all_tasks() - before if "MCP" in task.get_name()]
    await runner.cleanup()


async def test_two_tools_of_one_name_are_refused_and_nothing_stays_open() -> None:
    environment = McpEnvironment([{"id": "a", "opening": "hi"}], {"one": STDIO, "two": STDIO})
    with pytest.raises(
        ConfigurationError, match="two MCP servers have a tool 'put': leave one out, with `only`"
    ):
        await begin(environment)
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"server": {"command": "x", "url": "http://y"}}, "MCP server 'shop': .*needs command .* or url"),
        ({"server": {"args": ["x"]}}, "needs command .* or url"),
        ({"server": {"url": "http://y", "env": {"A": "1"}}}, "env has no effect"),
        ({"server": {"command": "x", "headers": {"A": "1"}}}, "headers has no effect"),
        ({"server": {"comand": "x"}}, "has no field 'comand' .did you mean 'command'"),
        ({"server": {"command": "x", "timeout": 0}}, "timeout: .*greater than 0"),
        ({"server": "python shop.py"}, "MCP server 'shop' must have command or url"),
        ({"session": "mine"}, "session must be conversation or shared, got 'mine'"),
        ({"user": "no_such_module:user"}, "user 'no_such_module:user' cannot be imported"),
        ({"success": "json:dumps", "max_turns": 0}, "max_turns must be"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        shop(**settings)


def test_servers_must_be_named() -> None:
    with pytest.raises(ConfigurationError, match="servers must be"):
        McpEnvironment([{"id": "a"}], {})


def test_without_the_library_the_cure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.client.streamable_http", None)
    with pytest.raises(ConfigurationError, match=r'pip install "mcp>=1.24,<3"'):
        shop()


def test_paths_of_servers_in_a_settings_file_start_from_its_folder(tmp_path: Path) -> None:
    data = {"environment": {"servers": {"shop": {"command": "python", "args": ["./shop.py", "-v"]}}}}
    resolve_paths(data, tmp_path)
    assert data["environment"]["servers"]["shop"]["args"] == [str(tmp_path / "shop.py"), "-v"]


ODD_SERVER = """
import json, sys
results = {
    "initialize": {"protocolVersion": "2025-06-18", "capabilities": {},
                   "serverInfo": {"name": "x", "version": "1"}},
    "tools/list": {"tools": [{"name": "put", "inputSchema": {"type": "object"}}]},
    "tools/call": {"content": [{"type": "text", "text": "done"}]},
    **json.loads(sys.argv[1]),
}
for line in sys.stdin:
    request = json.loads(line)
    if request.get("method") in results:
        answer = {"jsonrpc": "2.0", "id": request["id"], "result": results[request["method"]]}
        print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"initialize": {}}, r"'shop' cannot be reached: protocolVersion: field required, got {}$"),
        (
            {"tools/list": {"tools": 5}},
            r"'shop' cannot be reached: tools: input should be a valid list, got 5$",
        ),
        ({"tools/call": {"content": "done"}}, r"'shop' answered put with what is no result \(content: input"),
        (
            {"tools/call": {"content": [{"type": "smell"}]}},
            r"'shop' answered put with what is no result \(conte",
        ),
    ],
)
async def test_an_answer_of_another_shape_is_one_line(odd: dict[str, Any], told: str) -> None:
    environment = shop({"command": sys.executable, "args": ["-c", ODD_SERVER, json.dumps(odd)]})

    async def put() -> None:
        conversation = await begin(environment)
        try:
            await ask(conversation, ("put", {}))
        finally:
            await conversation.close()

    with pytest.raises(EnvironmentFailure, match=told) as error:
        await put()
    assert "\n" not in str(error.value)
