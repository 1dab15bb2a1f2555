"""Memory that training takes before the first token: weights, gradients and AdamW's moments, by model.

    training_memory(7e9, critic=7e9, reference=7e9).total     # 238e9 bytes: PPO
    training_memory(7e9, reference=7e9).total                 # 126e9: GRPO has no critic

`scripts/memory_page.py` makes docs/evidence/planned-bytes.md of it. Not counted, since it depends on what is
forwarded: activations, logits, keys and values of the rollouts, buffers of the libraries.
"""

from __future__ import annotations

from dataclasses import dataclass

from stateset_agents.types.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class BytesPerParameter:
    """Bytes that one parameter takes."""

    weights: float
    """Bytes that the forward pass reads."""
    gradients: float
    master: float
    """A copy in fp32 that the optimiser moves, where the weights are in half precision."""
    moments: float
    """Bytes of AdamW's two moments."""
    frozen: float
    """Bytes for a model that is only forwarded."""

    @property
    def trained(self) -> float:
        """Bytes for a model that is trained: weights, gradient, master copy and moments."""
        return self.weights + self.gradients + self.master + self.moments


MIXED_PRECISION = BytesPerParameter(weights=2, gradients=2, master=4, moments=8, frozen=2)
"""Half precision with an fp32 master copy, 16 and 2 (ZeRO, https://arxiv.org/abs/1910.02054, section 3.1)."""
FP32_MASTERS = BytesPerParameter(weights=4, gradients=4, master=0, moments=8, frozen=4)
"""This package's trainer in every `precision`: the masters are the weights, autocast casts them for each
product, and gradients are theirs; 16 and 4, but for 2 of a reference's layers where bf16 updates on a CPU go
through `training/rows/fused_layers.py`. The rollouts' copy comes on top."""
PARAMETERS_ALONE = BytesPerParameter(weights=1, gradients=0, master=0, moments=2, frozen=1)
"""The number of numbers that are kept, not how many bytes, and none for gradients: the count behind the often
quoted 490 of PPO against 280 of GRPO at 70B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """Bytes of one model."""

    name: str
    weights: float
    gradients: float = 0.0
    master: float = 0.0
    moments: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.master + self.moments


@dataclass(frozen=True, slots=True)
class TrainingMemory:
    """Bytes of all models that a training keeps."""

    models: tuple[ModelMemory, ...]
    """Policy, critic, reference, reward model, rollouts' copy: those there are."""

    @property
    def total(self) -> float:
        return sum(model.total for model in self.models)

    def of(self, name: str) -> float:
        """Bytes of the model of that name, 0 without one."""
        return sum(model.total for model in self.models if model.name == name)


def training_memory(
    parameters: float,
    *,
    adapter: float = 0,
    critic: float = 0,
    reference: float = 0,
    reward_model: float = 0,
    rollouts: float = 0,
    per_parameter: BytesPerParameter = MIXED_PRECISION,
) -> TrainingMemory:
    """Bytes of weights, gradients, master copies and moments of a policy of `parameters` and its helpers.

    `adapter`, `critic`, `reference` and `reward_model` are numbers of parameters, 0 for none. With an adapter
    only that is trained and the policy's own weights are frozen. `rollouts`: bytes for each parameter of a
    second copy of the policy that samples, 2 in half precision, 4 in fp32, 0 where the trained one samples.
    Raises ConfigurationError for fewer than no parameters.
    """
    counts = {
        "parameters": parameters,
        "adapter": adapter,
        "critic": critic,
        "reference": reference,
        "reward_model": reward_model,
        "rollouts": rollouts,
    }
    for name, number in counts.items():
        if not number >= 0:
            raise ConfigurationError(f"{name} must not be negative, got {number!r}")

    def trained(name: str, count: float) -> ModelMemory:
        return ModelMemory(
            name=name,
            weights=count * per_parameter.weights,
            gradients=count * per_parameter.gradients,
            master=count * per_parameter.master,
            moments=count * per_parameter.moments,
        )

    def frozen(name: str, count: float) -> ModelMemory:
        return ModelMemory(name=name, weights=count * per_parameter.frozen)

    models = [
        *([frozen("policy", parameters), trained("adapter", adapter)] if adapter else []),
        *([] if adapter else [trained("policy", parameters)]),
        trained("critic", critic),
        frozen("reference", reference),
        frozen("reward model", reward_model),
        ModelMemory(name="rollouts", weights=parameters * rollouts),
    ]
    return TrainingMemory(tuple(model for model in models if model.total))
