"""A checkpoint is a folder that is whole or absent, and loads without executing anything pickled.

    step-000050/
      model/               weights, config and tokenizer, as plain transformers loads them
      optimizer.safetensors
      state.json           step, version, frontier, schedule, KL coefficient, settings, machine
      manifest.json        schema version and the SHA-256 of every other file

It is written to a temporary name, synced, and renamed; a crash leaves the old ones untouched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from stateset_agents.errors import CheckpointError

__all__ = [
    "SCHEMA_VERSION",
    "Checkpoint",
    "fingerprint",
    "latest_checkpoint",
    "load_checkpoint",
    "machine",
    "prune",
    "save_checkpoint",
]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a resume needs."""

    step: int
    """Steps finished."""
    weights: Mapping[str, Tensor]
    """fp32 master weights by parameter name."""
    optimizer: Mapping[str, Any]
    """`Optimization.state()`."""
    state: Mapping[str, Any]
    """Plain JSON: version, frontier, KL coefficient, settings, machine."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, write_model: Any) -> Path:
    """Write `folder/step-NNNNNN` atomically; `write_model(path)` adds what plain transformers needs.

    Raises CheckpointError when the disk cannot take it; what stood there before stays.
    """
    target = folder / f"step-{checkpoint.step:06d}"
    partial = folder / f".{target.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "model").mkdir(parents=True)
        write_model(partial / "model")
        save_file(
            {
                name: tensor.detach().cpu().contiguous()
                for name, tensor in _untied(checkpoint.weights).items()
            },
            partial / "model" / "model.safetensors",
            metadata={"format": "pt"},
        )
        tensors, rest = _split_optimizer(checkpoint.optimizer)
        save_file(tensors, partial / "optimizer.safetensors")
        _write_json(
            partial / "state.json",
            {
                "schema_version": SCHEMA_VERSION,
                "step": checkpoint.step,
                "optimizer": rest,
                **checkpoint.state,
            },
        )
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sums = {str(path.relative_to(partial)): _sha256(path) for path in files}
        _write_json(partial / "manifest.json", {"schema_version": SCHEMA_VERSION, "files": sums})
        for path in partial.rglob("*"):
            _sync(path)
        _sync(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        _sync(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {target} ({error.strerror}): free the disk or choose another output_dir"
        ) from error
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, every file checked against the manifest.

    Raises CheckpointError naming the file that is missing or altered.
    """
    manifest = _read_json(path / "manifest.json")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint schema {manifest.get('schema_version')!r}; "
            f"this version reads {SCHEMA_VERSION}"
        )
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is incomplete: {name} is missing; resume from another checkpoint")
        if _sha256(file) != expected:
            raise CheckpointError(
                f"{path} is damaged: {name} is truncated or altered; resume from another one"
            )
    state = _read_json(path / "state.json")
    try:
        weights = load_file(path / "model" / "model.safetensors")
        tensors = load_file(path / "optimizer.safetensors")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} holds no readable weights ({error}); resume from another one"
        ) from error
    optimizer = _join_optimizer(tensors, state.pop("optimizer"))
    return Checkpoint(step=state["step"], weights=weights, optimizer=optimizer, state=state)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint of a run's `checkpoints/`, or None."""
    found = sorted(path for path in folder.glob("step-*") if (path / "manifest.json").is_file())
    return found[-1] if found else None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def _untied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without second names for the same storage (tied embeddings), which safetensors refuses."""
    seen: set[int] = set()
    kept = {}
    for name, tensor in weights.items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            kept[name] = tensor
            seen.add(tensor.data_ptr())
    return kept


def _split_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by a flat name, and the rest as plain JSON."""
    tensors = {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, entry in state["optimizer"]["state"].items()
        for name, value in entry.items()
        if isinstance(value, Tensor)
    }
    groups = [
        {
            key: value
            for key, value in group.items()
            if isinstance(value, (bool, int, float, str, list, tuple, type(None)))
        }
        for group in state["optimizer"]["param_groups"]
    ]
    rest = {name: value for name, value in state.items() if name != "optimizer"}
    return tensors, {**rest, "param_groups": groups}


def _join_optimizer(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    others = {name: value for name, value in rest.items() if name != "param_groups"}
    return {**others, "optimizer": {"state": state, "param_groups": rest["param_groups"]}}


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes: which weights these are."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """What bit-equality depends on: versions, threads, CPU type."""
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is no checkpoint: it has no {path.name}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); resume from another checkpoint") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object; resume from another checkpoint")
    return data


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
