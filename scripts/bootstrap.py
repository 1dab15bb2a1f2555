"""Make `.venv` ready: a Python, torch for this machine, then the package with its development tools.

The Makefile runs it before every target. It does nothing while the stamp in `.venv` still fits, so a
second run needs no network. Standard library only, and syntax that Python 3.9 reads, so that an old
Python can be told what to do.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
OLDEST = (3, 11)
CANDIDATES = ("python3.11", "python3.12", "python3.13")
STAMP = "setup-stamp.json"

Command = list[str]


class SetupError(Exception):
    """One line for the user: what is wrong and what cures it."""


class Stamp(NamedTuple):
    """What a finished set-up was made from."""

    key: str
    venv: str
    torch: str


def say(text: str) -> None:
    """One line of progress, apart from the output of what runs next."""
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def scripts_folder(venv: Path) -> Path:
    return venv / ("Scripts" if os.name == "nt" else "bin")


def venv_python(venv: Path) -> Path:
    return scripts_folder(venv) / ("python.exe" if os.name == "nt" else "python")


# --- Is anything to do? -------------------------------------------------------------------------


def venv_version(venv: Path) -> str | None:
    """The Python version that `pyvenv.cfg` names, or None where there is no environment."""
    try:
        text = (venv / "pyvenv.cfg").read_text(encoding="utf-8")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition("=")
        if name.strip() in ("version", "version_info"):
            return ".".join(value.strip().split(".")[:3])
    return None


def inputs_key(root: Path, version: str) -> str:
    """Changes when the environment has to be brought up to date."""
    digest = hashlib.sha256(version.encode())
    for name in ("pyproject.toml", "constraints.txt", "scripts/bootstrap.py"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def read_stamp(venv: Path) -> Stamp | None:
    try:
        return Stamp(**json.loads((venv / STAMP).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_stamp(venv: Path, stamp: Stamp) -> None:
    (venv / STAMP).write_text(json.dumps(stamp._asdict()) + "\n", encoding="utf-8")


def why_unusable(venv: Path) -> str | None:
    """Why an existing environment has to be made anew; None when it can be kept."""
    version = venv_version(venv)
    if version is None:
        return "it has no readable pyvenv.cfg"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"its Python is {version}"
    if not venv_python(venv).exists():
        return "its Python is gone"
    stamp = read_stamp(venv)
    if stamp is not None:
        made_at = stamp.venv
    else:
        try:
            activate = (scripts_folder(venv) / "activate").read_text(encoding="utf-8")
        except OSError:
            return "it has no activate script"
        made_at = str(venv) if str(venv) in activate else "another folder"
    return None if made_at == str(venv) else f"it was made at {made_at}"


def has_gpu() -> bool:
    """An NVIDIA device that this machine's driver shows."""
    if glob.glob("/dev/nvidia[0-9]*"):
        return True
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listing = subprocess.run([tool, "-L"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    return listing.returncode == 0 and b"GPU" in listing.stdout


def torch_build(platform: str, gpu: bool) -> str:
    """Which torch fits: "cpu", "cuda", or "plain" where the index has one build only."""
    if not platform.startswith("linux"):
        return "plain"
    return "cuda" if gpu else "cpu"


def up_to_date(root: Path, venv: Path, build: str) -> bool:
    stamp = read_stamp(venv)
    if stamp is None or not venv_python(venv).exists():
        return False
    fits_machine = stamp.torch == build or stamp.torch == "cuda"  # a CUDA build runs without a GPU too
    key = inputs_key(root, venv_version(venv) or "")
    return fits_machine and stamp.venv == str(venv) and stamp.key == key


# --- Python -------------------------------------------------------------------------------------


def python_version(executable: str) -> tuple[int, ...] | None:
    """(major, minor) of an interpreter, None when it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    parts = done.stdout.split()
    return tuple(int(part) for part in parts) if done.returncode == 0 and len(parts) == 2 else None


def find_python() -> str:
    """The interpreter to build `.venv` with: this one if it is new enough, else one on the PATH."""
    if sys.version_info >= OLDEST:
        # Inside an environment: the Python under it, for the environment may be about to be remade.
        return getattr(sys, "_base_executable", None) or sys.executable
    for name in CANDIDATES:
        executable = shutil.which(name)
        if executable and (python_version(executable) or (0, 0)) >= OLDEST:
            return executable
    mine = ".".join(str(part) for part in sys.version_info[:3])
    raise SetupError(
        f"Python 3.11 or newer is needed, {sys.executable} is {mine} and none was found on the PATH. "
        "Install one (Debian, Ubuntu: sudo apt install python3.11 python3.11-venv; macOS: brew install "
        "python@3.11), then run for example: make demo PYTHON=python3.11"
    )


def refuse_link(venv: Path, reason: str) -> None:
    """An environment that another checkout shares by a link is never made anew through it."""
    if venv.is_symlink():
        raise SetupError(
            f"{venv} is a link to {venv.resolve()} and cannot be used as it is ({reason}). "
            "Remove the link to have an environment made here, or run the target where it leads"
        )


def create_venv(python: str, venv: Path) -> None:
    check = subprocess.run(
        [python, "-c", "import venv, ensurepip"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if check.returncode != 0:
        version = ".".join(str(part) for part in python_version(python) or OLDEST)
        raise SetupError(
            f"{python} lacks venv or ensurepip. On Debian or Ubuntu: sudo apt install python{version}-venv "
            "(or python3-venv); elsewhere install a complete Python."
        )
    run([python, "-m", "venv", "--clear", str(venv)], "the environment could not be made")


# --- Packages -----------------------------------------------------------------------------------


def run(command: Command, failure: str, cwd: Path | None = None) -> None:
    """Run a command that must succeed; its own output says why it did not."""
    if subprocess.run(command, cwd=cwd, check=False).returncode != 0:
        raise SetupError(f"{failure}; the lines above say why. It failed in: {' '.join(command)}")


def pip(venv: Path) -> Command:
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    return [str(venv_python(venv)), "-m", "pip", "--disable-pip-version-check", *quiet]


def pinned(root: Path, name: str) -> str:
    """The exact version of a package in constraints.txt."""
    for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line[len(name) + 2 :].strip()
    raise SetupError(f"constraints.txt pins no {name}: add a line such as {name}==1.2.3")


def torch_attempts(build: str, version: str, venv: Path) -> list[list[Command]]:
    """Ways to get the right torch, best first; each is a list of commands that must all succeed.

    Plain pip finds the CPU build only on an index (or a folder of wheels) that serves local versions
    such as 2.13.0+cpu; uv knows where torch keeps its builds.
    """
    python = str(venv_python(venv))
    pip_install = [*pip(venv), "install", "-c", "constraints.txt"]
    uv_install = [python, "-m", "uv", "pip", "install", "--python", python, "-c", "constraints.txt"]
    backend = "cpu" if build == "cpu" else "auto"
    with_uv = [[*pip_install, "uv"], [*uv_install, "--torch-backend", backend, f"torch=={version}"]]
    if build == "cpu":
        return [[[*pip_install, f"torch=={version}+cpu"]], with_uv]
    if build == "cuda":
        return [with_uv, [[*pip_install, f"torch=={version}"]]]
    return [[[*pip_install, f"torch=={version}"]]]


def installed_torch(venv: Path) -> str:
    """The version of torch in the environment, empty where there is none."""
    code = "from importlib.metadata import version; print(version('torch'))"
    done = subprocess.run(
        [str(venv_python(venv)), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return done.stdout.decode().strip()


def install_torch(root: Path, venv: Path, build: str) -> None:
    version = pinned(root, "torch")
    present = installed_torch(venv)
    cpu_only = present.endswith("+cpu")
    if present.split("+")[0] == version and not (build == "cuda" and cpu_only):
        return
    if cpu_only:
        run([*pip(venv), "uninstall", "--yes", "torch"], "the other torch build could not be removed")
    complaints = []
    for attempt in torch_attempts(build, version, venv):
        for command in attempt:
            done = subprocess.run(command, cwd=root, stderr=subprocess.PIPE, check=False)
            if done.returncode != 0:
                complaints.append(f"{' '.join(command)}\n{done.stderr.decode(errors='replace').strip()}")
                break
        else:
            return
    print("\n".join(complaints), file=sys.stderr)
    raise SetupError(f"torch {version} ({build} build) could not be installed; the lines above say why")


def install(root: Path, venv: Path, build: str) -> None:
    if not list(venv.glob("[Ll]ib*/**/site-packages/pip")):
        run([str(venv_python(venv)), "-m", "ensurepip", "--upgrade"], "pip could not be added to .venv")
    say(f"torch ({build} build)")
    install_torch(root, venv, build)
    say("stateset-agents and its development tools")
    run(
        [*pip(venv), "install", "-c", "constraints.txt", "-e", ".[dev]"],
        "the packages could not be installed",
    )


def main(root: Path = ROOT) -> int:
    venv = root / ".venv"
    build = torch_build(sys.platform, has_gpu())
    try:
        if up_to_date(root, venv, build):
            return 0
        reason = why_unusable(venv) if venv.exists() else "there is none yet"
        if reason is not None:
            refuse_link(venv, reason)
            python = find_python()
            say(f"making .venv with {python} ({reason}); the first time takes a few minutes")
            create_venv(python, venv)
        (venv / STAMP).unlink(missing_ok=True)  # a set-up that is cut short must not look finished
        install(root, venv, build)
        write_stamp(venv, Stamp(inputs_key(root, venv_version(venv) or ""), str(venv), build))
        say("done")
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
