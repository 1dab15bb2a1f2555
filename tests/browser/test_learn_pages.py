"""The learning pages in a browser: plots, controls, mouse, keys, links. `make test-browser` runs this."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import learn_toys as toys
import numpy as np
import pytest
import torch
from chromium import Tab
from learn_math import near
from report_runs import finished_run
from study_folders import comparison, grid, write_study

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.algorithms.intervals import interquartile_mean
from stateset_agents.algorithms.kl_settings import value_and_slope
from stateset_agents.algorithms.losses import Denominators, LossInputs, policy_loss
from stateset_agents.algorithms.policy_losses import LOSSES, Clip
from stateset_agents.cli.pages import write_pages
from stateset_agents.grouping.advantages import absolute_shares, gae_batch, normalise_by_part, sign_flip_share
from stateset_agents.grouping.partitions import kmeans_parts, quantile_parts, random_parts
from stateset_agents.grouping.weights import GroupWeightCalculator
from stateset_agents.reporting.learn_pages import toy_parts
from stateset_agents.tracking.run_log import RunLog

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

PAGES = (
    *("grpo", "gradient_surgery", "soft_modularization", "infinite_mixture", "formation", "advantages"),
    *("lab", "grpo_vs_ppo", "tasks", "sensitivity"),
)
MINUS = "\u2212"
MOST_BYTES, MOST_CPU_SECONDS = 3_000_000, 3.0

PLOTS = {
    "group sizes": ("formation", "sizes"),
    "characteristics radar": ("formation", "radar"),
    "advantages by part": ("formation", "boxes"),
    "global and by part, dual histogram": ("advantages", "histogram"),
    "before and after": ("advantages", "slopes"),
    "heatmap by part": ("advantages", "heatmap"),
    "performance, a line for each task": ("tasks", "performance"),
    "weights, stacked": ("tasks", "weights"),
    "convergence by part": ("tasks", "convergence"),
}
"""Each plot that a page on grouping must have: where it stands."""
CONTROLS = {
    "strategy": ("formation", "select[name=strategy]"),
    "number of parts": ("formation", "input[type=range][name=parts]"),
    "weighting": ("tasks", "input[type=radio][name=weighting]"),
    "comparison": ("advantages", "input[type=checkbox][name=compare]"),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("learn")
    written = [
        *write_pages(out=root / "papers"),
        *write_pages(finished_run(root / "runs", steps=6).path)[:1],
        *write_pages(write_study(root / "comparison", comparison()))[:2],
        *write_pages(write_study(root / "grid", grid()))[2:],
    ]
    return {path.stem: path for path in written}


async def opened(tab: Tab, path: Path, **state: Any) -> None:
    """The page with these settings in its address."""
    query = "&".join(f"{name}={value}" for name, value in state.items())
    await tab.open("about:blank")
    await tab.open(f"{path.as_uri()}#?{query}")
    await tab.until("'ready' in document.documentElement.dataset")


async def shown(tab: Tab, name: str) -> float:
    """A number of the page, in full."""
    text = await tab.run(f"document.querySelector('[data-number=\"{name}\"]').dataset.value")
    return float(text)


async def turn(tab: Tab, name: str, value: Any) -> None:
    """Set a control as a user does: a slider, a list, a box, or one of several."""
    await tab.run(
        f"(() => {{ const all = [...document.querySelectorAll('[name=\"{name}\"]')];"
        f"const value = {json.dumps(value)};"
        "const own = all.find((one) => one.type === 'radio' && one.value === String(value)) ?? all[0];"
        "const ticked = own.type === 'radio' || own.type === 'checkbox';"
        "if (ticked && own.checked !== (value !== false)) own.click(); if (ticked) return;"
        "own.value = value; own.dispatchEvent(new Event('input', {bubbles: true}));"
        "own.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


async def drag(tab: Tab, grip: str, by: tuple[int, int]) -> None:
    """Pull a handle with the mouse by so many pixels."""
    halo = f"document.querySelector('[data-grip=\"{grip}\"] .halo')"
    await tab.run(f"{halo}.scrollIntoView({{block: 'center'}})")
    x, y = await tab.run(
        f"(() => {{ const box = {halo}.getBoundingClientRect();"
        "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    mouse = {"button": "left", "clickCount": 1}
    await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    await tab.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, **mouse)
    for part in (0.5, 1.0):
        at = {"x": x + part * by[0], "y": y + part * by[1]}
        await tab.call("Input.dispatchMouseEvent", type="mouseMoved", **at, buttons=1)
    await tab.call("Input.dispatchMouseEvent", type="mouseReleased", **at, **mouse)


async def pressed(tab: Tab, grip: str, key: str, times: int) -> None:
    """Move a handle by an arrow key; the focus stays on it."""
    await tab.run(f"document.querySelector('[data-grip=\"{grip}\"]').focus()")
    for _ in range(times):
        await tab.press(key)
        assert await tab.run("document.activeElement.dataset.grip") == grip


# ------------------------------------------------------------------------------------------ every page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
@pytest.mark.parametrize("name", PAGES)
async def test_a_page_is_one_small_file_without_a_complaint_a_request_or_an_overflow(
    tab: Tab, pages: dict[str, Path], name: str, width: int, height: int, scheme: str
) -> None:
    assert len(await asyncio.to_thread(pages[name].read_bytes)) <= MOST_BYTES
    await tab.look(width, height, scheme)
    await tab.call("Performance.enable")
    await tab.open(pages[name].as_uri())
    await tab.until("'ready' in document.documentElement.dataset")
    spent = {one["name"]: one["value"] for one in (await tab.call("Performance.getMetrics"))["metrics"]}
    assert spent["TaskDuration"] <= MOST_CPU_SECONDS
    await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    assert await tab.run("document.documentElement.scrollWidth") <= width
    assert tab.complaints == []
    assert [url for url in tab.requests if not url.startswith("data:")] == [pages[name].as_uri()]


@pytest.mark.parametrize("name", PAGES)
async def test_each_figure_says_what_it_shows_and_its_text_holds_no_broken_number(
    tab: Tab, pages: dict[str, Path], name: str
) -> None:
    await opened(tab, pages[name])
    await tab.run("document.querySelectorAll('details').forEach((one) => (one.open = true))")
    labels = await tab.run(
        "[...document.querySelectorAll('svg.drawn')].map((one) => one.getAttribute('aria-label'))"
    )
    assert labels
    assert all(len(label) > 20 for label in labels)
    drawn = "[...document.querySelectorAll('svg *')].flatMap((one) => [...one.attributes])"
    everything = await tab.run(f"document.body.innerText + {drawn}.map((own) => own.value).join(' ')")
    assert "NaN" not in everything
    assert "undefined" not in everything
    assert "Infinity" not in everything


@pytest.mark.parametrize("plot", PLOTS)
async def test_each_plot_of_grouping_stands_on_a_page_with_its_values(
    tab: Tab, pages: dict[str, Path], plot: str
) -> None:
    page, figure = PLOTS[plot]
    await opened(tab, pages[page])
    marks = f"document.querySelectorAll('svg[data-figure={figure}] :is(path, rect, circle)').length"
    assert await tab.run(marks) > 4
    details = (
        f"document.querySelector('svg[data-figure={figure}]').closest('figure').querySelector('details')"
    )
    await tab.run(f"{details}.open = true")
    await tab.until(f"{details}.querySelectorAll('tbody tr').length > 0")


@pytest.mark.parametrize("control", CONTROLS)
async def test_each_control_of_grouping_stands_on_a_page(
    tab: Tab, pages: dict[str, Path], control: str
) -> None:
    page, selector = CONTROLS[control]
    await opened(tab, pages[page])
    assert await tab.run(f"document.querySelectorAll({json.dumps(selector)}).length") >= 1


# ------------------------------------------------------------- controls give Python's numbers

TOY = toy_parts()
T = {name: np.array(values) for name, values in TOY["trajectories"].items()}
STEPS = {name: np.array(values) for name, values in TOY["steps"].items()}
REWARDS = [1, 0, 0, 1, 0, 0.5, 0, 0]


def first_advantage(**options: Any) -> float:
    (own,) = group_advantages([REWARDS], **options)
    assert own[0] is not None
    return own[0]


def k3(d: float) -> float:
    return float(value_and_slope(torch.tensor(d, dtype=torch.float64), "k3")[0])


def shrunk(size: int) -> float:
    return toys.expected_gradient(0.25, size, baseline="group_mean", scaling="population") / (0.25 * 0.75)


def token_loss(ratio: float, advantage: float, clip: Clip) -> float:
    values = (torch.tensor([value], dtype=torch.float64) for value in (0.0, ratio, advantage))
    return float(LOSSES["grpo"].token_loss(*values, clip))


def flips(labels: Any) -> float:
    return 100 * sign_flip_share(T["raw"], normalise_by_part(T["raw"], labels), T["tasks"])


def batch_advantages(scale: float = 1.0, gamma: float = 0.99, lam: float = 0.95) -> Any:
    factor = np.where(STEPS["tasks"] == 1, scale, 1.0)
    scaled = (STEPS[name] * factor for name in ("rewards", "values", "next"))
    ends = (STEPS[name].astype(bool) for name in ("terminated", "ended"))
    return gae_batch(*scaled, *ends, gamma=gamma, lam=lam).advantages


def task_share(by_task: bool, **options: Any) -> float:
    raw = batch_advantages(**options)
    tasks = np.broadcast_to(STEPS["tasks"], raw.shape)
    labels = tasks if by_task else np.zeros(raw.shape, dtype=np.int64)
    return 100 * float(absolute_shares(normalise_by_part(raw, labels), tasks, 2)[1])


def last_weights(method: str) -> Any:
    cell = next(own for own in comparison() if own["suite"] == "mix_large" and own["arm"] == "task")
    calculator = GroupWeightCalculator(method, 2)
    for scores in cell["curve"]["scores"]:
        weights = calculator.weights([np.nan if value is None else value for value in scores])
    return float(weights[0])


def arm_iqm(arm: str) -> float:
    cells = [own for own in comparison() if own["suite"] == "mix_large" and own["arm"] == arm]
    return interquartile_mean([score for own in cells for score in own["final"]["scores"]])


def outputs_after(temperature: float = 1.0, rate: float = 0.3, steps: int = 60) -> float:
    now = toys.Modules((0.5, 0.2), ((0.4, -0.4), (-0.3, 0.3)))
    for _ in range(steps + 1):
        before = now
        now, loss = toys.module_step(before, [1, -1], rate=rate, temperature=temperature)
    return loss


Case = tuple[str, str, Any, str, Callable[[], float]]
CASES: list[Case] = [
    ("grpo", "baseline", "group_median", "first", lambda: first_advantage(baseline="group_median")),
    ("grpo", "baseline", "leave_one_out", "first", lambda: first_advantage(baseline="leave_one_out")),
    ("grpo", "scaling", "sample", "first", lambda: first_advantage(scaling="sample")),
    ("grpo", "scaling", "none", "first", lambda: first_advantage(scaling="none")),
    ("grpo", "size", 4, "scaled", lambda: shrunk(4)),
    ("grpo", "ratio", 1.7, "token-loss", lambda: token_loss(1.7, 1.0, Clip())),
    ("grpo", "high", 0.5, "token-loss", lambda: token_loss(1.0, 1.0, Clip(high=0.5))),
    ("grpo", "a", -1.5, "token-loss", lambda: token_loss(1.0, -1.5, Clip())),
    ("grpo", "d", -0.8, "k3", lambda: k3(-0.8)),
    ("formation", "strategy", "task", "flips", lambda: flips(T["tasks"])),
    ("formation", "strategy", "difficulty", "flips", lambda: flips(quantile_parts(T["returns"]).labels)),
    ("formation", "strategy", "random", "flips", lambda: flips(random_parts(240).labels)),
    ("formation", "parts", 7, "flips", lambda: flips(kmeans_parts(T["features"], 7).labels)),
    ("formation", "seed", 5, "flips", lambda: flips(kmeans_parts(T["features"], 4, seed=5).labels)),
    ("advantages", "scale", 2, "plain-share", lambda: task_share(False, scale=100.0)),
    ("advantages", "scale", 2, "part-share", lambda: task_share(True, scale=100.0)),
    ("advantages", "gamma", 0.9, "plain-share", lambda: task_share(False, gamma=0.9)),
    ("advantages", "lam", 0.5, "part-share", lambda: task_share(True, lam=0.5)),
    ("tasks", "weighting", "performance", "weight-0", lambda: last_weights("performance")),
    ("tasks", "weighting", "adaptive", "weight-0", lambda: last_weights("adaptive")),
    ("grpo_vs_ppo", "suite", "mix_large", "iqm-task", lambda: arm_iqm("task")),
    ("soft_modularization", "rate", 0.6, "loss", lambda: outputs_after(rate=0.6)),
    ("soft_modularization", "steps", 20, "loss", lambda: outputs_after(steps=20)),
]  # fmt: skip


@pytest.mark.parametrize(("page", "control", "value", "number", "wanted"), CASES)
async def test_a_control_changes_the_named_number_to_python_s(
    tab: Tab,
    pages: dict[str, Path],
    page: str,
    control: str,
    value: Any,
    number: str,
    wanted: Callable[[], float],
) -> None:
    await opened(tab, pages[page])
    await turn(tab, control, value)
    near(await shown(tab, number), wanted())
    text = await tab.run(f"document.querySelector('[data-number=\"{number}\"]').textContent")
    is_percent = "share" in number or number == "flips"  # with one decimal
    assert float(text.replace(MINUS, "-")) == pytest.approx(wanted(), abs=0.051 if is_percent else 6e-4)
    address = await tab.run("location.href")
    await tab.open("about:blank")
    await tab.open(address)
    await tab.until("'ready' in document.documentElement.dataset")
    near(await shown(tab, number), wanted())
    assert tab.complaints == []


async def test_one_task_s_scale_changes_nothing_within_parts_by_task(
    tab: Tab, pages: dict[str, Path]
) -> None:
    found = []
    for scale in (-2, 0, 2):
        await opened(tab, pages["advantages"])
        await turn(tab, "scale", scale)
        found.append([await shown(tab, name) for name in ("plain-share", "part-share", "part-flips")])
    assert found[0][0] < 5 < 60 < found[2][0]  # the task drowns, then drowns the other
    assert [own[1] for own in found] == pytest.approx([found[1][1]] * 3, abs=1e-3)
    assert [own[2] for own in found] == [0, 0, 0]


# ------------------------------------------------------------------------------------- mouse and keys


async def test_a_reward_dragged_by_mouse_or_by_keys_gives_the_same_advantage(
    tab: Tab, pages: dict[str, Path]
) -> None:
    await opened(tab, pages["grpo"])
    await drag(tab, "reward-0", (0, 60))
    by_mouse = await tab.run("document.querySelector('[data-grip=reward-0]').getAttribute('aria-valuenow')")
    assert 0 < float(by_mouse) < 1
    found = await shown(tab, "first")
    near(found, group_advantages([[float(by_mouse), *REWARDS[1:]]])[0][0])
    await opened(tab, pages["grpo"])
    await pressed(tab, "reward-0", "ArrowDown", round(100 * (1 - float(by_mouse))))
    near(await shown(tab, "first"), found)
    assert tab.complaints == []


@pytest.mark.parametrize(
    ("page", "figure", "words"),
    [
        ("tasks", "performance", "environment steps"),
        ("sensitivity", "curves", "environment steps"),
        ("formation", "boundaries", "environment steps"),  # of two made-up control tasks
    ],
)
async def test_an_axis_says_its_unit(
    tab: Tab, pages: dict[str, Path], page: str, figure: str, words: str
) -> None:
    await opened(tab, pages[page], **({"strategy": "length"} if page == "formation" else {}))
    axis = f"document.querySelector('[data-figure={figure}] .axis').textContent"
    assert await tab.run(axis) == words


async def test_steps_are_whole_on_their_axis(tab: Tab, pages: dict[str, Path]) -> None:
    await opened(tab, pages["soft_modularization"], steps=2)
    ticks = "[...document.querySelectorAll('[data-figure=loss] .tick')].map((one) => one.textContent)"
    assert await tab.run(ticks) == ["0", "1", "2"]


async def test_a_boundary_dragged_by_mouse_or_by_keys_moves_the_labels(
    tab: Tab, pages: dict[str, Path]
) -> None:
    for move in (drag(tab, "boundary-1", (70, 0)), pressed(tab, "boundary-1", "ArrowRight", 8)):
        await opened(tab, pages["formation"], strategy="length")
        before = [await shown(tab, f"size-{part}") for part in range(4)]
        await move
        bounds = [
            float(
                await tab.run(
                    f"document.querySelector('[data-grip=boundary-{at}]').getAttribute('aria-valuenow')"
                )
            )
            for at in range(3)
        ]
        labels = np.searchsorted(np.sort(bounds), T["lengths"], side="left")
        sizes = [await shown(tab, f"size-{part}") for part in range(4)]
        assert sizes != before
        assert sizes == np.bincount(labels, minlength=4).tolist()
        near(await shown(tab, "flips"), flips(labels))


async def test_a_centre_dragged_by_mouse_or_by_keys_gives_the_nearest_labels(
    tab: Tab, pages: dict[str, Path]
) -> None:
    for move in (drag(tab, "centre-2", (-60, 40)), pressed(tab, "centre-2", "ArrowLeft", 12)):
        await opened(tab, pages["formation"], strategy="auto", parts=4)
        await move
        address = await tab.run("new URLSearchParams(location.hash.split('?')[1]).get('centres')")
        centres = np.array([float(value) for value in address.split("~")]).reshape(4, 3)
        rows = T["features"]
        spread = rows.std(axis=0)
        labels = (((rows[:, None] - centres[None]) / spread) ** 2).sum(axis=2).argmin(axis=1)
        assert [await shown(tab, f"size-{part}") for part in range(4)] == np.bincount(
            labels, minlength=4
        ).tolist()
        near(await shown(tab, "flips"), flips(labels))


async def test_an_arrow_dragged_by_mouse_or_by_keys_gives_the_projection(
    tab: Tab, pages: dict[str, Path]
) -> None:
    for move in (drag(tab, "second", (-50, 30)), pressed(tab, "second", "ArrowLeft", 5)):
        await opened(tab, pages["gradient_surgery"])
        await move
        spoken = await tab.run("document.querySelector('[data-grip=second]').getAttribute('aria-valuetext')")
        second = [float(value) for value in spoken.split(", ")]
        assert second != [-0.9, 0.9]
        projected, total = toys.pcgrad([[1.6, 0.4], second])
        near([await shown(tab, "first-x"), await shown(tab, "second-y")], [projected[0][0], projected[1][1]])
        near([await shown(tab, "total-x"), await shown(tab, "total-y")], total)


async def test_a_point_dragged_in_the_mixture_has_python_s_prediction(
    tab: Tab, pages: dict[str, Path]
) -> None:
    await opened(tab, pages["infinite_mixture"], seen=1)
    await drag(tab, "probe", (40, -30))
    x, y = [float(await tab.run(f"document.querySelector('[name={name}]').value")) for name in ("probe", "y")]
    priors = toys.restaurant([1], 0, alpha=0.5, beta=3.0)
    near([await shown(tab, "prior-0"), await shown(tab, "prior-1")], priors)
    assert (x, y) != (0.5, 0.8)
    near(await shown(tab, "std-1"), float(np.sqrt(1.5**2 + 0.15**2)))


# --------------------------------------------------------------------------------- links and motion


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("grpo", {"rewards": "1~0.25~0.5", "baseline": "leave_one_out", "broken": "signed kl", "low": 0.35}),
        ("gradient_surgery", {"first": "0.5~-1.25", "adam": 1, "steps": 12}),
        ("soft_modularization", {"lean": "1.5~-2", "routed": 0, "temperature": 0.5}),
        ("infinite_mixture", {"alpha": 2, "seen": 17, "most": 2}),
        ("formation", {"strategy": "auto_outcome", "parts": 6, "overlay": "task"}),
        ("advantages", {"scale": 10, "parts": "difficulty", "compare": 0}),
        ("lab", {"baseline": "global_mean", "ratio": 1.5, "beta": 0.1, "d": 0.5, "group": 1}),
        ("grpo_vs_ppo", {"metric": "sample_efficiency", "tau": 0.8, "against": "random"}),
        ("tasks", {"weighting": "adaptive", "smoothing": 9, "hidden": "1", "seed": 2}),
        ("sensitivity", {"x": "learning_rate", "y": "n_groups", "margin": 0.2, "point": "n2-lr0.001"}),
    ],
)
async def test_a_link_restores_what_is_set(
    tab: Tab, pages: dict[str, Path], name: str, state: dict[str, Any]
) -> None:
    text = "document.getElementById('content').innerText"
    await opened(tab, pages[name])
    first = await tab.run(text)
    await opened(tab, pages[name], **{key: str(value).replace(" ", "%20") for key, value in state.items()})
    given = await tab.run(text)
    assert given != first
    await opened(tab, pages[name])
    address = f"{pages[name].as_uri()}#?" + "&".join(f"{key}={value}" for key, value in state.items())
    await tab.run(f"location.href = {json.dumps(address)}")  # a link within the page
    await tab.until(text, lambda found: found == given)
    assert tab.complaints == []


async def test_a_broken_link_falls_back_to_what_stands_there_at_first(
    tab: Tab, pages: dict[str, Path]
) -> None:
    await opened(tab, pages["grpo"])
    first = await tab.run("document.getElementById('content').innerText")
    await opened(tab, pages["grpo"], ratio="soup", rewards="1~x")
    assert await tab.run("document.getElementById('content').innerText") == first
    assert tab.complaints == []


async def test_with_reduced_motion_an_animation_is_at_its_end_at_once(
    tab: Tab, pages: dict[str, Path]
) -> None:
    reduced = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    await tab.call("Emulation.setEmulatedMedia", features=reduced)
    await opened(tab, pages["gradient_surgery"])
    press = "[...document.querySelectorAll('button')].find((one) => one.textContent === 'Roll').click()"
    await tab.run(press)
    assert await shown(tab, "steps") == 200


# ------------------------------------------------------------------------------------ one's own run


async def test_the_page_of_a_run_gives_its_recorded_advantages_and_follows_the_sliders(
    tab: Tab, pages: dict[str, Path]
) -> None:
    await opened(tab, pages["lab"])
    assert await shown(tab, "changed") == 0
    text = await tab.run("document.body.innerText")
    assert "not recorded" in text
    await turn(tab, "loss", "dapo")
    assert await shown(tab, "changed") >= 0
    await turn(tab, "ratio", 0.3)  # 10 ** 0.3 = 2: above the range
    clipped, tokens = await shown(tab, "clipped"), await shown(tab, "tokens")
    assert 0 < clipped < tokens
    assert await shown(tab, "silent") >= clipped
    assert await shown(tab, "member") == 0  # as in rollouts.jsonl and in the report
    await tab.run("document.querySelector('.token-list').focus()")
    await tab.press("ArrowDown")
    assert await shown(tab, "member") == 1
    assert tab.complaints == []


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunLog]:
    """The page of a run that recorded the learner's log-probs before the last pass."""
    folder = finished_run(tmp_path_factory.mktemp("recorded"), steps=3, learner=True)
    return write_pages(folder.path)[0], RunLog.open(folder.path)


def last_pass(log: RunLog) -> dict[str, float]:
    """Of the last step, by the trainer's loss over the file's log-probs; where none are the ratio is 1."""
    members = [one for one in log.rollouts("train") if one.step == 3]
    rewards = [[one.reward for one in members if one.group == key] for key in ("3/0", "3/1")]
    credit = [value for group in group_advantages(rewards) for value in group]
    sampled = [[v for v, bit in zip(one.logprobs, one.mask, strict=True) if bit] for one in members]
    old = [value for one, own in zip(members, sampled, strict=True) for value in one.old_logprobs or own]
    new = [value for one, own in zip(members, sampled, strict=True) for value in one.learner_logprobs or own]
    live = torch.tensor(new, dtype=torch.float64).requires_grad_()
    sizes = [len(own) for own in sampled]
    advantages = torch.repeat_interleave(torch.tensor(credit, dtype=torch.float64), torch.tensor(sizes))
    loss = policy_loss(
        "grpo",
        LossInputs(
            live,
            torch.tensor(old, dtype=torch.float64),
            advantages,
            torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)),
            Denominators.of(sizes, max_length=512),
        ),
        clip_ratio=0.2,
    )
    loss.loss.backward()
    assert live.grad is not None
    ratios = [math.exp(a - b) for one in members if one.learner_logprobs
              for a, b in zip(one.learner_logprobs, one.old_logprobs or (), strict=True)]  # fmt: skip
    return {
        "own-size": float(live.grad.abs().sum()),
        "loss": float(loss.loss.detach()),
        "ratio-clipped": float(((live.grad == 0) & (advantages != 0)).sum()),
        "ratio-tokens": float(len(ratios)),
        "ratio-low": min(ratios),
        "ratio-high": max(ratios),
        "ratio-mean": sum(ratios) / len(ratios),
        "ratio-without": 1.0,
    }


async def test_recorded_log_probs_give_the_last_pass_as_the_trainer_had_it(
    tab: Tab, recorded: tuple[Path, RunLog]
) -> None:
    page, log = recorded
    await opened(tab, page)
    wanted = last_pass(log)
    assert wanted["ratio-clipped"] > 2
    for name, value in wanted.items():
        near(await shown(tab, name), value)
    assert "The learner's log-probs were not recorded" not in await tab.run("document.body.innerText")
    await tab.run("document.querySelector('.token-list').focus()")
    await tab.press("ArrowRight")
    first = next(one for one in log.rollouts("train") if one.step == 3)
    assert first.learner_logprobs is not None
    assert first.old_logprobs is not None
    near(
        await shown(tab, "recorded-ratio"),
        math.exp(first.learner_logprobs[1] - first.old_logprobs[1]),
    )
    await turn(tab, "source", "assumed")
    assert await shown(tab, "clipped") == 0  # a ratio of 1
    near(await shown(tab, "own-size"), wanted["own-size"])
    await turn(tab, "source", "recorded")
    await turn(tab, "high", 0.9)
    await turn(tab, "low", 0.9)
    assert await shown(tab, "clipped") == 0
    assert await shown(tab, "changed") == wanted["ratio-clipped"]
    assert tab.complaints == []


async def test_a_click_on_a_square_shows_that_setting(tab: Tab, pages: dict[str, Path]) -> None:
    await opened(tab, pages["sensitivity"])
    assert await tab.run("document.querySelectorAll('[data-figure=grid] [fill=\"url(#hatch)\"]').length") == 1
    await tab.run(
        "document.querySelector('[data-arm=\"n2-lr0.01\"]')"
        ".dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    )
    cells = [own for own in grid() if own["arm"] == "n2-lr0.01"]
    near(
        await shown(tab, "point"),
        interquartile_mean([score for own in cells for score in own["final"]["scores"]]),
    )


@pytest.mark.parametrize(("arm", "seed"), [("task", "all"), ("none", "all"), ("task", "2"), ("task", "1")])
async def test_the_matrix_of_interference_has_the_file_s_cosines(
    tab: Tab, pages: dict[str, Path], arm: str, seed: str
) -> None:
    await opened(tab, pages["tasks"], suite="mix_large", arm=arm, seed=seed)
    cells = [own for own in comparison() if own["suite"] == "mix_large" and own["arm"] == arm]
    chosen = [own for own in cells if seed in ("all", str(own["seed"]))]
    known = [own["gradient_cosines"][0][1] for own in chosen if own["gradient_cosines"][0][1] is not None]
    for one, other in ((0, 1), (1, 0)):
        text = await tab.run(f"document.querySelector('[data-pair=\"{one}-{other}\"]').textContent")
        if not known:  # seed 1 never had two gradients
            assert text == "\u2013"
            continue
        wanted = float(np.mean(known))
        near(await shown(tab, f"cosine-{one}-{other}"), wanted)
        assert float(text.replace(MINUS, "-")) == pytest.approx(wanted, abs=6e-4)
        assert await tab.run(f"document.querySelector('[data-pair=\"{one}-{other}\"]').className") == (
            "cosine against"
        )
    assert await shown(tab, "cosine-0-0") == 1
    region = "document.querySelector('.matrix').closest('[tabindex=\"0\"]')"
    assert await tab.run(f"{region}.getAttribute('aria-label')") == "Cosines between the tasks' gradients"
    assert await tab.run("[...document.querySelectorAll('.matrix th')].every((one) => one.scope)")
    assert tab.complaints == []


async def test_without_cosines_the_page_says_why(tab: Tab, pages: dict[str, Path], tmp_path: Path) -> None:
    await opened(tab, pages["tasks"], suite="cart_pole")
    assert "nobody to interfere with" in await tab.run("document.getElementById('interference').innerText")
    cells = [{**own, "gradient_cosines": []} for own in comparison(seeds=1)]
    older = await asyncio.to_thread(write_pages, write_study(tmp_path / "older", cells))
    await opened(tab, next(page for page in older if page.stem == "tasks"))
    assert "recorded no cosines" in await tab.run("document.getElementById('interference').innerText")
    assert await tab.run("document.querySelector('.matrix')") is None
    assert tab.complaints == []


async def test_every_number_of_some_runs_is_the_file_s(tab: Tab, pages: dict[str, Path]) -> None:
    await opened(tab, pages["grpo_vs_ppo"], suite="mix_large")
    rows = await tab.run(
        "[...document.querySelectorAll('#cells tbody tr')]"
        ".map((row) => [...row.cells].map((one) => one.textContent))"
    )
    cells = [own for own in comparison() if own["suite"] == "mix_large"]
    assert len(rows) == len(cells)
    for at in (0, 3, 7, 12, 19):
        own = cells[at]
        final, rest = own["final"], ("worst_task", "fairness", "sign_flips", "cpu_seconds")
        numbers = [
            own["seed"],
            own["steps"],
            *final["returns"],
            *final["scores"],
            *(own[key] for key in rest),
        ]
        assert rows[at][0] == own["arm"]
        assert [float(text.replace(MINUS, "-")) for text in rows[at][1:-1]] == pytest.approx(
            numbers, rel=1e-5
        )
        assert rows[at][-1] == own["command"]


@pytest.mark.parametrize(("shift", "verdict"), [(0.5, "better"), (-0.5, "worse"), (0.0, "none shown")])
async def test_the_verdict_follows_the_interval(tab: Tab, tmp_path: Path, shift: float, verdict: str) -> None:
    cells = [
        own for own in comparison(seeds=10) if own["arm"] in ("none", "task") and own["suite"] == "cart_pole"
    ]
    for own in cells:
        if own["arm"] == "task":
            moved = [0.5 + shift + 0.01 * (own["seed"] - 4.5) for _ in own["final"]["scores"]]
        else:
            moved = [0.5 + 0.01 * ((own["seed"] * 7) % 10 - 4.5) for _ in own["final"]["scores"]]
        own["final"] = {"returns": moved, "scores": moved}
    page = write_pages(write_study(tmp_path / "study", cells))[0]
    await opened(tab, page)
    assert await tab.run(
        "[...document.querySelectorAll('[data-verdict]')].map((one) => one.dataset.verdict)"
    ) == [verdict]


async def test_a_study_of_one_seed_and_one_task_says_what_is_missing(tab: Tab, tmp_path: Path) -> None:
    cells = [own for own in comparison(seeds=1) if own["suite"] == "cart_pole"]
    pages = {path.stem: path for path in write_pages(write_study(tmp_path / "study", cells))}
    await opened(tab, pages["grpo_vs_ppo"])
    text = await tab.run("document.body.innerText")
    assert "fewer than three seeds" in text
    assert "no interval from 1 seed" in text
    await opened(tab, pages["tasks"])
    assert "One seed: there is no band." in await tab.run("document.body.innerText")
    await opened(tab, pages["sensitivity"])
    assert tab.complaints == []
