"""The arithmetic of the learning pages equals Python's to 1e-9. `make test-browser` runs this."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from chromium import chromium
from learn_math import SEEDS, PageMath, near
from learn_toys import pcgrad

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.algorithms.kl_settings import allowed_weightings
from stateset_agents.algorithms.losses import Denominators, LossInputs, kl_tokens, policy_loss
from stateset_agents.algorithms.policy_losses import LOSSES
from stateset_agents.grouping.partitions import mulberry32

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page() -> AsyncIterator[PageMath]:
    async with chromium() as browser, browser.tab() as tab:
        yield PageMath(tab, "learn.math.js")


GROUPS: dict[str, list[list[float | None]]] = {
    "by hand": [[1.0, 0.0, 0.5, 1.0]],
    "one member": [[0.7], [0.1, 0.3]],
    "no member": [[], [0.1, 0.3]],
    "all unscored": [[None, None], [0.2, 0.4]],
    "zero variance": [[0.1, 0.1, 0.1], [0.1, 0.1]],
    "one group ties": [[0.3, 0.3], [0.0, 1.0, None]],
    "nearly ties": [[0.1, 0.1 + 1e-7, 0.1], [1e6, 1e6 + 1]],
}


def random_groups(seed: int) -> list[list[float | None]]:
    draw = random.Random(seed)
    return [
        [None if draw.random() < 0.1 else round(draw.gauss(0, 3), 3) for _ in range(draw.randint(1, 12))]
        for _ in range(draw.randint(1, 6))
    ]


@pytest.mark.parametrize("baseline", ["group_mean", "group_median", "global_mean", "leave_one_out"])
@pytest.mark.parametrize("scaling", ["population", "sample", "batch", "none"])
async def test_advantages_are_the_trainer_s(page: PageMath, baseline: str, scaling: Any) -> None:
    cases = [*GROUPS.values(), *map(random_groups, SEEDS)]
    for clip in (None, 0.8):
        options = {"baseline": baseline, "scaling": scaling, "clip": clip}
        found = await page(
            "cases.map((groups) => groupAdvantages(groups, options).map((one) => one.advantages))",
            cases=cases,
            options=options,
        )
        wanted = [group_advantages(groups, baseline=baseline, scaling=scaling, clip=clip) for groups in cases]
        near(found, wanted)


@pytest.mark.parametrize("name", LOSSES)
async def test_losses_and_the_slope_of_each_token_are_the_trainer_s(page: PageMath, name: str) -> None:
    for seed in SEEDS:
        draw = random.Random(seed)
        lengths = [draw.randint(0, 6) for _ in range(draw.randint(1, 5))] + [3]
        count = sum(lengths)
        old = [-draw.expovariate(1.0) for _ in range(count)]
        logprobs = [value + draw.gauss(0, 0.4 if seed % 2 else 12.0) for value in old]
        reference = [value + draw.gauss(0, 0.5) for value in logprobs]
        advantages = [draw.choice([0.0, draw.gauss(0, 1)]) for _ in range(count)]
        estimator: Any = draw.choice(["k1", "k2", "k3"])
        weighting: Any = draw.choice(allowed_weightings(estimator))
        dual = 3.0 if LOSSES[name].clips == "both" and seed % 3 == 0 else None
        options = {
            "loss": name, "low": 0.2, "high": 0.28, "dual": dual, "beta": 0.05, "kl": estimator,
            "weighting": weighting, "length": 40,
        }  # fmt: skip
        tokens = {"logprobs": logprobs, "old": old, "advantages": advantages}
        batch = {"lengths": lengths, "reference": reference, **tokens}
        found = await page("batchLoss(batch, options)", batch=batch, options=options)

        tensors = {
            key: torch.tensor(batch[key], dtype=torch.float64) for key in ("logprobs", "old", "advantages")
        }
        live = tensors["logprobs"].requires_grad_()
        loss = policy_loss(
            name,
            LossInputs(
                live,
                tensors["old"],
                tensors["advantages"],
                torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
                Denominators.of(lengths, max_length=40),
                ref_logprobs=torch.tensor(reference, dtype=torch.float64),
            ),
            clip_ratio=0.2,
            clip_ratio_high=0.28,
            dual_clip=dual,
            beta=0.05,
            kl_estimator=estimator,
            kl_weighting=weighting,
        )
        loss.loss.backward()
        assert live.grad is not None
        metrics = loss.metrics.to_dict()
        near(found["total"], loss.loss.item())
        near([found["policy"], found["kl"]], [metrics["loss/policy"], metrics["loss/kl"]])
        near(found["slopes"], live.grad.tolist())
        if LOSSES[name].level == "token":
            for side in ("low", "high"):
                share = sum(one == side for one in found["clipped"]) / count
                near(share, metrics[f"policy/clip_fraction_{side}"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
async def test_kl_terms_are_the_trainer_s(page: PageMath, estimator: Any) -> None:
    for weighting in allowed_weightings(estimator):
        pairs = [(d / 4, live / 5) for d in range(-12, 13) for live in range(-5, 6)]
        found = await page(
            "pairs.map(([d, live]) => klToken(d, live, estimator, weighting))",
            pairs=pairs, estimator=estimator, weighting=weighting,
        )  # fmt: skip
        logprobs = torch.zeros(len(pairs), dtype=torch.float64, requires_grad=True)
        reference = torch.tensor([-d for d, _ in pairs], dtype=torch.float64)
        behaviour = torch.tensor([-live for _, live in pairs], dtype=torch.float64)
        values = kl_tokens(logprobs, behaviour, reference, estimator=estimator, weighting=weighting)
        values.sum().backward()
        assert logprobs.grad is not None
        near([one["value"] for one in found], values.tolist())
        near([one["slope"] for one in found], logprobs.grad.tolist())


async def test_the_own_reward_in_the_mean_shrinks_the_gradient_by_one_over_the_size(page: PageMath) -> None:
    for size in (2, 4, 8, 16):
        found = await page(
            "[0.1, 0.5, 0.9].map((p) => ['group_mean', 'leave_one_out'].map((baseline) => "
            "expectedGradient(p, size, {baseline, scaling: 'none'}) / (p * (1 - p))))",
            size=size,
        )
        near(found, [[1 - 1 / size, 1.0]] * 3)
    scaled = await page("[0.05, 0.5].map((p) => expectedGradient(p, 8, {}) / (p * (1 - p)))")
    assert scaled[0] > scaled[1] > 1  # a rare success counts more


async def test_as_a_loss_only_k1_has_no_gradient_and_bare_k3_the_forward_kl_s(page: PageMath) -> None:
    p, q = 0.3, 0.6
    reverse = p * (1 - p) * (math.log(p / (1 - p)) - math.log(q / (1 - q)))
    terms = [("k1", "none", 0.0), ("k2", "none", reverse), ("k3", "none", p - q), ("k3", "live", reverse)]
    for estimator, weighting, wanted in terms:
        expression = f"expectedKlGradient({p}, {q}, '{estimator}', '{weighting}')"
        near(await page(expression), wanted)


CLIPPED = {"loss": "grpo", "low": 0.2, "high": 0.2}


def learned(rewards: list[float], broken: str | None, *, seed: int, beta: float) -> list[list[float]]:
    """The toy policy over arms, trained by the package's own functions; of each step its reward and KL."""
    draws, size, passes = mulberry32(seed), 8, 2
    logits = torch.zeros(len(rewards), dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.zeros(len(rewards), dtype=torch.float64), dim=0)
    payoff, history = torch.tensor(rewards, dtype=torch.float64), []
    for _ in range(30):
        old = torch.log_softmax(logits, dim=0).detach()
        history.append([float(old.exp() @ payoff), float(old.exp() @ (old - reference))])
        limits = old.exp().cumsum(dim=0)[:-1].tolist()
        arms = torch.tensor([sum(draw >= limit for limit in limits) for draw in islice(draws, size)])
        (credit,) = group_advantages([payoff[arms].tolist()])
        advantages = torch.tensor(credit, dtype=torch.float64)
        for _ in range(passes):
            now = torch.log_softmax(logits, dim=0)[arms]
            loss = policy_loss(
                "grpo",
                LossInputs(
                    now,
                    (reference if broken == "reference ratio" else old)[arms],
                    advantages,
                    torch.arange(size),
                    Denominators.of([1] * size),
                    ref_logprobs=None if broken == "signed kl" else reference[arms],
                ),
                clip_ratio=0.2,
                beta=0.0 if broken == "signed kl" else beta,
            ).loss
            if broken == "signed kl":
                loss = loss + beta * (now - reference[arms]).mean()
            (slope,) = torch.autograd.grad(loss, logits)
            logits = (logits - slope).detach().requires_grad_()
    return history


@pytest.mark.parametrize("broken", [None, "reference ratio", "signed kl"])
async def test_the_toy_policy_learns_as_the_package_has_it(page: PageMath, broken: str | None) -> None:
    rewards = [0.0, 0.2, 0.5, 1.0]
    for seed in range(5):
        options = {"seed": seed, "beta": 0.1, "steps": 30, "broken": broken, **CLIPPED}
        found = await page("bandit(rewards, options).map(Object.values)", rewards=rewards, options=options)
        near(found, learned(rewards, broken, seed=seed, beta=0.1))


async def test_each_mistake_costs_what_the_page_says(page: PageMath) -> None:
    ends = await page(
        "[null, 'reference ratio', 'signed kl'].map((broken) => Array.from({length: 10}, (_, seed) => "
        "bandit([0, 0.2, 0.5, 1], {seed, beta: 0.3, broken, loss: 'grpo', low: 0.2, high: 0.2}).at(-1)))"
    )
    reward, kl = ([[own[name] for own in runs] for runs in ends] for name in ("reward", "kl"))
    assert max(reward[1]) < 0.6 < min(reward[0])  # learning stalls within the clip of the start
    assert sum(kl[2]) > sum(kl[0])  # beta holds nothing


async def test_a_ball_rolls_as_numpy_has_it(page: PageMath) -> None:
    for surgery in (True, False):
        at = np.array([2.0, 0.5])
        for _ in range(40):
            x, y = at
            gradients = [[0.2 * (x - 1), 3 * y], [x + 1, 0.4 * (y + 1)]]
            at = at - 0.05 * np.array(pcgrad(gradients)[1] if surgery else np.sum(gradients, axis=0))
        found = await page(
            "surgeryDescent([2, 0.5], {surgery, adam: false, steps: 40, steep: 3, rate: 0.05}).at(-1).at",
            surgery=surgery,
        )
        near(found, at.tolist())
