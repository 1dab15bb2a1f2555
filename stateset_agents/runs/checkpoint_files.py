"""A checkpoint is a folder that is whole or absent, and loads without executing anything pickled.

    step-000050/
      model/               fp32 master weights, config, tokenizer, as plain transformers loads them, and a
                           model card (README.md)
      adapter/             peft's layout, where a LoRA adapter was trained
      optimizer.safetensors
      critic.safetensors   value head and its optimiser, where advantage_estimator has a critic
      state.json           step, version, frontier, schedule, KL coefficient, settings, machine
      manifest.json        schema version and the SHA-256 of every other file
    best                   a link to the best step's, where the run evaluates

It is written to a temporary name, synced, and renamed; a crash leaves the old ones untouched. What begins
with a dot is never loaded: a checkpoint that was being written, replaced or removed when a kill came.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stateset_agents.backends.tensor_files import tensor_bytes, write_tensors
from stateset_agents.runtime.machine import sync
from stateset_agents.types.errors import CheckpointError

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The content of a checkpoint: all that a resume needs."""

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
    with _atomic_replacement(target) as partial:
        (partial / "model").mkdir()
        write_model(partial / "model")
        write_tensors(partial / "model" / "model.safetensors", checkpoint.weights)
        tensors, fields = _split_optimizer(checkpoint.optimizer)
        write_tensors(partial / "optimizer.safetensors", tensors)
        if checkpoint.critic:
            write_tensors(partial / "critic.safetensors", checkpoint.critic)
        head = {"schema_version": SCHEMA_VERSION, "step": checkpoint.step, "optimizer": fields}
        _write_json(partial / "state.json", {**head, **checkpoint.state})
    return target


def write_texts(path: Path, texts: Mapping[str, str]) -> None:
    """Write these texts into files of a checkpoint; after a kill all of them are old or all are new.

    Raises CheckpointError for a damaged checkpoint, and when the disk cannot take it.
    """
    names = _verified_files(path)
    with _atomic_replacement(path) as partial:
        for name in names | texts.keys():
            file = partial / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if name in texts:
                file.write_text(texts[name], encoding="utf-8")
                continue
            try:
                os.link(path / name, file)
            except OSError:  # a disk without hard links
                shutil.copyfile(path / name, file)


@contextlib.contextmanager
def _atomic_replacement(target: Path) -> Iterator[Path]:
    """Yield a new folder to fill; then write its manifest and rename it to `target`."""
    partial = target.with_name(f".{target.name}.partial")
    try:
        _clear(partial)
        partial.mkdir(parents=True)
        yield partial
        files = sorted(path for path in partial.rglob("*") if path.is_file())
        sums = {str(path.relative_to(partial)): _sha256(path) for path in files}
        _write_json(partial / "manifest.json", {"schema_version": SCHEMA_VERSION, "files": sums})
        for path in (*partial.rglob("*"), partial):
            sync(path)
        _swap(partial, target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            _clear(partial)
            restore_replaced(target.parent)
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot write checkpoint {target} ({reason}): free the disk or choose another output_dir"
        ) from error


def _swap(partial: Path, target: Path) -> None:
    """Rename `partial` to `target`; a kill between the two renames is repaired by `restore_replaced`."""
    if not target.exists():
        partial.rename(target)
        return
    replaced = target.with_name(f".{target.name}.replaced")
    _clear(replaced)
    target.rename(replaced)
    partial.rename(target)
    _clear(replaced)


def restore_replaced(folder: Path) -> None:
    """Rename back the checkpoint that a kill left between the two renames of its replacement.

    Only the process that writes the run may call it. Raises OSError where the folder cannot be written.
    """
    for replaced in folder.glob(".step-*.replaced"):
        target = folder / replaced.name.removeprefix(".").removesuffix(".replaced")
        if not target.exists():
            replaced.rename(target)
            sync(folder)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint, every file checked against the manifest.

    Raises CheckpointError naming the file that is missing or altered.
    """
    try:
        names = _verified_files(path)
        state = _read_json(path / "state.json")
        weights = load_file(path / "model" / "model.safetensors")
        optimizer = _join_optimizer(load_file(path / "optimizer.safetensors"), state.pop("optimizer"))
        critic = load_file(path / "critic.safetensors") if "critic.safetensors" in names else {}
        return Checkpoint(
            step=int(state["step"]), weights=weights, optimizer=optimizer, critic=critic, state=state
        )
    except _Damaged as error:
        raise CheckpointError(f"{error}{_other_checkpoint(path)}") from error.__cause__
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:  # though the hashes agree
        raise CheckpointError(f"{path} is damaged ({error}){_other_checkpoint(path)}") from error


class _Damaged(CheckpointError):
    """Another checkpoint of the folder may be sound."""


def _verified_files(path: Path) -> set[str]:
    """The files of a checkpoint, each compared with its hash in the manifest.

    Raises CheckpointError where one is missing or differs.
    """
    manifest = _read_json(path / "manifest.json")
    if manifest.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has checkpoint schema {manifest.get('schema_version')!r} and this program reads "
            f"{SCHEMA_VERSION}: use the stateset-agents that wrote it"
        )
    sums = manifest.get("files")
    if not isinstance(sums, dict) or not sums.keys() >= _FILES:
        raise _Damaged(f"{path} is damaged: manifest.json is altered")
    for name, expected in sums.items():
        file = path / name
        if not file.is_file():
            raise _Damaged(f"{path} is incomplete: {name} is missing")
        try:
            digest = _sha256(file)
        except OSError as error:
            raise _Damaged(f"{file} cannot be read ({error.strerror})") from error
        if digest != expected:
            raise _Damaged(f"{path} is damaged: {name} is truncated or altered")
    return set(sums)


_FILES = {"model/model.safetensors", "optimizer.safetensors", "state.json"}


def _other_checkpoint(damaged: Path) -> str:
    """Advice for a checkpoint that cannot be loaded."""
    for path in reversed(_checkpoints(damaged.parent)):
        if path.name != damaged.name:
            with contextlib.suppress(CheckpointError):
                _verified_files(path)
                return f"; resume from {path}"
    return "; there is no other one: train again"


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first."""
    named = [path for path in folder.glob("step-*") if path.name[5:].isdecimal() and path.is_dir()]
    return sorted(named, key=lambda path: int(path.name[5:]))


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run's `checkpoints/`, or None."""
    paths = _checkpoints(folder)
    return paths[-1] if paths else None


def mark_best(folder: Path, step: int | None) -> None:
    """Link `folder/best` to the checkpoint of `step`; remove the link where there is no such checkpoint.

    Raises CheckpointError when the folder cannot take it.
    """
    link, partial = folder / "best", folder / ".best.partial"
    try:
        partial.unlink(missing_ok=True)
        if step is None or not (folder / f"step-{step:06d}").is_dir():
            link.unlink(missing_ok=True)
            return
        partial.symlink_to(f"step-{step:06d}", target_is_directory=True)
        partial.replace(link)
    except OSError as error:
        raise CheckpointError(
            f"cannot write {link} ({error.strerror}): free the disk or choose another output_dir"
        ) from error


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that `folder/best` leads to, or None."""
    link = folder / "best"
    return link.resolve() if link.is_dir() else None


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one, and what a kill left unfinished.

    Raises CheckpointError for one that cannot be removed.
    """
    best = best_checkpoint(folder)
    for path in _checkpoints(folder)[:-keep]:
        if best is None or path.name != best.name:
            _remove(path)
    for unfinished in folder.glob(".step-*"):
        _clear(unfinished)


def remove_after(folder: Path, step: int) -> None:
    """Remove the checkpoints of later steps, which a run that goes on from `step` writes again.

    The newest is removed first, so that a kill leaves a run up to an earlier step. Raises CheckpointError
    for one that cannot be removed.
    """
    for path in reversed(_checkpoints(folder)):
        if int(path.name[5:]) > step:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint; a kill on the way leaves no part of it under its name."""
    removed = path.with_name(f".{path.name}.removed")
    try:
        _clear(removed)
        path.rename(removed)
    except OSError as error:
        raise CheckpointError(f"cannot remove {path} ({error.strerror}): mend the folder's rights") from error
    _clear(removed)


def _clear(path: Path) -> None:
    """Remove what has the name of an unfinished checkpoint; files still in use are left for the next time."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _split_optimizer(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by a flat name, and the rest as plain JSON."""
    tensors = {
        f"{index}.{name}": value
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
    others = {name: value for name, value in state.items() if name != "optimizer"}
    return tensors, {**others, "param_groups": groups}


def _join_optimizer(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    others = {name: value for name, value in fields.items() if name != "param_groups"}
    return {**others, "optimizer": {"state": state, "param_groups": fields["param_groups"]}}


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over names and bytes: which weights these are."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(tensor_bytes(weights[name]))
    return digest.hexdigest()


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _Damaged(f"{path.parent} is no checkpoint: it has no {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise _Damaged(f"{path} cannot be read ({error})") from error
    if not isinstance(data, dict):
        raise _Damaged(f"{path} is damaged: not a JSON object")
    return data


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
