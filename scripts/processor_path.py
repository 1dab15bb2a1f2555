"""Run a command as another make of processor would run it, after seeing that the products really go that way.

    .venv/bin/python scripts/processor_path.py torch-linears .venv/bin/python -m pytest tests/unit

torch chooses its kernels by the processor, in three libraries: ATen's own, oneDNN and MKL. A path below
forces all three by their environment variables. A probe in a process of its own then multiplies two matrices
under `ONEDNN_VERBOSE` and `MKL_VERBOSE` and prints what ran; where that is not the forced path nothing is
started.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass

_PROBE = """
import torch
from stateset_agents.backends import linears as fast_linear
from stateset_agents.backends.linears import packing
print("probe:aten", torch.backends.cpu.get_cpu_capability())
print("probe:fast-linears", "on" if fast_linear.is_available() else "off")
print("probe:packing", packing(torch.ones(1)) or "nobody")
a = torch.randn(64, 64)
print("probe:own", flush=True)
fast_linear.linear(a, a)
print("probe:torch", flush=True)
a @ a
print("probe:onednn", flush=True)
torch.ops.mkldnn._linear_pointwise(a, a, None, "none", [], "")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """The kernels that a process ran, as they name themselves."""

    aten: str
    """`torch.backends.cpu.get_cpu_capability()`: DEFAULT, AVX2, AVX512, ..."""
    onednn: str
    """The kernel of a product by oneDNN, such as `brg_matmul:avx512_core`."""
    mkl: str
    """MKL's instruction set where it names one (on Intel's processors), and its reproducibility mode."""
    fast_linears: bool
    """Did a linear layer of ours go to oneDNN?"""
    packing: str
    """Who packs the weights of rollouts in fp32: oneDNN, MKL or nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """One way through torch's kernels: what forces it, and how it is recognised."""

    environment: dict[str, str]
    expected: dict[str, str]
    """A pattern for each field of `Taken` that is forced."""


PATHS = {
    "native": Path(environment={}, expected={}),
    "torch-linears": Path(
        environment={"STATESET_AGENTS_FAST_LINEARS": "0"},
        expected={"fast_linears": "False", "packing": "nobody"},
    ),
    # MKL_ENABLE_INSTRUCTIONS works on Intel's processors alone; COMPATIBLE is MKL's one path on every make.
    "avx2": Path(
        environment={
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "MKL_CBWR": "COMPATIBLE",
        },
        expected={"aten": "AVX2", "onednn": r".*\bavx2", "mkl": ".*CNR:COMPATIBLE"},
    ),
}


def probe(environment: dict[str, str]) -> Taken:
    """What a process with these variables runs. Raises RuntimeError with its output where it fails."""
    verbose = {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={**os.environ, **environment, **verbose},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    start, own_probe, torchs, onednns = re.split(
        r"^probe:(?:own|torch|onednn)$", done.stdout, flags=re.MULTILINE
    )
    facts = dict(re.findall(r"^probe:(\S+) (.*)$", start, re.MULTILINE))
    enabled = re.search(r"\((Intel\(R\) [^()]*)\) enabled processors", done.stdout)
    mode = re.search(r"CNR:\S+", torchs)
    kernels = r"onednn_verbose,v1,primitive,exec,cpu,\w+,([^,]+),"
    return Taken(
        aten=facts["aten"],
        onednn=", ".join(re.findall(kernels, onednns)) or "none",
        mkl=" ".join(setting for setting in (enabled and enabled[1], mode and mode[0]) if setting) or "none",
        fast_linears=bool(re.search(kernels, own_probe)),
        packing=facts["packing"],
    )


def refusals(path: Path, taken: Taken) -> list[str]:
    """One line for each kernel that is not the forced one."""
    return [
        f"{name} is {getattr(taken, name)}, not {pattern}"
        for name, pattern in path.expected.items()
        if not re.match(pattern, str(getattr(taken, name)))
    ]


def main(words: list[str]) -> int:
    """`NAME COMMAND...`: the command's exit status, or 2 where the path was not taken."""
    if not words or words[0] not in PATHS:
        requested = words[0] if words else "nothing"
        print(f"the path must be one of {', '.join(PATHS)}, got {requested}", file=sys.stderr)
        return 2
    name, *command = words
    path = PATHS[name]
    taken = probe(path.environment)
    linears = "oneDNN" if taken.fast_linears else "torch's"
    ours = f"our linears {linears}, packed by {taken.packing}"
    kernels = f"ATen {taken.aten}; oneDNN {taken.onednn}; MKL {taken.mkl}; {ours}"
    print(f"processor path {name}: {kernels}", flush=True)
    if wrong := refusals(path, taken):
        print(f"processor path {name} was not taken: {'; '.join(wrong)}", file=sys.stderr)
        return 2
    if not command:
        return 0
    return subprocess.run(command, env={**os.environ, **path.environment}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
