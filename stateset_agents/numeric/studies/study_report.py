"""A study in words and tables, as Markdown; every number is one of `analyse`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.numeric.studies.sensitivity import grid, recommend
from stateset_agents.numeric.studies.study import analyse
from stateset_agents.numeric.studies.study_folder import StudyFolder


def study_report(folder: StudyFolder) -> str:
    """Tables of the arms, one per suite, then the verdict. Raises ConfigurationError without a cell."""
    found, settings = analyse(folder), folder.settings()
    missing = f", {found['missing']} are missing" if found["missing"] else ""
    lines = [f"# {found['name']}", "", f"{found['num_cells']} cells of {settings['num_cells']}{missing}."]
    for suite, arms in found["suites"].items():
        if arms:
            lines += ["", f"## {suite}", "", *_table(arms)]
    if found["improvement"]:
        lines += ["", f"## Probability of a run above one of {found['reference']}", ""]
        lines += [f"- {arm}: {_probability(each)}" for arm, each in found["improvement"].items()]
    lines += ["", "## Verdict", "", *(f"- {sentence}" for sentence in found["verdict"])]
    axes = settings.get("axes") or {}
    if axes:
        lines += ["", "## Sensitivity", "", *_sensitivity(folder, axes)]
    return "\n".join(lines) + "\n"


def _table(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    head = (
        "arm",
        "seeds",
        "IQM of final scores",
        "worst task",
        "area under curve",
        "fairness",
        "std over seeds",
        "sign flips",
    )
    rows = [
        (
            f"{arm} (outcome: diagnostic)" if each["outcome"] else arm,
            str(each["num_cells"]),
            _with_interval(each["iqm"], each["interval"]),
            f"{each['worst_task']:.3f}",
            f"{each['sample_efficiency']:.3f}",
            f"{each['group_fairness']:.3f}",
            _or_dash(each["training_stability"]["std_over_seeds"], ".3f"),
            _or_dash(each["sign_flips"], ".1%"),
        )
        for arm, each in arms.items()
    ]
    return _markdown(head, rows)


def _sensitivity(folder: StudyFolder, axes: Mapping[str, Sequence[Any]]) -> list[str]:
    lines = []
    for suite in folder.settings()["suites"]:
        cells = grid([cell for cell in folder.cells() if cell.suite == suite], axes)
        rows = [
            (
                *(str(cell.settings[name]) for name in axes),
                str(cell.num_seeds),
                "not measured" if cell.iqm is None else _with_interval(cell.iqm, cell.interval),
                _or_dash(cell.cpu_seconds or None, ".1f"),
            )
            for cell in cells
        ]
        table = _markdown((*axes, "seeds", "IQM of final scores", "CPU s a run"), rows)
        lines += [f"{suite}:", "", *table, "", f"Recommended: {recommend(cells)[1]}", ""]
    return lines[:-1]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _with_interval(value: float, interval: Sequence[float] | None) -> str:
    return f"{value:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else " (no interval)")


def _probability(found: Mapping[str, Any] | None) -> str:
    return "no suite in common" if found is None else _with_interval(found["probability"], found["interval"])


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
