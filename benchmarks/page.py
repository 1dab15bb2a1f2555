"""Writes what results.json holds into docs/performance.md, between its marks, and the figures beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.comparisons import comparisons
from benchmarks.environments import ROOT
from benchmarks.figures import FIGURES, PEERS, alternative, drawn

PAGE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
_PEERS = {**PEERS, "generate": "HF `generate`"}
_QUANTITIES = {"cpu": "CPU time", "wall": "wall time", "peak": "peak memory", "extra": "extra memory"}


def files(rows: Mapping[str, Any], page: str) -> dict[Path, str]:
    """What the page and its pictures are to hold."""
    made = {PAGE: written(page, rows)}
    for figure in FIGURES:
        picture = drawn(figure, rows)
        if picture is not None:
            made[IMAGES / f"performance-{figure.name}.svg"] = picture
    return made


def write(rows: Mapping[str, Any]) -> None:
    """Write the page and its pictures where they belong."""
    for path, text in files(rows, PAGE.read_text(encoding="utf-8")).items():
        path.write_text(text, encoding="utf-8")


def written(page: str, rows: Mapping[str, Any]) -> str:
    """The page with its generated parts made anew."""
    parts = {
        "machine": machine(rows),
        "wanted": wanted(rows),
        "others": others(rows),
        "split": split(rows),
        "figures": figures(rows),
        "settings": settings(rows),
    }
    for name, text in parts.items():
        marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        if not marked.search(page):
            raise ValueError(f"docs/performance.md has no <!-- {name} --> ... <!-- end of {name} -->")
        page = marked.sub(rf"\g<1>{_literal(text)}\n\g<2>", page)
    return page


def _literal(text: str) -> str:
    """As a regular expression's replacement."""
    return text.replace("\\", "\\\\")


def wanted(rows: Mapping[str, Any]) -> str:
    """The table of what was to be shown, those that fall short included."""
    lines = [
        "| work | against | by | ratio (quartiles) | wanted | aim | reached |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in _lines(rows):
        if line["at_least"] is None:
            continue
        share = line["peer"] == "floor"
        reached = (
            "aim" if line["ratio"] >= line["aim"] else "yes" if line["ratio"] >= line["at_least"] else "no"
        )
        bounds = [f"{value:.0%}" if share else f"{value:g}" for value in (line["at_least"], line["aim"])]
        lines.append(
            f"| {line['title']} | {_PEERS[line['peer']]} | {_QUANTITIES[line['quantity']]} | "
            f"{_ratio(line)} | {bounds[0]} | {bounds[1]} | {reached} |"
        )
    return "\n".join(lines)


def others(rows: Mapping[str, Any]) -> str:
    """Everything else that was measured."""
    lines = ["| work | against | by | ratio (quartiles) |", "|---|---|---|---|"]
    for line in _lines(rows):
        if line["at_least"] is None and line["peer"] in _PEERS:
            quantity = _QUANTITIES[line["quantity"]]
            lines.append(f"| {line['title']} | {_PEERS[line['peer']]} | {quantity} | {_ratio(line)} |")
    return "\n".join(lines)


def settings(rows: Mapping[str, Any]) -> str:
    """Peers' settings that were tried: how much more they take than those that are used."""
    lines = ["| setting | by | against what is used (quartiles) |", "|---|---|---|"]
    lines += [
        f"| {line['title']} | {_QUANTITIES[line['quantity']]} | {_ratio(line)} |"
        for line in _lines(rows)
        if line["peer"] not in _PEERS
    ]
    return "\n".join(lines)


def figures(rows: Mapping[str, Any]) -> str:
    """The pictures whose rows are measured, with what they show in words."""
    made = [(figure, alternative(figure, rows)) for figure in FIGURES]
    return "\n\n".join(
        f"![{words}](images/performance-{figure.name}.svg)" for figure, words in made if words is not None
    )


def split(rows: Mapping[str, Any]) -> str:
    """Where a step's time goes, and the memory of each side."""
    lines = ["| row | side | rollout | update | peak memory | success |", "|---|---|---|---|---|---|"]
    for name, row in _ordered(rows):
        if not name.startswith(("step-", "turns-", "demo")):
            continue
        for side, values in row["sides"].items():
            parts = [
                f"{values[part] / values['wall']:.0%}" if part in values else ""
                for part in ("rollout", "update")
            ]
            parts.append(f"{values['peak'] / 2**20:,.0f} MiB" if "peak" in values else "")
            parts.append("{} of {}".format(*values["success"]) if "success" in values else "")
            lines.append(f"| `{name}` | {_PEERS[side]} | {' | '.join(parts)} |")
    return "\n".join(lines)


def machine(rows: Mapping[str, Any]) -> str:
    """What was measured, on what, and how often."""
    cpus = sorted({row["cpu"] for row in rows.values()})
    commits = sorted({row["commit"] for row in rows.values()})
    claims = [
        row["repetitions"] for row in rows.values() if any(line["at_least"] for line in row["lines"])
    ] or [0]
    versions: dict[str, set[str]] = {}
    for row in rows.values():
        for side in row["sides"].values():
            for package, version in side["versions"].items():
                versions.setdefault(package, set()).add(version)
    said = ", ".join(f"{package} {' and '.join(sorted(versions[package]))}" for package in sorted(versions))
    counts = f"{min(claims)}" if len(set(claims)) == 1 else f"{min(claims)} to {max(claims)}"
    return (
        f"{'; '.join(cpus)}; one thread; {counts} repetitions of the rows with a claim; at commit "
        f"{', '.join(f'`{one}`' for one in commits)}; {said}.{_busy(rows)}"
    )


def _busy(rows: Mapping[str, Any]) -> str:
    """How quiet the machine was while rows by wall time were measured."""
    timed = [row for row in rows.values() if any(line["quantity"] == "wall" for line in row["lines"])]
    cores = [row["others"] for row in timed if row.get("others") is not None]
    if not cores:
        return ""
    return (
        f" While the rows by wall time were measured, other processes kept {min(cores):.2f} to "
        f"{max(cores):.2f} of its cores busy."
    )


def _ordered(rows: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in comparisons():
        if name in rows:
            yield name, rows[name]


def _lines(rows: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for _, row in _ordered(rows):
        yield from row["lines"]


def _ratio(line: Mapping[str, Any]) -> str:
    low, high = line["spread"]
    if line["peer"] == "floor":
        return f"{line['ratio']:.0%} ({low:.0%} to {high:.0%})"
    return f"{line['ratio']:.2f} ({low:.2f} to {high:.2f})"
