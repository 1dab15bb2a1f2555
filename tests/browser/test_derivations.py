"""Derivations and pitfalls of the papers' pages: both sides of each claim. `make test-browser` runs this."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import learn_toys as toys
import numpy as np
import pytest
import torch
from chromium import Tab
from learn_math import near
from test_learn_pages import REWARDS, opened, shown

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.algorithms.kl_settings import value_and_slope
from stateset_agents.algorithms.losses import Denominators, LossInputs, policy_loss
from stateset_agents.algorithms.policy_losses import LOSSES, Clip
from stateset_agents.grouping.partitions import mulberry32
from stateset_agents.reporting.learn_pages import write_learn_pages

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

CLAIMS = {"grpo": 9, "gradient_surgery": 5, "soft_modularization": 5, "infinite_mixture": 5}
PITFALLS = {"grpo": 6, "gradient_surgery": 5, "soft_modularization": 5, "infinite_mixture": 5}
MOST_BYTES = 120_000
Sides = tuple[float, float]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {path.stem: path for path in write_learn_pages(out=tmp_path_factory.mktemp("papers"))}


async def verdict(tab: Tab, claim: int) -> str:
    return str(await tab.run(f"document.querySelector('[data-claim=claim-{claim}]').dataset.verdict"))


async def sides(tab: Tab, claim: int) -> Sides:
    return await shown(tab, f"claim-{claim}-left"), await shown(tab, f"claim-{claim}-right")


# ------------------------------------------------------------------------------------------- each claim


@pytest.mark.parametrize("page", CLAIMS)
async def test_no_claim_stands_without_a_formula_a_knob_and_two_sides_that_agree(
    tab: Tab, pages: dict[str, Path], page: str
) -> None:
    await opened(tab, pages[page])
    assert len(await asyncio.to_thread(pages[page].read_bytes)) <= MOST_BYTES
    found = await tab.run(
        "[...document.querySelectorAll('#derivation .claims > li')].map((one) => [one.querySelector('p')"
        ".textContent.length, one.querySelector('.formula').textContent.length,"
        "one.querySelectorAll('input').length, one.querySelectorAll('.sides output').length,"
        "one.querySelector('.verdict').dataset.verdict])"
    )
    assert len(found) == CLAIMS[page]
    for words, formula, knobs, outputs, agrees in found:
        assert min(words, formula) > 10
        assert knobs >= 1
        assert (outputs, agrees) == (2, "agree")


ALWAYS = {
    "grpo": (1, 6, 9),
    "gradient_surgery": (2, 3, 4),
    "soft_modularization": (1, 2, 3, 4),
    "infinite_mixture": (3, 4),
}
"""Claims without a condition, which no knob can break."""


MOVED = """((claim) => {
  const own = document.querySelectorAll('#derivation .claims > li')[claim];
  const sides = () => [...own.querySelectorAll('.sides output')].map((out) => out.dataset.value).join();
  const turned = (slider, value) => {
    slider.value = value;
    slider.dispatchEvent(new Event('input'));
    return [sides(), own.querySelector('.verdict').dataset.verdict];
  };
  return [...own.querySelectorAll('input[type=range]')].map((slider) => {
    const first = slider.value, [low, high] = [Number(slider.min), Number(slider.max)];
    const seen = [0, 0.3, 0.6, 1].map((part) => turned(slider, low + part * (high - low)));
    turned(slider, first);
    return [slider.name, seen];
  });
})"""
"""Each slider of a claim at four places: both sides as text, and the verdict."""


@pytest.mark.parametrize("page", CLAIMS)
async def test_every_knob_moves_a_side_and_breaks_no_claim_that_has_no_condition(
    tab: Tab, pages: dict[str, Path], page: str
) -> None:
    await opened(tab, pages[page])
    found = [await tab.run(f"{MOVED}({claim})") for claim in range(CLAIMS[page])]
    assert tab.complaints == []
    unmoved = {("grpo", "low"), ("grpo", "high")}  # at a ratio of 1 the clip does not act
    unmoved |= {("grpo", "b"), ("grpo", "p_old"), ("soft_modularization", "shift")}  # that is the claim
    for at, claim in enumerate(found, start=1):
        for name, seen in claim:
            if (page, name) not in unmoved:
                assert len({values for values, _ in seen}) > 1, (at, name)
            if at in ALWAYS[page]:
                assert {agrees for _, agrees in seen} <= {"agree", "none"}, (at, name)


@pytest.mark.parametrize(
    ("page", "claim", "state"),
    [
        ("grpo", 2, {"b_extra": 0.3}),
        ("grpo", 3, {"by_std": 1}),
        ("grpo", 5, {"with_rho": 0}),
        ("grpo", 7, {"with_rho": 0}),
        ("grpo", 8, {"with_rho": 0, "p": 0.4}),
        ("gradient_surgery", 1, {"eta": 1}),
        ("soft_modularization", 5, {"little": 3}),
        ("infinite_mixture", 1, {"finite": 10}),
    ],
)
async def test_the_page_says_where_a_claim_s_condition_is_broken(
    tab: Tab, pages: dict[str, Path], page: str, claim: int, state: dict[str, Any]
) -> None:
    await opened(tab, pages[page], **state)
    assert await verdict(tab, claim) == "differ"
    left, right = await sides(tab, claim)
    near(await shown(tab, f"claim-{claim}-apart"), abs(left - right))
    words = await tab.run(f"document.querySelector('[data-claim=claim-{claim}]').textContent")
    assert words.startswith("≠")
    assert words.endswith(".")


async def test_where_a_sum_is_zero_there_is_no_direction_to_compare(tab: Tab, pages: dict[str, Path]) -> None:
    await opened(tab, pages["gradient_surgery"], first="1.5~0", second="-0.8~0")
    assert await verdict(tab, 5) == "none"


# ----------------------------------------------------------------------------------- Python's numbers


def two_tokens(p: float, old: float, value: Callable[[int, float], float]) -> float:
    """The mean over a reply drawn with probability `old` of value(reply, slope of its log-prob)."""
    return old * value(0, 1 - p) + (1 - old) * value(1, -p)


def drawn_variance(p: float, size: int, groups: int) -> float:
    draws = mulberry32(1)
    means = [sum(draw < p for draw in islice(draws, size)) / size for _ in range(groups)]
    return float(np.var(means, ddof=1))


def k3_mean(p: float, q: float, old: float, *, slope: bool) -> float:
    def term(reply: int, direction: float) -> float:
        now, reference, then = ((a if reply == 0 else 1 - a) for a in (p, q, old))
        rho, d = now / then, math.log(now / reference)
        value = float(value_and_slope(torch.tensor(d, dtype=torch.float64), "k3")[0])
        return rho * d * direction if slope else rho * value  # of rho k3 by the log-prob: rho d

    return two_tokens(p, old, term)


def kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def clipped_slope(ratio: float, advantage: float) -> float:
    moved = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    value = torch.tensor([advantage], dtype=torch.float64)
    LOSSES["grpo"].token_loss(moved, ratio * moved.exp(), value, Clip()).sum().backward()
    assert moved.grad is not None
    return float(moved.grad)


def group_slope(ratio: float, beta: float, d: float) -> float:
    """The trainer's loss of the page's group, a token each, by a common move of the log-probs."""
    (credit,) = group_advantages([REWARDS])
    size, shift = len(REWARDS), torch.zeros((), dtype=torch.float64, requires_grad=True)
    now = torch.full((size,), math.log(0.5), dtype=torch.float64)
    inputs = LossInputs(
        now + shift,
        now - math.log(ratio),
        torch.tensor(credit, dtype=torch.float64),
        torch.arange(size),
        Denominators.of([1] * size),
        ref_logprobs=now - d,
    )
    policy_loss("grpo", inputs, clip_ratio=0.2, beta=beta).loss.backward()
    assert shift.grad is not None
    return float(shift.grad)


def modules_gradient() -> tuple[float, float, float]:
    """Of the first slope, of the first number of task 1, and the squared length of the whole, by autograd."""
    slopes = torch.tensor([0.7, 0.2], dtype=torch.float64, requires_grad=True)
    logits = torch.tensor([[0.8, -0.8], [-0.3, 0.3]], dtype=torch.float64, requires_grad=True)
    outputs = torch.softmax(logits / 2, dim=1) @ slopes
    (0.5 * (outputs - torch.tensor([0.5, -1.0])) ** 2).sum().backward()
    assert slopes.grad is not None
    assert logits.grad is not None
    total = float((slopes.grad**2).sum() + (logits.grad**2).sum())
    return float(slopes.grad[0]), float(logits.grad[0, 0]), total


MODULES = {"lean": "0.8~-0.3", "temperature": 2, "slopes": "0.7~0.2", "targets": "0.5~-1"}
ARROWS = {"first": "1.5~0.5", "second": "-1~0.75"}
FIRST, SECOND = np.array([1.5, 0.5]), np.array([-1.0, 0.75])


def kept_direction() -> float:
    total, plain = np.array(toys.pcgrad([FIRST, SECOND])[1]), FIRST + SECOND
    return float(total @ plain / np.linalg.norm(total) / np.linalg.norm(plain))


Case = tuple[str, dict[str, Any], int, Callable[[], Sides]]
CASES: list[Case] = [
    ("grpo", {"p": 0.6, "win": 0.9, "lose": 0.1}, 1, lambda: (0.24 * 0.8, 0.24 * 0.8)),
    ("grpo", {"p": 0.3, "b": -0.5, "b_extra": 0.4}, 2, lambda: (0.21 * (0.8 - 0.4), 0.21 * 0.8)),
    ("grpo", {"p": 0.3, "size": 4}, 3, lambda: (
        toys.expected_gradient(0.3, 4, baseline="group_mean", scaling="none"), 0.75 * 0.21)),
    ("grpo", {"p": 0.3, "size": 4, "by_std": 1}, 3, lambda: (
        toys.expected_gradient(0.3, 4, baseline="group_mean", scaling="population"), 0.75 * 0.21)),
    ("grpo", {"p": 0.3, "size": 5, "num_groups": 40}, 4, lambda: (drawn_variance(0.3, 5, 40), 0.21 / 5)),
    ("grpo", {"p": 0.3, "p_old": 0.6}, 5, lambda: (0.21 * 0.8, 0.21 * 0.8)),
    ("grpo", {"p": 0.3, "p_old": 0.6, "with_rho": 0}, 5, lambda: (
        two_tokens(0.3, 0.6, lambda reply, slope: (1.0, 0.2)[reply] * slope), 0.21 * 0.8)),
    ("grpo", {"ratio": 0.5, "a": 1}, 6, lambda: (clipped_slope(0.5, 1.0),) * 2),
    ("grpo", {"ratio": 1.5, "a": 1}, 6, lambda: (clipped_slope(1.5, 1.0),) * 2),
    ("grpo", {"ratio": 1.5, "a": -1}, 6, lambda: (clipped_slope(1.5, -1.0),) * 2),
    ("grpo", {"p": 0.3, "q": 0.6, "p_old": 0.5}, 7, lambda: (
        k3_mean(0.3, 0.6, 0.5, slope=False), kl(0.3, 0.6))),
    ("grpo", {"p": 0.3, "q": 0.6, "p_old": 0.5}, 8, lambda: (k3_mean(0.3, 0.6, 0.5, slope=True),) * 2),
    ("grpo", {"ratio": 1.3, "beta": 0.5, "d": -0.8}, 9, lambda: (group_slope(1.3, 0.5, -0.8),) * 2),
    ("gradient_surgery", {**ARROWS, "eta": 0.5, "bend": 3}, 1, lambda: (
        float(-FIRST @ SECOND + 0.75 * SECOND @ SECOND), float(-FIRST @ SECOND))),
    ("gradient_surgery", ARROWS, 3, lambda: (
        float(np.linalg.norm(toys.pcgrad([FIRST, SECOND])[0][0]) ** 2),) * 2),
    ("gradient_surgery", ARROWS, 4, lambda: (float(FIRST @ toys.pcgrad([FIRST, SECOND])[1]),) * 2),
    ("gradient_surgery", ARROWS, 5, lambda: (kept_direction(),) * 2),
    ("soft_modularization", MODULES, 1, lambda: (toys.softmax([0.8, -0.8], 2)[0],) * 2),
    ("soft_modularization", MODULES, 3, lambda: (modules_gradient()[0],) * 2),
    ("soft_modularization", MODULES, 4, lambda: (modules_gradient()[1],) * 2),
    ("infinite_mixture", {"finite": 50, "seen": 1, "alpha": 2}, 1, lambda: (49 * 2 / 50 / 3, 2 / 3)),
]  # fmt: skip


@pytest.mark.parametrize(("page", "state", "claim", "wanted"), CASES)
async def test_both_sides_of_a_claim_are_python_s(
    tab: Tab,
    pages: dict[str, Path],
    page: str,
    state: dict[str, Any],
    claim: int,
    wanted: Callable[[], Sides],
) -> None:
    await opened(tab, pages[page], **state)
    assert await sides(tab, claim) == pytest.approx(wanted(), abs=2e-6)
    left, right = wanted()
    if claim != 4 or page != "grpo":  # that one is drawn
        assert await verdict(tab, claim) == ("agree" if left == pytest.approx(right, rel=0.01) else "differ")


async def test_the_squared_length_is_that_of_the_whole_gradient(tab: Tab, pages: dict[str, Path]) -> None:
    await opened(tab, pages["soft_modularization"], **MODULES)
    near(await shown(tab, "claim-5-right"), modules_gradient()[2])


async def test_points_of_a_component_have_the_density_of_them_together(
    tab: Tab, pages: dict[str, Path]
) -> None:
    await opened(tab, pages["infinite_mixture"], seen=1, probe=0.5, y=0.8)
    details = "document.querySelector('[data-figure=stream]').closest('figure').querySelector('details')"
    await tab.run(f"{details}.open = true")
    await tab.until(f"{details}.querySelectorAll('tbody tr').length > 0")
    cells = await tab.run(f"[...{details}.querySelectorAll('tbody td')].map((one) => one.textContent)")
    x, y = (float(text.replace("\u2212", "-")) for text in cells[:2])
    kernel = 1.5**2 * math.exp(-((x - 0.5) ** 2) / (2 * 0.8**2))
    covariance = np.array([[1.5**2 + 0.15**2, kernel], [kernel, 1.5**2 + 0.15**2]])
    values = np.array([y, 0.8])
    log = -math.log(2 * math.pi) - 0.5 * math.log(np.linalg.det(covariance))
    wanted = log - 0.5 * float(values @ np.linalg.solve(covariance, values))
    assert await sides(tab, 3) == pytest.approx((wanted, wanted), abs=1e-3)  # the table has six digits


async def test_drawn_groups_and_restaurants_agree_for_nearly_every_seed(
    tab: Tab, pages: dict[str, Path]
) -> None:
    for page, claim in (("grpo", 4), ("infinite_mixture", 2)):
        await opened(tab, pages[page])
        found = await tab.run(
            "(async () => { const found = []; for (let seed = 0; seed <= 20; seed += 1) {"
            "const own = document.querySelector('input[name=seed]');"
            "own.value = seed; own.dispatchEvent(new Event('input'));"
            f"const said = document.querySelector('[data-claim=claim-{claim}]');"
            "found.push([said.dataset.verdict, said.previousSibling.querySelector('output').dataset.value,"
            "Number(said.querySelector('output').dataset.value)]); } return found; })()"
        )
        assert [agrees for agrees, _, _ in found].count("agree") >= 20
        assert len({left for _, left, _ in found}) > 15  # each seed draws anew
        errors = [apart for _, _, apart in found]
        assert 0.4 < float(np.sqrt(np.mean(np.square(errors)))) < 1.6  # as standard errors are spread


# ------------------------------------------------------------------------------------ keys, pitfalls


async def test_a_knob_is_moved_by_keys(tab: Tab, pages: dict[str, Path]) -> None:
    await opened(tab, pages["grpo"], p=0.3, size=4)
    await tab.run("document.querySelectorAll('#derivation input[name=size]')[0].focus()")
    for kind in ("rawKeyDown", "keyUp"):
        await tab.call(
            "Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39
        )
    near(await shown(tab, "claim-3-right"), (1 - 1 / 5) * 0.21)
    assert await tab.run("document.activeElement.name") == "size"
    assert await verdict(tab, 3) == "agree"


async def test_the_arrow_turned_by_its_angle_is_the_arrow_of_part_one(
    tab: Tab, pages: dict[str, Path]
) -> None:
    await opened(tab, pages["gradient_surgery"])
    await tab.run(
        "(() => { const own = document.querySelector('#derivation input[name=angle]');"
        "own.value = 90; own.dispatchEvent(new Event('input')); })()"
    )
    assert await shown(tab, "cosine") == pytest.approx(0, abs=2e-4)
    spoken = await tab.run("document.querySelector('[data-grip=second]').getAttribute('aria-valuetext')")
    second = np.array([float(value) for value in spoken.split(", ")])
    assert np.linalg.norm(second) == pytest.approx(math.hypot(0.9, 0.9), abs=1e-3)


SHOWN: list[tuple[str, int, str, Callable[[float], bool]]] = [
    ("grpo", 1, "pit-largest", lambda value: value == 0),
    ("grpo", 1, "pit-mixed", lambda value: math.isclose(value, 100 * (1 - 0.95**4 - 0.05**4))),
    ("grpo", 2, "pit-hair", lambda value: abs(value - math.sqrt(7)) < 1e-4),
    ("grpo", 3, "pit-now", lambda value: abs(value - math.sqrt(7)) < 1e-6),
    ("grpo", 4, "pit-loss", lambda value: abs(value) < 1e-12),
    ("grpo", 5, "pit-weight", lambda value: math.isclose(value, 4 / 50)),
    ("grpo", 6, "skipped", lambda value: abs(value - math.sqrt(7)) < 1e-6),
    ("gradient_surgery", 1, "pit-total", lambda value: value < 1e-12),
    ("gradient_surgery", 2, "pit-after", lambda value: value > 5),
    ("gradient_surgery", 3, "pit-adam-2", lambda value: value > 0.5),
    ("gradient_surgery", 4, "pit-again", lambda value: value < -0.5),
    ("gradient_surgery", 5, "pit-taken", lambda value: 0 < value < 0.5),
    ("soft_modularization", 1, "pit-route", lambda value: value == 0),
    ("soft_modularization", 2, "pit-loss", lambda value: value > 0.5),
    ("soft_modularization", 3, "pit-certainty", lambda value: value < 1e-9),
    ("soft_modularization", 4, "pit-pull", lambda value: value > 70),
    ("soft_modularization", 5, "pit-fixed", lambda value: value < 1e-6),
    ("infinite_mixture", 1, "pit-alpha-rand", lambda value: value < 70),
    ("infinite_mixture", 2, "pit-beta-rand", lambda value: value < 55),
    ("infinite_mixture", 3, "pit-noise", lambda value: value == 0.05),
    ("infinite_mixture", 4, "pit-std", lambda value: value > 1.5),
    ("infinite_mixture", 5, "pit-sure", lambda value: value < 0.5),
]


@pytest.mark.parametrize("page", PITFALLS)
async def test_each_pitfall_can_be_shown_and_its_number_says_so(
    tab: Tab, pages: dict[str, Path], page: str
) -> None:
    await opened(tab, pages[page])
    buttons = "document.querySelectorAll('[data-pitfall]')"
    assert await tab.run(f"{buttons}.length") == PITFALLS[page]
    for own, pitfall, name, fits in SHOWN:
        if own == page:
            await opened(tab, pages[page])
            await tab.run(f"document.querySelector('[data-pitfall=\"{pitfall}\"]').click()")
            value = await shown(tab, name)
            assert fits(value), (pitfall, name, value)
    assert {pitfall for own, pitfall, _, _ in SHOWN if own == page} == set(range(1, PITFALLS[page] + 1))
    assert tab.complaints == []
