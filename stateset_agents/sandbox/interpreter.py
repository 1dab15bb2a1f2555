"""The Python that runs programs: where it and its standard library lie, and our child, compiled by it."""

from __future__ import annotations

import marshal
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stateset_agents.types.errors import ConfigurationError

CHILD = Path(__file__).with_name("child.py")
"""The source of what runs beside a program."""
_LOOK = """
import ctypes, marshal, resource, sys
code = marshal.dumps(compile(sys.stdin.buffer.read(), "child.py", "exec"), 4)
with open("/proc/self/maps") as file:
    mapped = sorted({line.split(None, 5)[5].strip() for line in file if ".so" in line})
sys.stdout.buffer.write(marshal.dumps((sys.path, mapped, code), 4))
"""
_NOT_LIBRARY = {
    "site-packages",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "test",
    "turtledemo",
}
"""In the standard library's folder, but packages of others, or of no use to a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python without site-packages, as the child is started."""

    path: str
    library: tuple[Path, ...]
    """sys.path of `python -I -S`, as far as it exists."""
    mapped: tuple[str, ...]
    """Shared objects that it has loaded when the door is shut."""
    child: bytes
    """child.py, compiled by it, for marshal."""

    def readable(self) -> Iterator[Path]:
        """Files and folders of the standard library, without what others have installed in it.

        Links are left out: what they lead to may lie anywhere.
        """
        for folder in self.library:
            if not folder.is_dir():
                yield folder
                continue
            for entry in sorted(folder.iterdir()):
                if not entry.is_symlink() and entry.name not in _NOT_LIBRARY and _may_read(entry):
                    yield entry

    def hidden(self) -> Iterator[Path]:
        """Folders that lie in the library and are not of it."""
        for folder in self.library:
            yield from (folder / name for name in sorted(_NOT_LIBRARY) if (folder / name).is_dir())


def _may_read(path: Path) -> bool:
    return (path.is_file() or path.is_dir()) and os.access(path, os.R_OK)


@cache
def find_interpreter(python: str | None = None) -> Interpreter:
    """What this Python says of itself; None: the one that runs us, outside of its virtual environment.

    Raises ConfigurationError where it cannot be started.
    """
    path = os.path.realpath(python or getattr(sys, "_base_executable", None) or sys.executable)
    try:
        done = subprocess.run(
            [path, "-I", "-S", "-c", _LOOK],
            input=CHILD.read_bytes(),
            capture_output=True,
            env={},
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"the sandbox cannot start {path}: {error}; give another python") from error
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {done.returncode}"]
        raise ConfigurationError(f"the sandbox cannot use {path}: {why[0]}; give a Python from 3.9 on")
    paths, mapped, child = marshal.loads(done.stdout)
    return Interpreter(
        path=path,
        library=tuple(Path(entry) for entry in paths if os.path.exists(entry)),
        mapped=tuple(mapped),
        child=child,
    )
