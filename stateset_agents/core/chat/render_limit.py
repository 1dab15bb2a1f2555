"""Bounds for the code of chat templates, which come with models that strangers made.

jinja's sandbox keeps a template from files and from Python's insides, not from loops that never end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from stateset_agents.types.errors import ConfigurationError

_SECONDS, _SECONDS_EACH = 1.0, 0.01
"""Processor time of one rendering, and for each message and tool in it: a hundred times what they take."""
_FILE = "<template>"
"""What jinja calls the code of a template."""
_LINES = 8
"""Between two looks at the clock."""
_MOST_TIMES = 10_000
"""That a text may be repeated by `*`."""
_MOST = 10_000_000
"""Of numbers that stand in a template: `ljust` and its like fill the memory, too."""


class RenderLimit(Exception):
    """A rendering has used up its processor time."""


def within_limit(render: Callable[[], str], size: int) -> str:
    """What `render` returns; `size` counts messages and tools. Raises RenderLimit where it takes too long.

    The interpreter calls us for each line of the template that it executes, in this thread alone, so that
    nothing has to be killed. A debugger's own such function is back afterwards.
    """
    seconds = _SECONDS + _SECONDS_EACH * size
    deadline, lines = time.thread_time() + seconds, 0

    def check() -> None:
        if time.thread_time() > deadline:
            raise RenderLimit(f"it took longer than {seconds:.1f} s of processor time")

    def on_line(_: FrameType, __: str, ___: Any) -> Any:
        nonlocal lines
        lines += 1
        if lines % _LINES == 0:
            check()
        return on_line

    def on_call(frame: FrameType, _: str, __: Any) -> Any:
        return on_line if frame.f_code.co_filename == _FILE else None

    previous = sys.gettrace()
    sys.settrace(on_call)
    try:
        text = render()
    finally:
        sys.settrace(previous)
    check()
    return text


def expect_no_bombs(tree: Any) -> None:
    """Raises ConfigurationError for a template with `**`, with `*` by what may be any number, or with a huge
    number: a single such step fills the memory, and no clock is looked at within it. `tree` is jinja's."""
    from jinja2 import nodes

    for power in tree.find_all(nodes.Pow):
        raise ConfigurationError(f"the chat template has a power (**) in line {power.lineno}: leave it out")
    for product in tree.find_all(nodes.Mul):
        factors = [side.value for side in (product.left, product.right) if isinstance(side, nodes.Const)]
        if not any(isinstance(factor, int) and factor <= _MOST_TIMES for factor in factors):
            raise ConfigurationError(
                f"the chat template multiplies by what may be any number in line {product.lineno}: only "
                f"numbers up to {_MOST_TIMES:,} are taken"
            )
    for number in tree.find_all(nodes.Const):
        if isinstance(number.value, int) and number.value > _MOST:
            raise ConfigurationError(
                f"the chat template has the number {str(number.value)[:20]} in line {number.lineno}: only "
                f"numbers up to {_MOST:,} are taken"
            )
