"""Two drawn digits, to be added: problems that only a model that looks at the picture can solve.

[a picture of 7 and 5] add them  ->  <answer> 12 </answer>

Every digit has its own size, slant, place and stroke, and every picture its own ink and ground.
"""

from __future__ import annotations

import functools
import io
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from stateset_agents.backends.pretrained.pictures import expect_pillow
from stateset_agents.environments.problems.environment import (
    Drawn,
    DrawnProblems,
    ProblemConversation,
    Trace,
    at_least,
)
from stateset_agents.runtime.tasks import in_thread
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.images import IMAGE_MARK, Image
from stateset_agents.types.messages import Message
from stateset_agents.types.scenario import Scenario, Split
from stateset_agents.types.seeds import derive

_FINER = 4
"""Strokes are drawn on so many times as many pixels, and averaged."""
_NUM_DRAWINGS = 10**6
"""Number of drawings of each pair of digits."""
_NUM_KEPT = 4096
"""Pictures that are not drawn again: the members of a group see the same one."""


class PictureProblems(DrawnProblems):
    """The sum of the two digits in a picture, 0 to 18.

        PictureProblems(size=32, num_train=3000)

    The pictures of a split are in no other; the hundred pairs of digits are in all. With `shuffled` each
    problem is asked with the picture of another one of its split: an agent that reads the picture is then
    right about one time in fifteen. Needs Pillow.
    """

    def __init__(self, *, size: int = 32, shuffled: bool = False, **settings: Any) -> None:
        """`size`: pixels of a picture's side; `settings` are those of `DrawnProblems`."""
        at_least(16, size=size)
        if not isinstance(shuffled, bool):
            raise ConfigurationError(f"shuffled must be true or false, got {shuffled!r:.60}")
        expect_pillow()
        super().__init__(levels=range(10), family="pictures", **settings)
        self._size = size
        self._shuffled = shuffled
        self._pictured: dict[str, Mapping[str, Scenario]] = {}
        """Split -> id of a problem -> the problem whose picture it shows."""

    def draw(self, rng: random.Random, level: int, split: Split) -> Drawn:
        left, right, number = level, rng.randrange(10), rng.randrange(_NUM_DRAWINGS)
        name = f"{left} and {right}, drawing {number}"
        context = {
            "answer": left + right,
            "left": left,
            "right": right,
            "drawing": number,
            "difficulty": 1 + (left + right > 9),
        }
        return name, Scenario(
            id=f"picture of {name}",
            family="one digit" if left + right < 10 else "two digits",
            opening=f"{IMAGE_MARK}add them",
            context=context,
            split=split,
        )

    def solve(self, scenario: Scenario) -> Trace:
        context: Mapping[str, Any] = scenario.context
        return Trace(steps=(f"{context['left']} + {context['right']}",), answer=str(context["answer"]))

    async def start(self, scenario: Scenario, seed: int) -> ProblemConversation:
        """Show the picture and ask for the sum."""
        image = await in_thread(self.picture, scenario)
        question = Message(role="user", content=scenario.opening, images=(image,))
        return ProblemConversation(opening=(*self._system, question), scenario=scenario, environment=self)

    def picture(self, scenario: Scenario) -> Image:
        """The picture of the problem, as a PNG. Blocking."""
        context = self._shown(scenario).context if self._shuffled else scenario.context
        return _picture(context["left"], context["right"], context["drawing"], self._size)

    def _shown(self, scenario: Scenario) -> Scenario:
        """Another problem of the same split, each shown once."""
        split = scenario.split
        if split not in self._pictured:
            problems = list(self.scenarios(split))
            others = random.Random(derive(0, "shuffled pictures", split)).sample(problems, len(problems))
            pairs = zip(problems, others, strict=True)
            self._pictured[split] = {problem.id: other for problem, other in pairs}
        return self._pictured[split].get(scenario.id, scenario)


@functools.lru_cache(_NUM_KEPT)
def _picture(left: int, right: int, drawing: int, size: int) -> Image:
    rng = random.Random(derive(0, "drawing", left, right, drawing))
    return Image(data=drawn_digits((left, right), rng, size=size))


def drawn_digits(digits: tuple[int, int], rng: random.Random, *, size: int = 32) -> bytes:
    """A square PNG of two digits side by side, light on dark.

    Raises ConfigurationError where Pillow is missing.
    """
    pillow = expect_pillow()
    from PIL import ImageDraw

    fine, unit = size * _FINER, size * _FINER / 32
    image = pillow.new("L", (fine, fine), rng.randint(0, 60))
    pen, ink = ImageDraw.Draw(image), rng.randint(170, 255)
    for place, digit in enumerate(digits):
        width, height = rng.uniform(7, 10), rng.uniform(14, 20)
        x, y = 16 * place + rng.uniform(2, 14 - width), rng.uniform(3, 29 - height)
        slant, stroke = rng.uniform(-0.12, 0.12), rng.uniform(2, 3)
        for line in _STROKES[digit]:
            points = [
                (unit * (x + width * (across + slant * (0.5 - down))), unit * (y + height * down))
                for across, down in line
            ]
            pen.line(points, fill=ink, width=round(unit * stroke), joint="curve")
    file = io.BytesIO()
    image.resize((size, size), pillow.Resampling.BOX).convert("RGB").save(file, "PNG")
    return file.getvalue()


_Line = list[tuple[float, float]]


def _arc(centre: tuple[float, float], radii: tuple[float, float], begin: int, end: int) -> _Line:
    """Points of an ellipse, clockwise in degrees from the right."""
    angles = [math.radians(begin + (end - begin) * step / 24) for step in range(25)]
    return [(centre[0] + radii[0] * math.cos(a), centre[1] + radii[1] * math.sin(a)) for a in angles]


_STROKES: Sequence[Sequence[_Line]] = (
    [_arc((0.5, 0.5), (0.45, 0.5), 0, 360)],
    [[(0.2, 0.25), (0.55, 0.0), (0.55, 1.0)]],
    [[*_arc((0.5, 0.28), (0.42, 0.28), 180, 375), (0.08, 1.0), (0.95, 1.0)]],
    [[*_arc((0.45, 0.26), (0.42, 0.26), 200, 450), *_arc((0.45, 0.75), (0.47, 0.25), -90, 160)]],
    [[(0.7, 1.0), (0.7, 0.0), (0.05, 0.68), (1.0, 0.68)]],
    [[(0.9, 0.0), (0.2, 0.0), (0.13, 0.43)], _arc((0.45, 0.68), (0.45, 0.32), -125, 140)],
    [_arc((0.7, 0.6), (0.62, 0.6), -95, -180), _arc((0.5, 0.7), (0.42, 0.3), 0, 360)],
    [[(0.05, 0.0), (0.95, 0.0), (0.35, 1.0)]],
    [_arc((0.5, 0.26), (0.36, 0.26), 0, 360), _arc((0.5, 0.75), (0.45, 0.25), 0, 360)],
    [_arc((0.5, 0.3), (0.42, 0.3), 0, 360), _arc((0.3, 0.4), (0.62, 0.6), 0, 85)],
)
"""The lines of each digit in a unit square."""
