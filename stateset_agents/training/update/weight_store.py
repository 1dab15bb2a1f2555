"""The trained weights: held in full, as an adapter beside frozen ones, or one shard in each process.

The learners ask it for what the sampler and a checkpoint read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stateset_agents.backends.adapters import Adapter, identity, shapes_of
from stateset_agents.runs.checkpoint_files import fingerprint
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.processes import Processes
from stateset_agents.training.update.lora import (
    adapter_of,
    load_trainable_state,
    merged_weights,
    plain_weights,
    save_trainable_state,
)
from stateset_agents.training.update.policy import Policy
from stateset_agents.training.update.sharding import (
    empty_tensor,
    gather_optimizer_state,
    gather_state_dict,
    load_full_weights,
    named_tensors,
    shard_like,
)
from stateset_agents.types.errors import CheckpointError, ConfigurationError

State = dict[str, Any]
"""An optimiser's state dict."""


@dataclass(frozen=True, slots=True)
class FullWeights:
    """A model's trained weights, all of them in every process.

    The methods' `trained` are the tensors that the optimiser moves, in its order.
    """

    model: nn.Module

    def weights(self) -> Mapping[str, Tensor]:
        """The weights by the names of a plain model: the live tensors where they are not sharded; with an
        adapter in fp32, each merged as it is read."""
        return merged_weights(self.model)

    def adapter(self, state: State | None = None, trained: Sequence[Tensor] = ()) -> Adapter | None:
        """The adapter in training, or that of a state that `optimizer_state` saved; None where all weights
        train."""
        return None

    def optimizer_state(self, state: State, trained: Sequence[Tensor]) -> State:
        """The part of the optimiser's state that a checkpoint keeps; the live tensors where they are not
        sharded."""
        return state

    def contribute_shards(self, state: State) -> None:
        """Take part, in a process that writes no checkpoint, while the first one gathers the shards."""

    def restore(self, weights: Mapping[str, Tensor], state: State, trained: Sequence[Tensor]) -> State:
        """Load a checkpoint's tensors, tied ones under one name only; returns the optimiser's state.

        Raises CheckpointError, before anything changes, when the weights are of another model.
        """
        _check_same_model(weights, merged_weights(self.model))
        self.model.load_state_dict(dict(weights), strict=False)
        return state


@dataclass(frozen=True, slots=True)
class AdapterWeights(FullWeights):
    """An adapter is trained on a frozen model. Merged weights do not give it back, so its tensors go with the
    optimiser's state."""

    def adapter(self, state: State | None = None, trained: Sequence[Tensor] = ()) -> Adapter:
        if state is None:
            return adapter_of(self.model)
        saved = {parameter: state["state"][index]["weight"] for index, parameter in enumerate(trained)}
        return adapter_of(self.model, saved)

    def optimizer_state(self, state: State, trained: Sequence[Tensor]) -> State:
        return save_trainable_state(state, trained)

    def restore(self, weights: Mapping[str, Tensor], state: State, trained: Sequence[Tensor]) -> State:
        _check_same_model(weights, shapes_of(merged_weights(self.model)))
        return load_trainable_state(state, trained)


@dataclass(frozen=True, slots=True)
class ShardedWeights(FullWeights):
    """Each process holds one shard; all processes gather full tensors together."""

    processes: Processes

    def weights(self) -> Mapping[str, Tensor]:
        with self.processes.collective("the weights"):
            return gather_state_dict(self.model)

    def optimizer_state(self, state: State, trained: Sequence[Tensor]) -> State:
        with self.processes.collective("the optimiser's states"):
            return gather_optimizer_state(state)

    def contribute_shards(self, state: State) -> None:
        with self.processes.collective("the weights"):
            gather_state_dict(self.model, empty_tensor)
        with self.processes.collective("the optimiser's states"):
            gather_optimizer_state(state, empty_tensor)

    def restore(self, weights: Mapping[str, Tensor], state: State, trained: Sequence[Tensor]) -> State:
        _check_same_model(weights, named_tensors(self.model), identity=id)
        load_full_weights(self.model, weights)
        return shard_like(state, trained)


def weights_and_reference(
    policy: Policy, config: TrainingConfig, processes: Processes, reference_model: nn.Module | None = None
) -> tuple[str, FullWeights, Policy | None]:
    """The fingerprint of the policy's weights, how `config` has them held, and the frozen reference where it
    uses one: the model without its adapter, `reference_model`, or a copy. With fsdp2 both are cut into
    shards."""
    digest = fingerprint(plain_weights(policy.model, {}))  # before any shard is cut off
    if reference_model is not None and (config.lora is not None or not config.uses_reference):
        why = "beta is 0" if config.lora is None else "an adapter's reference is the model without it"
        raise ConfigurationError(f"a reference model is of no use here ({why}): leave it out")
    if config.lora is not None:
        reference = policy.without_adapter() if config.uses_reference else None
        return digest, AdapterWeights(policy.model), reference
    reference = policy.reference(reference_model) if config.uses_reference else None
    if config.parallelism == "fsdp2" and processes.count > 1:
        with processes.collective("the model's division"):
            for model in filter(None, (policy, reference)):
                model.shard(processes.count)
        return digest, ShardedWeights(policy.model, processes), reference
    if reference is not None and reference_model is None and reference.fuses:
        reference.round_operands()
    return digest, FullWeights(policy.model), reference


def _check_same_model(
    weights: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    *,
    identity: Callable[[Tensor], int] = identity,
) -> None:
    """Raises CheckpointError where a name or a shape differs; `identity` is equal for tied tensors."""
    present = {identity(tensors[name]) for name in weights if name in tensors}
    missing = [name for name in tensors if name not in weights and identity(tensors[name]) not in present]
    other = [name for name in weights if name not in tensors or tensors[name].shape != weights[name].shape]
    if missing or other:
        raise CheckpointError(
            f"the checkpoint's weights are of another model: {[*missing, *other][0]} differs"
        )
