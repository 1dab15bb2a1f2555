"""Folders with new weights that a vLLM server loads; backend.py writes one for each version."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stateset_agents.types.errors import BackendError

if TYPE_CHECKING:
    import torch


class WeightFolders:
    """Folders of safetensors inside a shared folder, or inside a temporary one, which `close` removes."""

    def __init__(self, shared: Path | None) -> None:
        self._shared = shared
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def write(self, weights: Mapping[str, torch.Tensor], name: str) -> Path:
        """Write the folder `name` atomically. Raises BackendError if the disk cannot take it."""
        from safetensors.torch import save_file

        folder = self._parent() / name
        part = folder.with_name(f"{name}.part")
        try:
            part.mkdir(parents=True, exist_ok=True)
            # Copies: tied weights share their memory, and safetensors refuses that.
            tensors = {key: tensor.detach().cpu().clone() for key, tensor in weights.items()}
            save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        except OSError as error:
            raise BackendError(f"cannot write weights to {folder}: {error.strerror or error}") from error
        return folder

    def forget(self, folder: Path) -> None:
        """Remove a folder that `write` made; other folders are kept."""
        if folder.parent == self._parent():
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _parent(self) -> Path:
        if self._shared is not None:
            return self._shared
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="stateset-weights-")
        return Path(self._temporary.name)
