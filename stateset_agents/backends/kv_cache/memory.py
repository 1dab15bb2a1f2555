"""Memory for the cache, and freed memory back to the system; called by slot_store.py and batcher.py."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor

__all__ = ["hand_back", "zeros"]

_HUGE = 2**22
"""Bytes from which on memory is asked for in huge pages, of 2 MB."""


def hand_back() -> None:
    """Let the C library give freed memory up, where it is glibc; nothing happens elsewhere.

    glibc keeps what a thread has freed for that thread. Generation and update run in threads of their own, so
    that the process would hold what either of them ever needed, and never both threads use the same.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # macOS, musl, Windows
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros that lies in huge pages where Linux has them and it is large enough.

    A decode step reads a whole cache once. In pages of 4 KB the processor looks an address up for every block
    that it reads, and stops fetching ahead at every page's end: attention took a tenth to a fifth longer. A
    huge page is in memory as soon as any of it was written.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
