"""A virtual environment for each peer, made once under benchmarks/.environments (git ignores it)."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from scripts import bootstrap

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / ".environments"

PEERS: dict[str, tuple[str, ...]] = {
    "trl": ("trl>=1.16,<1.17",),
    # Not its `training` extra, which asks for trackers and data sets as well: what its trainer imports.
    "sb3": ("stable-baselines3>=2.9,<3", "gymnasium[box2d]>=1.4,<2"),
    "stateset": ("stateset-agents>=0.69,<0.70", "accelerate", "peft", "psutil"),
}
"""Peer -> what is installed beside torch and transformers, which have the project's versions. `own` is the
project's environment, where plain transformers runs as well."""


def python_of(name: str) -> Path:
    """The interpreter of an environment that is there."""
    if name == "own":
        return Path(sys.executable)
    return bootstrap.venv_python(FOLDER / name)


def ensure(name: str) -> None:
    """Make a peer's environment unless it is there; raises bootstrap.SetupError where that fails."""
    if name == "own":
        return
    venv, stamp = FOLDER / name, FOLDER / f"{name}.stamp"
    constraints = FOLDER / "constraints.txt"
    pins = [f"{package}=={bootstrap.pinned(ROOT, package)}" for package in ("torch", "transformers")]
    key = hashlib.sha256(" ".join([*pins, *PEERS[name]]).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == key and python_of(name).exists():
        return
    bootstrap.say(f"benchmarks: making {venv.relative_to(ROOT)}, which takes some minutes once")
    FOLDER.mkdir(parents=True, exist_ok=True)
    constraints.write_text("\n".join(pins) + "\n")
    if bootstrap.why_unusable(venv) is not None:
        bootstrap.create_venv(bootstrap.find_python(), venv)
    bootstrap.install_torch(ROOT, venv, bootstrap.torch_build(sys.platform, gpu=False))
    command = [*bootstrap.pip(venv), "install", "-c", str(constraints), "transformers", *PEERS[name]]
    bootstrap.run(command, f"{name} could not be installed", cwd=ROOT)
    stamp.write_text(key)


def commit() -> str:
    """The commit that is measured, with a + where files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    measured = ("stateset_agents", "benchmarks", "examples/demo.yaml", "constraints.txt")
    changed = git("status", "--porcelain", "--", *measured, ":!benchmarks/results.json")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
