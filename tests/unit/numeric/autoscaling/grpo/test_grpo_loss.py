"""Group advantages and the loss on plain tensors, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stateset_agents.algorithms.advantages import turn_gae
from stateset_agents.numeric.autoscaling.grpo.config import AdvantageComparison, GRPOConfig, GRPOLoss
from stateset_agents.types.errors import ConfigurationError

PLAIN = GRPOLoss(GRPOConfig(kl_coefficient=0, entropy_coefficient=0))


def test_group_advantages_by_hand() -> None:
    rewards = torch.tensor([[1, 0, 0.5, 1], [2, 2, 2, 2]], dtype=torch.float64)
    expected = [[0.90453403, -1.50755672, -0.30151134, 0.90453403], [0, 0, 0, 0]]
    assert PLAIN.compute_group_advantages(rewards).tolist() == pytest.approx(np.array(expected), abs=1e-6)
    sample = PLAIN.compute_group_advantages(rewards, ddof=1)
    assert sample[0].tolist() == pytest.approx([0.7833, -1.3056, -0.2611, 0.7833], abs=1e-4)
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    masked = PLAIN.compute_group_advantages(rewards.masked_fill(~mask.bool(), torch.nan), mask)
    assert masked[0, :2].tolist() == PLAIN.compute_group_advantages(rewards[:1, :2])[0].tolist()
    assert masked[:, 2:].tolist() == [[0, 0], [0, 0]]
    assert masked[1, 0] == 0  # a single member
    assert PLAIN.compute_group_advantages(torch.tensor([[1, 3]])).tolist() == [
        [pytest.approx(-1), pytest.approx(1)]
    ]
    raw = GRPOLoss(GRPOConfig(advantage_normalization="none"))
    assert raw.compute_group_advantages(rewards)[0].tolist() == [0.375, -0.625, -0.125, 0.375]
    with pytest.raises(ConfigurationError, match="ddof must be 0 or 1, got 2"):
        PLAIN.compute_group_advantages(rewards, ddof=2)


def sampled(actions: int = 4, rows: int = 12) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, actions, generator=drawn, dtype=torch.float64)
    chosen = torch.randint(actions, (rows, 1), generator=drawn)
    return {
        "logits": logits,
        "log_probs": logits.log_softmax(-1).gather(1, chosen)[:, 0],
        "old_log_probs": (logits + 0.3 * torch.randn(rows, actions, generator=drawn))
        .log_softmax(-1)
        .gather(1, chosen)[:, 0],
        "rewards": torch.randn(rows, generator=drawn, dtype=torch.float64),
        "group_indices": torch.arange(rows) // 4,
    }


def test_the_loss_is_the_clipped_surrogate_plus_kl_less_entropy() -> None:
    given = sampled()
    loss, metrics = GRPOLoss()(**given)
    ratio = (given["log_probs"] - given["old_log_probs"]).exp()
    advantages = PLAIN.compute_group_advantages(given["rewards"].reshape(3, 4)).flatten()
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    k3 = 1 / ratio - 1 + ratio.log()
    probabilities = given["logits"].softmax(-1)
    spread = -(probabilities * probabilities.log()).sum(-1).mean()
    assert float(loss) == pytest.approx(
        float(surrogate + 0.1 * (ratio * k3).mean() - 0.01 * spread), abs=1e-6
    )
    assert metrics == {
        "total_loss": pytest.approx(float(loss)),
        "policy_loss": pytest.approx(float(surrogate), abs=1e-6),
        "kl_div": pytest.approx(float(k3.mean()), abs=1e-6),
        "entropy": pytest.approx(float(spread), abs=1e-6),
        "advantage_mean": pytest.approx(0, abs=1e-6),
        "advantage_std": pytest.approx(1, abs=1e-6),
        "ratio_mean": pytest.approx(float(ratio.mean()), abs=1e-6),
    }
    _, other = GRPOLoss()(**given, ref_log_probs=given["log_probs"])
    assert other["kl_div"] == pytest.approx(0)


def test_groups_are_found_by_their_index_wherever_they_stand() -> None:
    given = sampled()
    expected, metrics = GRPOLoss()(**given)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    moved = {name: value[order] for name, value in given.items()}
    moved["group_indices"] = 70 - 10 * moved["group_indices"]
    found, again = GRPOLoss()(**moved)
    assert float(found) == pytest.approx(float(expected), abs=1e-9)
    assert again == pytest.approx(metrics, abs=1e-6)
    other, _ = GRPOLoss()(**{**given, "group_indices": torch.arange(12) % 3})
    assert float(other) != pytest.approx(float(expected), abs=1e-3)
    uneven = {**given, "group_indices": torch.tensor([0] * 4 + [1] * 3 + [2] * 5)}
    parts = torch.cat(
        [PLAIN.compute_group_advantages(part[None])[0] for part in given["rewards"].split([4, 3, 5])]
    )
    level = {**uneven, "old_log_probs": given["log_probs"]}
    assert PLAIN(**level)[1]["policy_loss"] == pytest.approx(float(-parts.mean()), abs=1e-6)


def test_the_first_pass_has_ratio_one_and_the_gradient_of_reinforce() -> None:
    given = sampled()
    log_probs = given["log_probs"].clone().requires_grad_()
    loss, metrics = PLAIN(log_probs, given["log_probs"], given["rewards"], given["group_indices"])
    loss.backward()
    advantages = PLAIN.compute_group_advantages(given["rewards"].reshape(3, 4)).flatten()
    assert metrics["ratio_mean"] == 1
    assert log_probs.grad.tolist() == pytest.approx((-advantages / 12).tolist(), abs=1e-7)


def test_without_logits_the_entropy_is_right_on_average() -> None:
    """Summed over all actions by their old probabilities, value and gradient are the exact ones."""
    drawn = torch.Generator().manual_seed(3)
    logits = torch.randn(4, generator=drawn, dtype=torch.float64).requires_grad_()
    old = torch.randn(4, generator=drawn, dtype=torch.float64).log_softmax(-1)
    loss = GRPOLoss(GRPOConfig(kl_coefficient=0, entropy_coefficient=1))
    log_p = logits.log_softmax(-1)
    estimate = torch.zeros((), dtype=torch.float64)
    for action in range(4):
        given = (log_p[action].expand(2), old[action].expand(2), torch.zeros(2), torch.zeros(2))
        estimate = estimate + old[action].exp() * loss(*given)[0]
    exact = (log_p.exp() * log_p).sum()
    ours, theirs = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact))
    assert estimate.item() == pytest.approx(exact.item(), abs=1e-7)
    assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-7)


def test_an_action_without_a_reward_takes_no_part() -> None:
    given = sampled()
    broken = {**given, "rewards": given["rewards"].clone()}
    broken["rewards"][2] = math.nan
    kept = torch.arange(12) != 2
    fewer = {name: value[kept] for name, value in given.items()}
    assert float(GRPOLoss()(**broken)[0]) == pytest.approx(float(GRPOLoss()(**fewer)[0]))
    with pytest.raises(ConfigurationError, match="no reward is a finite number"):
        GRPOLoss()(**{**given, "rewards": torch.full((12,), math.inf)})
    with pytest.raises(ValueError, match="rewards must be shaped as log_probs"):
        GRPOLoss()(**{**given, "rewards": given["rewards"].reshape(3, 4)})


@pytest.mark.parametrize(
    "change",
    [
        {"clip_epsilon": 0.01},
        {"clip_ratio_high": 0.01},
        {"dual_clip": 1.01},
        {"kl_coefficient": 0.5},
        {"kl_estimator": "k1"},
        {"entropy_coefficient": 0.5},
        {"advantage_normalization": "sample"},
        {"loss_type": "reinforce"},
    ],
)
def test_each_setting_of_the_loss_changes_it(change) -> None:
    given = sampled()
    assert float(GRPOLoss(GRPOConfig(**change))(**given)[0]) != pytest.approx(
        float(GRPOLoss()(**given)[0]), abs=1e-6
    )


def test_generalised_advantages_end_where_episodes_do() -> None:
    rewards, values = [1, 0, 2, 1, 3], [0.5, 0.1, 0.4, 0.3, 0.2]
    dones = [False, True, False, False, False]
    found = AdvantageComparison.traditional_advantage(rewards, values, dones=dones, final_value=0.7)
    options = {"gamma": 0.99, "lam": 0.95}
    first = turn_gae(rewards[:2], values[:2], **options)
    second = turn_gae(rewards[2:], values[2:], **options, terminated=False, final_value=0.7)
    assert found.tolist() == pytest.approx([*first.advantages, *second.advantages])
    whole = AdvantageComparison.traditional_advantage(rewards, values)
    assert whole.tolist() == pytest.approx(turn_gae(rewards, values, **options).advantages)
    assert whole[-1] == pytest.approx(2.8)  # integers are not cut
    beyond = AdvantageComparison.traditional_advantage(rewards, [*values, 0.7], dones=dones)
    assert beyond.tolist() == found.tolist()
    with pytest.raises(
        ConfigurationError, match=r"rewards, values and dones must be \[T\], got \[5\], \[4\]"
    ):
        AdvantageComparison.traditional_advantage(rewards, values[1:])


def test_group_advantages_of_successive_rewards_drop_the_tail() -> None:
    found = AdvantageComparison.grpo_advantage([1, 3, 0, 0, 7], group_size=2)
    assert found.tolist() == pytest.approx([-1, 1, 0, 0])
    assert len(AdvantageComparison.grpo_advantage(range(17))) == 16
    assert len(AdvantageComparison.grpo_advantage([1, 2])) == 0
    with pytest.raises(ConfigurationError, match="group_size must be at least 2, got 1"):
        AdvantageComparison.grpo_advantage([1, 2], group_size=1)
