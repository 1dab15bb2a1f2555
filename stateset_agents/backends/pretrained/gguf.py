"""GGUF files: transformers reads weights, tokenizer and chat template out of one file; for `loading.py`.

Quantised weights are dequantised while they are read, so that the model is like any other: it trains, and is
saved as safetensors.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stateset_agents.types.errors import ConfigurationError

_NEEDED = ("gguf", "accelerate")
UNREADABLE: tuple[type[Exception], ...] = (struct.error,)
"""What the reader raises for a damaged file, besides what transformers raises for any."""


def is_gguf(where: str) -> bool:
    """Is it a GGUF file's name?"""
    return where.lower().endswith(".gguf")


def expect_gguf_reader(where: str) -> None:
    """Raises ConfigurationError where the packages that read GGUF files are missing."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"reading {where!r} needs {' and '.join(missing)} (the extra gguf): "
            'pip install "gguf>=0.18" "accelerate>=1"'
        )


def source_of(where: str) -> tuple[str, dict[str, str]]:
    """What transformers' `from_pretrained` takes for this file or folder: a name, and arguments with it."""
    if not is_gguf(where):
        return where, {}
    return str(Path(where).parent), {"gguf_file": Path(where).name}


def without_packing(where: str) -> dict[str, Any]:
    """Arguments for the model: else some architectures keep their weights quantised, which cannot train."""
    from transformers import GgufConfig

    return {"quantization_config": GgufConfig(dequantize=True)} if is_gguf(where) else {}


@contextlib.contextmanager
def quiet_reading(where: str) -> Iterator[None]:
    """Inside, no progress bar is drawn unless stderr is a terminal: it heeds no setting of transformers.

    The caller holds the lock of `load_lock.py`.
    """
    if not is_gguf(where) or sys.stderr.isatty():
        yield
        return
    from transformers import modeling_gguf_pytorch_utils

    reader: Any = modeling_gguf_pytorch_utils
    bar, reader.tqdm = reader.tqdm, _no_bar
    try:
        yield
    finally:
        reader.tqdm = bar


def _no_bar(items: Iterable[Any], **_: Any) -> Iterable[Any]:
    return items
