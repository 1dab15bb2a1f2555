"""Samples for GRPO: `group_size` actions from each state, their rewards, and their log-probs then."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from stateset_agents.algorithms.group_arrays import group_advantages_array
from stateset_agents.numeric.acquisition.families import Tasks, as_key
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.rewards import (
    ExplorationStrategy,
    RewardConfig,
    apply_reward_scaling,
)
from stateset_agents.numeric.acquisition.functional.states import AcquisitionState, check_scms, joined_states
from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.numeric.acquisition.network import AcquisitionPolicyNetwork
from stateset_agents.numeric.acquisition.surrogates import Surrogate
from stateset_agents.numeric.policy import as_tensors, sample_actions
from stateset_agents.numeric.rollout import action_keys, uniforms
from stateset_agents.rewards.composites import RewardScaling
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

Params = Mapping[str, Tensor]
"""A network's parameters by name."""
Apply = Callable[[Params, Any], Tensor]
"""(parameters, observations [B, ...]) -> [B, A] logits."""
States = AcquisitionState | Sequence[AcquisitionState]
SCMs = Tasks | Sequence[Tasks]


class GRPOBatch(TypedDict):
    """N = S * G samples of S states, group after group. The log-probs are those of the policy that chose,
    whatever has been learned since."""

    states: AcquisitionState  # N
    """`states[i]` is the one that sample i began in."""
    actions: Tensor  # [N] places in the menu
    """`states.interventions(actions)` says what they set."""
    rewards: Tensor  # [N]
    old_log_probs: Tensor  # [N]
    group_ids: Tensor  # [N] of the state each sample began in
    num_experiments: int
    """Number of experiments that were made for it, those after the sampled ones included."""


def initial_params(policy_network: nn.Module) -> dict[str, Tensor]:
    """Copies of the network's parameters, without gradient."""
    return {name: each.detach().clone() for name, each in policy_network.named_parameters()}


@lru_cache(maxsize=8)  # what is compiled stays compiled
def applied(policy_network: nn.Module, *, compile: bool = False) -> Apply:
    """The network as a function of its parameters. `compile`: by `torch.compile`, at the first call.

    Raises ConfigurationError, at that call, where nothing can be compiled.
    """

    def apply(params: Params, observations: Any) -> Tensor:
        logits: Tensor = functional_call(policy_network, dict(params), (observations,))
        return logits

    if not compile:
        return apply
    compiled = torch.compile(apply)

    def checked(params: Params, observations: Any) -> Tensor:
        try:
            return compiled(params, observations)
        except RuntimeError as error:  # no compiler, an operator that it does not know
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigurationError(
                f"torch.compile failed with {reason}; install a C++ compiler (g++), or leave compile out"
            ) from error

    return checked


def collect_grpo_batch(
    policy_network: nn.Module,
    params: Params,
    states: States,
    scms: SCMs,
    surrogate_model: Surrogate | None,
    surrogate_params: Any,
    config: GRPOConfig,
    reward_config: RewardConfig | None,
    key: int | torch.Generator | Sequence[int],
    reward_scaling: RewardScaling = "tanh",
    reward_clip_value: float = 10.0,
    *,
    compile: bool = False,
) -> GRPOBatch:
    """`config.group_size` actions from each state, all of a state against one model and one noise. Blocking.

    `scms`: the models that answer, one for each state. `surrogate_model`: what believes, with
    `surrogate_params` as its state_dict; None: the exact posterior, or what the states were begun with.
    Everything random follows from `key`, or from one for each state; what is given stays as it is. Raises
    ConfigurationError for a state without a payable experiment, and for models that are not the states'.
    """
    first = joined_states(states).believing(surrogate_model, surrogate_params)
    check_scms(scms, first)
    apply, keys = applied(policy_network, compile=compile), _keys(key, len(first), config.group_size)
    reward_config = reward_config or RewardConfig()
    if not first.goes_on.all():
        row = int(first.goes_on.argmin())
        raise ConfigurationError(
            f"state {row} cannot pay an experiment: leave it out, states.take(np.flatnonzero(states.goes_on))"
        )
    knows_graphs = first.environment.surrogate is None or not reward_config.weights.get("structure")
    hint = "a surrogate says nothing of the graph"
    expect_that(knows_graphs, "weights", "be without structure", dict(reward_config.weights), hint)
    group_ids = np.repeat(np.arange(len(first)), config.group_size)
    begun = first.take(group_ids)
    actions, log_probs = sampled(apply, params, begun, uniforms(keys, 0))
    ends, num_experiments, step = begun.after(actions), len(begun), 1
    while reward_config.horizon == "campaign" and (goes_on := ends.goes_on).any():
        next_actions, _ = sampled(apply, params, ends, uniforms(keys, step))
        ends, num_experiments, step = ends.after(next_actions), num_experiments + int(goes_on.sum()), step + 1
    before, after = begun.worth(), ends.worth()
    rewards = reward_config.total({name: after[name] - before[name] for name in before})
    return {
        "states": begun,
        "actions": torch.from_numpy(actions),
        "rewards": apply_reward_scaling(rewards, reward_scaling, reward_clip_value),
        "old_log_probs": torch.from_numpy(log_probs),
        "group_ids": torch.from_numpy(group_ids),
        "num_experiments": num_experiments,
    }


def compiled_batch_collection(
    policy_params: Params,
    states: States,
    keys: Sequence[int] | Tensor,
    *,
    policy_network: nn.Module | None = None,
    config: GRPOConfig | None = None,
    reward_config: RewardConfig | None = None,
    **scaling: Any,
) -> GRPOBatch:
    """`collect_grpo_batch` of all states at once with the forward pass compiled, each state's group by a key
    of its own. `policy_network`: an `AcquisitionPolicyNetwork` of the parameters' width when absent;
    `scaling`: reward_scaling and reward_clip_value."""
    if policy_network is None:
        policy_network = _network(len(policy_params["mix.bias"]), "value.bias" in policy_params)
    begun, config = joined_states(states), config or GRPOConfig()
    before = (policy_network, policy_params, begun, begun.environment.tasks, None, None, config)
    return collect_grpo_batch(*before, reward_config, list(keys), **scaling, compile=True)


def grpo_with_exploration(
    exploration_strategy: ExplorationStrategy, *arguments: Any, **named: Any
) -> Callable[..., GRPOBatch]:
    """`collect_grpo_batch` with the strategy's bonuses in the rewards. Arguments that are given here need
    not be given there.

    >>> collect = grpo_with_exploration(CountBonus(0.1), policy_network)
    >>> batch = collect(params, states, scms, None, None, config, reward_config, key)
    """
    collect = partial(collect_grpo_batch, *arguments, **named)
    compute: Callable[..., Any] = exploration_strategy.compute_bonuses
    size = len(inspect.signature(compute).parameters)

    def enhanced_batch_collection(*more: Any, **more_named: Any) -> GRPOBatch:
        batch = collect(*more, **more_named)
        bonuses = torch.as_tensor(compute(*(batch["states"], batch["actions"].numpy())[:size]))
        return {**batch, "rewards": batch["rewards"] + bonuses}

    return enhanced_batch_collection


def sampled(apply: Apply, params: Params, states: AcquisitionState, drawn: Array) -> tuple[Ints, Any]:
    """[B] actions and log-probs; a row that has ended takes any."""
    mask = states.mask | ~states.goes_on[:, None]
    with torch.no_grad():
        logits = apply(params, as_tensors(states.observations)).numpy()
    return sample_actions(logits, mask, drawn)


def compute_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """Rewards [S, G], or of one group [G], minus their group's mean, divided by the deviation that
    `advantage_normalization` names.

    >>> compute_advantages(torch.tensor([1.0, 3.0]), GRPOConfig())
    tensor([-1.,  1.])
    """
    advantages: Tensor = group_advantages_array(rewards, scaling=config.advantage_normalization)
    return advantages


def _keys(key: int | torch.Generator | Sequence[int], num_states: int, group_size: int) -> np.ndarray:
    """[N] a stream for each sample."""
    if not isinstance(key, Sequence):
        return action_keys(as_key(key), 0, num_states, group_size)
    expect_that(len(key) == num_states, "the number of keys", "be that of the states", len(key))
    return np.concatenate([action_keys(as_key(each), 0, 1, group_size) for each in key])


@lru_cache(maxsize=8)
def _network(hidden: int, critic: bool) -> AcquisitionPolicyNetwork:
    return AcquisitionPolicyNetwork(hidden=hidden, critic=critic)
