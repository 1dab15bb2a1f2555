"""Is there anything to learn? Regret of rules that choose experiments, on families of causal tasks.

A family on which imagining outcomes to the budget's end gains little over a rule of one line teaches a
policy nothing. Every rule plays the same tasks with the same noise, so differences are paired. The expected
regret is the posterior's at the end; its mean is that of the regret, and its noise a third.

    PYTHONPATH=. python scripts/acquisition_headroom.py --tasks 2000 --output headroom.jsonl
    PYTHONPATH=. python scripts/acquisition_headroom.py --output headroom.jsonl --table    # as Markdown

The first goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.rivals.lookahead import rollout_lookahead
from stateset_agents.algorithms.intervals import mean_interval
from stateset_agents.numeric.acquisition.campaign import play
from stateset_agents.numeric.acquisition.families import LinearFamily
from stateset_agents.numeric.acquisition.lookahead import knowledge_gradient
from stateset_agents.numeric.acquisition.rules import RULES, Rule
from stateset_agents.types.seeds import derive

_wide = partial(LinearFamily, costs=(1.0, 20.0), budget=20.0)
FAMILIES: Mapping[str, LinearFamily] = {
    "costs .5-2, budget 5": LinearFamily(),
    "costs 1-20, budget 20": _wide(),
    "and noise .1-3": _wide(noise=(0.1, 3.0)),
    "and 4 graphs": _wide(noise=(0.1, 3.0), num_graphs=4),
    "8 variables": _wide(num_variables=8, density=0.4),
}
"""Every family has 5 variables, 60 % of all edges and noise .5 unless it says otherwise."""
BASE = "EI per cost"
COMPARED: Mapping[str, Rule] = {
    **RULES,
    "knowledge gradient": knowledge_gradient(samples=16, per_cost=False),
    "knowledge gradient per cost": knowledge_gradient(samples=16),
    "lookahead": rollout_lookahead(RULES[BASE], samples=32),
}
CHUNK = 50
"""Tasks that are played and written at once."""


def seeds(chunk: int) -> list[int]:
    """The tasks of a chunk, which no training plays."""
    return [derive(0, "headroom", chunk, index) for index in range(CHUNK)]


def measure(path: Path, families: list[str], rules: list[str], num_chunks: int) -> None:
    """Append what is missing, one line per family, rule and chunk; the cheap ones of a chunk come first."""
    if path.exists() and not path.read_text(encoding="utf-8").endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")  # a line that was torn ends here, and is measured again
    done = {(line["family"], line["rule"], line["chunk"]) for line in read(path)}
    for chunk in range(num_chunks):
        for family in families:
            wanted = [rule for rule in rules if (family, rule, chunk) not in done]
            tasks = FAMILIES[family].draw(seeds(chunk)) if wanted else None
            for rule in wanted:
                assert tasks is not None
                begun = time.process_time()
                outcome = play(COMPARED[rule], tasks, seed=chunk)
                line = {
                    "family": family,
                    "rule": rule,
                    "chunk": chunk,
                    "regret": [round(float(value), 6) for value in outcome.regret],
                    "expected": [round(float(value), 6) for value in outcome.expected_regret],
                    "experiments": float(outcome.num_experiments.mean()),
                    "cpu": round(time.process_time() - begun, 3),
                }
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file; the last may be torn."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(text))
    return found


def table(path: Path) -> str:
    """Markdown: each rule's regret, and what it saves against EI per cost on the tasks of both."""
    rows = ["| family | rule | tasks | regret | expected regret | saved | experiments | CPU ms a task |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    lines = {(line["family"], line["rule"], line["chunk"]): line for line in read(path)}
    for family in FAMILIES:
        for rule in COMPARED:
            mine, base = (
                {chunk: line for (place, who, chunk), line in lines.items() if (place, who) == (family, name)}
                for name in (rule, BASE)
            )
            both = sorted(mine.keys() & base.keys())
            if not both:
                continue
            regret, expected = (
                [value for chunk in both for value in mine[chunk][key]] for key in ("regret", "expected")
            )
            against = [value for chunk in both for value in base[chunk]["expected"]]
            saved = [theirs - ours for ours, theirs in zip(expected, against, strict=True)]
            share, limits = fmean(saved) / fmean(against), mean_interval(saved)
            shown = "-"
            if rule != BASE and limits is not None:
                low, high = (limit / fmean(against) for limit in limits)
                shown = f"{share:+.1%} [{low:+.1%}, {high:+.1%}]"
            experiments = fmean(mine[chunk]["experiments"] for chunk in both)
            cpu = 1000 * fmean(mine[chunk]["cpu"] for chunk in both) / CHUNK
            rows.append(
                f"| {family} | {rule} | {len(expected):,} | {fmean(regret):.4f} | {fmean(expected):.4f} "
                f"| {shown} | {experiments:.1f} | {cpu:.1f} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="one line per family, rule and chunk of tasks"
    )
    parser.add_argument("--tasks", type=int, default=1000)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rules", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is there")
    given = parser.parse_args()
    if not given.table:
        os.nice(5)
        rules = list(dict.fromkeys([BASE, *given.rules]))
        measure(given.output, given.families, rules, -(-given.tasks // CHUNK))
    print(table(given.output))


if __name__ == "__main__":
    main()
