"""Chat templates of well-known shapes, each with a tiny tokenizer that has its control tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trl
from tiny_models import tiny_tokenizer

from stateset_agents.backends.tokenizers import HuggingFaceTokenizer
from stateset_agents.core.chat.plain_template import CHATML as OUR_CHATML
from stateset_agents.core.chat.template import JinjaTemplate

__all__ = [
    "ALL_NAMES",
    "FAMILIES",
    "IN_SUITE",
    "NOT_APPENDING",
    "OURS",
    "REWRITING",
    "TRL_APPENDING",
    "TRL_NAMES",
    "TRL_WITHOUT_TOOLS",
    "TRL_WITH_HIDDEN_TOOLS",
    "TRL_WITH_TOOLS",
    "TRL_WITH_UNSTABLE_TOOLS",
    "Family",
    "chosen",
    "family_tokenizer",
    "tokenizer_with",
    "trl_template",
    "trl_tokenizer",
]

_GENERATE = "{% if add_generation_prompt %}"

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'\n<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}</tool_call>' }}"
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
    "ours": Family(OUR_CHATML, _IM, "<|im_end|>", "\n"),
}

_THINK = "message.content.split('</think>')[-1].lstrip('\\n')"
NOT_APPENDING = {
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
}
"""They show earlier replies otherwise than they were said; what stands between two turns does not change."""
REWRITING = {
    "numbers turns": CHATML.replace("message.role + '\n'", "message.role + loop.index0 | string + '\n'"),
    "shows the last message only": CHATML.replace("in messages %}", "in messages[-1:] %}"),
    "shows the last messages only": CHATML.replace("in messages %}", "in messages[-3:] %}"),
    "shows messages in another order": CHATML.replace(
        "in messages %}", "in messages | sort(attribute='role') %}"
    ),
}


TRL_FOLDER = Path(trl.__file__).parent / "chat_templates"
TRL_NAMES = tuple(sorted(path.stem for path in TRL_FOLDER.glob("*.jinja")))
"""Every template that TRL ships."""
TRL_WITHOUT_TOOLS = (
    *("cohere", "cohere_training", "cohere2", "cohere2_training", "gemma", "gemma_training", "gemma3"),
    *("gemma3_training", "llava_next", "llava_next_training", "phi3", "phi3_training", "phi3_5"),
    "phi3_5_training",
)
"""Those that have no place for a tool's result."""
TRL_WITH_UNSTABLE_TOOLS = (
    *("deepseek_r1_distill", "deepseek_r1_distill_training", "deepseekv3", "deepseekv3_training"),
)
"""From the second tool round on they write something else around a result."""
TRL_WITH_HIDDEN_TOOLS = (
    *("idefics3", "idefics3_training", "llama3", "llama3_training", "qwen2_5_vl", "qwen2_5_vl_training"),
    *("smolvlm", "smolvlm_training"),
)
"""They show results, but not which tools there are."""
TRL_WITH_TOOLS = tuple(
    sorted({*TRL_NAMES} - {*TRL_WITHOUT_TOOLS, *TRL_WITH_UNSTABLE_TOOLS, *TRL_WITH_HIDDEN_TOOLS})
)
TRL_APPENDING = (
    *TRL_WITHOUT_TOOLS,
    *TRL_WITH_HIDDEN_TOOLS,
    *("gemma4_v2", "lfm2", "lfm2_training", "lfm2_v2", "lfm2_v2_training", "qwen2_5", "qwen2_5_training"),
    *("qwen3_instruct_2507", "qwen3_instruct_2507_training", "qwen3_vl", "qwen3_vl_training"),
)
"""Those whose rendering of a longer talk begins with the row, whatever was said."""
OURS = ("chatml",)
"""The built-in one: it shows tools, and only appends."""
ALL_NAMES = (*TRL_NAMES, *OURS)
IN_SUITE = (
    *("qwen3", "gptoss", "gemma4_v5", "qwen2_5", "chatml", "nemotron_3_nano", "qwen3_8"),
    *("glm4moe", "deepseekv3", "llama3_1", "gemma3"),
)
"""One of each kind, for what takes long; `make test-templates` has the others."""


def chosen(in_suite: Sequence[Any], of: Iterable[Any]) -> list[Any]:
    """All of them, those outside the suite as `long`."""
    return [
        case
        if case in in_suite
        else pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.long)
        for case in of
    ]


@dataclass(frozen=True)
class _TrlFamily:
    """What a family's tokenizer and generation config have besides the control tokens in its template."""

    eos: str
    bos: str | None = None
    extra_eos: tuple[str, ...] = ()
    """Of the generation config."""
    more: tuple[str, ...] = ()
    """Control tokens without the usual shape."""


_GEMMA4 = _TrlFamily("<eos>", "<bos>", ("<turn|>", "<|tool_response>"))
_TRL_FAMILIES = {  # by how a template's name begins
    "chatml": _TrlFamily("<|im_end|>", None, ("<|endoftext|>",)),
    "cohere": _TrlFamily("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>"),
    "deepseek": _TrlFamily("<\uff5cend▁of▁sentence\uff5c>", "<\uff5cbegin▁of▁sentence\uff5c>"),
    "diffusion_gemma": _GEMMA4,
    "gemma4": _GEMMA4,
    "gemma": _TrlFamily("<eos>", "<bos>", ("<end_of_turn>",), ("<start_of_turn>", "<start_of_image>")),
    "glm4moe": _TrlFamily("<|endoftext|>", None, ("<|user|>", "<|observation|>"), ("[gMASK]", "<sop>")),
    "gptoss": _TrlFamily("<|return|>", "<|startoftext|>", ("<|endoftext|>", "<|call|>")),
    "idefics3": _TrlFamily("<|end_of_text|>", "<|begin_of_text|>", ("<end_of_utterance>",)),
    "lfm2": _TrlFamily("<|im_end|>", "<|startoftext|>"),
    "llama3": _TrlFamily("<|eot_id|>", "<|begin_of_text|>", ("<|end_of_text|>", "<|eom_id|>")),
    "llava_next": _TrlFamily("</s>", "<s>"),
    "muse_glimmer": _TrlFamily("<|eot|>", "<|begin_of_text|>"),
    "nemotron": _TrlFamily("<|im_end|>", "<s>", ("</s>",)),
    "phi3": _TrlFamily("<|endoftext|>", "<s>", ("<|end|>",)),
    "qwen": _TrlFamily("<|im_end|>", None, ("<|endoftext|>",)),
    "smolvlm": _TrlFamily("<end_of_utterance>", "<|im_start|>"),
}
_CONTROL = re.compile(
    r"<[|\uff5c][^<>'\"\s]+?[|\uff5c]>"  # <|im_end|>; DeepSeek's bars are wide
    r"|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>"  # Gemma 4: <|turn>, <turn|>, <|"|>
    r"|<(?:start|end)_of_[a-z]+>"
)
_ADDED = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
"""What families have as added tokens that are not flagged special."""


def trl_tokenizer(name: str) -> HuggingFaceTokenizer:
    """The tiny tokenizer with one of TRL's own templates, or ours, and the control tokens of its family."""
    text = OUR_CHATML if name in OURS else (TRL_FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    family = next(family for start, family in _TRL_FAMILIES.items() if name.startswith(start))
    ends = [family.eos, *family.extra_eos]
    named = [*ends, *family.more, *([family.bos] if family.bos else [])]
    hf = tiny_tokenizer(bos=False).hf
    if family.bos:
        hf.bos_token = family.bos
    hf.eos_token = hf.pad_token = family.eos
    hf.add_tokens(sorted({*named, *_CONTROL.findall(text)} - {*hf.get_vocab()}), special_tokens=True)
    hf.add_tokens(sorted({*_ADDED.findall(text)} - {*hf.get_vocab()}))
    hf.chat_template = text
    return HuggingFaceTokenizer(hf, extra_eos_ids=hf.convert_tokens_to_ids(list(family.extra_eos)))


@functools.cache
def trl_template(name: str) -> JinjaTemplate:
    """One of `ALL_NAMES` as it is loaded; tests share it, for loading takes some 40 ms."""
    return JinjaTemplate(trl_tokenizer(name), allow_hidden_tools=True)


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
