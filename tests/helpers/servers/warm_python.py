"""Programs that start at once: `[*warm_python(), "-m", "stateset_agents", "serve", ...]` in place of Python.

Importing torch and transformers is seconds of work, in each program that a test starts. Here one process for
the whole session imports them, at the first request, runs nothing, and forks for every program. A program has
the streams, folder, environment and signals that its test gives it, and a process of its own. What libraries
read at import (OMP_NUM_THREADS, HF_ENDPOINT, ...) is the session's, and so is the seed of `hash()`: a test of
these, or of what is imported, starts Python itself.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import io
import marshal
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

__all__ = ["of_another", "program_id", "start", "stop", "warm_python"]

_ADDRESS = "WARM_PYTHON"
_MODULES = (
    "openai",
    "stateset_agents.backends.local.backend",
    "stateset_agents.cli.main",
    "stateset_agents.environments.retail_desk",
    "stateset_agents.serving.server",
    "stateset_agents.training.experiment",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
)


def warm_python() -> list[str]:
    """The words that stand for Python in a command; behind them goes `-m MODULE`, `-c CODE` or a file."""
    client = Path(__file__).with_name("warm_client.py")
    return [sys.executable, "-I", "-S", str(client), os.environ[_ADDRESS]]


def program_id(pid: int) -> int:
    """The number of the program's own process; `pid` is that of what `warm_python()` started."""
    return int(Path(f"/proc/{pid}/comm").read_text())


def start() -> subprocess.Popen[bytes]:
    """Called once in a session, by conftest.py; workers inherit the address."""
    os.environ[_ADDRESS] = str(Path(tempfile.mkdtemp(prefix="warm-python-"), "socket"))
    return _start(os.environ[_ADDRESS], sys.executable, _MODULES)


def _start(address: str, python: str, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    with listener:
        return subprocess.Popen(
            [python, __file__, str(listener.fileno()), *modules],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,  # its end is the session's
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
            start_new_session=True,  # a Ctrl-C reaches programs by those who started them
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    process.communicate()
    address = Path(os.environ.pop(_ADDRESS))
    address.unlink()
    address.parent.rmdir()


@contextmanager
def of_another(python: Path, modules: Sequence[str]) -> Iterator[list[str]]:
    """What `warm_python` returns, of another Python, with these modules imported, while open."""
    with tempfile.TemporaryDirectory(prefix="warm-python-") as folder:
        process = _start(f"{folder}/socket", str(python), modules)
        try:
            yield [*warm_python()[:-1], f"{folder}/socket"]
        finally:
            process.communicate()


# ------------------------------------------------------------------------------ the process that forks

_Job = tuple[list[str], str, dict[str, str], list[int]]


def _receive(door: socket.socket) -> _Job | None:
    """Arguments, folder, environment and the three streams; None where the test gave up meanwhile."""
    head, files, _, _ = socket.recv_fds(door, 4, 3)
    length, parts = int.from_bytes(head, "little"), b""
    while head and len(parts) < length:
        part = door.recv(length - len(parts))
        if not part:
            return None
        parts += part
    return (*marshal.loads(parts), files) if head else None


class _Programs:
    """Forks a program for each connection, kills it where the connection ends, and tells how it ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._doors: dict[int, socket.socket] = {}
        self._pids: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def next_job(self) -> _Job:
        """Returns in a fork, with what it has to do."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    job = self._fork()
                    if job is not None:
                        return job
                elif key.fileobj == 0:
                    os._exit(0)
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._hear(key.fileobj)

    def _fork(self) -> _Job | None:
        door, _ = self._listener.accept()
        job = _receive(door)
        if job is None:
            door.close()
            return None
        _import_all()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            self._selector.close()
            for inherited in (self._listener, door, *self._pids):
                inherited.close()
            return job
        for file in job[3]:
            os.close(file)
        self._doors[pid], self._pids[door] = door, pid
        self._selector.register(door, selectors.EVENT_READ)
        self._tell(door, pid)
        return None

    def _hear(self, door: socket.socket) -> None:
        number = door.recv(1)
        os.kill(self._pids[door], number[0] if number else signal.SIGKILL)
        if not number:
            self._selector.unregister(door)

    def _reap(self) -> None:
        while self._doors:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            door = self._doors.pop(pid)
            del self._pids[door]
            if door in self._selector.get_map():
                self._selector.unregister(door)
            self._tell(door, os.waitstatus_to_exitcode(status))
            door.close()

    @staticmethod
    def _tell(door: socket.socket, number: int) -> None:
        try:
            door.sendall(number.to_bytes(4, "little", signed=True))
        except OSError:
            return  # whoever asked was killed


@cache
def _import_all() -> None:
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _open_streams(*, at_once: bool) -> None:
    """As Python does at its start: a terminal is written line by line, and so are errors."""
    encoding = sys.stdout.encoding
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding)
    for name, number, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        file = io.FileIO(number, "wb", closefd=False)
        stream = io.TextIOWrapper(
            file if at_once else io.BufferedWriter(file),
            encoding,
            errors,
            line_buffering=number == 2 or os.isatty(number),
            write_through=at_once,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _become(job: _Job) -> types.CodeType:
    """Take the program's streams, folder, environment and arguments; returns the code of its `__main__`."""
    arguments, folder, environment, files = job
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    given = environment.get("PYTHONPATH", "")
    of_path = given.split(os.pathsep) if given and given != os.environ.get("PYTHONPATH") else []
    os.environ.clear()
    os.environ.update(environment)
    sys.dont_write_bytecode = True  # where a test limits the size of files it would be torn
    _open_streams(at_once=bool(environment.get("PYTHONUNBUFFERED")))
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[1:1] = of_path
    return _code(arguments, folder)


def _code(arguments: list[str], folder: str) -> types.CodeType:
    """`-m MODULE ...`, `-c CODE ...` or `FILE ...`, as Python understands them."""
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        return compile(arguments[1], "<string>", "exec", dont_inherit=True)
    if arguments[0] == "-m":
        sys.path[0] = folder
        spec = importlib.util.find_spec(arguments[1])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{arguments[1]}.__main__")
        if spec is None or spec.origin is None:
            sys.exit(f"No module named {arguments[1]}")
        main.__dict__.update(__spec__=spec, __package__=spec.parent)
        arguments = [spec.origin, *arguments[2:]]
    else:
        sys.path[0] = str(Path(arguments[0]).absolute().parent)
    sys.argv = arguments
    main.__dict__.update(__file__=arguments[0])
    return compile(Path(arguments[0]).read_bytes(), arguments[0], "exec", dont_inherit=True)


if __name__ == "__main__":
    _job = _Programs(socket.socket(fileno=int(sys.argv[1]))).next_job()
    exec(_become(_job), sys.modules["__main__"].__dict__)
