"""What people read on a terminal: nothing in it is a command, begins a line or turns the order around."""

from __future__ import annotations

import logging

import pytest

from stateset_agents.cli.main import main
from stateset_agents.types.logs import configure_logging, get_logger, shown, shown_line


def test_control_and_direction_characters_are_escapes() -> None:
    assert shown("a\x1b[2J\rb\x9b\x7f") == r"a\x1b[2J\rb\x9b\x7f"
    assert shown("pay \u202eevil\u2069\u2028now") == r"pay \u202eevil\u2069\u2028now"
    assert shown("Zürich, שלום\u200f, 東京 👍\n\tyes") == "Zürich, שלום\u200f, 東京 👍\n\tyes"
    assert shown_line(" two\nlines \x07") == r"two lines \x07"


def test_a_log_line_stays_one_line_whatever_its_values_hold(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    try:
        get_logger("stateset_agents.shop").warning(
            "tool failed\x1b[31m", error="no\n12:00:00 ERROR all\r\u202e"
        )
        try:
            raise ValueError("two\x1b[2J\nlines")
        except ValueError:
            get_logger("stateset_agents.shop").exception("tool broke")
    finally:
        logger = logging.getLogger("stateset_agents")
        logger.handlers.clear()
        logger.propagate = True
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert first.endswith(r"WARNING tool failed\x1b[31m  error=no\n12:00:00 ERROR all\r\u202e")
    assert second.endswith("ERROR   tool broke")
    assert trace[-2:] == [r"ValueError: two\x1b[2J", "lines"]


def test_an_error_of_the_command_line_is_shown_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "no\x1b[2J\u202erun"]) == 1
    assert "\x1b" not in capsys.readouterr().err
