"""The one guard of all HTTP servers: names in Host, JSON bodies only, keys, addresses that need one."""

from __future__ import annotations

import asyncio
import subprocess
from contextlib import asynccontextmanager

import aiohttp
import pytest
from report_runs import finished_run
from warm_python import warm_python

from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.environments.programs.rollout_endpoint import RolloutServer
from stateset_agents.reporting import live
from stateset_agents.runtime.http_guard import HttpGuard, is_loopback, read_api_keys
from stateset_agents.serving.server import AgentServer
from stateset_agents.tracking.run_log import RunLog
from stateset_agents.types.errors import ConfigurationError

HI = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def served(**settings):
    """The chat-completions address of an agent, and a client."""
    backend = ScriptedBackend(lambda request: "Hello!")
    async with (
        MultiTurnAgent(AgentConfig(model_name="mine"), backend=backend) as agent,
        AgentServer(agent, **settings) as server,
        aiohttp.ClientSession() as client,
    ):
        yield f"{server.url}/chat/completions", client


async def status(
    client, url, method="POST", body=b'{"messages": [{"role": "user", "content": "hi"}]}', **headers
):
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.request(method, url, data=body, headers=given) as answer:
        return answer.status


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8080", True),
        ("LOCALHOST:1", True),
        ("localhost.", True),
        ("LocalHost.:99", True),
        ("[::1]", True),
        ("[::1]:80", True),
        ("agents.example:443", True),
        ("Agents.Example.:443", True),
        ("agents.example", False),
        ("agents.example:80", False),
        ("any.example:80", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example:80", False),
        ("evil.example:127.0.0.1", False),
        ("localhost:80, evil.example", False),
        ("10.0.0.7:80", False),
        ("[::1].evil.example", False),
        ("", False),
    ],
)
def test_a_host_is_compared_without_case_and_last_dot_and_with_its_port(host, allowed):
    guard = HttpGuard.listening_on("127.0.0.1", allowed_hosts=["agents.example:443", "ANY.example"])
    assert guard.allows_host(host) is allowed


def test_a_server_for_others_takes_addresses_in_numbers_and_no_foreign_name():
    guard = HttpGuard.listening_on("0.0.0.0", api_keys=["secret"])
    assert guard.allows_host("10.0.0.7:80")
    assert guard.allows_host("[fe80::1]:80")
    assert not guard.allows_host("evil.example")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "", "192.168.1.5", "agents.example"])
def test_a_server_for_others_needs_a_key(address):
    assert not is_loopback(address)
    with pytest.raises(ConfigurationError, match="nobody is asked for a key: give --api-key-file"):
        HttpGuard.listening_on(address)
    HttpGuard.listening_on(address, api_keys=["secret"])
    for local in ("127.0.0.1", "127.0.0.2", "::1", "localhost", "LOCALHOST"):
        HttpGuard.listening_on(local)


async def test_what_a_page_of_another_site_can_send_is_refused_by_serve():
    async with served() as (url, client):
        json = {"Content_Type": "application/json"}
        assert await status(client, url, **json) == 200
        assert await status(client, url, Content_Type="Application/JSON; charset=utf-8") == 200
        assert await status(client, url, Host="evil.example", **json) == 403
        for simple in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            assert await status(client, url, Content_Type=simple, Origin="https://evil.example") == 415
        assert await status(client, url, Content_Type="text/plain; application/json") == 415
        asked = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "content-type"}
        async with client.options(url, headers={"Origin": "https://evil.example", **asked}) as answer:
            assert answer.status == 405
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]
            assert (await answer.json())["error"]["code"] == "method_not_served"


async def test_the_rollout_endpoint_and_the_live_report_have_the_same_guard(tmp_path):
    server = RolloutServer()
    rollout = await server.open()
    async with aiohttp.ClientSession() as client:
        url = f"{rollout.url}/chat/completions"
        assert await status(client, url, Content_Type="text/plain") == 415
        assert await status(client, url, Host="evil.example", Content_Type="application/json") == 403
        assert not rollout.is_waiting
        await server.close(rollout)
        address = asyncio.get_running_loop().create_future()
        log = RunLog(finished_run(tmp_path, steps=1))
        page = asyncio.create_task(live.serve(log, port=0, on_ready=address.set_result))
        url = await address
        for host, wanted in (("evil.example", 403), ("LOCALHOST", 200), ("localhost.:9", 200)):
            assert await status(client, url, "GET", None, Host=host) == wanted
        page.cancel()
        await asyncio.wait([page])


async def test_a_key_is_asked_for_where_there_is_one():
    async with served(api_keys=["alpha-key", "beta-key"]) as (url, client):
        json = {"Content_Type": "application/json"}
        assert await status(client, url, **{"X-Api-Key": "beta-key"}, **json) == 200
        assert await status(client, url, **{"X-Api-Key": "wrong"}, **json) == 401
        for good in ("Bearer alpha-key", "bearer beta-key", "Bearer  beta-key"):
            assert await status(client, url, Authorization=good, **json) == 200
        for bad in (
            "Bearer wrong",
            "Bearer alpha-ke",
            "Bearer alpha-keyy",
            "Basic alpha-key",
            "alpha-key",
            "",
        ):
            assert await status(client, url, Authorization=bad, **json) == 401
        assert await status(client, url, Authorization="Bearer alph\xe4-key", **json) == 401
        async with client.post(url, json=HI) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert (await answer.json())["error"]["code"] == "invalid_api_key"


def test_keys_come_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the shop\nalpha\n\n  beta \n")
    assert read_api_keys(file, {"STATESET_API_KEY": "gamma"}) == ("alpha", "beta")
    assert read_api_keys(None, {"STATESET_API_KEY": "gamma\n"}) == ("gamma",)
    assert read_api_keys(None, {}) == ()
    assert "alpha" not in repr(HttpGuard(api_keys=("alpha",)))
    for text in ("", "# none\n", "two words\n", "clé\n"):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigurationError, match="holds no key: write one"):
            read_api_keys(file, {})
    with pytest.raises(ConfigurationError, match="STATESET_API_KEY holds no key"):
        read_api_keys(None, {"STATESET_API_KEY": ""})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_api_keys(tmp_path / "none", {})


def test_serve_refuses_an_address_for_others_without_a_key_in_one_line():
    words = [*warm_python(), "-m", "stateset_agents.cli.main", "serve", "no-such-model", "--host", "0.0.0.0"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "nobody is asked for a key: give --api-key-file FILE, set STATESET_API_KEY" in line


@pytest.mark.parametrize("settings", [{"api_keys": "a-long-secret"}, {"allowed_hosts": "agents.example"}])
def test_a_text_is_no_list_of_texts(settings):  # each of its letters would be a key, or a host
    (name,) = settings
    with pytest.raises(ConfigurationError, match=rf"{name} must be a list of texts, got a text"):
        HttpGuard.listening_on("127.0.0.1", **settings)


@pytest.mark.parametrize("key", ["", " "])
def test_an_empty_key_is_no_key(key):  # `Authorization: Bearer` would be let in
    for make in (lambda: HttpGuard(api_keys=(key,)), lambda: HttpGuard.listening_on("::", api_keys=[key])):
        with pytest.raises(ConfigurationError, match="an API key is empty: give one"):
            make()


@pytest.mark.parametrize("host", ["*", "https://agents.example", "fe80::1", "", "a b", "agents.example:x"])
def test_a_host_that_no_request_has_is_one_line(host):
    with pytest.raises(ConfigurationError, match="is no name that a request has as its Host: write"):
        HttpGuard.listening_on("127.0.0.1", allowed_hosts=[host])
