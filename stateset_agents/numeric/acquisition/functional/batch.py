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
                f"compile=True: torch.compile failed with {reason}; install a C++ compiler (g++), or leave "
                "compile out"
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
    key: int | torch.Generator,
    reward_scaling: RewardScaling = "tanh",
    reward_clip_value: float = 10.0,
    *,
    compile: bool = False,
) -> GRPOBatch:
    """`config.group_size` actions from each state, all of a state against one model and one noise. Blocking.

    `scms`: the models that answer, one for each state. `surrogate_model`: what believes, with
    `surrogate_params` as its state_dict; None: the exact posterior, or what the states were begun with.
    Everything random follows from `key`; states and parameters stay as they are. Raises ConfigurationError
    for a state without a payable experiment, and for models that are not the states'.
    """
    begun = joined_states(states).believing(surrogate_model, surrogate_params)
    check_scms(scms, begun)
    keys = action_keys(as_key(key), 0, len(begun), config.group_size)
    apply = applied(policy_network, compile=compile)
    return _collected(apply, params, begun, keys, reward_config, reward_scaling, reward_clip_value)


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
    begun = joined_states(states)
    if len(keys) != len(begun):
        raise ConfigurationError(f"keys must be one for each state, got {len(keys)} for {len(begun)} states")
    size = (config or GRPOConfig()).group_size
    drawn = np.concatenate([action_keys(as_key(key), 0, 1, size) for key in keys])
    if policy_network is None:
        policy_network = _network(len(policy_params["mix.bias"]), "value.bias" in policy_params)
    apply = applied(policy_network, compile=True)
    return _collected(apply, policy_params, begun, drawn, reward_config, **scaling)


def grpo_with_exploration(
    exploration_strategy: ExplorationStrategy, *arguments: Any, **named: Any
) -> Callable[..., GRPOBatch]:
    """`collect_grpo_batch` with the strategy's bonuses in the rewards. Arguments that are given here need
    not be given there.

    >>> collect = grpo_with_exploration(CountBonus(0.1), policy_network)
    >>> batch = collect(params, states, scms, None, None, config, reward_config, key)
    """
    collect = partial(collect_grpo_batch, *arguments, **named)
    takes_actions = len(inspect.signature(exploration_strategy.compute_bonuses).parameters) > 1
    compute: Callable[..., Any] = exploration_strategy.compute_bonuses

    def enhanced_batch_collection(*more: Any, **more_named: Any) -> GRPOBatch:
        batch = collect(*more, **more_named)
        states, actions = batch["states"], batch["actions"].numpy()
        bonuses = torch.as_tensor(compute(states, actions) if takes_actions else compute(states))
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


@lru_cache(maxsize=8)
def _network(hidden: int, critic: bool) -> AcquisitionPolicyNetwork:
    return AcquisitionPolicyNetwork(hidden=hidden, critic=critic)


def _collected(
    apply: Apply,
    params: Params,
    states: AcquisitionState,
    keys: np.ndarray,
    reward_config: RewardConfig | None,
    reward_scaling: RewardScaling = "tanh",
    reward_clip_value: float = 10.0,
) -> GRPOBatch:
    """The samples of these states, of which each has the same number of keys."""
    reward_config = reward_config or RewardConfig()
    if not states.goes_on.all():
        row = int(states.goes_on.argmin())
        raise ConfigurationError(
            f"state {row} cannot pay any experiment: leave it out by "
            "states.take(np.flatnonzero(states.goes_on))"
        )
    if states.environment.surrogate is not None and reward_config.weights.get("structure"):
        raise ConfigurationError(
            "weights: structure is the graph's entropy, of which a surrogate says nothing: leave it out"
        )
    group_ids = np.repeat(np.arange(len(states)), len(keys) // len(states))
    begun = states.take(group_ids)
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
