"""Text from models, tools, servers and files as a terminal and a log may show it."""

from __future__ import annotations

import re

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
"""A terminal obeys control characters, and the others end lines or turn the order of what is read around. The
marks of right-to-left scripts (U+200E, U+200F, U+061C) turn nothing that a letter of theirs does not."""


def shown(text: str) -> str:
    r"""Control and direction characters as escapes; tabs and ends of lines stay.

    >>> shown("gone\x1b[2J")
    'gone\\x1b[2J'
    """
    return _COMMANDS.sub(lambda match: ascii(match[0])[1:-1], text)


def shown_line(text: str) -> str:
    """The same on one line: white space of any kind and length is a space."""
    return shown(" ".join(text.split()))
