"""A disk that is full, for tests: `from full_disk import files_of_at_most`."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator

__all__ = ["files_of_at_most"]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: a part is written, then the system refuses, as a
    full disk does (Python ignores SIGXFSZ). No bytecode is written meanwhile: the interpreter would take a
    part of a file for the whole one."""
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes_no_bytecode
