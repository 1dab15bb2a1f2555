"""Chat templates of well-known shapes, each with a tiny tokenizer that has its control tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import trl
from tiny_models import tiny_tokenizer

from stateset_agents.backends.text.tokenizers import HuggingFaceTokenizer

__all__ = [
    "FAMILIES",
    "REWRITING",
    "TRL_WITHOUT_TOOLS",
    "TRL_WITH_HIDDEN_TOOLS",
    "TRL_WITH_TOOLS",
    "Family",
    "family_tokenizer",
    "tokenizer_with",
    "trl_tokenizer",
]

_GENERATE = "{% if add_generation_prompt %}"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '\n<tool_call>' + call.function.name + call.function.arguments | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + _GENERATE + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set role = 'ipython' if message.role == 'tool' else message.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{% if tools and loop.first %}"
    "{{ 'Functions:\n' }}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}"
    "{{ message.content | trim }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{ call.function.arguments | tojson + '}' }}"
    "{% endfor %}{{ '<|eot_id|>' }}{% endfor %}"
    + _GENERATE
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% else %}{% set system = 'You are helpful.' %}{% endif %}"
    "{{ '<|im_start|>system\n' + system }}"
    "{% if tools %}{{ '\n\n# Tools\n<tools>' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '\n</tools>' }}{% endif %}{{ '<|im_end|>\n' }}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message.role != 'system' or not loop.first %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    '{% for call in message.tool_calls or [] %}{{ \'\n<tool_call>\n{"name": "\' + call.function.name }}'
    "{{ '\", \"arguments\": ' }}{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}" + _GENERATE + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    + _GENERATE
    + "{{ '<start_of_turn>model\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set talk = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set talk = messages %}{% endif %}{% for message in talk %}"
    "{% if message.role == 'user' %}{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ message.content | trim + ' [/INST]' }}"
    "{% elif message.role == 'assistant' %}{{ ' ' + message.content | trim + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """One template and what it needs."""

    template: str
    controls: tuple[str, ...]
    end: str
    """The end-of-turn token."""
    after_end: str = ""
    """What the template writes between it and the next role."""
    bos: bool = False
    tools: bool = True
    """Has a place for tool results."""


_IM = ("<|im_start|>", "<|im_end|>")
FAMILIES = {
    "chatml": Family(CHATML, _IM, "<|im_end|>", "\n"),
    "llama3": Family(
        LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>", bos=True
    ),
    "qwen": Family(QWEN, (*_IM, "<tool_response>", "</tool_response>"), "<|im_end|>", "\n"),
    "gemma": Family(
        GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", "\n", bos=True, tools=False
    ),
    "llama2": Family(LLAMA2, (), "<|end|>", bos=True, tools=False),
}

_THINK = "message.content.split('</think>')[-1].lstrip('\\n')"
REWRITING = {
    "drops earlier thinking": CHATML.replace(
        "message.content }}", f"({_THINK} if message.role == 'assistant' else message.content) }}}}"
    ),
    "thinks in the last turn only": CHATML.replace(
        "+ message.content }}",
        "+ ('<think>\n\n</think>\n\n' if loop.last and message.role == 'assistant' else '')"
        " + message.content }}",
    ),
    "opens the agent's turn by a thought": CHATML.replace(
        "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"
    ),
    "numbers turns": CHATML.replace("message.role + '\n'", "message.role + loop.index0 | string + '\n'"),
    "shows the last message only": CHATML.replace("in messages %}", "in messages[-1:] %}"),
}


TRL_WITHOUT_TOOLS = (
    *("cohere", "cohere_training", "gemma", "gemma_training", "gemma3", "gemma3_training"),
    *("cohere2", "cohere2_training", "diffusion_gemma", "diffusion_gemma_training", "gemma4", "gemma4_v3"),
    *("gemma4_v4", "gemma4_v5", "phi3", "phi3_training", "phi3_5", "phi3_5_training"),
)
"""Of the templates that TRL ships, those that we take, and that have no place for a tool's result."""
TRL_WITH_TOOLS = (
    *("gemma4_v2", "lfm2", "lfm2_training", "lfm2_v2", "lfm2_v2_training", "llama3_1", "llama3_2", "qwen2_5"),
    *("qwen2_5_training", "qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen3_vl"),
    "qwen3_vl_training",
)
TRL_WITH_HIDDEN_TOOLS = ("llama3", "llama3_training", "qwen2_5_vl", "qwen2_5_vl_training")
"""They show results, but not which tools there are."""
_CONTROL = re.compile(
    r"<[|][^<>'\"\s]+?[|]>|<(?:start_of_turn|end_of_turn|turn\||\|turn|\|?tool_response\|?)>"
)


def trl_tokenizer(name: str) -> HuggingFaceTokenizer:
    """The tiny tokenizer with one of TRL's own templates and the control tokens that stand in it."""
    text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    controls = sorted({*_CONTROL.findall(text)} - {*tiny_tokenizer().hf.get_vocab()})
    return tokenizer_with(*controls, bos=True, template=text)


def tokenizer_with(*controls: str, bos: bool = False, template: str | None = None) -> HuggingFaceTokenizer:
    """The tiny tokenizer (eos `<|end|>`) with more control tokens, and a chat template of its own."""
    hf = tiny_tokenizer(bos=bos).hf
    hf.add_tokens(list(controls), special_tokens=True)
    hf.chat_template = template
    return HuggingFaceTokenizer(hf)


def family_tokenizer(name: str) -> HuggingFaceTokenizer:
    """The tokenizer of one of `FAMILIES`."""
    family = FAMILIES[name]
    return tokenizer_with(*family.controls, bos=family.bos, template=family.template)
