"""The document's network: what it reads, how it begins, and what it draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stateset_agents.numeric.autoscaling.actions import InfrastructureActionSpace
from stateset_agents.numeric.autoscaling.grpo.network import (
    GRPOPolicyNetwork,
    InfrastructureStateEncoder,
    NetworkPolicy,
)
from stateset_agents.types.errors import ConfigurationError

SMALL = {"state_dim": 8, "hidden_dim": 12, "num_heads": 2, "num_layers": 2, "num_metrics": 3}


def small(**changes) -> GRPOPolicyNetwork:
    return GRPOPolicyNetwork(**{**SMALL, "action_dim": 5, "history_length": 6, **changes}).eval()


def drawn(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=shape).astype(np.float32))


def sharpened(network: GRPOPolicyNetwork) -> GRPOPolicyNetwork:
    """With logits that differ."""
    with torch.no_grad():
        network.policy_head[-1].weight.mul_(100)
    return network


def test_the_encoder_reads_the_window_and_the_metrics_of_now() -> None:
    torch.manual_seed(0)
    encoder = InfrastructureStateEncoder(3, 8, 6).eval()
    history, now = drawn(2, 6, 3), drawn(2, 3)
    found = encoder(history, now)
    assert found.shape == (2, 8)
    assert torch.equal(found, encoder(history, now))
    assert not torch.allclose(found, encoder(history, now + 1))
    assert not torch.allclose(found, encoder(history.flip(1), now))
    steps = encoder.sequence(history, now)
    assert torch.equal(steps[:, -1], found)
    assert torch.allclose(steps[:, :4], encoder.sequence(history[:, :4], now), atol=1e-6)  # none looks ahead
    assert not torch.equal(encoder.train()(history, now), encoder(history, now))  # dropout
    for wrong in (drawn(2, 7, 3), drawn(2, 6, 4), drawn(6, 3)):
        with pytest.raises(
            ConfigurationError, match=r"metrics_history must be \[rows, 1 to 6 steps, 3 metrics"
        ):
            encoder(wrong, now)
    with pytest.raises(ConfigurationError, match=r"current_state must be \[2, 3\], got \[3\]"):
        encoder(history, now[0])
    with pytest.raises(ConfigurationError, match="hidden_dim must be a multiple of 4, got 6"):
        InfrastructureStateEncoder(3, 6)


def test_the_transformer_sees_every_step() -> None:
    network = sharpened(small())
    history, now = drawn(1, 6, 3), drawn(1, 3)
    logits, value = network(history, now)
    assert logits.shape == (1, 5)
    assert value.shape == (1, 1)
    assert not torch.allclose(logits, network(history[:, [1, 0, 2, 3, 4, 5]], now)[0], atol=1e-5)
    steps = network.state_encoder.sequence(history, now)
    lengths = []
    handle = network.transformer[0].register_forward_pre_hook(
        lambda layer, given: lengths.append(given[0].shape[1])
    )
    network(history, now)
    handle.remove()
    assert lengths == [steps.shape[1]] == [6]


def test_the_first_policy_is_nearly_uniform_and_a_function_of_the_seed() -> None:
    assert small(action_dim=None, action_space=InfrastructureActionSpace()).action_dim == 539
    space = InfrastructureActionSpace(enable_traffic_actions=False)
    state = torch.get_rng_state()
    network, again, other = (
        GRPOPolicyNetwork(**SMALL, action_space=space, seed=seed).eval() for seed in (1, 1, 2)
    )
    assert torch.equal(state, torch.get_rng_state())
    assert network.action_dim == space.total_actions == 49
    probabilities = network(5 * drawn(4, 60, 3), 5 * drawn(4, 3))[0].softmax(-1)
    assert probabilities.max() < 1.1 / 49
    gain = network.policy_head[-1].weight
    assert torch.allclose(gain.T @ gain, 1e-4 * torch.eye(12), atol=1e-7)  # orthogonal, .01
    first = network.policy_head[0].weight
    assert torch.allclose(first.T @ first, 2 * torch.eye(8), atol=1e-5)  # root 2
    assert all(
        not bias.any()
        for name, bias in network.named_parameters()
        if name.endswith("bias") and "norm" not in name
    )
    for name, weight in network.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
        assert weight.isfinite().all()
    assert not torch.equal(first, other.policy_head[0].weight)
    with pytest.raises(ConfigurationError, match="action_dim is 49 and the action space has 539 actions"):
        GRPOPolicyNetwork(action_dim=49, action_space=InfrastructureActionSpace())
    with pytest.raises(ConfigurationError, match="state_dim must be a multiple of num_heads 3, got 8"):
        small(num_heads=3)


def test_a_value_head_and_the_size_of_the_document() -> None:
    network, without = small(), small(use_value_head=False)
    _, value = network(drawn(4, 6, 3), drawn(4, 3))
    assert value.shape == (4, 1)
    assert torch.equal(value[:, 0], network.values(drawn(4, 6, 3), drawn(4, 3)))
    assert without(drawn(4, 6, 3), drawn(4, 3))[1] is None
    with pytest.raises(ConfigurationError, match="has no value: make it with use_value_head=True"):
        without.values(drawn(4, 6, 3), drawn(4, 3))
    whole = GRPOPolicyNetwork()
    assert sum(weight.numel() for weight in whole.parameters()) == 1_127_836
    assert len(whole.transformer) == 4


def test_actions_are_drawn_as_often_as_the_policy_says() -> None:
    network = sharpened(small(dropout=0.5)).train()
    number = 4000
    history, now = drawn(1, 6, 3), drawn(1, 3)
    actions, logprobs = network.get_action(history.expand(number, -1, -1), now.expand(number, -1))
    assert network.training  # as it was
    exact = network.eval()(history, now)[0].log_softmax(-1)[0].detach().numpy()
    assert 0.02 < np.exp(exact).min() < np.exp(exact).max() < 0.9  # a policy that prefers some
    assert logprobs == pytest.approx(exact[actions], abs=1e-5)
    expected = number * np.exp(exact)
    counts = np.bincount(actions, minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi squared, 4 degrees: .1 %
    best, logprob = network.get_action(history[0].numpy(), now[0].numpy(), deterministic=True)
    assert network.get_action(history, now, deterministic=True) == (best, logprob)  # [1, T, M]
    assert (best, logprob) == (int(exact.argmax()), pytest.approx(exact.max(), abs=1e-5))
    assert {network.get_action(history[0], now[0])[0] for _ in range(40)} > {best}


def test_a_trainer_reads_the_network_by_names() -> None:
    network = small()
    observations = {"metrics_history": drawn(2, 6, 3), "current_metrics": drawn(2, 3)}
    assert torch.equal(NetworkPolicy(network)(observations), network(*observations.values())[0])
