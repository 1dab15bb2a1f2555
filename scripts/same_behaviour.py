"""Compare what two checkouts of this project train: weights bit for bit, events, settings, public names.

    python scripts/same_behaviour.py ../old .                 every training in full, about ten minutes
    python scripts/same_behaviour.py ../old . --quick         a few steps of each
    python scripts/same_behaviour.py ../old . --only demo-0   one of them

Both checkouts run under the interpreter that runs this script, one after the other, so that the processor and
the packages are the same. The exit code is 1 where anything differs. Weights and metrics are compared by
bytes; metrics of times, rates and memory are left out, and of the events all but names, steps and groups.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TRAININGS: Mapping[str, tuple[str, int, int, int]] = {
    "demo-0": ("demo.yaml", 0, 0, 6),
    "demo-1": ("demo.yaml", 1, 0, 6),
    "reason": ("reason.yaml", 0, 0, 4),
    "cartpole": ("cartpole.yaml", 0, 0, 12_000),
    "acquisition": ("acquisition.yaml", 0, 0, 6_000),
    "autoscaling": ("autoscaling.yaml", 0, 400_000, 30_000),
}
"""Name -> file in examples/, seed, steps in full (0: those of the file), steps with --quick."""
MEASURED = ("time/", "memory/", "throughput/", "tokens_per_second", "steps_per_second", "per_second", "cpu")
"""Parts of the names of metrics that differ between two runs of the same checkout."""
OF_THE_MACHINE = ("event loop", "memory", "generation")
"""Checks whose warnings tell how busy the machine was."""
NAMES = """
import importlib, json, pkgutil, sys
sys.path.insert(0, ".")
import stateset_agents
names = {}
for module in ["stateset_agents", *sys.argv[1:]]:
    names[module] = sorted(getattr(importlib.import_module(module), "__all__", ()))
from stateset_agents.training.config import TrainingConfig
print(json.dumps({"names": names, "settings": sorted(TrainingConfig.model_fields)}))
"""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def run_facts(run: Path) -> dict[str, str]:
    """Name -> digest of everything of a finished run that must not change."""
    facts = {}
    for path in sorted(run.glob("checkpoints/*/**/*.safetensors")):
        facts[str(path.relative_to(run))] = digest(path.read_bytes())
    metrics = [
        {name: value for name, value in line.items() if not any(part in name for part in MEASURED)}
        for line in json_lines(run / "metrics.jsonl")
    ]
    for line in metrics:
        for name in ("time", "elapsed", "run"):
            line.pop(name, None)
    facts["metrics.jsonl"] = digest(json.dumps(metrics, sort_keys=True).encode())
    events = [
        [line.get("event"), line.get("step"), line.get("group")]
        for line in json_lines(run / "events.jsonl")
        if line.get("event") != "warning" or line.get("check") not in OF_THE_MACHINE
    ]
    # Groups of a step whose rewards are computed in threads finish in any order, in two runs of one checkout
    # as well.
    finished = sorted(json.dumps(event) for event in events if event[0] == "group finished")
    others = [event for event in events if event[0] != "group finished"]
    facts["events.jsonl"] = digest(json.dumps([others, finished]).encode())
    config = (run / "config.yaml").read_text(encoding="utf-8")
    config = "\n".join(line for line in config.splitlines() if "output_dir" not in line)
    facts["config.yaml"] = digest(config.encode())
    return facts


def train(checkout: Path, name: str, *, quick: bool) -> dict[str, str]:
    file, seed, steps, few_steps = TRAININGS[name]
    limit = few_steps if quick else steps
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "stateset_agents", "train", f"examples/{file}", "--seed", str(seed)]
        command += ["--output-dir", folder, "--no-eval"]
        command += ["--max-steps", str(limit)] if limit else []
        finished = subprocess.run(
            command, cwd=checkout, env=_environment(checkout), capture_output=True, text=True, check=False
        )
        if finished.returncode:
            raise SystemExit(f"{checkout}: {name} exited {finished.returncode}\n{finished.stderr[-2000:]}")
        (run,) = (path.parent for path in Path(folder).glob("*/config.yaml") if not path.parent.is_symlink())
        return run_facts(run)


def public_names(checkout: Path) -> dict[str, str]:
    rooms = [
        "core",
        "rewards",
        "environments",
        "evaluation",
        "training",
        "types",
        "runs",
        "serving",
        "deployment",
    ]
    modules = [f"stateset_agents.{room}" for room in rooms]
    printed = subprocess.run(
        [sys.executable, "-c", NAMES, *modules],
        cwd=checkout,
        env=_environment(checkout),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    facts = json.loads(printed)
    return {"settings": " ".join(facts["settings"])} | {
        module: " ".join(names) for module, names in facts["names"].items()
    }


def _environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"}


def compare(name: str, old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    different = [fact for fact in sorted(old.keys() | new.keys()) if old.get(fact) != new.get(fact)]
    print(f"{name}: {'the same, ' + str(len(old)) + ' facts' if not different else 'DIFFERENT'}", flush=True)
    for fact in different:
        print(f"  {fact}: {old.get(fact)} -> {new.get(fact)}")
    return not different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--quick", action="store_true", help="a few steps of each training")
    parser.add_argument("--only", nargs="+", choices=(*TRAININGS, "names"), default=(*TRAININGS, "names"))
    chosen = parser.parse_args()
    old, new = chosen.old.resolve(), chosen.new.resolve()
    verdicts = []
    for name in chosen.only:
        if name == "names":
            verdicts.append(compare(name, public_names(old), public_names(new)))
        else:
            verdicts.append(
                compare(name, train(old, name, quick=chosen.quick), train(new, name, quick=chosen.quick))
            )
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
