"""A disk that is full, for tests: `from full_disk import files_of_at_most`."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

__all__ = ["files_of_at_most"]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: a part is written, then the system refuses, as a
    full disk does (Python ignores SIGXFSZ)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
