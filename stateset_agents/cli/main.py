"""The entry point: each family of verbs is a module; an error is one line and a non-zero exit code."""

from __future__ import annotations

import argparse
import io
import os
import select
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from typing import Any, cast

from stateset_agents.cli import (
    chat,
    deployment,
    evaluate,
    health,
    imitation,
    imports,
    init,
    models,
    pages,
    prompts,
    rewards,
    serve,
    study,
    train,
)
from stateset_agents.cli.output import HelpFormatter, add_verb
from stateset_agents.types.errors import ConfigurationError, StatesetError
from stateset_agents.types.logs import configure_logging, shown_line
from stateset_agents.types.settings import nearest


class _Parser(argparse.ArgumentParser):
    """Adds hints to argparse's errors; subparsers are of this class, too."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, with hints for `NAME=VALUE` and misspelt options."""
        args, unknown = self.parse_known_args(args, namespace)
        if unknown:
            subparser = self._subparser(getattr(args, "verb", None))
            subparser.error(f"unrecognized arguments: {' '.join(unknown)}{subparser._hint(unknown[0])}")
        return args

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = nearest(str(value), map(str, action.choices or ()))
            if isinstance(action, argparse._SubParsersAction):
                self.error(f"no verb {value!r}{hint}: `{self.prog} --help` lists them")
            error.message += hint
            raise

    def _subparser(self, verb: str | None) -> _Parser:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and verb in action.choices:
                return cast(_Parser, action.choices[verb])
        return self

    def _hint(self, argument: str) -> str:
        if "=" in argument and not argument.startswith("-"):
            has_steps = argument.partition("=")[0] in ("max_steps", "seed", "output_dir", "profile")
            name = f"training.{argument}" if has_steps else argument
            return f" (settings go behind --set: --set {name})"
        return nearest(argument.partition("=")[0], self._option_string_actions)


_VERBS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "init": init.run,
    "train": train.run,
    "sft": imitation.run_sft,
    "distill": imitation.run_distill,
    "demonstrate": imitation.run_demonstrate,
    "import": imports.run,
    "served": imports.run_served,
    "evaluate": evaluate.run_evaluate,
    "compare": evaluate.run_compare,
    "optimize-prompt": prompts.run,
    "audit": rewards.run_audit,
    "rescore": rewards.run_rescore,
    "chat": chat.run,
    "serve": serve.run,
    "deploy": deployment.run_deploy,
    "status": deployment.run_status,
    "promote": deployment.promote,
    "rollback": deployment.roll_back,
    "report": pages.run_report,
    "study": study.run,
    "learn": pages.run_learn,
    "dashboard": pages.run_dashboard,
    "diagnose": health.run_diagnose,
    "doctor": health.run_doctor,
    "engine": models.run_engine,
    "fetch": models.run_fetch,
}
"""The verbs, in the order of the help."""


class _PrintCompletion(argparse.Action):
    """Prints a shell's completion script; what no choices bound is completed as a file."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        import shtab

        parsers = [parser]
        for each in parsers:
            for action in each._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()
                elif action.nargs != 0 and action.choices is None and action.type is None:
                    action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab reads it
        print(shtab.complete(parser, values))
        parser.exit()


_COMPUTED_OPTIONS: Mapping[str, Callable[[argparse.ArgumentParser], None]] = {
    "evaluate": evaluate.add_options,
    "compare": partial(evaluate.add_options, sides=evaluate.SIDES),
    "optimize-prompt": partial(evaluate.add_options, without=prompts.OF_OTHERS),
    "serve": serve.add_limits,
    "study": study.add_verbs,
    "fetch": models.add_models,
}
"""Adders of those arguments that a table cannot hold."""


def command_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = _Parser(
        prog="stateset-agents",
        usage="%(prog)s VERB ...",
        formatter_class=partial(HelpFormatter, max_help_position=20),
        description="Train multi-turn conversational agents by GRPO, on this machine.",
        epilog="`stateset-agents VERB --help` has options, examples and exit codes.",
    )
    version = f"%(prog)s {metadata.version('stateset-agents')}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=("bash", "zsh", "fish"),
        metavar="SHELL",
        help="print the completion script of bash, zsh or fish",
    )
    subparsers = parser.add_subparsers(prog=parser.prog, dest="verb", title="verbs", metavar="VERB")
    for verb, run in _VERBS.items():
        verb_parser = add_verb(subparsers, verb, run)
        if verb in _COMPUTED_OPTIONS:
            _COMPUTED_OPTIONS[verb](verb_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, 1 for an error, 2 for a wrong command, 130 when interrupted.

    `status` returns 3 for a deployment that was rolled back.
    """
    parser = command_parser()
    args = parser.parse_args(argv)
    if args.verb is None:
        parser.print_help()
        return 0
    args.argv = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows ?
    configure_logging()
    if not sys.stderr.isatty():  # progress bars are for people
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if os.getcwd() not in sys.path:  # environments and rewards of the user's own, as package.module:Class
        sys.path.insert(0, os.getcwd())
    try:
        if args.verb != "train":
            _check_single_process(args.verb)
        code: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except StatesetError as error:
        if args.verb != "train" and os.environ.get("RANK", "0") != "0":
            return 1  # the first process says it
        print(f"stateset-agents: {shown_line(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        hint = "; what had ended is kept, and is not played again by: " + shlex.join(
            [parser.prog, *args.argv]
        )
        print(f"stateset-agents: interrupted{hint if vars(args).get('keeps') else ''}", file=sys.stderr)
        return 130
    return code


def _check_single_process(verb: str) -> None:
    """Raises ConfigurationError if a launcher started several processes: each would do the same work."""
    num_processes = os.environ.get("WORLD_SIZE", "1")
    if num_processes.isdecimal() and int(num_processes) > 1:
        raise ConfigurationError(
            f"{num_processes} processes were started, and {verb} is for one: leave the launcher out"
        )


def _reader_is_gone() -> bool:
    """True if the reader of the standard output, such as `head`, has closed it."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
