"""KL estimators and their gradients by exact enumeration, and the controllers of the coefficient."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stateset_agents.algorithms.kl_settings import (
    FixedKLController,
    SteppedKLController,
    ZieglerKLController,
    allowed_weightings,
    create_kl_controller,
)
from stateset_agents.algorithms.losses import (
    Denominators,
    estimate,
    kl_loss,
    kl_rewards,
    kl_tokens,
    token_returns_to_go,
)
from stateset_agents.types.errors import ConfigurationError, TrainingStopped

WORDS = 5


def double(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log_policy(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1)


# ------------------------------------------------------------------------- values and their means


def test_worked_estimators():
    logprobs, ref = double([-1.0, -2.0]), double([-1.5, -1.0])  # d = .5 and -1
    assert estimate(logprobs, ref, "k1").tolist() == pytest.approx([0.5, -1.0])
    assert estimate(logprobs, ref, "k2").tolist() == pytest.approx([0.125, 0.5])
    assert estimate(logprobs, ref, "k3").tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.e - 2])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_have_the_kl_as_their_mean(estimator):
    pi, ref = log_policy(0, WORDS), log_policy(1, WORDS)
    exact = (pi.exp() * (pi - ref)).sum()
    assert float((pi.exp() * estimate(pi, ref, estimator)).sum()) == pytest.approx(float(exact), abs=1e-12)


@settings(deadline=None)
@given(st.floats(-15, 0), st.floats(-15, 0))
def test_k2_and_k3_are_never_negative_and_zero_only_where_the_policies_agree(logprob, ref):
    for estimator in ("k2", "k3"):
        value = float(estimate(double([logprob]), double([ref]), estimator))
        assert value >= -1e-15  # rounding
        assert (value > 0) or abs(logprob - ref) < 1e-7


def test_a_token_that_the_policy_has_given_up_stays_finite():
    logprobs = torch.tensor([-300.0], requires_grad=True)
    estimate(logprobs, torch.tensor([0.0]), "k3").sum().backward()
    assert logprobs.grad.isfinite().all()


FAR = [-60.0, -45.5, -21.0, -20.0, -3.0, -1.0, 0.0, 0.5, 19.5, 20.5, 44.0, 60.0]
"""Log ratios, exact in fp32."""
FORMS = [
    ("k1", "live"),
    ("k2", "detached"),
    ("k2", "none"),
    ("k3", "live"),
    ("k3", "detached"),
    ("k3", "none"),
]


def closed_form(estimator: str, weighting: str, d: Tensor, log_rho: Tensor) -> tuple[Tensor, Tensor]:
    """Value and derivative by the log-prob, in fp64."""
    value = {"k1": d, "k2": d.square() / 2, "k3": torch.expm1(-d) + d}[estimator]
    slope = {"k1": torch.ones_like(d), "k2": d, "k3": -torch.expm1(-d)}[estimator]
    if weighting == "none":
        return value, slope
    rho = log_rho.exp()
    if weighting == "live":
        return rho * value, rho * (d if estimator == "k3" else value + slope)
    return rho * value, rho * slope


@pytest.mark.parametrize(("estimator", "weighting"), FORMS)
def test_no_token_loses_its_gradient_however_far_it_went(estimator, weighting):
    pairs = double(list(product(FAR, FAR)))
    d, log_rho = pairs[:, 0], pairs[:, 1]
    logprobs = torch.full((len(pairs),), -70.0, requires_grad=True)  # fp32
    tokens = kl_tokens(
        logprobs,
        (logprobs - log_rho).detach().float(),
        (logprobs - d).detach().float(),
        estimator=estimator,
        weighting=weighting,
    )
    tokens.sum().backward()
    values, slopes = closed_form(estimator, weighting, d.clamp(-20, 20), log_rho.clamp(-20, 20))
    for actual, exact in zip((tokens.detach(), logprobs.grad), (values, slopes), strict=True):
        assert actual.isfinite().all()
        torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-30)
    assert ((logprobs.grad != 0) == (slopes != 0)).all()
    assert logprobs.grad.square().sum().isfinite()  # or the step would be skipped


@pytest.mark.parametrize(("estimator", "weighting"), FORMS)
@pytest.mark.parametrize("d", [-5000.0, 5000.0, -math.inf, math.inf])
def test_beyond_every_range_a_gradient_still_points_back(estimator, weighting, d):
    logprobs = torch.tensor([-6000.0], requires_grad=True)
    kl_tokens(
        logprobs, logprobs.detach(), logprobs.detach() - d, estimator=estimator, weighting=weighting
    ).sum().backward()
    assert logprobs.grad.isfinite().all()
    assert math.copysign(1, d) * float(logprobs.grad) > 0 or estimator == "k1"


# ------------------------------------------------- gradients for one token, by enumeration


class OneToken:
    """A policy over five words, sampled from itself or from another policy; all expectations are sums."""

    def __init__(self, *, on_policy: bool) -> None:
        self.logits = log_policy(0, WORDS).requires_grad_()
        self.pi = self.logits.log_softmax(-1)
        self.ref = log_policy(1, WORDS)
        self.mu = self.pi.detach() if on_policy else log_policy(2, WORDS)

    def gradient(self, expected: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(expected, self.logits, retain_graph=True)
        return gradient

    def of_loss(self, tokens: Tensor) -> Tensor:
        """Expected gradient of a loss term over words drawn from mu."""
        return self.gradient((self.mu.exp() * tokens).sum())

    def reverse_kl(self) -> Tensor:
        return self.gradient((self.pi.exp() * (self.pi - self.ref)).sum())

    def forward_kl(self) -> Tensor:
        return self.gradient((self.ref.exp() * (self.ref - self.pi)).sum())


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def test_bare_k1_has_no_gradient_on_policy():
    toy = OneToken(on_policy=True)
    assert _distance(toy.of_loss(estimate(toy.pi, toy.ref, "k1")), torch.zeros(WORDS)) < 1e-15


def test_bare_k2_is_reverse_kl_on_policy():
    toy = OneToken(on_policy=True)
    tokens = kl_tokens(toy.pi, toy.mu, toy.ref, estimator="k2", weighting="none")
    assert _distance(toy.of_loss(tokens), toy.reverse_kl()) < 1e-15


def test_bare_k3_is_forward_kl_on_policy():
    toy = OneToken(on_policy=True)
    tokens = kl_tokens(toy.pi, toy.mu, toy.ref, estimator="k3", weighting="none")
    assert _distance(toy.of_loss(tokens), toy.forward_kl()) < 1e-15
    assert _distance(toy.forward_kl(), toy.reverse_kl()) > 0.05


@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize(("estimator", "weighting"), [("k1", "live"), ("k2", "detached"), ("k3", "live")])
def test_default_weightings_are_exact_reverse_kl_on_and_off_policy(estimator, weighting, on_policy):
    assert allowed_weightings(estimator)[0] == weighting
    toy = OneToken(on_policy=on_policy)
    tokens = kl_tokens(toy.pi, toy.mu, toy.ref, estimator=estimator)
    assert _distance(toy.of_loss(tokens), toy.reverse_kl()) < 1e-14


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_bare_estimators_are_wrong_off_policy(estimator):
    toy = OneToken(on_policy=False)
    gradient = toy.of_loss(kl_tokens(toy.pi, toy.mu, toy.ref, estimator=estimator, weighting="none"))
    assert _distance(gradient, toy.reverse_kl()) > 0.05
    assert _distance(gradient, toy.forward_kl()) > 0.05


def test_the_default_loss_is_k3_times_the_live_ratio():
    toy = OneToken(on_policy=False)
    ids, counts = torch.zeros(WORDS, dtype=torch.int64), Denominators.of([WORDS])
    output = kl_loss(toy.pi, toy.mu, toy.ref, ids, counts, averaging="token")
    d = toy.pi - toy.ref
    by_hand = ((toy.pi - toy.mu).exp() * ((-d).exp() - 1 + d)).mean()
    assert output.loss.item() == pytest.approx(float(by_hand.detach()))
    assert _distance(toy.gradient(output.loss), toy.gradient(by_hand)) < 1e-15


def test_the_reported_kl_is_bare_k3_whatever_the_loss_uses():
    logprobs, ref, ids = double([-1.0, -2.0]), double([-1.5, -1.0]), torch.tensor([0, 1])
    expected = (math.exp(-0.5) - 0.5 + math.e - 2) / 2
    for estimator in ("k1", "k2", "k3"):
        output = kl_loss(
            logprobs, logprobs - 1, ref, ids, Denominators.of([1, 1]), averaging="token", estimator=estimator
        )
        assert output.metrics.to_dict() == pytest.approx({"kl/reference": expected})


@pytest.mark.parametrize(
    ("estimator", "weighting", "message"),
    [
        ("k1", "none", "k1 in the loss must be one of live, got 'none'"),
        ("k1", "detached", "k1 in the loss must be one of live"),
        ("k2", "live", "k2 in the loss must be one of detached, none"),
        ("k4", None, "k1, k2, k3, got 'k4'"),
    ],
)
def test_pairs_without_a_useful_gradient_are_refused(estimator, weighting, message):
    a = double([-1.0])
    with pytest.raises(ConfigurationError, match=message):
        kl_tokens(a, a, a, estimator=estimator, weighting=weighting)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ConfigurationError, match="got 'k0'"):
        estimate(double([-1.0]), double([-1.0]), "k0")


# ------------------------------------------------------- gradients for sequences, by enumeration


class TwoTokens:
    """All 25 two-word sentences, laid out flat: the second word's distribution depends on the first."""

    def __init__(self) -> None:
        self.first = (1.5 * log_policy(0, WORDS)).requires_grad_()
        self.second = (1.5 * log_policy(1, WORDS, WORDS)).requires_grad_()
        sentences = torch.tensor(list(product(range(WORDS), repeat=2)))
        self.logprobs = self._read(self.first, self.second, sentences)  # [50]
        self.ref = self._read(log_policy(2, WORDS), log_policy(3, WORDS, WORDS), sentences)
        self.ids = torch.arange(len(sentences)).repeat_interleave(2)
        sentence_logprobs = self.logprobs.view(-1, 2).sum(1)
        divergence = sentence_logprobs - self.ref.view(-1, 2).sum(1)
        self.exact = self.gradient((sentence_logprobs.exp() * divergence).sum())
        self.chance = sentence_logprobs.detach().exp().repeat_interleave(2)  # [50]
        self.old = self.logprobs.detach()

    @staticmethod
    def _read(first: Tensor, second: Tensor, sentences: Tensor) -> Tensor:
        a, b = sentences.unbind(1)
        return torch.stack([first.log_softmax(-1)[a], second.log_softmax(-1)[a, b]], 1).flatten()

    def gradient(self, expected: Tensor) -> Tensor:
        parts = torch.autograd.grad(expected, [self.first, self.second], retain_graph=True)
        return torch.cat([part.flatten() for part in parts])


def test_k1_in_the_reward_with_return_to_go_is_the_exact_sequence_gradient():
    toy = TwoTokens()
    to_go = token_returns_to_go(kl_rewards(toy.old, toy.ref, beta=1.0), toy.ids)
    surrogate = -(toy.chance * to_go * toy.logprobs).sum()
    assert _distance(toy.gradient(surrogate), toy.exact) < 1e-15


def test_k1_summed_into_the_trajectorys_reward_is_exact_too():
    toy = TwoTokens()
    values = kl_rewards(toy.old, toy.ref, beta=1.0)
    sums = values.new_zeros(WORDS**2).index_add(0, toy.ids, values)
    surrogate = -(toy.chance * sums[toy.ids] * toy.logprobs).sum()
    assert _distance(toy.gradient(surrogate), toy.exact) < 1e-15


@pytest.mark.parametrize(("estimator", "weighting"), [("k1", "live"), ("k2", "none"), ("k3", "live")])
def test_per_token_losses_miss_the_early_tokens_share_of_later_divergence(estimator, weighting):
    toy = TwoTokens()
    tokens = kl_tokens(toy.logprobs, toy.old, toy.ref, estimator=estimator, weighting=weighting)
    error = toy.gradient((toy.chance * tokens).sum()) - toy.exact
    assert float(error[:WORDS].abs().max()) > 0.05  # the first word's parameters
    assert float(error[WORDS:].abs().max()) < 1e-14  # the last word's are exact


def test_kl_rewards_are_minus_beta_d_without_gradient():
    logprobs = double([-1.0, -2.0]).requires_grad_()
    rewards = kl_rewards(logprobs, double([-1.5, -1.0]), beta=0.1)
    assert rewards.tolist() == pytest.approx([-0.05, 0.1])
    assert not rewards.requires_grad


def test_token_sums_stay_within_their_trajectory():
    values, ids = double([1, 10, 2, 20, 3]), torch.tensor([0, 1, 0, 1, 0])
    assert token_returns_to_go(values, ids).tolist() == [6, 30, 5, 20, 3]


# ---------------------------------------------------------------------------------- controllers


@pytest.mark.parametrize(
    ("observed", "beta"),
    [(0.0151, 0.06), (0.015, 0.04), (0.01, 0.04), (0.005, 0.04), (0.0049, 0.04 / 1.5)],
)
def test_the_adaptive_controller_steps_past_half_the_target(observed, beta):
    controller = SteppedKLController(tolerance=0.5 + 1e-9)
    assert controller.updated(observed).beta == pytest.approx(beta)


def test_the_adaptive_controller_starts_as_documented_and_stays_in_bounds():
    controller = SteppedKLController()
    assert (controller.beta, controller.target) == (0.04, 0.01)
    high, low = controller, controller
    for _ in range(30):
        high, low = high.updated(1.0), low.updated(0.0)
    assert (high.beta, low.beta) == (1.0, 0.001)


def test_zieglers_controller_moves_in_proportion_and_at_most_a_fifth_per_horizon():
    controller = ZieglerKLController(beta=0.1, target=0.01, horizon=1000)
    assert controller.updated(0.011, num_episodes=100).beta == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.updated(1.0, num_episodes=100).beta == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert controller.updated(0.0, num_episodes=100).beta == pytest.approx(0.1 * (1 - 0.2 * 0.1))
    assert controller.updated(0.0, num_episodes=10**6).beta == pytest.approx(0.08)


def test_a_fixed_coefficient_stays():
    assert FixedKLController(beta=0.1).updated(5.0).beta == 0.1


@pytest.mark.parametrize("kind", ["adaptive", "ziegler"])
def test_a_controller_pulls_the_kl_of_a_simple_plant_to_its_target(kind):
    """KL falls as 1/beta: from ten times the target the loop must settle near it."""
    controller = create_kl_controller(kind, beta=0.01, target=0.01, horizon=8)
    for _ in range(200):
        controller = controller.updated(0.001 / controller.beta, num_episodes=8)
    assert 0.5 < (0.001 / controller.beta) / 0.01 < 1.51


@pytest.mark.parametrize("kind", ["adaptive", "ziegler"])
@pytest.mark.parametrize("observed", [math.nan, math.inf])
def test_a_kl_that_is_no_number_stops_training(kind, observed):
    with pytest.raises(TrainingStopped, match="kl/reference"):
        create_kl_controller(kind, beta=0.1).updated(observed)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("fixed", {"beta": -0.1}, "beta must be a number of at least 0, got -0.1"),
        ("adaptive", {"beta": 0.0}, "beta must be positive for an adaptive controller, got 0.0"),
        ("ziegler", {"beta": 0.1, "target": 0.0}, "target kl must be positive, got 0.0"),
        ("ziegler", {"beta": 0.1, "horizon": 0}, "kl horizon must be at least 1 episode, got 0"),
        ("pid", {"beta": 0.1}, "fixed, adaptive, ziegler, got 'pid'"),
    ],
)
def test_impossible_controllers_are_refused(kind, options, message):
    with pytest.raises(ConfigurationError, match=message):
        create_kl_controller(kind, **options)
