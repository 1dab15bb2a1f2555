"""Every attack and every honest program against a sandbox: `attack_run.py FOLDER [--as-nobody]`.

Prints a JSON object: attacks' and honest programs' scores by name, and what was left behind. The answers lie
in reach of this process, which is the grader: a file, a module, its environment and memory, two sockets.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import random
import resource  # noqa: F401  # os.wait4 wants it, when root's files may be out of reach
import shutil
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attacks import ATTACKS, HONEST, HONEST_STDIN
from builders import trajectory

from stateset_agents.rewards.code import CodeReward
from stateset_agents.sandbox import Limits, Sandbox, SandboxFailure
from stateset_agents.sandbox.walls import find_interpreter

NOBODY = 65534
NUMBERS = (3, 14, 159, 2653)
LIMITS = Limits(cpu_seconds=1, wall_seconds=120)


def python_for_all(folder: Path) -> str:
    """An interpreter that every user may start: ours, the system's, or a copy of ours."""
    ours = Path(find_interpreter().path)
    for python in (ours, Path("/usr/bin/python3")):
        if python.exists() and all(path.stat().st_mode & stat.S_IXOTH for path in python.resolve().parents):
            return str(python)
    copy = folder / "python"
    library = next(path for path in find_interpreter().library if path.is_dir())
    left_out = shutil.ignore_patterns("site-packages", "test", "tests", "idlelib", "config-*", "ensurepip")
    shutil.copytree(library, copy / "lib" / library.name, ignore=left_out)
    for shared in library.parent.glob("libpython*.so*"):
        shutil.copy(shared, copy / "lib" / shared.name)
    (copy / "bin").mkdir()
    shutil.copy(ours, copy / "bin" / ours.name)
    return str(copy / "bin" / ours.name)


class Grader:
    """Answers in many places, and what programs are told of them."""

    def __init__(self, folder: Path) -> None:
        text = os.environ["SECRET_ANSWERS"]
        self.answers = {int(number): answer for number, answer in json.loads(text).items()}
        self.secrets = folder / "secrets" / "scenarios.json"
        self.secrets.parent.mkdir(mode=0o755)
        self.secrets.write_text(text)
        (self.secrets.parent / "secret_generator.py").write_text(f"ANSWERS = {self.answers!r}\n")
        self.playground = folder / "playground"
        self.playground.mkdir()
        self.playground.chmod(0o777)
        self.memory = ctypes.create_string_buffer(" ".join(map(str, self.answers.values())).encode(), 64)
        self.marker = f"left-by-an-attack-{os.getpid()}"
        self.text = text.encode()
        self.port = self._serve(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0{self.marker}")
        abstract.listen()
        self._serve(abstract)
        self.before = self.state()

    def _serve(self, listener: socket.socket) -> socket.socket:
        def serve() -> None:
            while True:
                with listener.accept()[0] as line:
                    line.sendall(self.text)

        threading.Thread(target=serve, daemon=True).start()
        return listener

    def told(self, program: str) -> str:
        """The program, with the places it asks for."""
        places = {
            "SECRETS": self.secrets,
            "FOLDER": self.secrets.parent,
            "PACKAGES": Path(__file__).resolve().parents[2],
            "PLAYGROUND": self.playground,
            "MARKER": self.marker,
            "ABSTRACT": self.marker,
            "PORT": self.port,
            "PID": os.getpid(),
            "ADDRESS": ctypes.addressof(self.memory),
        }
        for name, place in places.items():
            program = program.replace(f"@{name}@", str(place))
        return program

    def state(self) -> tuple[object, ...]:
        """Of the scenario's file."""
        status = self.secrets.stat()
        return self.secrets.read_text(), status.st_mode, status.st_mtime_ns, status.st_uid, status.st_nlink

    def left_behind(self) -> list[str]:
        """Files and processes that were not there before."""
        found = [str(path) for path in self.playground.iterdir()]
        places = (Path(tempfile.gettempdir()), Path("/dev/shm"), Path("/"), Path("/var/tmp"))
        found += [str(place / self.marker) for place in places if (place / self.marker).exists()]
        found += ["the scenario's file is changed"] if self.state() != self.before else []
        found += [f"process {pid}" for pid in children()]
        return found


def children() -> list[str]:
    """Of this process, and others that run a program of a sandbox of ours; zombies, too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                session = (entry / "environ").read_bytes() if parent == "1" else b""
            except OSError:  # it has ended, or is another user's
                continue
            if parent == str(os.getpid()) or (parent == "1" and b"n['serve']" in session):
                found.append(entry.name)
    return found


async def scores(sandbox: Sandbox, grader: Grader, only: Sequence[str]) -> dict[str, Any]:
    """By kind and name; None where a program was left unscored."""
    reward = CodeReward(sandbox)
    hidden = [{"arguments": [number], "expected": answer} for number, answer in grader.answers.items()]
    visible = [
        {"arguments": [100], "expected": 1, "visible": True},
        {"arguments": [101], "expected": 2, "visible": True},
    ]
    secret = {"entry_point": "solve", "cases": visible + hidden}
    digits = {
        "entry_point": "solve",
        "cases": [{"arguments": [number], "expected": sum(map(int, str(number)))} for number in NUMBERS],
    }
    sums = {"cases": [{"stdin": f"{n} {n + 1}\n", "expected": f"{2 * n + 1}\n"} for n in NUMBERS]}

    async def score(program: str, tests: object) -> float | None:
        talk = trajectory("Write it.", f"```python\n{grader.told(program)}\n```", context={"tests": tests})
        for _ in range(3):  # as the engine asks again
            try:
                return (await reward.score(talk)).score
            except SandboxFailure as failure:
                print(failure, file=sys.stderr)
        return None

    async def all_of(programs: dict[str, str], tests: object) -> dict[str, float | None]:
        found = await asyncio.gather(*(score(program, tests) for program in programs.values()))
        return dict(zip(programs, found, strict=True))

    return {
        "attacks": {
            kind: await all_of(
                {name: text for name, text in programs.items() if not only or name in only}, secret
            )
            for kind, programs in ATTACKS.items()
        },
        "honest": await all_of(dict(HONEST), digits) | await all_of(dict(HONEST_STDIN), sums),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="empty, and every user may enter it")
    parser.add_argument("--as-nobody", action="store_true", help="give root's rights up first")
    parser.add_argument("--sandbox", default="auto")
    parser.add_argument("--only", nargs="*", default=(), help="of the attacks these")
    args = parser.parse_args()
    if "SECRET_ANSWERS" not in os.environ:  # a process's environment is that of its start
        answers = {number: random.SystemRandom().randrange(10**12) for number in NUMBERS}
        os.environ["SECRET_ANSWERS"] = json.dumps(answers)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    python = python_for_all(args.folder) if args.as_nobody else None
    find_interpreter(python)
    grader = Grader(args.folder)
    if args.as_nobody:
        os.chown(grader.secrets, NOBODY, NOBODY)
        grader.before = grader.state()
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    sandbox = Sandbox(args.sandbox, limits=LIMITS, python=python)
    found = asyncio.run(scores(sandbox, grader, args.only))
    print(json.dumps({**found, "left": grader.left_behind(), "level": sandbox.level, "user": os.getuid()}))


if __name__ == "__main__":
    main()
