"""Deltas against `renderers`, a library that writes every model's format by hand: `make test-renderers`.

Its `bridge_to_next_turn` with all thoughts retained does what `history: keep` does: it appends to the tokens
that were sampled. Its renderers check that a tokenizer has their model's tokens, so those of its models
whose template is among TRL's are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from chat_templates import trl_tokenizer
from template_talks import Exchange, end_of, fitting, opening_of, tools_of, written

from stateset_agents import Message
from stateset_agents.core.chat.template import JinjaTemplate
from stateset_agents.types.messages import ToolCall

pytestmark = pytest.mark.renderers

FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    # TRL's template: the renderer, its settings, tokens that it wants and the template does not name
    "deepseek_r1_distill": ("deepseek-r1", {}, ()),
    "gemma4": ("gemma4", {}, ("<|image>", "<image|>")),
    "gemma4_v5": ("gemma4", {}, ("<|image>", "<image|>")),
    "glm4moe": ("glm-4.5", {}, ()),
    "llama3_1": ("llama-3", {}, ()),
    "llama3_2": ("llama-3", {}, ()),
    "nemotron_3_nano": ("nemotron-3", {}, ()),
    "nemotron_3_super": ("nemotron-3", {}, ()),
    "nemotron_3_ultra": ("nemotron-3-ultra", {}, ()),
    "nemotron_3_5_lightning": ("nemotron-3.5", {}, ()),
    "qwen3": ("qwen3", {}, ()),
    "qwen3_vl": ("qwen3-vl", {}, ("</think>",)),
    "qwen3_5_think": ("qwen3.5", {"enable_thinking": True}, ()),
    "qwen3_5_nothink": ("qwen3.5", {"enable_thinking": False}, ()),
    "qwen3_6": ("qwen3.6", {}, ()),
    "qwen3_8": ("qwen3.8", {}, ()),
}
"""Not compared: gpt-oss, for which the library downloads a vocabulary; and DeepSeek V3, whose template in TRL
opens a thought that the library's does not know. A control token in a user's words is text to us and a
control token to the library; the words here have none."""


def said(content: str, **fields: Any) -> Message:
    return Message(role="assistant", content=content, **fields)


LOOK = ToolCall(name="look", arguments={"at": "K27"}, id="call_0_0")
AGAIN = ToolCall(name="look", arguments={"at": "K28", "times": 2}, id="call_0_1")
EXCHANGES = {
    "user after a thought": Exchange(said("Which one?", reasoning="Hm."), ("K27: é ✓\n",)),
    "user after words": Exchange(said("Which one?"), ("K27",)),
    "result": Exchange(said("", reasoning="Hm.", tool_calls=(LOOK,)), ("It left.",)),
    "two results": Exchange(said("", tool_calls=(LOOK, AGAIN)), ("here", "é ✓\n{}")),
}
compared: defaultdict[str, set[str]] = defaultdict(set)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_delta_is_what_the_family_s_renderer_appends(name: str) -> None:
    from renderers import config_from_name, create_renderer

    kind, settings, tokens = FAMILIES[name]
    tokenizer = trl_tokenizer(name)
    tokenizer.hf.add_tokens(list(tokens), special_tokens=True)
    template = JinjaTemplate(tokenizer)
    config = type(config_from_name(kind))(thinking_retention="all", **settings)
    renderer = create_renderer(tokenizer.hf, config)
    tools = tools_of(name)
    prompt = template.prompt(opening_of(name), tools)
    for answer, exchange in EXCHANGES.items():
        if exchange.reply.tool_calls and not tools:
            continue
        (fitted,) = fitting(name, exchange)
        reply = fitted.reply
        ids = tokenizer.encode_markup(written(name, reply) + end_of(name, reply))
        following = answers(reply, fitted.heard)
        bridged = renderer.bridge_to_next_turn(
            prompt,
            ids,
            [as_dict(message) for message in following],
            tools=[tool["function"] for tool in tools],
        )
        delta = template.delta(following, reply.tool_calls, end=ids[-1])
        assert list(bridged.token_ids) == [*prompt, *ids, *delta], answer
        compared[name].add(answer)
    assert compared[name]


def test_enough_was_compared() -> None:
    for name, kinds in compared.items():
        print(f"{name}: {', '.join(kinds)}")
    assert len({FAMILIES[name][0] for name in compared}) >= 4
    assert sum({"user after words", "result"} <= kinds for kinds in compared.values()) >= 4


def answers(reply: Message, heard: Sequence[str]) -> list[Message]:
    if not reply.tool_calls:
        return [Message(role="user", content=text) for text in heard]
    return [
        Message(role="tool", content=text, name=call.name, tool_call_id=call.id)
        for call, text in zip(reply.tool_calls, heard, strict=True)
    ]


def as_dict(message: Message) -> dict[str, Any]:
    data = {"role": message.role, "content": message.content}
    return data if message.role == "user" else {**data, "tool_call_id": message.tool_call_id, "name": "look"}
