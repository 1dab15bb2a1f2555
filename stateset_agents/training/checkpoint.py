"""A checkpoint is a folder that is whole or absent, and loads without executing anything pickled.

    step-000050/
      model/               fp32 master weights, config, tokenizer, as plain transformers loads them
      optimizer.safetensors
      critic.safetensors   value head and its optimiser, where advantage_estimator has a critic
      state.json           step, version, frontier, schedule, KL coefficient, settings, machine
      manifest.json        schema version and the SHA-256 of every other file
    best                   a link to the best step's, where the run evaluates

It is written to a temporary name, synced, and renamed; a crash leaves the old ones untouched.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stateset_agents.errors import CheckpointError
from stateset_agents.training.tensor_file import write_tensors

__all__ = [
    "SCHEMA_VERSION",
    "Checkpoint",
    "best_checkpoint",
    "fingerprint",
    "latest_checkpoint",
    "load_checkpoint",
    "machine",
    "mark_best",
    "prune",
    "remove_later",
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
    critic: Mapping[str, Tensor] = field(default_factory=dict)
    """`Learner.critic_state()`; empty without a critic."""
    state: Mapping[str, Any]
    """Plain JSON: version, frontier, KL coefficient, settings, machine."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, *, write_model: Callable[[Path], None]) -> Path:
    """Write `folder/step-NNNNNN` atomically; `write_model(path)` adds what plain transformers needs.

    A checkpoint of the same step is replaced. Raises CheckpointError when the disk cannot take it; what
    stood there before stays.
    """
    target = folder / f"step-{checkpoint.step:06d}"
    partial = folder / f".{target.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "model").mkdir(parents=True)
        write_model(partial / "model")
        _write_files(partial, checkpoint)
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        _swap(partial, target)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot write checkpoint {target} ({reason}): free the disk or choose another output_dir"
        ) from error
    return target


def _write_files(partial: Path, checkpoint: Checkpoint) -> None:
    weights = {name: _saveable(tensor) for name, tensor in _untied(checkpoint.weights).items()}
    write_tensors(partial / "model" / "model.safetensors", weights)
    tensors, rest = _split_optimizer(checkpoint.optimizer)
    write_tensors(partial / "optimizer.safetensors", tensors)
    if checkpoint.critic:
        critic = {name: _saveable(tensor) for name, tensor in checkpoint.critic.items()}
        write_tensors(partial / "critic.safetensors", critic)
    head = {"schema_version": SCHEMA_VERSION, "step": checkpoint.step, "optimizer": rest}
    _write_json(partial / "state.json", {**head, **checkpoint.state})
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    sums = {str(path.relative_to(partial)): _sha256(path) for path in files}
    _write_json(partial / "manifest.json", {"schema_version": SCHEMA_VERSION, "files": sums})


def _swap(partial: Path, target: Path) -> None:
    """Put `partial` in the place of `target`, which is gone only once the new one stands there."""
    if not target.exists():
        partial.rename(target)
        return
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    target.rename(replaced)
    partial.rename(target)
    shutil.rmtree(replaced)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, every file checked against the manifest.

    Raises CheckpointError naming the file that is missing or altered.
    """
    manifest = _read_json(path / "manifest.json")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint schema {manifest.get('schema_version')!r} and this program reads "
            f"{SCHEMA_VERSION}: use the stateset-agents that wrote it"
        )
    sums = manifest.get("files")
    if not isinstance(sums, dict) or not sums.keys() >= _FILES:
        raise CheckpointError(f"{path} is damaged: manifest.json is altered{_others(path)}")
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is incomplete: {name} is missing{_others(path)}")
        if _sha256(file) != expected:
            raise CheckpointError(f"{path} is damaged: {name} is truncated or altered{_others(path)}")
    state = _read_json(path / "state.json")
    weights = load_file(path / "model" / "model.safetensors")
    optimizer = _join_optimizer(load_file(path / "optimizer.safetensors"), state.pop("optimizer"))
    critic = load_file(path / "critic.safetensors") if "critic.safetensors" in sums else {}
    return Checkpoint(step=state["step"], weights=weights, optimizer=optimizer, critic=critic, state=state)


_FILES = {"model/model.safetensors", "optimizer.safetensors", "state.json"}


def _others(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    rest = [other for other in _steps(path.parent) if other != path]
    return f"; resume from {rest[-1]}" if rest else "; there is no other one: train again"


def _steps(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    named = [path for path in folder.glob("step-*") if path.name[5:].isdecimal()]
    return sorted(named, key=lambda path: int(path.name[5:]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run's `checkpoints/`, or None."""
    found = _steps(folder)
    return found[-1] if found else None


def mark_best(folder: Path, step: int | None) -> None:
    """Let `folder/best` lead to the checkpoint of `step`; where there is none (any more) it goes."""
    link, beside = folder / "best", folder / f".best.{os.getpid()}"
    beside.unlink(missing_ok=True)
    if step is None or not (folder / f"step-{step:06d}").is_dir():
        link.unlink(missing_ok=True)
        return
    beside.symlink_to(f"step-{step:06d}", target_is_directory=True)
    beside.replace(link)


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `folder/best` leads to, or None."""
    link = folder / "best"
    return link.resolve() if link.is_dir() else None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one, and what a kill left unfinished."""
    best = best_checkpoint(folder)
    for path in (*_steps(folder)[:-keep], *folder.glob(".step-*")):
        if best is None or path.name != best.name:
            shutil.rmtree(path, ignore_errors=True)


def remove_later(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, which a run that goes on from `step` makes anew."""
    for path in _steps(folder):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


def _saveable(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


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
        f"{index}.{name}": _saveable(value)
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
        digest.update(_saveable(tensor).reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def machine(device: torch.device) -> dict[str, Any]:
    """What bit-equality depends on beside seed and settings: versions, threads, kind of processor."""
    cuda = device.type == "cuda"
    return {
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "threads": torch.get_num_threads(),
        "cpu": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "device": torch.cuda.get_device_name(device) if cuda else device.type,
    }


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path.parent} is no checkpoint: it has no {path.name}{_others(path.parent)}"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}){_others(path.parent)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object{_others(path.parent)}")
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
