"""Memory that was freed goes back to the system; called by batching.py before an update."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["hand_back"]


def hand_back() -> None:
    """Let the C library give freed memory up, where it is glibc; nothing happens elsewhere.

    glibc keeps what a thread has freed for that thread. Generation and update run in threads of their own, so
    that the process would hold what either of them ever needed, and never both threads use the same.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # macOS, musl, Windows
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
