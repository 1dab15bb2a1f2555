"""Time a sampled token and an update of the demo in two checkouts, in interleaved pairs.

    python scripts/paired_steps.py ../old .           twenty pairs, about seven minutes on a quiet machine
    python scripts/paired_steps.py ../old . --pairs 5

Both run under the interpreter that runs this script, with one thread. A ratio is the second checkout's median
over the first's, of the steps after the first; printed are its median, least and largest over the pairs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 7


def times(checkout: Path) -> tuple[float, float]:
    """Seconds of rollout a sampled token, and of an update: medians of a short training's steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stateset_agents", "train", "examples/demo.yaml", "--no-eval"]
        command += ["--max-steps", str(STEPS), "--output-dir", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
        subprocess.run(command, cwd=checkout, env=environment, check=True, capture_output=True)
        (file,) = (path for path in Path(folder).glob("0*/metrics.jsonl"))
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    steps = [values for line in lines if "time/rollout" in (values := line.get("values", line))][1:]
    decode = statistics.median(values["time/rollout"] / values["tokens/agent"] for values in steps)
    return decode, statistics.median(values["time/update"] for values in steps)


def main() -> None:
    """Print the ratios of each pair, then their medians."""
    parser = argparse.ArgumentParser(description="Interleaved pairs of the demo's steps.")
    parser.add_argument("old", type=Path, help="checkout that the second is held against")
    parser.add_argument("new", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=20, help="how many pairs (20)")
    args = parser.parse_args()
    ratios: dict[str, list[float]] = {"decode": [], "update": []}
    for pair in range(args.pairs):
        checkouts = [args.old.resolve(), args.new.resolve()]
        measured = {checkout: times(checkout) for checkout in checkouts[:: -1 if pair % 2 else 1]}
        for name, new, old in zip(ratios, measured[checkouts[1]], measured[checkouts[0]], strict=True):
            ratios[name].append(new / old)
        print(f"pair {pair + 1}: " + ", ".join(f"{name} {values[-1]:.3f}" for name, values in ratios.items()))
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
