"""`stateset-agents init`: a folder with all that a training needs, from templates and a user's own rows."""

from __future__ import annotations

import argparse
import json
import keyword
import shlex
import sys
from pathlib import Path
from string import Template
from typing import Any

from stateset_agents.cli.imports import converted, write_rows
from stateset_agents.tracking.run_folder import replace_file
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.settings import expect_that

_TEMPLATES = Path(__file__).with_name("project_template")
_EXAMPLE_PROMPT = "shop desk. customer u53 is signed in."
"""The example's system prompt, in the words that embedded:desk was shown."""
_QUESTIONS = {
    "domain": "what is the agent for, as its system prompt (empty: none; for the example its own): ",
    "data": "a file of your own rows (empty: an example, a shop of three orders): ",
    "tools": "its tools, MODULE:FUNCTION or names to write, blanks between them (empty: none): ",
    "model": "its model, a name or a folder (empty: embedded:desk): ",
}
_VERDICTS = {
    "example": "scenarios, tools, user and verdict are an example; README.md says what to replace",
    "answer": "reward: correctness, since every row has an `answer`",
    "calls": "verdict: every call that the row records is made, since every row records calls",
    "unwritten": "verdict: the rows do not say what a success is: write verdict.py, until then train refuses",
}
"""What the scenarios tell of a success -> what is said of it. Each has templates of its own."""
_STUB = '''

def {name}(WRITE_ITS_ARGUMENTS):
    """Write what it does, as the agent is to read it; train refuses until its arguments have types."""
    raise NotImplementedError("write {name}")
'''


def run(args: argparse.Namespace) -> int:
    """Exit code 0 once the folder is written."""
    folder = Path(args.folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"{args.folder} is there already: name a new or an empty folder")
    if sys.stdin.isatty() and not any(getattr(args, name) for name in _QUESTIONS):
        _ask(args)
    tools, stubs = _tools(args.tools)
    rows = _rows(args.data) if args.data else []
    verdict = _verdict(rows, args.data) if args.data else "example"
    model = args.model or "embedded:desk"
    is_embedded = model.startswith("embedded:")
    prompt = args.domain or (None if args.data else _EXAMPLE_PROMPT)
    commands = _commands(folder, verdict)
    words = {
        "model": _quoted(model),
        "max_new_tokens": 48 if is_embedded else 256,
        "tools": _quoted([*([] if args.data else ["tools:Shop"]), *tools]),
        "domain": _quoted(prompt),
        "stubs": "".join(_STUB.format(name=name) for name in stubs),
        "commands": "\n".join(commands),
        "verdict": f"{_VERDICTS[verdict].capitalize()}.",
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the folder {folder}: {error.strerror}") from error
    if args.data:
        write_rows(folder / "scenarios.jsonl", rows)
    for layer in ("own", verdict) if args.data else ("example",):
        for template in sorted((_TEMPLATES / layer).glob("*.tmpl")):
            text = template.read_text(encoding="utf-8")
            replace_file(folder / template.stem, Template(text).substitute(words))
    print(f"written: {args.folder}\n{_VERDICTS[verdict]}")
    if args.data and is_embedded:
        print(f"model: {model} knows the words of its own desk alone; for your rows give --model NAME")
    print("\n".join(["go on with:", *(f"  {command}" for command in commands)]))
    return 0


_quoted = json.JSONEncoder(ensure_ascii=False).encode  # YAML reads an escaped emoji as two characters


def _ask(args: argparse.Namespace) -> None:
    """Set the options by answers on the terminal."""
    try:
        answers = {name: input(question).strip() for name, question in _QUESTIONS.items()}
    except EOFError:
        raise KeyboardInterrupt from None
    vars(args).update({**answers, "tools": answers["tools"].split()})


def _tools(names: list[str]) -> tuple[list[str], list[str]]:
    """The tools as run.yaml names them, and those that are to be written. Raises ConfigurationError for code
    that is not there, or is no tool."""
    from stateset_agents.core.tools import Toolbox

    Toolbox([name for name in names if ":" in name])
    stubs = [name for name in names if ":" not in name]
    are_new = len({*names, "Shop"}) > len(names)
    expect_that(are_new, "--tools", "be some, each once, and none called Shop as the example's", names)
    for name in stubs:
        is_name = name.isidentifier() and not keyword.iskeyword(name)
        expect_that(is_name, "--tools", "be MODULE:FUNCTION or the name of a function to write", name)
    return [name if ":" in name else f"tools:{name}" for name in names], stubs


def _rows(file: str) -> list[dict[str, Any]]:
    """The rows of a file as scenarios, some of them held out. Prints which, and which were left out.

    Raises ConfigurationError for a file that gives none.
    """
    from stateset_agents.core.sources.datasets import with_drawn_split

    rows = converted(file, ["scenarios"])["scenarios"]
    if not any(row.get("split") == "test" for row in rows):
        train_rows = [row for row in rows if row.get("split") in (None, "", "train")]
        scenarios = with_drawn_split([Scenario(id=row["id"]) for row in train_rows], "test")
        for row, scenario in zip(train_rows, scenarios, strict=True):
            row["split"] = scenario.split
        num_drawn = sum(row["split"] == "test" for row in train_rows)
        print(f"held out as test, drawn by a hash: {num_drawn} of {len(train_rows)}")
    if missing := {"train", "test"} - {row.get("split") or "train" for row in rows}:
        none = f"none is left for {' and '.join(sorted(missing))}"
        raise ConfigurationError(f"{file} has too few rows, {none}: give at least two")
    return rows


def _verdict(rows: list[dict[str, Any]], file: str) -> str:
    """The key of `_VERDICTS` for scenarios of a user's own. Raises ConfigurationError for an answer that the
    reward cannot compare."""
    from stateset_agents.rewards.verifiable import agreement

    columns = [{**row, **(row.get("context") or {})} for row in rows]
    if all(row.get("answer") is not None for row in columns):
        for row in columns:
            try:
                agreement("", row["answer"])
            except ConfigurationError as error:
                raise ConfigurationError(f"{file}, scenario {row['id']}: {error}") from error
        return "answer"
    return "calls" if all(row.get("recorded") for row in columns) else "unwritten"


def _commands(folder: Path, verdict: str) -> list[str]:
    """Test, audit, train, report. A replay pays whoever makes its calls: two agents that may are left out."""
    file, without = shlex.quote(str(folder / "run.yaml")), ""
    if verdict == "calls":
        without = " --without tool_spammer --without consent_skipper"
    return [
        f"python -m pytest {shlex.quote(str(folder))}",
        f"stateset-agents audit {file} --max-reward .05{without}",
        f"stateset-agents train {file}",
        "stateset-agents report runs/latest",
    ]
