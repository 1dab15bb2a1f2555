"""The live display on a terminal and its plain lines elsewhere; log lines for people."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from stateset_agents.tracking import console
from stateset_agents.tracking.console import ConsoleDisplay, PlayDisplay, progress_line
from stateset_agents.types.logs import configure_logging, get_logger

METRICS = {"reward/mean": 0.4123, "success/rate": 0.38, "kl/reference": 0.00123, "tokens/per_second": 5120.0}


@pytest.fixture
def clean_logging() -> Iterator[None]:
    logger = logging.getLogger("stateset_agents")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before[0], before[1], before[2]


def test_a_line_shows_reward_success_kl_speed_and_time_left() -> None:
    line = progress_line(METRICS, 65.4)
    assert line == "reward 0.412  success 38%  KL 0.0012  tokens/s 5,120  left 1:05"


def test_a_line_says_how_many_replies_were_cut_where_any_were() -> None:
    assert "  cut 12%  left" in progress_line({**METRICS, "rollout/cut_replies": 0.12}, 65.4)
    assert "cut" not in progress_line({**METRICS, "rollout/cut_replies": 0.02}, 65.4)


def test_a_number_that_a_step_does_not_have_is_a_dash() -> None:
    line = progress_line({"reward/mean": float("nan")}, float("nan"))
    assert line == "reward -  success -  KL -  tokens/s -"


def test_a_pipe_gets_about_twenty_plain_lines() -> None:
    out = io.StringIO()
    with ConsoleDisplay(100, console=Console(file=out, width=40)) as display:
        for step in range(1, 101):
            display.on_step_end(step, METRICS)
    lines = out.getvalue().splitlines()
    assert len(lines) == 20
    assert lines[0].startswith("step 5/100  reward 0.412")
    assert lines[-1].startswith("step 100/100")
    assert "\x1b" not in out.getvalue()


def test_an_evaluation_is_a_line_that_marks_the_best() -> None:
    out = io.StringIO()
    trainer = SimpleNamespace(progress=SimpleNamespace(best_step=10))
    with ConsoleDisplay(20, console=Console(file=out, width=40), trainer=trainer) as display:
        display.on_evaluate(10, measured(success=0.4167, reward=0.25))
        display.on_evaluate(20, measured(reward=0.125))
        display.on_evaluate(30, measured(loss=0.25, reward_low=0.1))
    assert out.getvalue().splitlines() == [
        "eval step 10: success 41.7%, reward 0.250 (best)",
        "eval step 20: reward 0.125",
        "eval step 30: loss 0.2500",
    ]


def measured(**values: float) -> SimpleNamespace:
    return SimpleNamespace(metrics=lambda: {f"eval/{name}": value for name, value in values.items()})


def test_the_last_step_is_always_printed() -> None:
    out = io.StringIO()
    with ConsoleDisplay(7, every=5, console=Console(file=out, width=40)) as display:
        for step in range(1, 8):
            display.on_step_end(step, METRICS)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["5/7", "7/7"]


def test_a_terminal_of_eighty_columns_shows_everything_on_one_line() -> None:
    out = io.StringIO()
    with ConsoleDisplay(110, console=Console(file=out, width=80, force_terminal=True)) as display:
        display.on_step_end(109, METRICS)
    last = out.getvalue()
    assert "step 109/110 reward 0.412  success 38%  KL 0.0012  tokens/s 5,120  left 0:00" in last


def test_held_out_plays_are_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> list[str]:
        out = io.StringIO()
        with PlayDisplay("before", console=Console(file=out, width=40)) as display:
            for done in range(1, 4):
                display.on_progress(done, 3)
        return out.getvalue().splitlines()

    assert printed() == []  # it took no ten seconds
    monkeypatch.setattr(console, "_PLAY_SECONDS", 0.0)
    assert printed() == [f"before: {done}/3 conversations played  left 0:00" for done in (1, 2, 3)]


def test_held_out_plays_are_a_live_line_on_a_terminal() -> None:
    out = io.StringIO()
    with PlayDisplay("after", console=Console(file=out, width=80, force_terminal=True)) as display:
        display.on_progress(1, 4)
        display.on_progress(4, 4)
    assert "after: 4/4 conversations played  left 0:00" in out.getvalue()


@pytest.mark.parametrize("display", [partial(ConsoleDisplay, 3), partial(PlayDisplay, "before")])
def test_what_a_program_prints_meanwhile_stays_on_its_stdout(
    display: partial[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with display(console=Console(file=sys.stderr, force_terminal=True)):
        print("a result")
    printed = capsys.readouterr()
    assert printed.out == "a result\n"
    assert "a result" not in printed.err


def test_log_lines_are_for_people(clean_logging: None, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    configure_logging()
    log = get_logger("stateset_agents.training.trainer")
    log.debug("not shown")
    log.info("checkpoint saved", step=20, path="runs/0001-demo")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("INFO    checkpoint saved  step=20 path=runs/0001-demo")


def test_a_traceback_stands_below_its_line(clean_logging: None, capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    try:
        raise ValueError("seven")
    except ValueError:
        get_logger("stateset_agents.core").exception("it broke", step=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("it broke  step=1")
    assert lines[-1] == "ValueError: seven"


def test_a_program_that_uses_the_library_sees_warnings_only() -> None:
    code = (
        "from stateset_agents.types.logs import get_logger; log = get_logger('stateset_agents.x'); "
        "log.info('quiet'); log.warning('loud', why='because')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert done.stderr == "loud  why=because\n"
