"""Where new weights are put for a vLLM server to load; backend.py writes one folder for each version."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from stateset_agents.types.errors import BackendError

if TYPE_CHECKING:
    import torch

__all__ = ["WeightFolders"]


class WeightFolders:
    """Folders of safetensors below a shared one, or below one of our own, which `close` removes."""

    def __init__(self, shared: Path | None) -> None:
        self._shared = shared
        self._own: tempfile.TemporaryDirectory[str] | None = None

    def write(self, weights: Mapping[str, torch.Tensor], name: str) -> Path:
        """The folder `name`, whole or not there at all. Raises BackendError where the disk cannot take it."""
        from safetensors.torch import save_file

        folder = self._above() / name
        part = folder.with_name(f"{name}.part")
        try:
            part.mkdir(parents=True, exist_ok=True)
            # copies: tied weights share their memory, which the format has no place for
            tensors = {key: tensor.detach().cpu().clone() for key, tensor in weights.items()}
            save_file(tensors, part / "model.safetensors", metadata={"format": "pt"})
            shutil.rmtree(folder, ignore_errors=True)
            part.rename(folder)
        except OSError as error:
            raise BackendError(f"cannot write weights to {folder}: {error.strerror or error}") from error
        return folder

    def forget(self, folder: Path) -> None:
        """Remove a folder that `write` made; leaves others alone."""
        if folder.parent == self._above():
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def _above(self) -> Path:
        if self._shared is not None:
            return self._shared
        if self._own is None:
            self._own = tempfile.TemporaryDirectory(prefix="stateset-weights-")
        return Path(self._own.name)
