"""How the trained weights are held: whole, as an adapter beside frozen ones, or one shard in each process.

Called by the learners, for what the sampler and a checkpoint read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.distributed.processes import Processes
from stateset_agents.training.distributed.sharding import (
    cut_like,
    dropped,
    fill,
    gathered,
    gathered_states,
    named,
)
from stateset_agents.training.update.lora import load_trainable_state, merged_weights, save_trainable_state
from stateset_agents.training.update.policy import Policy
from stateset_agents.types.errors import CheckpointError

__all__ = ["AdapterWeights", "FullWeights", "ShardedWeights", "WeightStore", "weights_and_reference"]

State = dict[str, Any]
"""An optimiser's state dict."""


class WeightStore(Protocol):
    """A model's trained weights; `trained` are the tensors that the optimiser moves, in its order."""

    def weights(self) -> dict[str, Tensor]:
        """By the names of a plain model, an adapter added: the live tensors where they are whole."""

    def optimizer_state(self, state: State, trained: Sequence[Tensor]) -> State:
        """What a checkpoint keeps of the optimiser; tensors are the live ones where they are whole."""

    def help_keep(self, state: State) -> None:
        """In a process that writes no checkpoint: give the first one what it gathers for its own."""

    def restore(self, weights: Mapping[str, Tensor], state: State, trained: Sequence[Tensor]) -> State:
        """Load what a checkpoint kept, a tied tensor under one of its names; returns the optimiser's state.

        Raises CheckpointError, before anything changes, when the weights are of another model.
        """


@dataclass(frozen=True, slots=True)
class FullWeights:
    """Every process trains all weights and has them whole."""

    model: nn.Module

    def weights(self) -> dict[str, Tensor]:
        return merged_weights(self.model)

    def optimizer_state(self, state: State, trained: Sequence[Tensor]) -> State:
        return state

    def help_keep(self, state: State) -> None:
        """Every process has all of it."""

    def restore(self, weights: Mapping[str, Tensor], state: State, trained: Sequence[Tensor]) -> State:
        _refuse_other_model(weights, self.weights())
        self.model.load_state_dict(dict(weights), strict=False)
        return state


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter is trained on a frozen model. Merged weights do not give it back, so its tensors go with the
    optimiser's state."""

    model: nn.Module

    def weights(self) -> dict[str, Tensor]:
        return merged_weights(self.model)

    def optimizer_state(self, state: State, trained: Sequence[Tensor]) -> State:
        return save_trainable_state(state, trained)

    def help_keep(self, state: State) -> None:
        """Every process has all of it."""

    def restore(self, weights: Mapping[str, Tensor], state: State, trained: Sequence[Tensor]) -> State:
        _refuse_other_model(weights, self.weights())
        return load_trainable_state(state, trained)


@dataclass(frozen=True, slots=True)
class ShardedWeights:
    """Each process holds one shard; whole tensors are gathered, by all processes together."""

    model: nn.Module
    processes: Processes

    def weights(self) -> dict[str, Tensor]:
        with self.processes.giving("the weights"):
            return gathered(self.model)

    def optimizer_state(self, state: State, trained: Sequence[Tensor]) -> State:
        with self.processes.giving("the optimiser's states"):
            return gathered_states(state)

    def help_keep(self, state: State) -> None:
        with self.processes.giving("the weights"):
            gathered(self.model, dropped)
        with self.processes.giving("the optimiser's states"):
            gathered_states(state, dropped)

    def restore(self, weights: Mapping[str, Tensor], state: State, trained: Sequence[Tensor]) -> State:
        _refuse_other_model(weights, named(self.model), identity=id)
        fill(self.model, weights)
        return cut_like(state, trained)


def weights_and_reference(
    policy: Policy, config: TrainingConfig, processes: Processes
) -> tuple[WeightStore, Policy | None]:
    """How the policy's weights are held by `config`, and the frozen reference where it uses one: the model
    without its adapter, or a copy. With fsdp2 both are cut into shards."""
    if config.lora is not None:
        return AdapterWeights(policy.model), policy.without_adapter() if config.uses_reference else None
    reference = policy.reference() if config.uses_reference else None
    if config.parallelism == "fsdp2" and processes.count > 1:
        with processes.giving("the model's division"):
            for model in filter(None, (policy, reference)):
                model.shard(processes.count)
        return ShardedWeights(policy.model, processes), reference
    return FullWeights(policy.model), reference


def _refuse_other_model(
    weights: Mapping[str, Tensor],
    known: Mapping[str, Tensor],
    *,
    identity: Callable[[Tensor], int] = Tensor.data_ptr,
) -> None:
    """Raises CheckpointError where a name or a shape differs; `identity` is equal for tied tensors."""
    tied = {identity(known[name]) for name in weights if name in known}
    missing = [name for name in known if name not in weights and identity(known[name]) not in tied]
    foreign = [name for name in weights if name not in known or known[name].shape != weights[name].shape]
    if missing or foreign:
        raise CheckpointError(
            f"the checkpoint's weights are of another model: {[*missing, *foreign][0]} differs"
        )
