"""How cost grows, as SVG: ours and a peer over turns, conversations, group size and vocabulary.

Both axes begin at 0 and are linear, so that a line's shape is the growth. Cost is in units of ours at the
first point, which makes machines comparable.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 300, 62, 110, 40, 48
COLOURS = ("#1d4ed8", "#9a3412")
PEERS = {
    "ours": "ours",
    "trl": "TRL",
    "generate": "HF generate",
    "plain": "plain HF",
    "pieces": "plain HF, a row at a time",
    "stateset": "stateset-agents 0.69",
    "floor": "packed matmuls",
    "highest": "ours at highest",
    "fp32": "ours in fp32",
}
"""Sides as they are called where people read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row of results.json, and where it stands."""

    at: int
    row: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One picture."""

    name: str
    title: str
    along: str
    peer: str
    points: Sequence[Point]
    quantity: str = "cpu"


_VOCABULARIES = (
    Point(at=4096, row="update-4k-of-4"),
    Point(at=32768, row="update-32k-of-4"),
    Point(at=151936, row="update-152k"),
)
FIGURES = (
    Figure(
        name="turns",
        title="Rollout of 16 conversations: CPU time by turns",
        along="turns",
        peer="generate",
        points=[Point(at=turns, row=f"rollout-{turns}x16") for turns in (1, 2, 4, 6)],
    ),
    Figure(
        name="conversations",
        title="Rollout of 4 turns: CPU time by conversations",
        along="conversations",
        peer="generate",
        points=[Point(at=count, row=f"rollout-4x{count}") for count in (8, 16, 32, 64)],
    ),
    Figure(
        name="group-size",
        title="Update of 16 conversations: CPU time by group size",
        along="conversations of one group",
        peer="plain",
        points=[
            Point(at=2, row="update-group-2"),
            Point(at=4, row="update-group-4"),
            Point(at=8, row="update-4k"),
            Point(at=16, row="update-group-16"),
        ],
    ),
    Figure(
        name="vocabulary",
        title="Update of 4 conversations: CPU time by vocabulary",
        along="tokens in the vocabulary",
        peer="plain",
        points=_VOCABULARIES,
    ),
    Figure(
        name="vocabulary-memory",
        title="Update of 4 conversations: extra memory by vocabulary",
        along="tokens in the vocabulary",
        peer="plain",
        points=_VOCABULARIES,
        quantity="extra",
    ),
)


def series(figure: Figure, rows: Mapping[str, Any]) -> dict[str, list[float]] | None:
    """The cost of each side at each point; None until all its rows are measured. Ours at the first is 1."""
    if any(point.row not in rows for point in figure.points):
        return None
    costs = {
        side: [rows[point.row]["sides"][side][figure.quantity] for point in figure.points]
        for side in ("ours", figure.peer)
    }
    unit = costs["ours"][0]
    return {side: [value / unit for value in values] for side, values in costs.items()}


def alternative(figure: Figure, rows: Mapping[str, Any]) -> str | None:
    """What the picture shows, in words, for those who do not see it."""
    drawn_series = series(figure, rows)
    if drawn_series is None:
        return None
    at = ", ".join(f"{point.at:,}" for point in figure.points)
    sides = "; ".join(
        f"{PEERS[side]} {', '.join(f'{value:.3g}' for value in values)}"
        for side, values in drawn_series.items()
    )
    return f"{figure.title}. At {at} {figure.along}: {sides}."


def drawn(figure: Figure, rows: Mapping[str, Any]) -> str | None:
    """The picture, or None until all its rows are measured."""
    values, text = series(figure, rows), alternative(figure, rows)
    if values is None or text is None:
        return None
    return _svg(figure, values, text)


def _svg(figure: Figure, values: Mapping[str, Sequence[float]], description: str) -> str:
    marks = ticks(max(value for costs in values.values() for value in costs))
    last, floor = figure.points[-1].at, HEIGHT - BOTTOM

    def x(index: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * figure.points[index].at / last, 1)

    def y(value: float) -> float:
        return round(floor - (floor - TOP) * value / marks[-1], 1)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    parts.append(f'<text x="{LEFT}" y="20" font-weight="bold">{figure.title}</text>')
    for value in marks:
        parts.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
    for index, point in enumerate(figure.points):
        parts.append(f'<path d="M{x(index)} {floor}v5" stroke="#374151"/>')
        parts.append(f'<text x="{x(index)}" y="{floor + 18}" text-anchor="middle">{_short(point.at)}</text>')
    middle, half = (LEFT + WIDTH - RIGHT) / 2, (TOP + floor) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{figure.along}</text>')
    turned = f'transform="rotate(-90 16 {half})" text-anchor="middle"'
    parts.append(f'<text x="16" y="{half}" {turned}>ours at {_short(figure.points[0].at)} is 1</text>')
    for (side, costs), colour in zip(values.items(), COLOURS, strict=True):
        line = " ".join(f"{x(index)},{y(value)}" for index, value in enumerate(costs))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(
            f'<circle cx="{x(index)}" cy="{y(value)}" r="3" fill="{colour}"/>'
            for index, value in enumerate(costs)
        )
        label = f"{PEERS[side]} {costs[-1]:.3g}"
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y(costs[-1]) + 4}" fill="{colour}">{label}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    style = 'font-family="sans-serif" font-size="12" fill="#374151"'
    named = f"<title>{figure.title}</title><desc>{description}</desc>"
    return f"{head} {style}>{named}{''.join(parts)}</svg>\n"


def _short(count: int) -> str:
    """16, 32k for 32768, 152k for 151936."""
    return str(count) if count < 1000 else f"{count / (1024 if count % 1024 == 0 else 1000):.0f}k"


def ticks(highest: float) -> list[float]:
    """Round numbers (steps of 1, 2 or 5 times a power of ten) from 0 to `most` or just above it."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= highest / 4 * 0.999)
    return [round(index * step, 12) for index in range(math.ceil(highest / step - 1e-9) + 1)]
