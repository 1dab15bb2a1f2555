"""Files of tensors as https://huggingface.co/docs/safetensors lays them out, written one tensor at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from stateset_agents.backends.adapters import identity, shapes_of

# safetensors' `save_file` keeps Python's global lock while it writes, half a second for a small model on
# a busy disk; an event loop in the same process waits as long. So files are written here.

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
"""Bytes that the data's beginning is a multiple of; the header is filled up with spaces."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as https://huggingface.co/docs/safetensors lays them out, tied ones under one name.

    Eight bytes of header length, the header (names, dtypes, shapes, offsets) as JSON, and the bytes; lazy
    tensors are made one at a time. Raises OSError where the disk cannot take them.
    """
    shapes = _untied(shapes_of(tensors))
    ordered = sorted(shapes.items(), key=lambda item: (-item[1].element_size(), item[0]))  # aligned by that
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
        for name, _ in ordered:
            file.write(tensor_bytes(tensors[name]))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, copied only from another device and where they do not lie in a row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without second names for the same storage (tied embeddings), which safetensors refuses."""
    names = {identity(tensor): name for name, tensor in reversed(list(weights.items()))}
    return {name: weights[name] for name in names.values()}
