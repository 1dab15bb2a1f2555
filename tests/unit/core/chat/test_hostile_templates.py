"""Chat templates that never end, call themselves or fill the memory: each is one line, and soon."""

from __future__ import annotations

import gc
import sys
import time

import pytest
from chat_templates import CHATML, tokenizer_with

from stateset_agents.core.chat import rendering
from stateset_agents.core.chat.template import JinjaTemplate
from stateset_agents.types.errors import ConfigurationError

ENDLESS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.mark.first(10)
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
        ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "maximum recursion depth exceeded"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ (1e308 * 10) | int }}", "'inf' is not defined"),
        ("{{ 'x' * 10000000000 }}", "multiplies by any number in line 1"),
        ("{{ 10 ** 10 ** 10 }}", "has a power"),
        ("{{ 'x'.ljust(5000000000) }}", "has 5000000000 in line 1"),
        ("{{ cycler() }}", "at least one item has to be provided"),
        ("{{ range(10000000) }}", "Range too big"),
        (ENDLESS, "does not end .it took longer than 1.0 s"),
        ("{% if tools %}" + ENDLESS + "{% endif %}", "does not end"),
        ("{% if messages | length > 4 %}" + ENDLESS + "{% endif %}", "does not end"),
        ("{{ range(99999) | map('string') | list | sort | join }}" * 3, "does not end"),
        ("{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}", "does not end"),
    ],
)
def test_a_hostile_template_is_one_line(text: str, told: str) -> None:
    before, tracing = time.thread_time(), sys.gettrace()
    with pytest.raises(ConfigurationError, match=told) as error:
        JinjaTemplate(tokenizer_with("<|im_start|>", "<|im_end|>"), text + CHATML)
    assert "\n" not in str(error.value)
    assert time.thread_time() - before < 30
    assert sys.gettrace() is tracing


def test_a_garbage_collection_is_not_the_templates_time(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = [[number] for number in range(300_000)]
    monkeypatch.setattr(rendering, "_SECONDS", 0.005)
    gc.collect()
    before = time.thread_time()
    gc.collect()
    assert time.thread_time() - before > 0.005, len(heap)
    assert rendering.within_limit(lambda: f"text {gc.collect()}", 0) == "text 0"
    assert not [call for call in gc.callbacks if getattr(call, "__module__", "") == rendering.__name__]


def test_a_number_written_out_may_multiply() -> None:
    JinjaTemplate(tokenizer_with("<|im_start|>", "<|im_end|>"), CHATML.replace("'\n'", "'\n' * 1", 1))


@pytest.mark.parametrize("text", [3, ["x"], {"default": 3}])
def test_a_template_that_is_no_text_is_one_line(text: object) -> None:
    tokenizer = tokenizer_with()
    tokenizer.hf.chat_template = text
    with pytest.raises(ConfigurationError, match="the chat template is no text, but"):
        JinjaTemplate(tokenizer)
