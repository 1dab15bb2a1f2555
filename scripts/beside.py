"""Make a virtual environment that has everything of this one and some packages more.

    .venv/bin/python scripts/beside.py .venv-openenv "openenv>=0.10,<0.11"

For libraries that bring too much to live in `.venv`. What `.venv` has is seen, not copied; the packages and
what they lack are installed beside it. Does nothing when that was done.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ensure(venv: Path, packages: list[str]) -> None:
    """Raises CalledProcessError where an installation fails; the lines above say why."""
    python, stamp = venv / "bin" / "python", venv / "packages.txt"
    wanted = "\n".join([sysconfig.get_paths()["purelib"], *packages])
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"making {venv}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    done = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True)
    (Path(done.stdout.strip()) / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), *packages], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    ensure(Path(sys.argv[1]).absolute(), sys.argv[2:])
