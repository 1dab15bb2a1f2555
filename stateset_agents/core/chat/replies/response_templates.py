"""How models write thoughts and tool calls, as response templates of transformers; for parsing.py.

Each is a `response_template` (https://huggingface.co/docs/transformers/main/en/chat_response_parsing) without
the anchor at which a message starts, since the end of the prompt is known here. A field named `frame` is
dropped. Three readers of contents are our own (call_values.py): `python-calls`, `bare-keys` and `tags`. A
call is complete without its closing delimiter where that may be empty: the token that ends the turn closes
it. What is optional at the end of an opening delimiter must not reach past the closing one: while a reply is
sampled the shorter match decides.

A reply of nothing but one delimiter, or a part of it, must not take time with the square of its length. So no
delimiter begins with white space of any length, what is repeated in one stops where the next may begin (`to=`
has a name without `=` behind it), and what gives nothing back is possessive (`++`).

Most patterns are those of TRL (trl/chat_template_utils.py, Copyright 2020-2026 The HuggingFace Team, Apache
License 2.0, https://www.apache.org/licenses/LICENSE-2.0), changed in these ways: text between delimiters is
kept as it stands, a call whose head is broken is a call nevertheless, and the token that ended the turn is
not there. DeepSeek, Mistral and ATEM are our own.
"""

from __future__ import annotations

from typing import Any

_THINK = {"open": "<think>", "close_pattern": r"</think>\s*"}
_NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

_QWEN3_5 = {
    "reasoning_content": _THINK,
    "tool_calls": {
        "open_pattern": r"<tool_call>(?:\s*<function=(?P<name>[^\s<>]+)>)?",
        "close": "</tool_call>",
        "repeats": True,
        "content": "tags",
        "content_args": {
            "opens": "<parameter=",
            "key": r"[^>\n]+",
            "divides": r">\n?",
            "closes": r"\n?</parameter>(?=\s*(?:<parameter=|</function>|$))",
        },
        "transform": _NAMED,
    },
    "content": {},
}
"""Qwen 3.5 and later, Nemotron 3."""

_GLM = {
    "reasoning_content": _THINK,
    "tool_calls": {
        "open_pattern": r"<tool_call>\s*(?P<name>[^\s<{]+)?",
        "close": "</tool_call>",
        "repeats": True,
        "content": "tags",
        "content_args": {
            "opens": "<arg_key>",
            "key": r"(?:(?!</?arg_key>).)*",
            "divides": r"</arg_key>\s*<arg_value>",
            "closes": r"</arg_value>(?=\s*(?:<arg_key>|$))",
        },
        "transform": _NAMED,
    },
    "content": {},
}

_LLAMA3 = {
    "tool_calls": {
        "open_pattern": r'(?=\{\s*(?:"type":\s*"function",\s*)?"name":\s*"[^"]*",\s*'
        r'"(?:parameters|arguments|args)":)',
        "close_pattern": r"\Z",
        "repeats": True,
        "content": "json",
        "transform": {
            "type": "function",
            "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
        },
    },
    "content": {},
}
"""The call is the end of the reply, and nothing but its keys tells it from words."""

_TO = r"(?:functions\.)?(?P<name>[^\s<=]++)"
_MESSAGE = r"[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>"
_HARMONY = {
    "thinking": {
        "open": "<|channel|>analysis<|message|>",
        "close_pattern": r"<\|end\|>|(?=<\|start\|>|<\|channel\|>)",
    },
    "tool_calls": {
        # Two alternatives with an end each: one end for both is sought from every place in a text without it.
        "open_pattern": rf" ?to={_TO}\s*+<\|channel\|>\s*+\w++{_MESSAGE}"
        rf"|<\|channel\|>\s*+\w++\s++to={_TO}{_MESSAGE}",
        "close_pattern": r"<\|call\|>|<\|end\|>|\Z",
        "repeats": True,
        "content": "json",
        "transform": _NAMED,
    },
    "frame": {
        "open_pattern": rf"<\|channel\|>{_MESSAGE}"
        r"|<\|start\|>\w*|<\|end\|>|<\|return\|>",
        "close_pattern": "",
    },
    "content": {},
}
"""gpt-oss. Words in the channel `commentary` are for the user, as those in `final`."""

_ATEM = {
    "thinking": {"open_pattern": r" ?to=self<\|message\|>", "close_pattern": r"<\|eom\|>|(?=<\|start\|>)"},
    "tool_calls": {
        "open_pattern": r'<atem:invoke(?: name="(?P<name>[^"<>]*)">)?',
        "close": "</atem:invoke>",
        "repeats": True,
        "content": "tags",
        "content_args": {
            "opens": '<atem:parameter name="',
            "key": r'[^"]*',
            "divides": '">',
            "closes": r"</atem:parameter>(?=\s*(?:<atem:parameter|$))",
        },
        "transform": _NAMED,
    },
    "frame": {
        "open_pattern": r"<\|start\|>\w*| ?to=[^\s<=]+<\|message\|>|</?atem:function_calls>\s*|<\|eom\|>",
        "close_pattern": "",
    },
    "content": {},
}

_GEMMA4 = {
    "reasoning_content": {"open": "<|channel>thought\n", "close_pattern": r"<channel\|>\s*"},
    "tool_calls": {
        "open_pattern": r"<\|tool_call>(?:call:(?P<name>[^\s{<]+))?",
        "close": "<tool_call|>",
        "repeats": True,
        "content": "bare-keys",
        "transform": _NAMED,
    },
    "frame": {"open": "<|tool_response>", "close_pattern": ""},
    "content": {},
}

_LFM2: dict[str, Any] = {
    "thinking": _THINK,
    "tool_calls": {
        "open": "<|tool_call_start|>",
        "close": "<|tool_call_end|>",
        "repeats": True,
        "content": "python-calls",
    },
    "content": {},
}

_LFM2_RAW = {**_LFM2, "tool_calls": {**_LFM2["tool_calls"], "content_args": {"escapes": False}}}
"""LFM2.5 and its second version write texts between quotes as they are."""

_DEEPSEEK = {
    "reasoning_content": _THINK,
    "tool_calls": {
        "open_pattern": r"<\uff5ctool▁call▁begin\uff5c>(?:function<\uff5ctool▁sep\uff5c>)?"
        r"(?:(?P<name>[^\n<`{]++)(?:<\uff5ctool▁sep\uff5c>|\s*```json\s))?",
        "close_pattern": r"(?:```\s*)?<\uff5ctool▁call▁end\uff5c>",
        "repeats": True,
        "content": "json",
        "transform": _NAMED,
    },
    "frame": {"open_pattern": r"<\uff5ctool▁calls▁(?:begin|end)\uff5c>", "close_pattern": ""},
    "content": {},
}
"""V3 and R1 write a call's type before its name and fence its arguments; V3.1 does neither."""

_MAGISTRAL = {"open": "[THINK]", "close_pattern": r"\[/THINK\]\s*"}
_MISTRAL = {
    "reasoning_content": _MAGISTRAL,
    "tool_calls": {
        "open_pattern": r"\[TOOL_CALLS\]\s*(?:(?P<name>[^\s\[{]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?)?",
        "close_pattern": r"(?=\[TOOL_CALLS\])|\Z",
        "repeats": True,
        "content": "json",
        "transform": _NAMED,
    },
    "content": {},
}
_MISTRAL_LIST = {
    "reasoning_content": _MAGISTRAL,
    "tool_calls": {
        "open": "[TOOL_CALLS]",
        "close_pattern": r"\Z",
        "content": "json",
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        "transform_each": True,
    },
    "content": {},
}
"""Before its tokenizer's version 11 Mistral wrote all calls of a reply as one JSON list."""

RESPONSE_TEMPLATES: dict[str, dict[str, Any]] = {
    "qwen3_5": _QWEN3_5,
    "glm": _GLM,
    "llama3": _LLAMA3,
    "harmony": _HARMONY,
    "atem": _ATEM,
    "gemma4": _GEMMA4,
    "lfm2": _LFM2,
    "lfm2_raw": _LFM2_RAW,
    "deepseek": _DEEPSEEK,
    "mistral": _MISTRAL,
    "mistral_list": _MISTRAL_LIST,
}
"""Fields by the format's name, in the order in which they are tried."""
