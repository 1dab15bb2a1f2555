"""Parts, weights and the papers' toys in the pages equal Python's to 1e-9, with identical labels."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import learn_toys as toys
import numpy as np
import pytest
import pytest_asyncio
from chromium import chromium
from learn_math import SEEDS, PageMath, near

from stateset_agents.algorithms.intervals import interquartile_mean, stratified_interval
from stateset_agents.grouping.advantages import (
    absolute_shares,
    gae_batch,
    normalise_by_part,
    part_statistics,
    sign_flip_share,
)
from stateset_agents.grouping.partitions import (
    kmeans,
    kmeans_parts,
    quantile_parts,
    random_parts,
    standardised,
)
from stateset_agents.grouping.weights import GroupWeightCalculator, group_fairness, part_weights
from stateset_agents.numeric.studies.study import (
    area_under_curve,
    probability_of_improvement,
    worst_drawdown,
)

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

EDGES: dict[str, list[float]] = {
    "one value": [0.3],
    "all equal": [0.1] * 6,
    "fewer than parts": [2.0, 1.0, 1.5],
    "ties at a boundary": [0.0, 1.0, 0.0, 1.0, 0.5, 0.5],
    "whole numbers": [float(value) for value in range(9)],
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page() -> AsyncIterator[PageMath]:
    async with chromium() as browser, browser.tab() as tab:
        yield PageMath(tab, "learn.math.js", "parts/grouping.math.js", "study/study.math.js")


async def test_draws_are_python_s(page: PageMath) -> None:
    from stateset_agents.grouping.partitions import mulberry32

    for seed in SEEDS:
        draws = mulberry32(seed)
        found = await page("Array.from({length: 50}, mulberry32(seed))", seed=seed)
        assert found == [next(draws) for _ in range(50)]


async def test_quantile_parts_have_python_s_labels(page: PageMath) -> None:
    cases = [
        *EDGES.values(),
        *(np.random.default_rng(seed).normal(size=40).round(1).tolist() for seed in SEEDS),
    ]
    for parts in range(1, 9):
        found = await page(
            "cases.map((values) => { const bounds = quantileBoundaries(values, parts);"
            " return [bounds, labelsBetween(values, bounds)]; })",
            cases=cases, parts=parts,
        )  # fmt: skip
        for (bounds, labels), values in zip(found, cases, strict=True):
            wanted = quantile_parts(np.array(values), parts)
            assert wanted.boundaries is not None
            near(bounds, wanted.boundaries.tolist())
            assert labels == wanted.labels.tolist()


async def test_k_means_has_python_s_labels_and_centres(page: PageMath) -> None:
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        rows = draw.normal(size=(draw.integers(1, 120), draw.integers(1, 5)))
        if seed % 4 == 0:  # rows that repeat, and a feature that never changes
            rows = np.repeat(rows.round(0), 2, axis=0)
            rows[:, 0] = 0.1
        parts = 1 + seed % 8
        found = await page(
            "(() => { const all = standardised(rows), own = kmeans(all.rows, parts, seed);"
            " const back = (one) => one.map((value, at) => value * all.spreads[at] + all.means[at]);"
            " return { labels: own.labels, centres: own.centres.map(back) }; })()",
            rows=rows.tolist(), parts=parts, seed=seed,
        )  # fmt: skip
        wanted = kmeans_parts(rows, parts, seed=seed)
        assert wanted.centres is not None
        assert found["labels"] == wanted.labels.tolist()
        near(found["centres"], wanted.centres.tolist())


async def test_a_dragged_centre_gives_python_s_labels(page: PageMath) -> None:
    rows = standardised(np.random.default_rng(3).normal(size=(80, 2)))[0]
    given = np.array([[-1.0, 0.5], [0.25, 0.25], [1.0, -1.0]])
    found = await page("kmeans(rows, 3, 0, {centres: given})", rows=rows.tolist(), given=given.tolist())
    wanted = kmeans(rows, 3, centres=given)
    assert found["labels"] == wanted.labels.tolist()
    near(found["centres"], wanted.centres.tolist())


async def test_random_parts_are_python_s(page: PageMath) -> None:
    for seed in SEEDS:
        found = await page("randomLabels(60, 4, seed)", seed=seed)
        assert found == random_parts(60, 4, seed=seed).labels.tolist()


def batches() -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Advantages, labels and tasks: random ones, then one part, an empty one, no variance, single steps."""
    cases = []
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        tasks = draw.integers(0, 2, 64)
        raw = draw.normal(size=64) * np.where(tasks == 0, 1.0, 0.01)
        cases.append((raw, draw.integers(0, 4, 64), tasks))
    four = np.array([1.0, 2.0, 3.0, 4.0])
    none = np.zeros(4, dtype=np.int64)
    cases += [
        (four, none, none),
        (four, np.array([0, 0, 3, 3]), none),
        (np.full(4, 0.1), none, none),
        (four, np.arange(4), none),
        (four, np.array([0, 0, 1, 1]), none),
    ]
    return cases


async def test_normalisation_shares_and_flips_are_python_s(page: PageMath) -> None:
    for raw, labels, tasks in batches():
        for ddof in (0, 1):
            found = await page(
                "(() => { const own = normaliseByPart(raw, labels, {ddof}); return { own, "
                "flips: signFlipShare(raw, own, tasks), shares: absoluteShares(own, labels, 4), "
                "statistics: partStatistics(own, labels, 4).map(Object.values) }; })()",
                raw=raw.tolist(), labels=labels.tolist(), tasks=tasks.tolist(), ddof=ddof,
            )  # fmt: skip
            own = normalise_by_part(raw, labels, ddof=ddof)
            near(found["own"], own.tolist())
            near(found["flips"], sign_flip_share(raw, own, tasks))
            near(found["shares"], absolute_shares(own, labels, 4).tolist())
            near(found["statistics"], [list(one) for one in part_statistics(own, labels, 4)])


async def test_gae_is_python_s_with_ends_and_cuts(page: PageMath) -> None:
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        rewards, values, following = (draw.normal(size=(24, 5)) for _ in range(3))
        ended = draw.random((24, 5)) < 0.2
        terminated = ended & (draw.random((24, 5)) < 0.5)
        batch = {
            "rewards": rewards.tolist(), "values": values.tolist(), "next": following.tolist(),
            "terminated": terminated.astype(int).tolist(), "ended": ended.astype(int).tolist(),
        }  # fmt: skip
        found = await page("gaeBatch(batch, {gamma: 0.97, lam: 0.9})", batch=batch)
        wanted = gae_batch(rewards, values, following, terminated, ended, gamma=0.97, lam=0.9)
        near(found, wanted.advantages.tolist())


async def test_weights_and_fairness_are_python_s(page: PageMath) -> None:
    cases: list[list[float | None]] = [
        [0.9, 0.4],
        [0.5],
        [None, 0.2, 1.4],
        [None, None],
        [1.0, 1.0, 1.0],
        [-0.5] * 30,
    ]
    for seed in SEEDS:
        cases.append(np.random.default_rng(seed).normal(0.5, 0.5, 1 + seed % 6).tolist())
    for method in ("balanced", "performance"):
        found = await page("cases.map((scores) => partWeights(method, scores))", cases=cases, method=method)
        known = [[math.nan if value is None else value for value in scores] for scores in cases]
        near(found, [part_weights(method, scores).tolist() for scores in known])
    for scores in (case for case in cases if None not in case):
        near(
            await page("groupFairness(scores)", scores=scores),
            group_fairness([value or 0.0 for value in scores]),
        )


@pytest.mark.parametrize("method", ["balanced", "performance", "adaptive"])
async def test_weights_over_a_training_are_python_s(page: PageMath, method: str) -> None:
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        series = np.where(draw.random((30, 3)) < 0.2, np.nan, draw.random((30, 3)))
        given = [[None if math.isnan(value) else value for value in row] for row in series.tolist()]
        found = await page("weightSeries(method, series)", method=method, series=given)
        calculator = GroupWeightCalculator(method, 3)
        near(found, [calculator.weights(row).tolist() for row in series])


# ---------------------------------------------------------------------------------- the papers' toys


async def test_projected_gradients_are_python_s_and_raise_no_loss(page: PageMath) -> None:
    cases: list[list[list[float]]] = [
        [[1.0, 0.0], [-1.0, 1.0]],
        [[1.0, 0.0], [-1.0, 0.0]],
        [[0.0, 0.0], [1.0, 1.0]],
    ]
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        cases.append(draw.normal(size=(2 + seed % 3, 3)).tolist())
    for gradients in cases:
        order = list(range(len(gradients)))[::-1]
        found = await page("pcgrad(gradients, order)", gradients=gradients, order=order)
        projected, total = toys.pcgrad(gradients, order)
        near(found["projected"], projected)
        near(found["total"], total)
        if len(gradients) == 2:
            assert all(np.dot(total, own) >= -1e-12 for own in gradients)


async def test_module_steps_are_python_s(page: PageMath) -> None:
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        slopes, logits, targets = draw.normal(size=3), draw.normal(size=(2, 3)), draw.normal(size=2)
        routed = bool(seed % 2)
        found = await page(
            "(() => { let now = begun; const losses = []; for (let i = 0; i < 40; i += 1) {"
            " now = moduleStep(now, targets, {rate: 0.2, temperature: 0.7, routed}); losses.push(now.loss); }"
            " return [losses, now.slopes, now.logits]; })()",
            begun={"slopes": slopes.tolist(), "logits": logits.tolist()},
            targets=targets.tolist(), routed=routed,
        )  # fmt: skip
        now = toys.Modules(tuple(slopes.tolist()), tuple(map(tuple, logits.tolist())))
        losses = []
        for _ in range(40):
            now, loss = toys.module_step(now, targets.tolist(), rate=0.2, temperature=0.7, routed=routed)
            losses.append(loss)
        near(found, [losses, list(now.slopes), [list(own) for own in now.logits]])


async def test_points_of_a_stream_go_where_python_sends_them(page: PageMath) -> None:
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        tasks = np.repeat([0, 1, 0, 2], 6)
        xs = draw.uniform(-3, 3, 24)
        ys = np.choose(tasks, [np.sin(1.5 * xs), 1.6 - 0.5 * xs, -1.5 + 0.3 * xs]) + 0.1 * draw.normal(
            size=24
        )
        stream = [(float(x), float(y)) for x, y in zip(xs, ys, strict=True)]
        most = None if seed % 3 else 2
        process = toys.Process(length=0.8, signal=1.5, noise=0.15)
        options = {"alpha": 0.5, "beta": 3.0, "length": 0.8, "signal": 1.5, "noise": 0.15, "most": most}
        found = await page("mixture(stream, options).steps", stream=stream, options=options)
        wanted = toys.mixture(stream, process, alpha=0.5, beta=3.0, most=most)
        assert [one["chosen"] for one in found] == [one.chosen for one in wanted]
        near([one["prior"] for one in found], [one.prior for one in wanted])
        near([one["posterior"] for one in found], [one.posterior for one in wanted])


async def test_expected_gradients_are_python_s(page: PageMath) -> None:
    for baseline, scaling in (
        ("group_mean", "none"),
        ("leave_one_out", "none"),
        ("group_mean", "population"),
    ):
        for size in (2, 8, 16):
            found = await page(
                "[0.02, 0.25, 0.5, 0.98].map((p) => expectedGradient(p, size, {baseline, scaling}))",
                size=size, baseline=baseline, scaling=scaling,
            )  # fmt: skip
            wanted = [
                toys.expected_gradient(p, size, baseline=baseline, scaling=scaling)
                for p in (0.02, 0.25, 0.5, 0.98)
            ]
            near(found, wanted)


# ---------------------------------------------------------------------------------- measures of a study


async def test_measures_of_a_study_are_python_s(page: PageMath) -> None:
    for seed in SEEDS:
        draw = np.random.default_rng(seed)
        steps = np.cumsum(draw.integers(1, 50, 12)).tolist()
        curve = draw.normal(0.5, 0.5, 12).tolist()
        ours = draw.normal(0.6, 0.2, (5, 2)).round(1).tolist()
        theirs = draw.normal(0.5, 0.2, (4, 2)).round(1).tolist()
        length = float(steps[-1] + draw.integers(-20, 60))
        found = await page(
            "[areaUnder(steps, curve, length), drawdown(curve), iqm(curve), improvement(ours, theirs),"
            " [0, 0.25, 0.5].map((tau) => profile(ours, tau))]",
            steps=steps, curve=curve, length=length, ours=ours, theirs=theirs,
        )  # fmt: skip
        means = [[float(np.mean(run)) for run in runs] for runs in (ours, theirs)]
        scores = [score for run in ours for score in run]
        wanted = [
            area_under_curve(steps, curve, length=length),
            worst_drawdown(curve),
            interquartile_mean(curve),
            probability_of_improvement({"a": means[0]}, {"a": means[1]}, resamples=1)[0],
            [np.mean([score > tau for score in scores]) for tau in (0, 0.25, 0.5)],
        ]
        near(found, wanted)


async def test_an_interval_drawn_in_the_page_holds_about_what_python_s_holds(page: PageMath) -> None:
    runs = np.random.default_rng(0).normal(0.6, 0.1, (10, 2)).tolist()
    low, high = await page("bootstrap(runs, iqmOf, {seed: 3})", runs=runs)
    _, interval = stratified_interval({"a": runs})
    assert interval is not None
    assert (low, high) == pytest.approx(interval, abs=0.015)
    assert await page("bootstrap(runs, iqmOf)", runs=runs[:2]) is None
