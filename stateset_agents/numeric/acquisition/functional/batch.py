"""Samples for GRPO: `group_size` actions from each state, their rewards, and their log-probs then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from stateset_agents.algorithms.group_arrays import group_advantages_array
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.rewards import Bonus, RewardConfig
from stateset_agents.numeric.acquisition.functional.states import AcquisitionState
from stateset_agents.numeric.acquisition.linear_models import Array, Ints
from stateset_agents.numeric.policy import as_tensors, sample_actions
from stateset_agents.numeric.rollout import action_keys, uniforms
from stateset_agents.types.errors import ConfigurationError

Params = Mapping[str, Tensor]
"""A network's parameters by name."""
Apply = Callable[[Params, Any], Tensor]
"""(parameters, observations [B, ...]) -> [B, A] logits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GRPOBatch:
    """N = S * G samples, group after group. The log-probs are those of the policy that chose, whatever has
    been learned since."""

    states: Any  # [N, ...] observations by name
    masks: Tensor  # [N, A]
    """Actions that could be paid."""
    actions: Tensor  # [N]
    rewards: Tensor  # [N]
    old_log_probs: Tensor  # [N]
    group_ids: Tensor  # [N] of the state each sample began in
    num_experiments: int
    """Number of experiments that were made for it, those after the sampled ones included."""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def group_size(self) -> int:
        return len(self) // (int(self.group_ids.max()) + 1)


def initial_params(policy_network: nn.Module) -> dict[str, Tensor]:
    """Copies of the network's parameters, without gradient."""
    return {name: each.detach().clone() for name, each in policy_network.named_parameters()}


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
    states: AcquisitionState,
    config: GRPOConfig,
    reward_config: RewardConfig | None = None,
    *,
    key: int,
    compute_bonuses: Bonus | None = None,
    apply: Apply | None = None,
) -> GRPOBatch:
    """`group_size` actions from each state, all against the same model and the same noise. Blocking.

    Everything random follows from `key`; states and parameters stay as they are. `compute_bonuses` enter the
    rewards before members are compared. `apply`: of `applied`, where it is to be compiled once. Raises
    ConfigurationError for a state without a payable experiment.
    """
    if not states.goes_on.all():
        row = int(states.goes_on.argmin())
        raise ConfigurationError(
            f"state {row} cannot pay any experiment: leave it out by "
            "states.take(np.flatnonzero(states.goes_on))"
        )
    apply = apply or applied(policy_network)
    reward_config = reward_config or RewardConfig()
    num_groups, group_size = len(states), config.group_size
    group_ids = np.repeat(np.arange(num_groups), group_size)
    begun = states.take(group_ids)
    keys = action_keys(key, 0, num_groups, group_size)
    observations, masks = begun.observations, begun.mask
    actions, log_probs = sampled(apply, params, begun, uniforms(keys, 0))
    ends, num_experiments = begun.after(actions), len(begun)
    if reward_config.horizon == "campaign":
        step = 1
        while (goes_on := ends.goes_on).any():
            next_actions, _ = sampled(apply, params, ends, uniforms(keys, step))
            ends, num_experiments, step = (
                ends.after(next_actions),
                num_experiments + int(goes_on.sum()),
                step + 1,
            )
    before, after = begun.worth(), ends.worth()
    rewards = reward_config.total({name: after[name] - before[name] for name in before})
    if compute_bonuses is not None:
        rewards = rewards + compute_bonuses(begun, actions)
    return GRPOBatch(
        states=as_tensors(observations),
        masks=torch.from_numpy(masks),
        actions=torch.from_numpy(actions),
        rewards=torch.from_numpy(rewards),
        old_log_probs=torch.from_numpy(log_probs),
        group_ids=torch.from_numpy(group_ids),
        num_experiments=num_experiments,
    )


def compiled_batch_collection(policy_network: nn.Module) -> Callable[..., GRPOBatch]:
    """`collect_grpo_batch` of this network with its forward pass compiled."""
    apply = applied(policy_network, compile=True)

    def collect(*arguments: Any, **named: Any) -> GRPOBatch:
        return collect_grpo_batch(policy_network, *arguments, **named, apply=apply)

    return collect


def sampled(apply: Apply, params: Params, states: AcquisitionState, drawn: Array) -> tuple[Ints, Any]:
    """[B] actions and log-probs; a row that has ended takes any."""
    mask = states.mask | ~states.goes_on[:, None]
    with torch.no_grad():
        logits = apply(params, as_tensors(states.observations)).numpy()
    return sample_actions(logits, mask, drawn)


def compute_advantages(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """[S, G] rewards minus their group's mean, divided by the deviation that `advantage_normalization` names.

    >>> compute_advantages(torch.tensor([[1.0, 3.0]]), GRPOConfig())
    tensor([[-1.,  1.]])
    """
    advantages: Tensor = group_advantages_array(rewards, scaling=config.advantage_normalization)
    return advantages
