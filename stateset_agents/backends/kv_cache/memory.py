"""Allocate memory for the cache, and return freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap

import torch
from torch import Tensor

_HUGE = 2**22
"""Bytes. A larger tensor is allocated in huge pages of 2 MB."""


def trim_memory() -> None:
    """Return freed memory to the system, if the C library is glibc; elsewhere a no-op.

    glibc keeps memory that a thread has freed for that thread. Generation and update run in two threads, so
    the process would hold the peaks of both, although they are not needed at the same time.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # macOS, musl, Windows
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; in huge pages where Linux has them and the tensor is large enough.

    A decode step reads the whole cache once. With pages of 4 KB the processor translates an address for every
    block and stops prefetching at the end of every page: attention took 10 to 20 % longer. A huge page takes
    its full memory as soon as a part of it is written.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
