"""How cost grows, as SVG: ours and a peer over turns, conversations, group size and vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 280, 52, 96, 34, 44
COLOURS = ("#2563eb", "#6b7280")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One picture: rows of results.json by what they grow with."""

    name: str
    title: str
    along: str
    peer: str
    rows: Mapping[str, tuple[str, int]]
    """Label on the axis -> the row, and its conversations."""
    quantity: str = "cpu"


FIGURES = (
    Figure(
        name="turns",
        title="Rollout: CPU time of a conversation by its turns",
        along="turns",
        peer="generate",
        rows={str(turns): (f"rollout-{turns}x16", 16) for turns in (1, 2, 4, 6)},
    ),
    Figure(
        name="conversations",
        title="Rollout: CPU time of all conversations by their number",
        along="conversations",
        peer="generate",
        rows={str(count): (f"rollout-4x{count}", 1) for count in (8, 16, 32, 64)},
    ),
    Figure(
        name="group-size",
        title="Update: CPU time of 16 conversations by group size",
        along="conversations of one group",
        peer="plain",
        rows={
            "2": ("update-group-2", 1),
            "4": ("update-group-4", 1),
            "8": ("update-4k", 1),
            "16": ("update-group-16", 1),
        },
    ),
    Figure(
        name="vocabulary",
        title="Update: CPU time of a conversation by vocabulary",
        along="vocabulary",
        peer="plain",
        rows={"4k": ("update-4k", 16), "32k": ("update-32k", 16), "152k": ("update-152k", 4)},
    ),
    Figure(
        name="vocabulary-memory",
        title="Update: extra peak memory of a conversation by vocabulary",
        along="vocabulary",
        peer="plain",
        rows={"4k": ("update-4k", 16), "32k": ("update-32k", 16), "152k": ("update-152k", 4)},
        quantity="extra",
    ),
)


def drawn(figure: Figure, rows: Mapping[str, Any]) -> str | None:
    """The picture, or None while fewer than two of its rows are measured. Ours at the first point is 1."""
    points = {label: rows[name]["sides"] for label, (name, _) in figure.rows.items() if name in rows}
    if len(points) < 2:
        return None
    parts = {label: figure.rows[label][1] for label in points}
    series = {
        side: [points[label][side][figure.quantity] / parts[label] for label in points]
        for side in ("ours", figure.peer)
    }
    unit = series["ours"][0]
    return _svg(figure, list(points), {side: [value / unit for value in own] for side, own in series.items()})


def _svg(figure: Figure, labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    marks = ticks(max(value for own in series.values() for value in own))

    def x(place: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * place / (len(labels) - 1), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / marks[-1], 1)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    parts.append(f'<text x="{LEFT}" y="18" font-weight="bold">{figure.title}</text>')
    for value in marks:
        parts.append(f'<path d="M{LEFT} {y(value)}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4}" text-anchor="end">{value:g}</text>')
    for place, label in enumerate(labels):
        parts.append(f'<text x="{x(place)}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{figure.along}</text>')
    for (side, values), colour in zip(series.items(), COLOURS, strict=True):
        line = " ".join(f"{x(place)},{y(value)}" for place, value in enumerate(values))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.extend(
            f'<circle cx="{x(place)}" cy="{y(value)}" r="3" fill="{colour}"/>'
            for place, value in enumerate(values)
        )
        said = f"{side} {values[-1]:.3g}"
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y(values[-1]) + 4}" fill="{colour}">{said}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    style = 'font-family="sans-serif" font-size="12" fill="#374151"'
    return f"{head} {style}><title>{figure.title}</title>{''.join(parts)}</svg>\n"


def ticks(most: float) -> list[float]:
    """Round numbers (steps of 1, 2 or 5 times a power of ten) from 0 to `most` or just above it."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= most / 4 * 0.999)
    return [round(place * step, 12) for place in range(math.ceil(most / step - 1e-9) + 1)]
