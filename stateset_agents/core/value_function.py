"""The critic: what a conversation is still worth, read off a language model's hidden states.

The trainer has one where `advantage_estimator` needs it; with a model of your own it works alone:

    value_function = create_value_function(model, gamma=0.99, gae_lambda=0.95)
    values = value_function.compute_values(input_ids)  # [B, T]

The hidden states carry no gradient: the critic learns from the policy's trunk and never moves it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stateset_agents.algorithms.advantages import (
    Credit,
    Scaling,
    group_advantages,
    token_gae,
    turn_gae,
)
from stateset_agents.algorithms.losses import Denominators, value_loss
from stateset_agents.types.errors import CheckpointError, ConfigurationError
from stateset_agents.types.settings import expect_that


class ValueHead(nn.Module):
    """Linear, ReLU, dropout, Linear: a hidden state to one number. Starts at 0 everywhere.

    In fp32 whatever the trunk's dtype, and under autocast too.
    """

    def __init__(self, hidden_size: int, *, inner_size: int | None = None, dropout: float = 0.1) -> None:
        """`inner_size`: between the two layers; `hidden_size` unless given."""
        super().__init__()
        inner = hidden_size if inner_size is None else inner_size
        for name, size in (("hidden_size", hidden_size), ("inner_size", inner)):
            expect_that(size >= 1, name, "be at least 1", size)
        expect_that(0 <= dropout < 1, "dropout", "be at least 0 and below 1", dropout)
        self.hidden_size = hidden_size
        self.inner = nn.Linear(hidden_size, inner, dtype=torch.float32)
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(inner, 1, dtype=torch.float32)
        nn.init.zeros_(self.outer.weight)
        nn.init.zeros_(self.outer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [...] values, fp32."""
        if hidden.shape[-1] != self.hidden_size:
            raise ValueError(
                f"hidden states must be [..., {self.hidden_size}], got {list(hidden.shape)}: "
                f"make a ValueHead({hidden.shape[-1]})"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            inner = torch.relu(self.inner(hidden.to(self.inner.weight.dtype)))
            values: Tensor = self.outer(self.dropout(inner)).squeeze(-1)
        return values


class ValueFunction:
    """A value head on a language model's last hidden states, with its own optimiser.

    The value at position t is that of the state after tokens 0..t: where t *predicts* a sampled token it
    is V before that token, and at a turn's last prompt token V before the turn.
    """

    def __init__(
        self,
        model: nn.Module,
        head: ValueHead,
        *,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        value_clip: float | None = 0.2,
        learning_rate: float = 1e-3,
        max_grad_norm: float = 1.0,
        autocast: torch.dtype | None = None,
    ) -> None:
        """`gamma` discounts from turn to turn, never within one; `value_clip`: how far a value may move in
        one `update_value_function`, None for no bound; `autocast`: the trunk's forward dtype."""
        self.model = model
        self.head = head
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.value_clip = value_clip
        self.max_grad_norm = max_grad_norm
        self.autocast = autocast
        self.optimizer = torch.optim.Adam(head.parameters(), lr=learning_rate)
        trunk_of(model)  # refuses what has no hidden states, before anything is sampled

    # ------------------------------------------------------------------------------ values

    @torch.no_grad()
    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, T] ids -> [B, T, H] last hidden states, without gradient and without dropout.

        Rows are padded on the right, where causal attention never looks. Raises ConfigurationError for a
        mask that shows padding on the left.
        """
        if attention_mask is not None and bool((attention_mask.diff(dim=-1) > 0).any()):
            raise ConfigurationError("rows are padded on the left: pad them on the right for values")
        device = next(self.model.parameters()).device
        dtype = self.autocast
        with _evaluating(self.model), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            output = trunk_of(self.model)(
                input_ids=input_ids.to(device),
                attention_mask=None if attention_mask is None else attention_mask.to(device),
                use_cache=False,
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def compute_values(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, T] ids -> [B, T] values, fp32, without gradient; those of padding mean nothing."""
        return self.values_of(self.hidden_states(input_ids, attention_mask))

    @torch.no_grad()
    def values_of(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [...] values as they are now, without dropout."""
        self.head.eval()
        values: Tensor = self.head(hidden)
        return values

    # ------------------------------------------------------------------------------ advantages

    def compute_gae(
        self,
        rewards: Sequence[float],
        values: Sequence[float],
        action_mask: Sequence[int] | None = None,
        *,
        terminated: bool = True,
        final_value: float = 0.0,
    ) -> Credit:
        """Advantages and returns of one trajectory: over turns, or with an `action_mask` over tokens.

        See `algorithms.advantages.turn_gae` and `token_gae`, which skips observations.
        """
        gae = turn_gae if action_mask is None else partial(token_gae, action_mask=action_mask)
        return gae(
            rewards,
            values,
            gamma=self.gamma,
            lam=self.gae_lambda,
            terminated=terminated,
            final_value=final_value,
        )

    def compute_grpo_advantages(
        self,
        group_rewards: Sequence[Any],
        baseline_type: str = "group_mean",
        *,
        advantage_normalization: Scaling | bool = "population",
    ) -> list[Any]:
        """Advantages without a critic: each reward against its group; [members] of one group, or
        [groups][members], and the result alike.

        [.8, .5, .9, .6] has the baseline .7 and, not normalised, [.1, -.2, .2, -.1]. True stands for
        "population", False for "none".
        """
        scaling = advantage_normalization
        if isinstance(scaling, bool):
            scaling = "population" if scaling else "none"
        is_single = not any(hasattr(rewards, "__len__") for rewards in group_rewards)
        groups = [group_rewards] if is_single else group_rewards
        advantages = group_advantages(groups, baseline=baseline_type, scaling=scaling)
        return advantages[0] if is_single else advantages

    # ------------------------------------------------------------------------------ learning

    def update_value_function(
        self,
        states: Tensor,
        returns: Tensor,
        *,
        mask: Tensor | None = None,
        old_values: Tensor | None = None,
        iterations: int = 1,
    ) -> dict[str, float]:
        """Move the head towards `returns`, by `iterations` steps of Adam on all states together.

        `states`: [B, T] ids, or [..., H] hidden states computed once; `returns` and `mask` (the positions
        that count; all unless given) have the states' shape without H. `old_values` are those the returns
        were made with; those of now unless given.

        Metrics: loss/value (half the squared error, clipped, in the last step), value/clip_fraction (values
        that wanted to move further than `value_clip`), value/explained_variance (by the old values, 1 is
        perfect, 0 no better than a constant; left out where all returns are equal) and value/mean.
        """
        hidden = states if states.is_floating_point() else self.hidden_states(states)
        returns = torch.as_tensor(returns, dtype=torch.float32, device=hidden.device)
        old = self.values_of(hidden) if old_values is None else old_values.to(returns)
        counted = (
            torch.ones_like(returns, dtype=torch.bool) if mask is None else mask.to(hidden.device).bool()
        )
        if not bool(counted.any()):
            raise ValueError("no state counts: give update_value_function a mask with at least one true")
        hidden, returns, old = hidden[counted].detach(), returns[counted], old[counted]
        metrics: dict[str, float] = {}
        for _ in range(iterations):
            metrics = self._step(hidden, old, returns)
        return metrics | explained_variance(old, returns)

    def _step(self, hidden: Tensor, old: Tensor, returns: Tensor) -> dict[str, float]:
        self.head.train()
        micro_batch = torch.zeros(len(returns), dtype=torch.long, device=returns.device)
        output = value_loss(
            self.head(hidden),
            old,
            returns,
            micro_batch,
            Denominators.of([len(returns)]),
            value_clip=self.value_clip,
        )
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(output.loss)
        norm = nn.utils.clip_grad_norm_(self.head.parameters(), self.max_grad_norm)
        if bool(norm.isfinite()):  # hidden states that overflowed teach nothing
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return output.metrics.to_dict()

    # ------------------------------------------------------------------------------ keeping

    def state_dict(self) -> dict[str, Tensor]:
        """Head and optimiser as named tensors, the live ones: what safetensors holds."""
        tensors = {f"head.{name}": tensor.detach() for name, tensor in self.head.state_dict().items()}
        for index, moments in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
        return tensors

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave; raises CheckpointError for another head's."""
        shapes = {f"head.{name}": tensor.shape for name, tensor in self.head.state_dict().items()}
        head = {name: tensor for name, tensor in tensors.items() if name.startswith("head.")}
        if shapes != {name: tensor.shape for name, tensor in head.items()}:
            raise CheckpointError(
                "the value head is of another size: resume with the model it was trained on"
            )
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, index, *rest = name.split(".")
            if kind == "optimizer":
                moments.setdefault(int(index), {})[".".join(rest)] = tensor
        groups = self.optimizer.state_dict()["param_groups"]
        self.head.load_state_dict({name.removeprefix("head."): value for name, value in head.items()})
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})


def create_value_function(
    model: nn.Module,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    *,
    hidden_size: int | None = None,
    inner_size: int | None = None,
    dropout: float = 0.1,
    **settings: Any,
) -> ValueFunction:
    """A `ValueFunction` with a new head on `model`, on its device.

    `model` is a transformers model, PEFT-wrapped or not, in any dtype. `settings` as `ValueFunction` takes
    them. gamma's default of .99 suits many short turns; a training run has its own, 1.
    """
    size = hidden_size_of(model) if hidden_size is None else hidden_size
    head = ValueHead(size, inner_size=inner_size, dropout=dropout)
    head.to(next(model.parameters()).device)
    return ValueFunction(model, head, gamma=gamma, gae_lambda=gae_lambda, **settings)


def trunk_of(model: Any) -> Any:
    """The part of a transformers model below its LM head, adapters included.

    Raises ConfigurationError for a model that has none, and for PEFT methods that add virtual tokens,
    which stand outside the trunk.
    """
    inner = model
    if hasattr(model, "get_base_model"):  # PEFT's
        if model.active_peft_config.is_prompt_learning:
            raise ConfigurationError(
                f"{model.active_peft_config.peft_type.value} adds virtual tokens, without a value: use LoRA"
            )
        inner = model.get_base_model()
    trunk = getattr(inner, "base_model", None)
    if trunk is None or (trunk is inner and inner.get_output_embeddings() is not None):
        raise ConfigurationError(
            f"{type(inner).__name__} has no trunk below its head to read hidden states from: use a "
            "transformers causal language model with a base_model"
        )
    return trunk


def hidden_size_of(model: Any) -> int:
    """The width of the trunk's hidden states, from the model's config.

    Raises ConfigurationError where the config does not say.
    """
    config = trunk_of(model).config.get_text_config()
    size = getattr(config, "hidden_size", None)
    if not isinstance(size, int):
        raise ConfigurationError(
            f"{type(config).__name__} has no hidden_size: give create_value_function its hidden_size"
        )
    return size


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """While open, no layer drops anything out; each then is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def explained_variance(values: Tensor, returns: Tensor) -> dict[str, float]:
    """value/explained_variance of [N] expectations, 1 - Var(returns - values) / Var(returns), and
    value/mean; the former is left out where all returns are equal."""
    spread = returns.var(correction=0)
    metrics = {"value/mean": float(values.mean())}
    if float(spread) > 0:
        metrics["value/explained_variance"] = float(1 - (returns - values).var(correction=0) / spread)
    return metrics
