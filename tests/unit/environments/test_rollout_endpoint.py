"""The endpoint of conversations in training, asked by the real openai client in the same event loop."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import aiohttp
import openai
import pytest

from stateset_agents.backends.dialects.request import ApiError
from stateset_agents.core.chat.replies.parsing import parse_reply
from stateset_agents.core.environment import ReplyLimits
from stateset_agents.environments.programs.rollout_endpoint import RolloutServer
from stateset_agents.types.messages import Completion, Message

HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
JSON = {"Content-Type": "application/json"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def said(text, *, tokens=3, finish="stop"):
    """A reply as a backend samples it."""
    return Completion(
        message=parse_reply(text),
        prompt_ids=(1, 2, 3, 4),
        token_ids=tuple(range(tokens)),
        logprobs=(-1.0,) * tokens,
        finish_reason=finish,
    )


class Talk:
    """A rollout with its client: `say` asks, and answers what was asked."""

    def __init__(self, rollout, client):
        self.rollout, self.client = rollout, client

    def ask(self, messages, **fields):
        return asyncio.ensure_future(
            self.client.chat.completions.create(model="gpt-any", messages=messages, **fields)
        )

    async def say(self, messages, reply, **fields):
        """What the agent is asked, and what the client gets."""
        answer = self.ask(messages, **fields)
        async with asyncio.timeout(20):
            asked = await self.rollout.next()
            self.rollout.answer(reply.message, reply)
            return asked, await answer

    async def refused(self, messages, **fields):
        async with asyncio.timeout(20):
            with pytest.raises(openai.BadRequestError) as caught:
                await self.ask(messages, **fields)
        return caught.value


@asynccontextmanager
async def talking(*, ignore=(), untrained=(), **client):
    server = RolloutServer(ignore=ignore, untrained=untrained)
    rollout = await server.open()
    try:
        async with openai.AsyncOpenAI(base_url=rollout.url, api_key="none", **client) as one:
            yield Talk(rollout, one)
    finally:
        await server.close(rollout)
        assert not server.is_listening


async def test_requests_that_go_on_are_one_conversation():
    async with talking() as talk:
        asked, answer = await talk.say(HELLO, said("Hello!", tokens=5))
        assert asked.messages == (
            Message(role="system", content="be brief"),
            Message(role="user", content="hi"),
        )
        choice = answer.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Hello!", "stop")
        assert (answer.model, answer.object) == ("gpt-any", "chat.completion")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)
        more = [*HELLO, choice.message, {"role": "user", "content": "and now?"}]
        asked, answer = await talk.say(more, said("Bye", finish="length"))
        assert asked.messages == (Message(role="user", content="and now?"),)
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(("untrained", "missing"), [(["gpt-any"], ""), (["gpt-any", "gaurd"], "gaurd")])
async def test_an_untrained_model_that_no_request_names_is_told(caplog, untrained, missing):
    with caplog.at_level(logging.WARNING, "stateset_agents"):
        async with talking(untrained=untrained) as talk:
            await talk.say(HELLO, said("Hello!"))
    told = [record.getMessage() for record in caplog.records]
    line = f"untrained: no request has named {missing} yet, only gpt-any"
    assert [one.partition(": a sub-agent")[0] for one in told] == ([line] if missing else [])


async def test_tool_calls_go_out_and_their_results_come_back_with_the_tool_s_name():
    async with talking() as talk:
        call = '<tool_call>{"name": "look", "arguments": {"order": "K27", "n": 1.5}}</tool_call>'
        asked, answer = await talk.say(HELLO, said(call), tools=[LOOK])
        assert asked.tools == (LOOK,)
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls[0].function.arguments == '{"order": "K27", "n": 1.5}'
        result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "shipped"}
        asked, _ = await talk.say([*HELLO, choice.message, result], said("Shipped."), tools=[LOOK])
        assert asked.messages == (
            Message(role="tool", content="shipped", tool_call_id="call_0_0", name="look"),
        )


async def test_a_client_may_give_calls_ids_of_its_own():
    async with talking() as talk:
        call = '<tool_call>{"name": "look", "arguments": {"n": 3.0}}</tool_call>'
        await talk.say(HELLO, said(call), tools=[LOOK])
        mine = {"id": "mine", "type": "function", "function": {"name": "look", "arguments": '{"n": 3}'}}
        back = {"role": "assistant", "content": None, "tool_calls": [mine]}
        result = {"role": "tool", "tool_call_id": "mine", "content": "shipped"}
        asked, _ = await talk.say([*HELLO, back, result], said("Shipped."), tools=[LOOK])
        assert [message.tool_call_id for message in asked.messages] == ["call_0_0"]


async def test_calls_of_several_rows_have_ids_of_their_own_and_results_find_them():
    async with talking() as talk:
        call = said('<tool_call>{"name": "look", "arguments": {}}</tool_call>')
        other = [{"role": "user", "content": "you are another agent"}]
        ids = []
        for messages in (HELLO, other):
            _, answer = await talk.say(messages, call, tools=[LOOK])
            ids.append(answer.choices[0].message.tool_calls[0].id)
        assert ids == ["call_0_0", "call_1_0"]  # OpenAI's Agents SDK ends a run in which one occurs twice
        result = {"role": "tool", "tool_call_id": ids[1], "content": "shipped"}
        asked, _ = await talk.say([*other, answer.choices[0].message, result], said("ok"), tools=[LOOK])
        assert [message.tool_call_id for message in asked.messages] == ["call_0_0"]  # as it was sampled


async def test_a_call_that_cannot_be_read_is_words_as_it_was_written():
    async with talking() as talk:
        text = "Wait. <tool_call>{broken</tool_call>"
        _, answer = await talk.say(HELLO, said(text), tools=[LOOK])
        message = answer.choices[0].message
        assert message.tool_calls is None
        assert message.content == "Wait.\n<tool_call>{broken</tool_call>"
        more = [*HELLO, message, {"role": "user", "content": "what?"}]
        asked, _ = await talk.say(more, said("Sorry."), tools=[LOOK])
        assert asked.messages == (Message(role="user", content="what?"),)


async def test_a_streamed_answer_adds_up_to_the_same():
    strict = {**LOOK, "function": {**LOOK["function"], "strict": True}}  # openai 2 streams no other
    async with talking() as talk:
        reply = said('Let me see. <tool_call>{"name": "look", "arguments": {"a": "é"}}</tool_call>', tokens=7)

        async def streamed():
            options = {"tools": [strict], "stream_options": {"include_usage": True}}
            async with talk.client.chat.completions.stream(model="m", messages=HELLO, **options) as events:
                return await events.get_final_completion()

        answer = asyncio.ensure_future(streamed())
        async with asyncio.timeout(20):
            await talk.rollout.next()
            talk.rollout.answer(reply.message, reply)
            whole = await answer
        choice = whole.choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert choice.message.tool_calls[0].function.arguments == '{"a": "\\u00e9"}'
        assert whole.usage.completion_tokens == 7
        back = {**choice.message.to_dict(), "tool_calls": [c.to_dict() for c in choice.message.tool_calls]}
        result = {"role": "tool", "tool_call_id": "call_0_0", "content": "x"}
        asked, _ = await talk.say([*HELLO, back, result], said("ok"), tools=[strict])
        assert asked.messages[0].content == "x"


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"n": 2}, "invalid_request", "n cannot be 2 in training: leave it out"),
        ({"logprobs": True}, "invalid_request", "logprobs cannot be true in training"),
        ({"tool_choice": "required"}, "invalid_tool_choice", "tools are missing"),
        ({"tool_choice": "always"}, "invalid_request", "tool_choice"),
        ({"response_format": {"type": "xml"}}, "invalid_request", "response_format"),
        ({"logit_bias": {"5": 1}}, "invalid_request", "logit_bias is not served here"),
        ({"tools": [{"name": "look"}]}, "invalid_request", "tools[0].function is missing"),
        ({"messages": []}, "invalid_request", "at least 1 item"),
        (
            {"messages": [{"role": "customer", "content": "hi"}]},
            "invalid_request",
            "messages[0].role must be 'system'",
        ),
        ({"messages": [{"role": "assistant", "content": "hi"}]}, "invalid_messages", "the assistant's own"),
    ],
)
async def test_what_cannot_be_served_is_named_with_the_mend(fields, code, words):
    async with talking() as talk:
        error = await talk.refused(**{"messages": HELLO, **fields})
        assert error.code == code
        assert words in error.message
        assert error.type == "invalid_request_error"
        await talk.say(HELLO, said("the conversation is none the worse"))


async def test_a_request_bounds_its_reply_and_training_chooses_how_it_is_sampled(caplog):
    fields = {"max_tokens": 50, "max_completion_tokens": 5, "stop": "END", "temperature": 0.2, "seed": 3}
    with caplog.at_level(logging.WARNING, "stateset_agents"):
        async with talking() as talk:
            asked, _ = await talk.say(HELLO, said("fine"), **fields)
            assert asked.limits == ReplyLimits(
                max_new_tokens=5, stop=("END",), with_reasoning=True, is_requested=True
            )
            asked, _ = await talk.say(HELLO, said("fine"), stop=["A", "B"], temperature=0.3)
            assert asked.limits == ReplyLimits(stop=("A", "B"), with_reasoning=True, is_requested=True)
    told = [record.getMessage().split(" is passed")[0] for record in caplog.records]
    assert told.count("temperature of a program's requests") <= 1  # once per process


async def test_fields_that_are_to_be_ignored_are():
    async with talking(ignore=["temperature", "max_tokens", "logit_bias"]) as talk:
        fields = {"temperature": 0.2, "max_tokens": 5, "logit_bias": {"5": 1}}
        asked, answer = await talk.say(HELLO, said("fine"), **fields)
        assert answer.choices[0].message.content == "fine"
        assert asked.limits == ReplyLimits(with_reasoning=True, is_requested=True)


REPLY = {"role": "assistant", "content": "Hello!"}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "fresh"),
    [
        ([{"role": "system", "content": "be long"}, *HELLO[1:]], 2),
        (HELLO, 2),
        ([*HELLO, {"role": "assistant", "content": "Better."}, USER], 4),
        ([*HELLO, REPLY, USER, {"role": "assistant", "content": "made up"}, USER], 3),
        ([*HELLO, {**REPLY, "reasoning_content": "a thought"}, USER], 4),
        ([*HELLO, {**REPLY, "reasoning_content": "", "content": "Hello!\n"}, USER], 1),
    ],
    ids=["another beginning", "again", "another reply", "a reply made up", "another thought", "white space"],
)
async def test_a_request_goes_on_from_what_it_repeats(messages, fresh):
    async with talking() as talk:
        await talk.say(HELLO, said("Hello!"))
        asked, _ = await talk.say(messages, said("yes"))
        assert len(asked.messages) == fresh
        told = [message.content.strip() for message in asked.conversation]
        assert told == [message["content"].strip() for message in messages]
        again, _ = await talk.say([*HELLO, REPLY, USER], said("the first one is still there"))
        assert len(again.messages) == 1


async def test_a_reply_stands_in_the_conversation_as_it_was_sampled():
    async with talking() as talk:
        text = "Wait. <tool_call>{broken</tool_call>"
        reply = said(text)
        _, answer = await talk.say(HELLO, reply, tools=[LOOK])
        asked, _ = await talk.say([*HELLO, answer.choices[0].message, USER], said("Sorry."), tools=[LOOK])
        assert asked.conversation[2] is reply.message


async def test_tools_may_change():
    async with talking() as talk:
        _, answer = await talk.say(HELLO, said("Hello!"), tools=[LOOK])
        asked, _ = await talk.say([*HELLO, answer.choices[0].message, USER], said("ok"))
        assert asked.tools == ()
        assert len(asked.messages) == 1


async def test_requests_at_the_same_time_are_answered_one_after_the_other():
    async with talking() as talk:
        answers = [talk.ask([{"role": "user", "content": name}]) for name in "abc"]
        for _ in answers:
            asked = await talk.rollout.next()
            assert talk.rollout.is_waiting
            talk.rollout.answer(Message(role="assistant", content=asked.messages[0].content.upper()))
        assert [(await answer).choices[0].message.content for answer in answers] == ["A", "B", "C"]
        assert not talk.rollout.is_waiting


async def test_a_client_that_asks_again_gets_the_one_answer():
    async with talking(timeout=0.3, max_retries=8) as talk:
        answer = talk.ask(HELLO)
        await talk.rollout.next()
        await asyncio.sleep(0.6)  # it has given up at least once
        talk.rollout.answer(Message(role="assistant", content="the one"))
        async with asyncio.timeout(20):
            assert (await answer).choices[0].message.content == "the one"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(talk.rollout.next(), 0.05)


async def test_of_two_that_ask_the_same_each_gets_its_own_answer_though_one_asks_again():
    async with talking(max_retries=8) as talk:
        hasty = talk.client.with_options(timeout=0.3).chat.completions
        first = asyncio.ensure_future(hasty.create(model="m", messages=HELLO))
        await talk.rollout.next()
        second = talk.ask(HELLO)
        await asyncio.sleep(1.2)  # the first has given up and asks again
        for words in ("one", "two"):
            talk.rollout.answer(Message(role="assistant", content=words))
            if words == "one":
                async with asyncio.timeout(20):
                    await talk.rollout.next()
        async with asyncio.timeout(20):
            answers = [await first, await second]
        assert [answer.choices[0].message.content for answer in answers] == ["one", "two"]


async def test_the_end_refuses_who_waits_and_who_comes_later():
    async with talking() as talk:
        first = talk.ask(HELLO)
        await talk.rollout.next()
        talk.rollout.end(ApiError("the context is full", code="context_length_exceeded"))
        with pytest.raises(openai.BadRequestError, match="the context is full") as caught:
            await first
        assert caught.value.code == "context_length_exceeded"
        assert (await talk.refused(HELLO)).code == "context_length_exceeded"


async def test_rollouts_are_apart_and_closed_ones_are_not_found():
    server = RolloutServer()
    one, other = await server.open(), await server.open()
    async with openai.AsyncOpenAI(base_url=one.url, api_key="none") as client:
        answer = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HELLO))
        await one.next()
        assert not other.is_waiting
        await server.close(one)
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await answer
        with pytest.raises(openai.NotFoundError, match="OPENAI_BASE_URL") as caught:
            await client.chat.completions.create(model="m", messages=HELLO)
        assert caught.value.code == "no_such_rollout"
        assert server.is_listening
        await server.close(other)
    assert not server.is_listening


async def test_what_is_not_served_is_said_in_openai_s_format():
    async with talking() as talk:
        assert [model.id async for model in talk.client.models.list()] == ["policy"]
        with pytest.raises(openai.NotFoundError, match=r"POST /v1/embeddings: .*POST /v1/chat/completions"):
            await talk.client.embeddings.create(model="m", input="hi")
        async with aiohttp.ClientSession() as session:
            async with session.post(
                f"{talk.rollout.url}/chat/completions", data=b"{", headers=JSON
            ) as answer:
                assert answer.status == 400
                assert "not JSON" in (await answer.json())["error"]["message"]
            async with session.post(f"{talk.rollout.url}/chat/completions", json=[1]) as answer:
                assert "must be a JSON object" in (await answer.json())["error"]["message"]


# --- the other dialects ---

ORDER = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
CALL = '<think>Hm.</think>Wait. <tool_call>{"name": "look", "arguments": {"order": "K27"}}</tool_call>'


class Chat:
    """What a program asks in its dialect: a question, then the result of the call that answers it."""

    path = "chat/completions"
    tools: ClassVar[Any] = [{"type": "function", "function": {"name": "look", "parameters": ORDER}}]
    required: ClassVar[Any] = {"tool_choice": "required"}
    named: ClassVar[Any] = {"tool_choice": {"type": "function", "function": {"name": "look"}}}
    schema: ClassVar[Any] = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ORDER}}
    }
    single: ClassVar[Any] = {"parallel_tool_calls": False}
    least: ClassVar[Any] = {"max_tokens": 5}

    def first(self):
        return {"messages": HELLO, "tools": self.tools}

    def second(self, answer):
        reply = answer["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "shipped"}
        return {"messages": [*HELLO, reply, result, USER], "tools": self.tools}


class Items(Chat):
    path = "responses"
    tools: ClassVar[Any] = [{"type": "function", "name": "look", "parameters": ORDER, "strict": True}]
    named: ClassVar[Any] = {"tool_choice": {"type": "function", "name": "look"}}
    schema: ClassVar[Any] = {"text": {"format": {"type": "json_schema", "name": "x", "schema": ORDER}}}
    least: ClassVar[Any] = {"max_output_tokens": 5}

    def first(self):
        return {"instructions": "be brief", "input": "hi", "tools": self.tools}

    def results(self, answer):
        (call,) = (item for item in answer["output"] if item["type"] == "function_call")
        return [{"type": "function_call_output", "call_id": call["call_id"], "output": "shipped"}, USER]

    def second(self, answer):
        items = [{"role": "user", "content": "hi"}, *answer["output"], *self.results(answer)]
        return {**self.first(), "input": items}


class ItemsById(Items):
    def second(self, answer):
        return {**self.first(), "input": self.results(answer), "previous_response_id": answer["id"]}


class Blocks(Chat):
    path = "messages"
    tools: ClassVar[Any] = [{"name": "look", "input_schema": ORDER}]
    required: ClassVar[Any] = {"tool_choice": {"type": "any"}}
    named: ClassVar[Any] = {"tool_choice": {"type": "tool", "name": "look"}}
    schema: ClassVar[Any] = {"output_config": {"format": {"type": "json_schema", "schema": ORDER}}}
    single: ClassVar[Any] = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}

    def first(self):
        head = {"model": "m", "max_tokens": 5, "system": "be brief", "tools": self.tools}
        return {**head, "messages": HELLO[1:]}

    def second(self, answer):
        call = answer["content"][-1]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "shipped"}
        blocks = {"role": "user", "content": [result, {"type": "text", "text": "x"}]}
        return {
            **self.first(),
            "messages": [*HELLO[1:], {"role": "assistant", "content": answer["content"]}, blocks],
        }


SPEAKERS = pytest.mark.parametrize("speaker", [Chat(), Items(), ItemsById(), Blocks()])


class Post:
    """A rollout with a client that posts bodies."""

    def __init__(self, rollout, http):
        self.rollout, self.http = rollout, http

    async def ask(self, speaker, body, **headers):
        async with self.http.post(f"{self.rollout.url}/{speaker.path}", json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def say(self, speaker, body, reply):
        """What the agent is asked, and what the client gets."""
        answer = asyncio.ensure_future(self.ask(speaker, body))
        async with asyncio.timeout(20):
            asked = await self.rollout.next()
            self.rollout.answer(reply.message, reply)
            status, data = await answer
        assert status == 200, data
        return asked, data


@asynccontextmanager
async def posting():
    server = RolloutServer()
    rollout = await server.open()
    try:
        async with aiohttp.ClientSession() as http:
            yield Post(rollout, http)
    finally:
        await server.close(rollout)


@SPEAKERS
async def test_what_is_asked_is_the_same_in_every_dialect(speaker):
    async with posting() as post:
        asked, answer = await post.say(speaker, speaker.first(), said(CALL))
        assert [(m.role, m.content) for m in asked.conversation] == [("system", "be brief"), ("user", "hi")]
        assert asked.tools == ({"type": "function", "function": {"name": "look", "parameters": ORDER}},)
        asked, _ = await post.say(speaker, speaker.second(answer), said("Shipped."))
        result = Message(role="tool", content="shipped", tool_call_id="call_0_0", name="look")
        assert asked.messages == (result, Message(role="user", content="x"))
        assert asked.conversation[2] == said(CALL).message  # as it was sampled, its thought included


@SPEAKERS
async def test_what_a_request_wants_of_its_reply_is_the_same_in_every_dialect(speaker):
    def limits(**fields):
        return ReplyLimits(max_new_tokens=5, with_reasoning=True, is_requested=True, **fields)

    async with posting() as post:
        first = {**speaker.first(), **speaker.least}
        for fields, wanted in (
            ({}, limits()),
            (speaker.required, limits(tool_choice="required")),
            (speaker.named, limits(tool_choice="look")),
            (speaker.schema, limits(answer_schema=ORDER)),
        ):
            asked, _ = await post.say(speaker, {**first, **fields}, said("ok"))
            assert asked.limits == wanted
        status, data = await post.ask(speaker, {**first, **speaker.single})
        assert (status, "parallel_tool_calls cannot be false in training" in str(data)) == (400, True)


async def test_stop_strings_end_words_and_no_call_that_has_to_come():
    async with talking() as talk:  # smolagents' ToolCallingAgent sends both
        for choice, stop in (("auto", ("Observation:",)), ("required", ())):
            fields = {"tools": [LOOK], "tool_choice": choice, "stop": "Observation:"}
            asked, _ = await talk.say(HELLO, said("ok"), **fields)
            assert asked.limits.stop == stop


@SPEAKERS
async def test_a_retry_gets_the_one_answer_in_every_dialect(speaker):
    async with posting() as post:
        _, answer = await post.say(speaker, speaker.first(), said("the one"))
        status, again = await post.ask(speaker, speaker.first(), **{"x-stainless-retry-count": "1"})
        assert (status, again["id"]) == (200, answer["id"])


@SPEAKERS
async def test_an_end_is_said_in_every_dialect(speaker):
    async with posting() as post:
        post.rollout.end(ApiError("the agent has had its 2 turns", code="max_turns"))
        status, data = await post.ask(speaker, speaker.first())
        assert (status, data["error"]["message"]) == (400, "the agent has had its 2 turns")
        if speaker.path == "messages":
            assert (data["type"], data["error"]["type"]) == ("error", "invalid_request_error")
        else:
            assert data["error"]["code"] == "max_turns"


async def test_responses_of_one_rollout_are_not_there_in_another():
    server = RolloutServer()
    one, other = await server.open(), await server.open()
    async with aiohttp.ClientSession() as http:
        _, answer = await Post(one, http).say(Items(), Items().first(), said("ok"))
        goes_on = {"input": "and?", "previous_response_id": answer["id"]}
        status, data = await Post(other, http).ask(Items(), goes_on)
        assert (status, data["error"]["code"]) == (404, "previous_response_not_found")
        await Post(one, http).say(Items(), goes_on, said("ok"))
    for rollout in (one, other):
        await server.close(rollout)
