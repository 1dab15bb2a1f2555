"""The verbs' shared options and results: as a line, a table or JSON."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stateset_agents.algorithms.intervals import interval_text
from stateset_agents.runtime.yaml_files import read_yaml
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import shown, shown_line

OPTIONS: Mapping[str, Any] = read_yaml(Path(__file__).with_name("options.yaml"))
"""Each verb's help, description and arguments, and the sets of arguments that verbs share."""
_TYPES = {"int": int, "float": float}


EXIT_CODES: Mapping[int, str] = {0: "done", 1: "an error", 2: "a wrong command", 130: "interrupted"}
"""What a verb's exit code means, unless `OPTIONS` says more."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help of at most 100 columns; lines that begin with a blank stay as they are."""

    def __init__(self, prog: str, max_help_position: int = 28) -> None:
        width = min(shutil.get_terminal_size().columns - 2, 100)
        super().__init__(prog, max_help_position=max_help_position, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        filled = (line if line.startswith(" ") else textwrap.fill(line, width) for line in text.split("\n"))
        return "\n".join(indent + line for line in filled)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):  # its verbs, without a heading of their own
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)


def add_verb(subparsers: Any, verb: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Register a verb as `OPTIONS` has it; `run` carries it out and returns the exit code."""
    words = dict(OPTIONS[verb])
    arguments, alternatives = words.pop("arguments", {}), words.pop("one_of", {})
    examples = "\n".join(f"  stateset-agents {example}" for example in words.pop("examples"))
    meanings = EXIT_CODES | words.pop("exit_codes", {})
    codes = "; ".join(f"{code} {meaning}" for code, meaning in sorted(meanings.items()))
    words["epilog"] = f"examples:\n{examples}\n\nexit codes: {codes}"
    parser: argparse.ArgumentParser = subparsers.add_parser(
        verb.split()[-1], formatter_class=HelpFormatter, **words
    )
    parser.set_defaults(run=run)
    if alternatives:
        needs_one = not any("default" in settings for settings in alternatives.values())
        add_arguments(parser.add_mutually_exclusive_group(required=needs_one), alternatives)
    add_arguments(parser, arguments)
    return parser


def add_arguments(parser: argparse._ActionsContainer, arguments: Mapping[str, Mapping[str, Any]]) -> None:
    """Register arguments as `OPTIONS` has them, by their names or flags."""
    for name, settings in arguments.items():
        types = {"type": _TYPES[settings["type"]]} if "type" in settings else {}
        names = {"metavar": tuple(settings["metavar"])} if settings.get("nargs") == 2 else {}
        parser.add_argument(name, **{**settings, **types, **names})


def cancel_on_sigterm() -> None:
    """Let SIGTERM cancel the running task, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None  # inside a coroutine
    with contextlib.suppress(NotImplementedError):  # Windows has no SIGTERM to handle
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


def rate(result: Mapping[str, Any]) -> str:
    """`success 16.0% [13.3%, 19.1%]`, or the mean reward if the environment has no success."""
    if result["success"] is not None:
        return f"success {percent({'value': result['success'], **result})}"
    reward = result["mean_reward"]
    return "no verdict, " + ("nothing scored" if reward is None else f"mean reward {reward:.3f}")


def percent(estimate: Mapping[str, Any]) -> str:
    """`16.0% [13.3%, 19.1%]` of something with a value and an interval."""
    return f"{estimate['value']:.1%}{interval_text(estimate['interval'], '.1%')}"


def verdict_line(verdict: str, reason: str) -> str:
    """`B is better`, or why that is unclear."""
    return f"which is better is unclear: {reason}" if verdict == "unclear" else f"B is {verdict}"


def exclusions(result: Mapping[str, Any]) -> list[str]:
    """`left out: 2 conversations that failed, of the mean reward 1 that could not be scored`; or nothing."""
    failed, unscored = result["num_failed"], result["num_unscored"]
    silent = result.get("num_unanswered", 0)  # not in summaries of earlier versions
    why = f" ({silent} of them not answered by the endpoint)" * bool(silent)
    parts = [f"{failed} conversations that failed{why}"] * bool(failed)
    parts += [f"of the mean reward {unscored} that could not be scored"] * bool(unscored)
    return [f"left out: {', '.join(parts)}"] if parts else []


def floors(result: Mapping[str, Any]) -> list[str]:
    """`floors: idle 38.0% [25.9%, 51.8%], ...`: agents that know nothing, on the same scenarios; or none."""
    judged = {name: floor for name, floor in result.get("floors", {}).items() if floor["success"] is not None}
    lines = [f"{name} {percent({'value': floor['success'], **floor})}" for name, floor in judged.items()]
    return [f"floors: {', '.join(lines)}"] if lines else []


def check_writable(file: str | None) -> None:
    """Raises ConfigurationError if `print_result` could not write there; called before anything is played."""
    if file is None:
        return
    path = Path(file)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"cannot write {file!r}: give a file in a folder that you may write to")


def check_new(file: str | None) -> None:
    """As `check_writable`; a file that is there stays as it is, too."""
    check_writable(file)
    if file is not None and Path(file).is_file():
        raise ConfigurationError(f"{file} exists: give another file, or remove it")


def print_result(result: Mapping[str, Any], args: argparse.Namespace, text: str) -> None:
    """Print `result`, as JSON with `--json`, else as `text`, and write its JSON to `--out`."""
    as_json = json.dumps(result, indent=2)
    if args.out is not None:
        Path(args.out).write_text(as_json + "\n", encoding="utf-8")
    print(as_json if args.json else shown(text))


def display_path(path: Path) -> str:
    """Relative below the working directory, absolute elsewhere."""
    path, cwd = path.absolute(), Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else str(path)


def health(run: RunFolder) -> list[str]:
    """The diagnostics' warnings, and how many checks passed."""
    from stateset_agents.tracking.diagnostics import diagnose
    from stateset_agents.tracking.run_log import RunLog

    findings = diagnose(RunLog(run))
    troubles = [shown_line(str(finding)) for finding in findings if finding.verdict != "ok"]
    passed = len(findings) - len(troubles)
    return [*troubles, f"diagnostics: {passed} of {len(findings)} checks passed"]
