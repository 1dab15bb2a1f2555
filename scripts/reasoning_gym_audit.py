"""Which data sets of reasoning-gym give a verdict that can be trusted.

    python scripts/reasoning_gym_audit.py            print what each pays, and why it is refused
    python scripts/reasoning_gym_audit.py --write    write procedural_allowed.yaml

A data set is allowed if each of its own answers scores 1, and by the environment's verdict "", "0", "I don't
know", the question itself, another entry's answer and text that would run for ever as code score .05 at most,
without an exception; and if its verdict does not hand the answer to `eval`, `exec` or sympy's parser, which
is `eval`. Each is tried in a process of its own with limits.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
import re
import resource
import sys
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stateset_agents.environments.problems.procedural import load_reasoning_gym, verdict_of

ALLOWED_FILE = Path(__file__).parents[1] / "stateset_agents/environments/problems/procedural_allowed.yaml"
ENTRIES = 12
MOST = 0.05
"""What a reply that knows nothing may get."""
SECONDS = 60
_RUNS_CODE = re.compile(r"parse_expr|sympify|\beval\(|\bexec\(")
REPLIES = (
    "",
    "0",
    "I don't know",
    "9**9**9**9",
    "factorial(10**7)",
    "__import__('os')._exit(0)",
    "None",
    "[]",
    "{}",
)


def faults(name: str) -> list[str]:
    """Why a data set's verdict is not to be trusted; empty for one that is."""
    library = load_reasoning_gym()
    try:
        dataset = library.create_dataset(name, seed=7, size=ENTRIES)
        entries = [dataset[place] for place in range(ENTRIES)]
    except Exception as error:  # some need arguments or files
        return [f"makes no entries: {type(error).__name__}: {error}"[:100]]
    found = [f"its verdict runs code: {word}" for word in _code_words(dataset)]
    if found:
        return found
    for place, entry in enumerate(entries):
        found += _faults_of_entry(dataset, entry, entries[place - 1])
    return list(dict.fromkeys(found))


def _code_words(dataset: Any) -> list[str]:
    """Words of the verdict's module that run text as code, unless the verdict is the library's plain
    comparison."""
    base = next(cls for cls in type(dataset).__mro__ if "score_answer" in vars(cls))
    if base.__module__ == "reasoning_gym.data.dataset" or base.__name__ == "ProceduralDataset":
        return []
    return sorted(set(_RUNS_CODE.findall(inspect.getsource(sys.modules[base.__module__]))))


def _faults_of_entry(dataset: Any, entry: Any, other: Any) -> list[str]:
    own = entry["answer"]
    if not isinstance(own, str) or not own.strip():
        return ["an entry has no answer"]
    found = []
    tried = [(own, "its own answer")]
    tried += [(reply, repr(reply)) for reply in REPLIES if reply.strip() != own.strip()]
    tried += [(entry["question"], "the question"), (str(other["answer"]), "another's answer")]
    for reply, said in tried:
        try:
            score = float(dataset.score_answer(answer=reply, entry=entry))
        except Exception as error:  # whatever a verdict may raise
            found.append(f"raises {type(error).__name__} for {said}")
            continue
        if said == "its own answer":
            if score != 1:
                found.append(f"pays {score:g} for its own answer")
        elif verdict_of(score) > MOST and reply.strip() != own.strip():
            found.append(f"pays {score:g} for {said}")
    return found


def _send_faults(name: str, answers: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (4 * 1024**3, 4 * 1024**3))
    answers.send(faults(name))


def tried(name: str) -> list[str]:
    """`faults` in a process with limits, forked so that the library is imported once."""
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe(duplex=False)
    process = forked.Process(target=_send_faults, args=(name, theirs))
    process.start()
    theirs.close()
    try:
        found: list[str] = ours.recv()
    except EOFError:
        found = []
    process.join()
    return [f"ended with status {process.exitcode}"] if process.exitcode else found


def main() -> None:
    parser = argparse.ArgumentParser(description="Audit reasoning-gym's verdicts")
    parser.add_argument("--write", action="store_true", help="write procedural_allowed.yaml")
    parser.add_argument(
        "--one", metavar="NAME", help="audit this data set here, and print its faults as JSON"
    )
    args = parser.parse_args()
    library = load_reasoning_gym()
    results = {name: tried(name) for name in sorted(library.factory.DATASETS)}
    for name, found in results.items():
        print(f"{name}: {'; '.join(found) or 'allowed'}")
    allowed = [name for name, found in results.items() if not found]
    print(f"{len(allowed)} of {len(results)} are allowed")
    if args.write:
        ALLOWED_FILE.write_text(
            f"# Data sets of reasoning-gym whose verdicts hold, by version {version('reasoning-gym')}, "
            f"{len(allowed)} of {len(results)}; scripts/reasoning_gym_audit.py writes it.\n"
            + "".join(f"- {name}\n" for name in allowed)
        )


if __name__ == "__main__":
    main()
