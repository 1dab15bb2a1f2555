"""What importance weights leave of a sampler's bias, by the size of its gaps and the length of conversations.

    OMP_NUM_THREADS=1 python -m scripts.importance_table            print it, in two minutes of one core
    OMP_NUM_THREADS=1 python -m scripts.importance_table --write    put it into stale-rollouts.md

Policies are Markov chains of six tokens, a conversation is T of them, and its reward is 1 where a token's
count is above its median. The expected gradient is exact. Without weights and with those of tokens it is
linear in how often each pair of tokens is expected in rewarded conversations, which powers of 6 x 6
matrices say: the pairs go through the package's own loss. With weights of conversations all 6^7 of seven
tokens go through it; of longer ones, whose weights are unbiased up to the cap, what the cap takes away is
bounded (Chernoff).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from scripts.page_tables import print_table
from stateset_agents.algorithms.losses import Denominators, LossInputs, WeightLevel, policy_loss
from stateset_agents.training.update.objective import WEIGHT_CAPS, weight_level

SIZES = (0.005, 0.014, 0.026, 0.05, 0.15)
"""Root mean squares of a token's gap, in nats: the update's log-prob less the sampler's."""
LENGTHS = (7, 50, 200, 1000, 4000)
SEEDS = (0, 1, 2)
ENUMERATED = 7
"""Tokens of the conversations that are enumerated."""
_TOKENS = 6
_START = _TOKENS
"""The row of a table that stands before the first token."""
_DRAWS = 512
"""Of the noise at a prefix."""
_NOISE_SHARE = 0.9
"""Of the square of the mixed gap."""


@dataclass(frozen=True)
class Sampler:
    """Who samples instead of the policy: the next token's log-probs, for each of some equally likely draws
    that are taken anew at each prefix."""

    logprobs: Tensor
    """[K, 7, 6]"""

    @property
    def kernel(self) -> Tensor:
        """[7, 6] the chances of the next token, over all draws."""
        return self.logprobs.exp().mean(0)


Family = Callable[[float], Sampler]
"""Samplers of one kind by the size of what parts them from the policy."""


def short_policy(seed: int) -> Tensor:
    """[7, 6] log-probs of a chain in which a token matters to the next few."""
    return torch.randn(7, 6, generator=_dice(seed), dtype=torch.float64).log_softmax(-1)


def long_policy(seed: int) -> Tensor:
    """[7, 6] log-probs of a chain of two modes of three tokens, left once in a hundred tokens."""
    logits = torch.randn(7, 6, generator=_dice(seed), dtype=torch.float64)
    mode = torch.arange(_TOKENS) // 3
    within = logits.view(7, 2, 3).log_softmax(-1)
    of_mode = torch.full((7, 2), 0.5, dtype=torch.float64)
    of_mode[:_TOKENS] = 0.01 + 0.98 * (mode[:, None] == torch.arange(2)).double()
    return (within + of_mode.log()[:, :, None]).view(7, 6)


POLICIES: Mapping[str, Callable[[int], Tensor]] = {"short": short_policy, "long": long_policy}


def families(policy: Tensor, gradient: Tensor, seed: int) -> dict[str, Family]:
    """How samplers part from the policy. `gradient`: [7, 6] of its expected reward."""
    step = torch.randn(7, 6, generator=_dice(100 + seed), dtype=torch.float64)
    half = torch.randn(_DRAWS // 2, 7, 6, generator=_dice(200 + seed), dtype=torch.float64)
    noise = torch.cat([half, -half])

    def along(direction: Tensor) -> Family:
        return lambda size: Sampler((policy + size * direction).log_softmax(-1)[None])

    spread = float(along(policy)(1e-4).logprobs.sub(policy).square().mul(policy.exp()).sum(-1).mean().sqrt())
    sharper = policy * 1e-4 / spread  # of deviation 1, as the noise
    mixed = _NOISE_SHARE**0.5 * noise + (1 - _NOISE_SHARE) ** 0.5 * sharper
    return {
        "random step": along(step),
        "sharper": along(policy),
        "90 % noise, 10 % sharper": lambda size: Sampler((policy + size * mixed).log_softmax(-1)),
        "stale": along(-gradient),
    }


# ------------------------------------------------------------------------------ expectations


def threshold(policy: Tensor, length: int) -> int:
    """The count of token 0 from which a conversation is rewarded: half of the policy's conversations are."""
    chances = _count_chances(policy.exp(), length)
    return int((chances.flip(0).cumsum(0).flip(0) - 0.5).abs().argmin())


def credit(kernel: Tensor, length: int, least: int) -> Tensor:
    """[7, 6] the expected sum, over a conversation's occurrences of a pair of tokens, of its reward less the
    mean reward."""
    kernel = kernel.clone().requires_grad_()
    chances = _count_chances(kernel, length)
    rewarded, everything = chances[least:].sum(), chances.sum()
    of_rewarded = torch.autograd.grad(rewarded, kernel, retain_graph=True)[0]
    of_all = torch.autograd.grad(everything, kernel)[0]
    return (kernel * (of_rewarded - rewarded * of_all)).detach()


def occurrences(kernel: Tensor, length: int) -> Tensor:
    """[7, 6] how often each pair of tokens is expected in a conversation."""
    kernel = kernel.clone().requires_grad_()
    total = _walk(kernel[None], length).sum()
    return (kernel * torch.autograd.grad(total, kernel)[0]).detach()


def _walk(kernels: Tensor, length: int) -> Tensor:
    """[F, 7, 6] -> [F] the sum, over all conversations, of the product of their pairs' entries."""
    power = torch.linalg.matrix_power(kernels[:, :_TOKENS], length - 1)
    sums: Tensor = (kernels[:, _START, None] @ power).sum((-2, -1))
    return sums


def _count_chances(kernel: Tensor, length: int) -> Tensor:
    """[length + 1] the chance of each count of token 0, by the characteristic function."""
    number = length + 1
    phases = torch.arange(number // 2 + 1, dtype=torch.float64) * (-2 * torch.pi / number)
    turned = torch.ones(len(phases), _TOKENS, dtype=torch.complex128)
    turned[:, 0] = torch.polar(torch.ones_like(phases), phases)
    chances: Tensor = torch.fft.irfft(_walk(kernel * turned[:, None], length), n=number)
    return chances


# ------------------------------------------------------------------------------ the package's loss


def token_gradient(policy: Tensor, sampler: Sampler, credits: Tensor, level: WeightLevel | None) -> Tensor:
    """[7, 6] the expected gradient of the loss, of a conversation: each pair of tokens is a conversation of
    one, with its expected credit for an advantage."""
    table = policy.clone().requires_grad_()
    behaviour = sampler.logprobs
    chosen = behaviour.softmax(0) * credits  # a draw is as likely as the pair is under it
    live = table.log_softmax(-1).expand_as(behaviour).flatten()
    inputs = LossInputs(
        live,
        live.detach().clone(),
        chosen.flatten(),
        torch.arange(len(live)),
        Denominators.of([1] * len(live)),
        behaviour_logprobs=None if level is None else behaviour.flatten(),
    )
    cap = None if level is None else WEIGHT_CAPS[level]
    output = policy_loss("grpo", inputs, weight_cap=cap, weight_level=level or "token", measure=False)
    return torch.autograd.grad(output.loss, table)[0] * len(live)


@cache
def enumerated() -> tuple[Tensor, Tensor, Tensor]:
    """[6^n, n] of all conversations of n = ENUMERATED tokens: the tokens, those before them, and a number for
    each prefix."""
    said = torch.cartesian_prod(*[torch.arange(_TOKENS)] * ENUMERATED)
    before = torch.cat([torch.full((len(said), 1), _START), said[:, :-1]], dim=1)
    prefixes = torch.zeros_like(said)
    for place in range(1, ENUMERATED):
        prefixes[:, place] = prefixes[:, place - 1] * _TOKENS + said[:, place - 1] + 1
    return said, before, prefixes


def sequence_gradient(policy: Tensor, sampler: Sampler, least: int, level: WeightLevel | None) -> Tensor:
    """[7, 6] the expected gradient of the loss of all conversations of ENUMERATED tokens."""
    said, before, prefixes = enumerated()
    draws = torch.randint(len(sampler.logprobs), (int(prefixes.max()) + 1,), generator=_dice(9))[prefixes]
    live = policy[before, said].flatten().requires_grad_()
    behaviour = sampler.logprobs[draws, before, said]
    chances = behaviour.sum(1).exp()
    rewards = ((said == 0).sum(1) >= least).double()
    advantages = (rewards - (chances * rewards).sum()) * chances * len(said) * ENUMERATED
    inputs = LossInputs(
        live,
        live.detach().clone(),
        advantages.repeat_interleave(ENUMERATED),
        torch.arange(len(said)).repeat_interleave(ENUMERATED),
        Denominators.of([ENUMERATED] * len(said)),
        behaviour_logprobs=None if level is None else behaviour.flatten(),
    )
    cap = None if level is None else WEIGHT_CAPS[level]
    output = policy_loss("grpo", inputs, weight_cap=cap, weight_level=level or "token", measure=False)
    slopes = torch.autograd.grad(output.loss, live)[0]
    pairs = torch.zeros(policy.numel(), dtype=torch.float64)
    pairs.index_add_(0, (before * _TOKENS + said).flatten(), slopes)
    table = policy.clone().requires_grad_()
    return torch.autograd.grad(table.log_softmax(-1), table, pairs.view_as(policy))[0]


def cap_bound(policy: Tensor, sampler: Sampler, length: int) -> float:
    """The most that the cap on conversations' weights takes from the norm of the expected gradient.

    E_sampler[min(w, cap) X] = E_policy[X] - E_policy[max(0, 1 - cap / w) X], and X, a reward within 1 of the
    baseline times a sum of `length` slopes, has at most the norm length * sqrt 2.
    """
    gaps = policy - sampler.logprobs
    cap = torch.tensor(WEIGHT_CAPS["sequence"], dtype=torch.float64).log()
    powers = torch.logspace(0, 2.5, 60, dtype=torch.float64)
    tilted = torch.stack([policy.exp() * (power * gaps).exp().mean(0) for power in powers])
    chance = (_walk(tilted, length).log() - powers * cap).exp().min()
    return float(chance * length * 2**0.5)


# ------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class Task:
    """A policy, the length of its conversations, and from which count on they are rewarded."""

    policy: Tensor
    length: int
    least: int
    gradient: Tensor
    """[7, 6] the expected one of the loss, on-policy."""

    def errors(self, sampler: Sampler, level: WeightLevel) -> tuple[float, float]:
        """Of the expected gradient, by its norm, without weights and with those of `level`; with those of
        conversations over ENUMERATED tokens a bound."""
        credits = credit(sampler.kernel, self.length, self.least)
        plain = self._error(token_gradient(self.policy, sampler, credits, None))
        if level == "token":
            return plain, self._error(token_gradient(self.policy, sampler, credits, level))
        if self.length == ENUMERATED:
            return plain, self._error(sequence_gradient(self.policy, sampler, self.least, level))
        return plain, cap_bound(self.policy, sampler, self.length) / float(self.gradient.norm())

    def _error(self, gradient: Tensor) -> float:
        return float((gradient - self.gradient).norm() / self.gradient.norm())


@cache
def task(name: str, seed: int, length: int) -> Task:
    """One of a policy of this name."""
    policy = POLICIES[name](seed)
    least = threshold(policy, length)
    gradient = token_gradient(policy, Sampler(policy[None]), credit(policy.exp(), length, least), None)
    return Task(policy, length, least, gradient)


def sampler_of_size(policy: Tensor, family: Family, rms: float, length: int) -> Sampler:
    """The one of a family whose gaps have this root mean square over what it samples."""
    size = rms
    for _ in range(4):
        sampler = family(size)
        weights = sampler.logprobs.softmax(0) * occurrences(sampler.kernel, length) / length
        reached = float((weights * (policy - sampler.logprobs).square()).sum().sqrt())
        size *= rms / reached
    return family(size)


def errors(name: str, rms: float, length: int, level: WeightLevel) -> dict[str, tuple[float, float]]:
    """By kind of gap: without weights and with those of `level`, each the worst of the seeds' policies."""
    worst: dict[str, tuple[float, float]] = {}
    for seed in SEEDS:
        of = task(name, seed, length)
        for kind, family in families(of.policy, -of.gradient, seed).items():
            plain, weighed = of.errors(sampler_of_size(of.policy, family, rms, length), level)
            before = worst.get(kind, (0.0, 0.0))
            worst[kind] = max(plain, before[0]), max(weighed, before[1])
    return worst


def lines() -> Iterator[str]:
    """The table's."""
    kinds = list(families(short_policy(0), torch.ones(7, 6, dtype=torch.float64), 0))
    columns = [f"{name}: {kind}" for name in POLICIES for kind in kinds]
    yield "| r.m.s. gap | tokens | weights | " + " | ".join(columns) + " |"
    yield "|---" * (3 + len(columns)) + "|"
    for rms in SIZES:
        for length in LENGTHS:
            level = weight_level("auto", rms, length)
            assert level is not None  # auto always weighs
            cells = [
                f"{_shown(weighed, level == 'sequence' and length > ENUMERATED)} [{_shown(plain)}]"
                for name in POLICIES
                for plain, weighed in errors(name, rms, length, level).values()
            ]
            yield f"| {rms:g} | {length:,} | {level} | " + " | ".join(cells) + " |"


def _shown(error: float, is_bound: bool = False) -> str:
    if error < 1e-4:
        return "< .0001"
    digits = f"{error:.4f}" if error < 1e-3 else f"{error:.3f}" if error < 0.1 else f"{error:.2f}"
    return ("≤ " if is_bound else "") + (digits.removeprefix("0"))


def _dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description="What importance weights leave of a sampler's bias.")
    parser.add_argument("--write", action="store_true", help="put the table into its page")
    arguments = parser.parse_args()
    print_table("evidence/stale-rollouts.md", "importance-weights", lines(), write=arguments.write)


if __name__ == "__main__":
    main()
