"""The built-in ChatML template with a place for tools, `chat_template: chatml`. Chosen by core/agent.py.

It is for models that speak ChatML and whose own template lists no tools. Tools, calls and results are
written as Qwen 2.5 and Hermes write them, so that `replies.parsing.HERMES` reads the calls:

    <|im_start|>system          the system message, then the tools as JSON between <tools> and </tools>
    <|im_start|>assistant       words, then <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    <|im_start|>user            results, each between <tool_response> and </tool_response>

It shows everything that was said, thoughts too, and only appends.
"""

from __future__ import annotations

from typing import Any

from stateset_agents.core.chat.plain_template import starts_with_bos
from stateset_agents.types.errors import ConfigurationError

_TOKENS = ("<|im_start|>", "<|im_end|>")
CHATML = r"""
{%- set first = messages[0] if messages else {} %}
{%- if tools or first.role == 'system' %}
    {{- '<|im_start|>system\n' }}
    {%- if first.role == 'system' %}
        {{- first.content or '' }}
    {%- endif %}
    {%- if tools %}
        {{- '\n\n' if first.role == 'system' else '' }}
        {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
        {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
        {%- for tool in tools %}
            {{- '\n' }}
            {{- tool | tojson }}
        {%- endfor %}
        {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
        {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
        {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function is defined else call %}
            {{- '' if loop.first and not message.content else '\n' }}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- message.content or '' }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {{- message.content or '' }}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
"""After Qwen 2.5's own template (https://huggingface.co/Qwen/Qwen2.5-7B-Instruct), without its default system
message."""


def speaks_chatml(tokenizer: Any) -> bool:
    """Has a `HuggingFaceTokenizer` the control tokens that frame ChatML's messages?"""
    added = {token.content for token in tokenizer.hf.added_tokens_decoder.values()}
    return added.issuperset(_TOKENS)


def chatml_text(tokenizer: Any) -> str:
    """The template for a `HuggingFaceTokenizer`, with a BOS in front where the tokenizer itself puts one.

    Raises ConfigurationError for a tokenizer without ChatML's control tokens.
    """
    if not speaks_chatml(tokenizer):
        raise ConfigurationError(
            "the chatml template frames messages by the control tokens <|im_start|> and <|im_end|>, which "
            'this model\'s tokenizer does not have: set AgentConfig(chat_template="plain")'
        )
    return "{{- bos_token }}" + CHATML if starts_with_bos(tokenizer) else CHATML
