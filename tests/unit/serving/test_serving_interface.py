"""What `serve` offers beside answers: errors in one shape, models, health, metrics, and its schema."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from contextlib import asynccontextmanager

import aiohttp
import jsonschema
import openai
import pytest
from repository_paths import ROOT

from stateset_agents.backends.dialects.chat import ChatBody
from stateset_agents.backends.scripted import ScriptedBackend
from stateset_agents.core.agent import AgentConfig, MultiTurnAgent
from stateset_agents.serving.openapi import ERRORS
from stateset_agents.serving.server import AgentServer
from stateset_agents.types.errors import BackendError

HI = [{"role": "user", "content": "hi"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
NAMED_X = {"type": "function", "function": {"name": "x"}}
CALL = '<tool_call>{"name": "look", "arguments": {"order": "%s"}}</tool_call>'


class Served:
    """A server with its clients: OpenAI's, and plain HTTP."""

    def __init__(self, server, openai_client, http):
        self.server, self.openai, self.http = server, openai_client, http
        self.root = server.url.removesuffix("/v1")

    async def create(self, **fields):
        return await self.openai.chat.completions.create(**{"model": "mine", "messages": HI, **fields})

    async def get(self, path, **headers):
        async with self.http.get(f"{self.root}{path}", headers=headers) as answer:
            return answer.status, answer.headers, await answer.text()

    async def post(self, body, path="/v1/chat/completions"):
        headers = {"Content-Type": "application/json"}
        async with self.http.post(f"{self.root}{path}", data=body, headers=headers) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def served(script, **settings):
    backend = script if isinstance(script, ScriptedBackend) else ScriptedBackend(script)
    async with (
        MultiTurnAgent(AgentConfig(model_name="mine"), backend=backend) as agent,
        AgentServer(agent, **settings) as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0) as client,
        aiohttp.ClientSession() as http,
    ):
        yield Served(server, client, http)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_nobody_foresaw_is_a_500_whose_id_is_in_the_log(stream, caplog):
    async with served([RuntimeError("a secret of the house")]) as it:
        with caplog.at_level(logging.ERROR), pytest.raises(openai.InternalServerError) as caught:
            await it.create(stream=stream)
        error = caught.value
        assert (error.code, error.type) == ("internal_error", "server_error")
        assert "secret" not in error.message
        id = error.response.headers["X-Request-Id"]
        assert id in error.message
        assert f"request {id} broke" in caplog.text
        assert "RuntimeError: a secret of the house" in caplog.text


class BreaksOff(ScriptedBackend):
    async def generate(self, prompt_ids, params, *, session=None, on_text=None):
        on_text("It is ")
        raise BackendError("no memory left")


async def test_a_stream_that_breaks_after_its_first_words_says_so():
    async with served(BreaksOff([])) as it:
        received = []

        async def listen():
            async for chunk in await it.create(stream=True):
                received.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match="no memory left") as caught:
            await listen()
        assert "".join(received) == "It is "
        assert caught.value.code == "backend_error"


async def test_what_is_not_there_is_said_in_openai_s_shape():
    async with served(["Hello!"]) as it:
        for method, path, status, code in [
            ("GET", "/v1/nothing", 404, "not_served"),
            ("GET", "/", 404, "not_served"),
            ("POST", "/v1/completions", 404, "not_served"),
            ("GET", "/v1/chat/completions", 405, "method_not_served"),
            ("DELETE", "/v1/models", 405, "method_not_served"),
            ("POST", "/v1/chat/completions", 413, "request_too_large"),
        ]:
            body = b" " * (it.server.max_body + 1) if status == 413 else None
            headers = {"Content-Type": "application/json"}
            async with it.http.request(method, it.root + path, data=body, headers=headers) as answer:
                assert answer.status == status
                error = (await answer.json())["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert error["code"] == code
                assert ("Allow" in answer.headers) is (status == 405)
                assert answer.headers["X-Request-Id"]
        assert (await it.post(b"{"))[0] == 400


async def test_what_is_no_http_is_refused_and_fills_no_log(caplog):
    async with served(["Hello!"]) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(it.root.rsplit(":", 1)[1]))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Null: \0\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).split()[1] == b"400"
        writer.close()
        assert caplog.records == []


async def test_another_model_is_not_found():
    async with served(["Hello!"] * 3) as it:
        for name in ("gpt-9", "Mine", "mine/"):
            with pytest.raises(
                openai.NotFoundError, match=f"there is no model '{name}' here: ask for 'mine'"
            ) as no:
                await it.create(model=name)
            assert (no.value.code, no.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.NotFoundError) as no:
                await it.openai.models.retrieve(name)
            assert no.value.code == "model_not_found"
        assert (await it.openai.models.retrieve("mine")).id == "mine"
        assert (await it.create()).model == "mine"
        assert (await it.post(json.dumps({"messages": HI})))[1]["model"] == "mine"
        status, body = await it.post(json.dumps({"messages": HI, "model": {"a": 1}}))
        assert (status, body["error"]["param"]) == (400, "model")


async def test_a_model_may_have_another_name_and_hold_slashes():
    async with served(["Hello!"] * 2, name="shop/clerk") as it:
        assert (await it.openai.models.retrieve("shop/clerk")).id == "shop/clerk"
        assert (await it.create(model="shop/clerk")).model == "shop/clerk"
        with pytest.raises(openai.NotFoundError, match="ask for 'shop/clerk'"):
            await it.create(model="mine")


async def test_health_and_readiness_need_no_key_and_the_rest_does():
    async with served(["Hello!"], api_keys=["secret"]) as it:
        for path in ("/health", "/ready"):
            assert (await it.get(path))[0] == 200
        for path in ("/version", "/metrics", "/openapi.json", "/v1/models", "/v1/models/mine"):
            assert (await it.get(path))[0] == 401
            assert (await it.get(path, Authorization="Bearer secret"))[0] == 200


async def test_a_backend_that_broke_is_unhealthy_and_not_ready():
    async with served(["Hello!"]) as it:

        async def check_health():
            raise BackendError("the generation worker broke: out of memory")

        it.server.agent.check_health = check_health
        for path in ("/health", "/ready"):
            status, _, text = await it.get(path)
            assert status == 503
            assert json.loads(text)["error"]["code"] == "unhealthy"
            assert "out of memory" in text


async def test_a_server_that_drains_is_healthy_and_not_ready():
    async with served(["Hello!"]) as it:
        assert await it.server.drain(5) == 0
        assert (await it.get("/health"))[0] == 200
        status, headers, text = await it.get("/ready")
        assert (status, json.loads(text)["error"]["code"]) == (503, "shutting_down")
        assert headers["Retry-After"]
        with pytest.raises(openai.InternalServerError, match="is shutting down"):
            await it.create()


async def test_the_metrics_count_requests_tokens_and_time():
    async with served(["Hello!"] * 2) as it:
        await it.create()
        await it.create()
        with pytest.raises(openai.BadRequestError):
            await it.create(temperature=-1)
        status, headers, text = await it.get("/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain")
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        path = "/v1/chat/completions"
        assert lines[f'stateset_requests_total{{path="{path}",status="200"}}'] == "2.0"
        assert lines[f'stateset_requests_total{{path="{path}",status="400"}}'] == "1.0"
        assert lines[f'stateset_request_seconds_count{{path="{path}"}}'] == "3.0"
        assert lines['stateset_tokens_total{kind="completion"}'] == "14.0"
        assert float(lines['stateset_tokens_total{kind="prompt"}']) > 0
        assert (lines["stateset_running"], lines["stateset_waiting"]) == ("0.0", "0.0")
        assert lines["stateset_wait_seconds_count"] == "2.0"


async def test_without_prometheus_client_metrics_say_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    async with served(["Hello!"]) as it:
        assert (await it.create()).choices
        status, _, text = await it.get("/metrics")
        assert status == 501
        assert 'pip install "prometheus_client>=0.21"' in json.loads(text)["error"]["message"]


def test_the_page_names_every_error():
    page = (ROOT / "docs" / "serving.md").read_text()
    rows = {
        int(status): codes for status, codes in re.findall(r"^\| (\d{3}) \| (.*?) \|", page, re.MULTILINE)
    }
    for status, (_, *codes) in ERRORS.items():
        assert set(codes) <= set(re.findall(r"`(\w+)`", rows[status]))


async def test_the_version_is_the_package_s():
    async with served(["Hello!"]) as it:
        assert json.loads((await it.get("/version"))[2]) == {"version": "0.1.0"}


async def test_tools_are_called_only_where_they_are_offered():
    text = "Let me look. " + CALL % "K27"
    async with served(lambda request: text) as it:
        called = (await it.create(tools=[LOOK])).choices[0]
        assert (called.message.content, called.finish_reason) == ("Let me look.", "tool_calls")
        for fields in ({}, {"tools": [LOOK], "tool_choice": "none"}, {"tools": []}):
            choice = (await it.create(**fields)).choices[0]
            assert (choice.message.content, choice.message.tool_calls) == (text, None)
            assert choice.finish_reason == "stop"
            stream = await it.create(stream=True, **fields)
            deltas = [chunk.choices[0].delta async for chunk in stream]
            assert "".join(delta.content or "" for delta in deltas) == text
            assert not any(delta.tool_calls for delta in deltas)


async def test_a_choice_of_no_tool_shows_the_agent_none():
    backend = ScriptedBackend(lambda request: "ok")
    async with served(backend) as it:
        await it.create(tools=[LOOK])
        await it.create(tools=[LOOK], tool_choice="none")
        await it.create()
        offered, refused, absent = (request.text for request in backend.requests)
        assert "look" in offered
        assert refused == absent


async def test_one_tool_call_at_a_time():
    async with served(lambda request: CALL % "K1" + CALL % "K2") as it:
        assert len((await it.create(tools=[LOOK])).choices[0].message.tool_calls) == 2
        single = (await it.create(tools=[LOOK], parallel_tool_calls=False)).choices[0].message.tool_calls
        assert [call.function.arguments for call in single] == ['{"order": "K1"}']
        stream = await it.create(tools=[LOOK], parallel_tool_calls=False, stream=True)
        calls = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
        assert len(calls) == 1


async def test_several_answers_to_one_request_have_streams_of_their_own():
    backend = ScriptedBackend(lambda request: f"{request.params.stream % 1000}")
    async with served(backend) as it:
        answer = await it.create(n=3, seed=7)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert len(set(texts)) == 3
        assert answer.usage.completion_tokens == sum(len(text) + 1 for text in texts)
        assert answer.usage.prompt_tokens == len(backend.requests[0].prompt_ids)
        assert texts == [choice.message.content for choice in (await it.create(n=3, seed=7)).choices]
        assert texts[0] == (await it.create(seed=7)).choices[0].message.content
        received = ["", "", ""]
        async for chunk in await it.create(n=3, seed=7, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                received[choice.index] += choice.delta.content or ""
        assert received == texts
        assert chunk.usage == answer.usage


@pytest.mark.parametrize("n", [1, 2])
async def test_log_probs_are_told_token_by_token(n):
    async with served(lambda request: "Grüße") as it:
        answer = await it.create(logprobs=True, n=n)
        for choice in answer.choices:
            tokens = choice.logprobs.content
            assert sum(len(c.logprobs.content) for c in answer.choices) == answer.usage.completion_tokens
            assert [item.token for item in tokens[:2]] == ["G", "r"]
            assert tokens[0].bytes == [ord("G")]
            assert all(item.logprob <= 0 and item.top_logprobs == [] for item in tokens)
        assert (await it.create()).choices[0].logprobs is None
        last = {}
        async for chunk in await it.create(logprobs=True, n=n, stream=True):
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    last[choice.index] = choice.logprobs.content
        assert [last[choice.index] for choice in answer.choices] == [
            c.logprobs.content for c in answer.choices
        ]
        with pytest.raises(
            openai.BadRequestError, match="top_logprobs must be less than or equal to 0, got 2"
        ):
            await it.create(logprobs=True, top_logprobs=2)


async def test_top_k_reaches_the_backend():
    backend = ScriptedBackend(lambda request: "ok")
    async with served(backend) as it:
        await it.create(extra_body={"top_k": 5})
        assert backend.requests[0].params.top_k == 5


def resolved(schema, parts):
    while "$ref" in schema:
        schema = parts[schema["$ref"].rsplit("/", 1)[1]]
    return schema


def bounds_of(schema, parts):
    """Values on both sides of every bound of a schema: (value, is it served?)."""
    schema = resolved(schema, parts)
    for branch in schema.get("anyOf", ()):
        yield from bounds_of(branch, parts)
    for value in schema.get("enum", [schema["const"]] if "const" in schema else []):
        yield value, True
        yield f"{value}x", False
    is_integer = schema.get("type") == "integer"
    tiny = 1 if is_integer else 1e-6
    if "minimum" in schema:
        yield schema["minimum"], True
        yield schema["minimum"] - tiny, False
    if "maximum" in schema:
        yield schema["maximum"], True
        yield schema["maximum"] + tiny, False
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"] + tiny, True
        yield schema["exclusiveMinimum"], False
    if "exclusiveMaximum" in schema:
        yield schema["exclusiveMaximum"] - tiny, True
        yield schema["exclusiveMaximum"], False
    if "minLength" in schema:
        yield "x" * schema["minLength"], True
        yield "x" * (schema["minLength"] - 1), False
    if "maxLength" in schema:
        yield "x" * schema["maxLength"], True
        yield "x" * (schema["maxLength"] + 1), False
    if "maxProperties" in schema:
        yield {f"k{n}": "v" for n in range(schema["maxProperties"])}, True
        yield {f"k{n}": "v" for n in range(schema["maxProperties"] + 1)}, False
    for name, step in (("minItems", -1), ("maxItems", 1)):
        if name in schema:
            item = sample(schema["items"], parts)
            yield [item] * schema[name], True
            yield [item] * (schema[name] + step), False
    if schema.get("type") == "array":
        for value, served_ in bounds_of(schema["items"], parts):
            yield [value], served_
    if schema.get("type") == "object" and "properties" in schema:
        base = sample(schema, parts)
        for name, inner in schema["properties"].items():
            for value, served_ in bounds_of(inner, parts):
                yield {**base, name: value}, served_
        for name in schema.get("required", ()):
            yield {key: value for key, value in base.items() if key != name}, False


def sample(schema, parts):
    """The smallest value of a schema."""
    schema = resolved(schema, parts)
    if "enum" in schema or "const" in schema:
        return "user" if "user" in schema.get("enum", ()) else schema.get("const", schema.get("enum", [0])[0])
    if schema.get("type") == "string":
        return "x" * schema.get("minLength", 1)
    if schema.get("type") == "object":
        return {name: sample(schema["properties"][name], parts) for name in schema.get("required", ())}
    raise AssertionError(f"no sample of {schema}")


async def test_each_bound_of_the_schema_holds_on_both_sides():
    async with served(lambda request: "ok") as it:
        document = json.loads((await it.get("/openapi.json"))[2])
        parts = document["components"]["schemas"]
        body = parts["ChatBody"]
        tried = {}
        for name, schema in body["properties"].items():
            for value, is_served in bounds_of(schema, parts):
                beside = {"tools": [LOOK, NAMED_X]} if name == "tool_choice" else {}
                status, answer = await it.post(json.dumps({"messages": HI, **beside, name: value}))
                tried.setdefault(name, set()).add(status)
                if is_served and name == "messages" and status == 400:
                    # An order that no schema can say, or a text that is as long as it may be.
                    assert answer["error"]["code"] in ("invalid_messages", "context_length_exceeded")
                    continue
                if is_served and status == 400 and answer["error"]["code"] == "unsupported_constraint":
                    continue  # a script follows no grammar
                assert status == (200 if is_served else 400), (name, value, answer)
                if not is_served:
                    assert (answer["error"]["code"], answer["error"]["param"]) == ("invalid_request", name)
        bounded = set(ChatBody.model_fields) - {"model", "stream", "logprobs", "parallel_tool_calls", "store"}
        assert set(tried) == bounded - {"stream_options"}
        assert all(statuses == {200, 400} for statuses in tried.values()), tried


@pytest.mark.parametrize(
    ("path", "body", "least"),
    [
        ("/v1/chat/completions", "ChatBody", {"messages": HI}),
        ("/v1/responses", "ResponseBody", {"input": "hi"}),
        ("/v1/messages", "MessagesBody", {"messages": HI, "model": "mine", "max_tokens": 9}),
        ("/v1/messages/count_tokens", "CountBody", {"messages": HI, "model": "mine"}),
    ],
)
async def test_each_type_of_the_schema_is_checked(path, body, least):
    wrong = {"string": 5, "integer": "5", "number": "5", "boolean": "yes", "array": 5, "object": 5}
    async with served(lambda request: "ok") as it:
        parts = json.loads((await it.get("/openapi.json"))[2])["components"]["schemas"]
        for name, schema in parts[body]["properties"].items():
            kinds = [resolved(branch, parts) for branch in schema.get("anyOf", [schema])]
            value = next(wrong[kind["type"]] for kind in kinds if kind.get("type") in wrong)
            status, answer = await it.post(json.dumps({**least, name: value}), path)
            assert status == 400
            assert answer["error"]["message"].startswith(name)
            assert answer["error"].get("param", name) == name
            if "anyOf" in schema and name not in least:  # null counts as absent
                assert (await it.post(json.dumps({**least, name: None}), path))[0] == 200


async def test_answers_are_as_the_schema_says(tmp_path):
    async with served(lambda request: "Hm. " + CALL % "K1", api_keys=["secret"]) as it:
        headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
        document = json.loads((await it.get("/openapi.json", **headers))[2])
        tool = {"messages": HI, "tools": [LOOK], "n": 2, "logprobs": True}
        function, custom = {"type": "function", "name": "look"}, {"name": "look", "input_schema": {}}
        talk = {"model": "mine", "max_tokens": 400, "messages": HI}
        requests = [
            ("post", "/v1/chat/completions", json.dumps({"messages": HI}), headers, 200),
            ("post", "/v1/chat/completions", json.dumps(tool), headers, 200),
            ("post", "/v1/chat/completions", b"{", headers, 400),
            ("post", "/v1/chat/completions", b"{}", {"Authorization": "Bearer secret"}, 415),
            ("post", "/v1/chat/completions", b"{}", {"Content-Type": "application/json"}, 401),
            ("post", "/v1/chat/completions", json.dumps({"messages": HI, "model": "x"}), headers, 404),
            ("post", "/v1/responses", json.dumps({"input": "hi"}), headers, 200),
            ("post", "/v1/responses", json.dumps({"input": "hi", "tools": [function]}), headers, 200),
            ("post", "/v1/responses", b"{", headers, 400),
            ("post", "/v1/responses", b"{}", {"Content-Type": "application/json"}, 401),
            ("post", "/v1/responses", json.dumps({"input": "hi", "model": "x"}), headers, 404),
            ("post", "/v1/messages", json.dumps(talk), headers, 200),
            ("post", "/v1/messages", json.dumps({**talk, "tools": [custom]}), headers, 200),
            ("post", "/v1/messages", b"{", headers, 400),
            ("post", "/v1/messages", b"{}", {"Authorization": "Bearer secret"}, 415),
            ("post", "/v1/messages", b"{}", {"Content-Type": "application/json"}, 401),
            ("post", "/v1/messages", json.dumps({**talk, "model": "x"}), headers, 404),
            (
                "post",
                "/v1/messages/count_tokens",
                json.dumps({"model": "mine", "messages": HI}),
                headers,
                200,
            ),
            ("get", "/v1/models", None, headers, 200),
            ("get", "/v1/models/{id}", None, headers, 404),
            ("get", "/health", None, {}, 200),
            ("get", "/ready", None, {}, 200),
            ("get", "/version", None, headers, 200),
            ("get", "/version", None, {**headers, "Host": "evil.example"}, 403),
            ("get", "/openapi.json", None, headers, 200),
        ]
        for method, path, body, options, status in requests:
            async with it.http.request(method, it.root + path, data=body, headers=options) as answer:
                assert answer.status == status, (path, await answer.text())
                content = document["paths"][path][method]["responses"][str(status)]["content"]
                jsonschema.validate(await answer.json(), content["application/json"]["schema"])
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            everything = document["paths"][path]["post"]["responses"]
            assert set(everything) == {
                *("200", "400", "401", "403", "404", "408", "413", "415", "429", "500", "503")
            }
