"""The folder of one run: its files, and the writes that concern several of them.

    runs/0001-demo/
      config.yaml     every setting of the run
      metrics.jsonl   one line per step: {"step": 3, "time": 1767.2, "reward/mean": 0.41, ...}
      rollouts.jsonl  one line per conversation (see `tracker.rollout_record`)
      timeline.jsonl  one line per conversation of training: what it did when (see `tracker.timeline_record`)
      tokens.jsonl    the text of each token id of rollouts.jsonl: {"id": 393, "text": "shop"}
      episodes.jsonl  of a numeric training, in place of the three above: one line per episode, as
                      {"step": 4096, "stage": "train", "group": 0, "member": 3, "return": 21.0, ...}
      events.jsonl    one line per thing that happened: {"event": "checkpoint saved", "step": 20, ...}
      summary.json    how the run ended
      windows.json    of a numeric training: held-out episodes over time (see `windows`)
      checkpoints/    written by the trainer
      .lock           held by the one process that writes (`RunLock`)
      report.html     written by `stateset-agents report`
      audit.json      where `audit --out` or `rescore --out` put it there, for the report; so rescore.json
    runs/latest       points to the newest run

The first line of each JSONL file is `{"schema_version": 1, "file": "metrics"}`; the other files carry
`schema_version` as a field. The trainer writes through `JsonlTracker`; `run_log` reads a folder back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from stateset_agents.tracking.jsonl import SCHEMA_VERSION, JsonlWriter, dump, read_lines
from stateset_agents.tracking.windows import Window
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

_NUMBERED = re.compile(r"^(\d{4,})-")


@dataclass(unsafe_hash=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    def __post_init__(self) -> None:
        path = self.path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.rollouts = path / "rollouts.jsonl"
        self.timeline = path / "timeline.jsonl"
        self.tokens = path / "tokens.jsonl"
        self.episodes = path / "episodes.jsonl"
        self.events = path / "events.jsonl"
        self.by_step = (self.metrics, self.rollouts, self.timeline, self.episodes, self.events)
        """The files that grow with every step, where the run has them."""
        self.summary = path / "summary.json"
        self.windows = path / "windows.json"
        self.checkpoints = path / "checkpoints"
        self.report = path / "report.html"
        self.audit = path / "audit.json"
        self.rescore = path / "rescore.json"

    @classmethod
    def create(cls, root: str | Path = "runs", name: str = "run", *, conversations: bool = True) -> RunFolder:
        """Make the next numbered folder, `root/0001-name`, and let `root/latest` point to it.

        `conversations`: False for a numeric training, whose episodes are rows of numbers.

        Special characters of `name` become dashes. Raises ConfigurationError if the folder cannot be written.
        """
        root = Path(root)
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
        try:
            root.mkdir(parents=True, exist_ok=True)
            folder = cls(_next_numbered(root, slug))
            folder.checkpoints.mkdir()
            unused = {folder.episodes} if conversations else {folder.rollouts, folder.timeline}
            for file in folder.by_step:
                if file in unused:
                    continue
                JsonlWriter(file).close()
            _point_latest(root, folder.path.name)
        except (OSError, ValueError) as error:  # ValueError: no name of a file can hold NUL
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"cannot write a run folder in {str(root)!r}: {reason}; choose another folder"
            ) from error
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run (`runs/latest` works). Raises ConfigurationError when it is no run folder."""
        folder = cls(Path(path).resolve())
        if not folder.path.exists():
            raise ConfigurationError(f"run folder {str(path)!r} does not exist: give one such as runs/latest")
        if not folder.metrics.is_file():
            raise ConfigurationError(
                f"{str(path)!r} is no run folder (it has no metrics.jsonl): give one such as runs/latest"
            )
        return folder

    def write_config(self, settings: Mapping[str, Any]) -> None:
        """Save the settings (plain values), with the schema version as their first field."""
        data = {"schema_version": SCHEMA_VERSION, **settings}
        replace_file(self.config, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Save how the run ended; numbers that are not finite become null."""
        replace_file(self.summary, dump({"schema_version": SCHEMA_VERSION, **summary}, indent=2) + "\n")

    def write_windows(self, windows: Sequence[Window]) -> None:
        """Save held-out episodes over time; numbers that are not finite become null."""
        records = [window.to_json() for window in windows]
        replace_file(self.windows, dump({"schema_version": SCHEMA_VERSION, "windows": records}) + "\n")

    def truncate_after(self, step: int) -> None:
        """Remove all lines from the first one of a later step on, before a resume plays these steps again.

        Each file is truncated in place, in one call, so that a tracker that has it open appends at the new
        end.
        """
        for file in self.by_step:
            _truncate_at(file, lambda record: record.get("step", -1) > step)

    def drop_evaluation(self, step: int) -> None:
        """Remove the lines of the evaluation after that step, before it is repeated."""
        self.drop_stage("validation", step)
        _truncate_at(
            self.metrics,
            lambda record: record.get("step") == step and any(name.startswith("eval/") for name in record),
        )

    def drop_stage(self, stage: str, step: int) -> None:
        """Remove the conversations of an evaluation at the end of the file, before it is repeated."""
        for file in (self.rollouts, self.episodes):
            _truncate_at(file, lambda record: record.get("stage") == stage and record["step"] == step)


def _truncate_at(file: Path, is_first: Callable[[Mapping[str, Any]], bool]) -> None:
    """Truncate the file before the first record for which `is_first` holds."""
    if not file.exists():  # the run was started by an earlier version
        return
    offset = next((start for start, record in read_lines(file) if is_first(record)), None)
    if offset is not None:
        os.truncate(file, offset)


def replace_file(file: Path, text: str, hint: str = "free or choose another disk") -> None:
    """Write a temporary file and rename it: readers find the old file or the new one, also after a kill. A
    link stays, and what it names is written.

    Raises ConfigurationError, with the hint, if the folder cannot be written, and for a pipe or device.
    """
    target = Path(os.path.realpath(file))
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise ConfigurationError(f"cannot write {file}: it is a pipe or a device; name a file")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigurationError(f"cannot write {file}: {error.strerror}; {hint}") from error


def _next_numbered(root: Path, slug: str) -> Path:
    """A new folder with the number after the highest one."""
    while True:
        numbers = [int(match[1]) for entry in root.iterdir() if (match := _NUMBERED.match(entry.name))]
        path = root / f"{max(numbers, default=0) + 1:04d}-{slug}"
        try:
            path.mkdir()
        except FileExistsError:  # another process was faster
            continue
        return path


def _point_latest(root: Path, name: str) -> None:
    link = root / f".latest.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name, target_is_directory=True)
    link.replace(root / "latest")


# ------------------------------------------------------------------------------ one writer per run folder
#
# The lock is the operating system's, on the file `.lock`: flock on Linux and macOS, msvcrt.locking on
# Windows. It ends with its process, however that ends; the file itself stays and means nothing.

_log = get_logger(__name__)

_HELD = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}
"""The errors by which an operating system says that another process has the lock."""
_UNKNOWN = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""The errors by which a file system says that it has no locks."""


class RunLock:
    """Held from its making until `release`, or until the process is gone, by kill -9 too."""

    def __init__(self, folder: Path, name: str = ".lock", *, writer: str = "trainer") -> None:
        """Raises ConfigurationError where another `writer` holds it, or the folder cannot be written.

        On a file system without locks it warns and holds nothing.
        """
        try:
            self._file = (folder / name).open("a+b")
        except OSError as error:
            raise ConfigurationError(
                f"cannot write in {folder}: {error.strerror}; mend its rights"
            ) from error
        try:
            _lock(self._file)
        except OSError as error:
            self._file.close()
            if error.errno in _HELD:
                raise ConfigurationError(
                    f"another {writer} is writing {folder}: wait for its end or stop it, then resume"
                ) from error
            if error.errno not in _UNKNOWN:
                raise ConfigurationError(f"cannot lock {folder}: {error.strerror}; choose another") from error
            _log.warning(f"the file system of {folder} has no locks: let one {writer} alone write there")

    def release(self) -> None:
        """Let another one write; releasing twice does nothing."""
        self._file.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[bytes]) -> None:
        os.lseek(file.fileno(), 0, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: IO[bytes]) -> None:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
