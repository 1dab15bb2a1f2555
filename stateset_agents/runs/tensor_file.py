"""Writes safetensors files without holding up the process's other threads. Checkpoints use it.

The package's own `save_file` keeps Python's global lock while it writes, half a second for a small model on
a busy disk; an event loop in the same process waits as long. `load_file` reads the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8
"""Of the data's beginning; the header is filled up with spaces."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous CPU tensors as https://huggingface.co/docs/safetensors lays them out.

    Eight bytes of header length, the header (names, dtypes, shapes, offsets) as JSON, and the bytes. Raises
    OSError where the disk cannot take them.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # aligned by that
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:  # a write gives the lock away for as long as the disk takes
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
