"""Writes what results.json holds into evidence/step-times.md and performance.md, and the figures."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.comparisons import comparisons
from benchmarks.environments import ROOT
from benchmarks.figures import FIGURES, PEERS, alternative, drawn

PAGE = ROOT / "docs" / "evidence" / "step-times.md"
FIRST_PAGE = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
_PEERS = {**PEERS, "generate": "HF `generate`"}
_FIRST = (
    *("step-40", "step-228", "step-52M", "smollm2-triage-bf16", "smollm2-desk-bf16"),
    *("turns-trl", "decode-5.8M", "prefill-6"),
)
"""The rows of the first page."""
_QUANTITIES = {"cpu": "CPU time", "wall": "wall time", "peak": "peak memory", "extra": "extra memory"}

Rows = Mapping[str, Any]
"""What was measured on one processor, by the rows' names."""
Results = Mapping[str, Rows]
"""The rows of every processor."""


def files(results: Results, page: str) -> dict[Path, str]:
    """What the pages and the pictures are to hold."""
    first = _filled(FIRST_PAGE, FIRST_PAGE.read_text(encoding="utf-8"), "least and most", extremes(results))
    files = {PAGE: written(page, results), FIRST_PAGE: first}
    for figure in FIGURES:
        picture = drawn(figure, results.get(pictured(results), {}))
        if picture is not None:
            files[IMAGES / f"performance-{figure.name}.svg"] = picture
    return files


def write(results: Results) -> None:
    """Write the pages and the pictures where they belong."""
    for path, text in files(results, PAGE.read_text(encoding="utf-8")).items():
        path.write_text(text, encoding="utf-8")


def written(page: str, results: Results) -> str:
    """The page with its generated parts made anew."""
    parts = {
        "machine": machine(results),
        "wanted": wanted(results),
        "others": other_lines(results),
        "split": split(results),
        "figures": figures(results),
        "settings": settings(results),
    }
    for name, text in parts.items():
        page = _filled(PAGE, page, name, text)
    return page


def _filled(path: Path, page: str, name: str, text: str) -> str:
    """A page with one of its parts made anew."""
    marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
    if not marked.search(page):
        raise ValueError(f"{path.relative_to(ROOT)} has no <!-- {name} --> ... <!-- end of {name} -->")
    return marked.sub(rf"\g<1>{_literal(text)}\n\g<2>", page)


def _literal(text: str) -> str:
    """As a regular expression's replacement."""
    return text.replace("\\", "\\\\")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One line of a comparison, and what it was on each processor that it was measured on."""

    line: Mapping[str, Any]
    by_processor: Mapping[str, Mapping[str, Any]]

    @property
    def least(self) -> float:
        """Over the processors."""
        return min(float(line["ratio"]) for line in self.by_processor.values())


def _entries(results: Results) -> list[_Entry]:
    """Every line that was measured somewhere, in the order of the page."""
    entries = []
    for name in comparisons():
        lines: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = {}
        for processor, rows in results.items():
            for line in rows.get(name, {"lines": ()})["lines"]:
                lines.setdefault((line["title"], line["quantity"], line["peer"]), {})[processor] = line
        entries += [
            _Entry(line=next(iter(by_processor.values())), by_processor=by_processor)
            for by_processor in lines.values()
        ]
    return entries


def _table(entries: Sequence[_Entry], names: Sequence[str], cells: Callable[[_Entry], Sequence[str]]) -> str:
    """A line for each entry: `cells` of it under `names`, and its ratio on each processor that has any."""
    processors = sorted({processor for entry in entries for processor in entry.by_processor})
    columns = [*names, *processors]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for entry in entries:
        ratios = [
            _ratio(entry.by_processor[processor]) if processor in entry.by_processor else ""
            for processor in processors
        ]
        lines.append(f"| {' | '.join([*cells(entry), *ratios])} |")
    return "\n".join(lines)


def extremes(results: Results) -> str:
    """The ratios of the rows that are looked for first, over the processors."""
    lines = ["| work | against | by | ratio |", "|---|---|---|---|"]
    for name in _FIRST:
        found = [rows[name]["lines"][0] for rows in results.values() if name in rows]
        if found:
            line, ratios = found[0], [each["ratio"] for each in found]
            least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
            reach = least if least == most else f"{least} to {most}"
            lines.append(
                f"| {line['title']} | {_PEERS[line['peer']]} | {_QUANTITIES[line['quantity']]} | {reach} |"
            )
    return "\n".join(lines)


def wanted(results: Results) -> str:
    """The table of what was to be shown, those that fall short anywhere included."""

    def cells(entry: _Entry) -> list[str]:
        line, share = entry.line, entry.line["peer"] == "floor"
        bounds = [
            "" if value is None else f"{value:.0%}" if share else f"{value:g}"
            for value in (line["at_least"], line["aim"])
        ]
        least = f"{entry.least:.0%}" if share else f"{entry.least:.2f}"
        return [*_titles(entry), *bounds, least, _reached(entry, results)]

    claims = [entry for entry in _entries(results) if entry.line["at_least"] is not None]
    return _table(claims, ["work", "against", "by", "wanted", "aim", "least", "reached"], cells)


def _reached(entry: _Entry, results: Results) -> str:
    """Does a claim hold on every processor? It is `open` where it held on some, and others were not tried."""
    if entry.least < entry.line["at_least"]:
        return "no"
    if entry.by_processor.keys() != results.keys():
        return "open"
    return "aim" if entry.least >= entry.line["aim"] else "yes"


def other_lines(results: Results) -> str:
    """Everything else that was measured."""
    selected = [
        entry
        for entry in _entries(results)
        if entry.line["at_least"] is None and entry.line["peer"] in _PEERS
    ]
    return _table(selected, ["work", "against", "by"], _titles)


def settings(results: Results) -> str:
    """Peers' settings that were tried: how much more they take than those that are used."""
    tried = [entry for entry in _entries(results) if entry.line["peer"] not in _PEERS]
    return _table(tried, ["setting", "by"], lambda entry: _titles(entry)[::2])


def _titles(entry: _Entry) -> list[str]:
    """What a line is of, against what, by what."""
    line = entry.line
    return [line["title"], _PEERS.get(line["peer"], ""), _QUANTITIES[line["quantity"]]]


def pictured(results: Results) -> str:
    """The processor whose rows the pictures show: that with the most; none where there is none."""
    return max(results, key=lambda processor: len(results[processor]), default="")


def figures(results: Results) -> str:
    """The pictures whose rows are measured, with what they show in words."""
    processor = pictured(results)
    figures = [(figure, alternative(figure, results.get(processor, {}))) for figure in FIGURES]
    pictures = [
        f"![{words}](../images/performance-{figure.name}.svg)"
        for figure, words in figures
        if words is not None
    ]
    return "\n\n".join([f"Measured on {processor}.", *pictures]) if pictures else ""


def split(results: Results) -> str:
    """Where a step's time goes, and the memory of each side."""
    lines = [
        "| row | side | processor | rollout | update | peak memory | success |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in comparisons():
        if not name.startswith(("step-", "turns-", "demo")):
            continue
        for processor, rows in results.items():
            for side, values in rows.get(name, {"sides": {}})["sides"].items():
                parts = [
                    f"{values[part] / values['wall']:.0%}" if part in values else ""
                    for part in ("rollout", "update")
                ]
                parts.append(f"{values['peak'] / 2**20:,.0f} MiB" if "peak" in values else "")
                parts.append("{} of {}".format(*values["success"]) if "success" in values else "")
                lines.append(f"| `{name}` | {_PEERS[side]} | {processor} | {' | '.join(parts)} |")
    return "\n".join(lines)


def machine(results: Results) -> str:
    """What was measured on each processor, and how often."""
    return "\n".join(f"- {_machine(processor, rows)}" for processor, rows in results.items())


def _machine(processor: str, rows: Rows) -> str:
    commits = sorted({row["commit"] for row in rows.values()})
    claims = [row["repetitions"] for row in rows.values() if any(line["at_least"] for line in row["lines"])]
    counted = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    versions: dict[str, set[str]] = {}
    for row in rows.values():
        for side in row["sides"].values():
            for package, version in side["versions"].items():
                versions.setdefault(package, set()).add(version)
    if claims:
        counts = f"{min(claims)}" if len(set(claims)) == 1 else f"{min(claims)} to {max(claims)}"
        counted += f", {counts} repetitions of those with a claim"
    parts = [
        f"**{processor}**: {counted}",
        f"at commit {', '.join(f'`{commit}`' for commit in commits)}",
        *sorted({row["source"] for row in rows.values() if "source" in row}),
    ]
    if versions:
        packages = (f"{package} {' and '.join(sorted(versions[package]))}" for package in sorted(versions))
        parts.append(", ".join(packages))
    return f"{'; '.join(parts)}.{_busy(rows)}"


def _busy(rows: Rows) -> str:
    """How quiet the machine was while rows by wall time were measured."""
    timed = [row for row in rows.values() if any(line["quantity"] == "wall" for line in row["lines"])]
    cores = [row["others"] for row in timed if row.get("others") is not None]
    if not cores:
        return ""
    return (
        f" While the rows by wall time were measured, other processes kept {min(cores):.2f} to "
        f"{max(cores):.2f} of its cores busy."
    )


def _ratio(line: Mapping[str, Any]) -> str:
    """With its quartiles, where the repetitions were kept."""
    share = line["peer"] == "floor"
    if line["spread"] is None:
        return f"{line['ratio']:.0%}" if share else f"{line['ratio']:.2f}"
    low, high = line["spread"]
    if share:
        return f"{line['ratio']:.0%} ({low:.0%} to {high:.0%})"
    return f"{line['ratio']:.2f} ({low:.2f} to {high:.2f})"
