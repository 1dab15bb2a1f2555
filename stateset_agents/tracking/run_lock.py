"""One writer per run folder: a lock that ends with its process, however that ends. Taken by `JsonlTracker`,
and on a file of their own by evaluations.

The lock is the operating system's, on the file `.lock`: flock on Linux and macOS, msvcrt.locking on Windows.
The file itself stays and means nothing.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import IO

from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger

_log = get_logger(__name__)

_HELD = {errno.EAGAIN, errno.EACCES, errno.EDEADLK}
"""How an operating system says that another one has the lock."""
_UNKNOWN = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}
"""How a file system says that it has no locks."""


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
