"""The document's GRPOConfig and GRPOLoss: `ControlConfig` with the defaults of GRPO for infrastructure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.algorithms.group_arrays import gae_array, group_advantages_array
from stateset_agents.algorithms.losses import Denominators, LossInputs, entropy, log_ratio, policy_loss
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.runs.settings import Schedule
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.settings import expect_that

PRINTED = (
    *("group_size", "clip_epsilon", "kl_coefficient", "entropy_coefficient", "learning_rate", "gamma"),
    *("gae_lambda", "max_grad_norm", "num_epochs", "batch_size"),
)
"""The document's settings, in the order in which it has them."""
_FIELDS = ControlConfig.model_fields
"""Descriptions, limits and aliases, which stay; the class below changes defaults."""


class GRPOConfig(ControlConfig):
    """Settings of GRPO for infrastructure (group-relative policy optimisation of numeric actions).

    A member's whole return is compared with its group's, in deviations of the group; a group is episodes from
    one start. The document's names clip_epsilon, kl_coefficient, entropy_coefficient, num_epochs and
    batch_size are accepted beside those of `ControlConfig`, and can be read.

    >>> GRPOConfig(clip_epsilon=0.1).clip_ratio
    0.1
    """

    steps_per_rollout: Annotated[int | None, _FIELDS["steps_per_rollout"]] = 2048
    advantage_estimator: Annotated[str, _FIELDS["advantage_estimator"]] = "group"
    advantage_normalization: Annotated[Scaling, _FIELDS["advantage_normalization"]] = "population"
    minibatch_size: Annotated[int, _FIELDS["minibatch_size"]] = 64
    entropy_coef: Annotated[float, _FIELDS["entropy_coef"]] = 0.01
    beta: Annotated[float, _FIELDS["beta"]] = 0.1
    learning_rate: Annotated[float, _FIELDS["learning_rate"]] = 3e-4
    lr_scheduler_type: Annotated[Schedule, _FIELDS["lr_scheduler_type"]] = "cosine"
    lr_min_ratio: Annotated[float, _FIELDS["lr_min_ratio"]] = 1 / 300  # down to 1e-6 from the default peak
    eval_steps: Annotated[int, _FIELDS["eval_steps"]] = 10_000
    eval_episodes: Annotated[int, _FIELDS["eval_episodes"]] = 10
    run_name: Annotated[str, _FIELDS["run_name"]] = "infrastructure"

    def __init__(self, *values: Any, **settings: Any) -> None:
        """Values without a name are the document's ten, in its order (`PRINTED`)."""
        expect_that(
            len(values) <= len(PRINTED), "GRPOConfig", f"get {len(PRINTED)} values at most", len(values)
        )
        super().__init__(**dict(zip(PRINTED, values, strict=False)), **settings)

    clip_epsilon = property(attrgetter("clip_ratio"), doc="The document's name of clip_ratio.")
    kl_coefficient = property(attrgetter("beta"), doc="The document's name of beta.")
    entropy_coefficient = property(attrgetter("entropy_coef"), doc="The document's name of entropy_coef.")
    num_epochs = property(attrgetter("num_iterations"), doc="The document's name of num_iterations.")
    batch_size = property(attrgetter("minibatch_size"), doc="The document's name of minibatch_size.")


# ------------------------------------------------------------------------------------------ loss
#
# GRPO's loss on plain tensors, and group advantages beside a critic's: the document's names.
#
# For loops of one's own. `numeric.update` does the same on rollouts, and both stand on
# `algorithms.losses.policy_loss` and `algorithms.group_arrays`.


class GRPOLoss(nn.Module):
    """GRPO's clipped surrogate of numeric actions, plus KL, less entropy (https://arxiv.org/abs/2402.03300).

    >>> loss, metrics = GRPOLoss()(log_probs, old_log_probs, rewards, group_indices, logits=logits)
    >>> loss.backward()
    """

    def __init__(self, config: GRPOConfig | None = None) -> None:
        """The loss reads the settings loss_type, the clips, beta, kl_estimator, entropy_coef and
        advantage_normalization."""
        super().__init__()
        self.config = config or GRPOConfig()

    def compute_group_advantages(
        self, rewards: Tensor, group_mask: Tensor | None = None, *, ddof: int | None = None
    ) -> Tensor:
        """[B, G] rewards of B groups -> [B, G] each less its group's mean, over the group's deviation.

        `group_mask`: False in slots without a member, which get 0 and do not count. `ddof`: 0 divides by the
        population's deviation, 1 by the sample's; None as advantage_normalization says. A group that ties
        gets 0.
        """
        expect_that(ddof in (None, 0, 1), "ddof", "be 0 or 1", ddof)
        by_ddof: dict[int, Scaling] = {0: "population", 1: "sample"}
        scaling = self.config.advantage_normalization if ddof is None else by_ddof[ddof]
        if not rewards.is_floating_point():
            rewards = rewards.to(torch.get_default_dtype())
        mask = None if group_mask is None else group_mask.bool()
        advantages: Tensor = group_advantages_array(rewards, mask, scaling=scaling)
        return advantages

    def forward(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        rewards: Tensor,
        group_indices: Tensor,
        *,
        logits: Tensor | None = None,
        ref_log_probs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss, a 0-d tensor with gradient, and seven metrics. Tensors are [N], a sampled action each.

        `group_indices`: the group of each action, any integers in any order. `logits` [N, A]: give them and
        the entropy is the exact sum; without, it is -ratio log p, whose mean and gradient are right on
        average. `ref_log_probs`: what the KL is to; without, the policy that sampled. An action whose reward
        is no finite number takes no part. Metrics: total_loss, policy_loss, kl_div (k3), entropy,
        advantage_mean, advantage_std, ratio_mean.

        Raises ConfigurationError where no reward is a finite number, ValueError on unequal shapes.
        """
        config = self.config
        for name, tensor in (("rewards", rewards), ("group_indices", group_indices)):
            if tensor.shape != log_probs.shape:
                raise ValueError(
                    f"{name} must be shaped as log_probs, {list(log_probs.shape)}, got {list(tensor.shape)}"
                )
        scored = torch.isfinite(rewards)
        if not scored.any():
            raise ConfigurationError("no reward is a finite number: look at the environment")
        log_probs, old_log_probs = log_probs[scored], old_log_probs[scored]
        advantages = self._advantages(rewards[scored], group_indices[scored])
        alone = torch.arange(len(log_probs), device=log_probs.device)
        output = policy_loss(
            config.loss_type,
            LossInputs(
                log_probs,
                old_log_probs,
                advantages,
                alone,
                Denominators.of(torch.ones_like(alone), max_length=1),
                ref_logprobs=old_log_probs.detach() if ref_log_probs is None else ref_log_probs[scored],
            ),
            clip_ratio=config.clip_ratio,
            clip_ratio_high=config.clip_ratio_high,
            dual_clip=config.dual_clip,
            beta=config.beta,
            kl_estimator=config.kl_estimator,
        )
        if logits is None:
            spread = -(log_ratio(log_probs, old_log_probs).exp() * log_probs).mean()
        else:
            spread = entropy(logits[scored]).mean()
        total = output.loss - config.entropy_coef * spread
        measured = output.metrics.to_dict()
        return total, {
            "total_loss": float(total.detach()),
            "policy_loss": measured["loss/policy"],
            "kl_div": measured["kl/reference"],
            "entropy": float(spread.detach()),
            "advantage_mean": float(advantages.mean()),
            "advantage_std": float(advantages.std(correction=0)),
            "ratio_mean": measured["policy/ratio"],
        }

    def _advantages(self, rewards: Tensor, group_indices: Tensor) -> Tensor:
        """[N] by group, wherever its members stand and however many they are."""
        _, group, sizes = torch.unique(group_indices, return_inverse=True, return_counts=True)
        order = torch.argsort(group, stable=True)
        first = torch.cumsum(sizes, 0) - sizes
        slot = torch.empty_like(order)
        slot[order] = torch.arange(len(order), device=order.device) - first[group[order]]
        shape = (len(sizes), int(sizes.max()))
        table = torch.zeros(shape, dtype=torch.float64, device=rewards.device)
        mask = torch.zeros(shape, dtype=torch.bool, device=rewards.device)
        table[group, slot], mask[group, slot] = rewards.double(), True
        return self.compute_group_advantages(table, mask)[group, slot].to(torch.float32)


class AdvantageComparison:
    """Generalised advantage estimation with a critic beside group-relative advantages, of the same rewards.

    >>> AdvantageComparison.grpo_advantage([1, 3, 0, 0, 7], group_size=2)
    array([-1.,  1.,  0.,  0.])
    """

    @staticmethod
    def traditional_advantage(
        rewards: ArrayLike,
        values: ArrayLike,
        gamma: float = 0.99,
        *,
        gae_lambda: float = 0.95,
        dones: Sequence[bool] | NDArray[np.bool_] | None = None,
        final_value: float = 0.0,
    ) -> NDArray[np.float64]:
        """[T] GAE (https://arxiv.org/abs/1506.02438) of successive steps, episode by episode.

        `values`: V of the state before each step, [T + 1] with that after the last one. `dones`: did an
        episode end by itself after the step? By default none does. `final_value`: V of the state after the
        last step, which counts where the last episode did not end. Raises ConfigurationError for unequal
        lengths.
        """
        earned, expected = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
        if expected.shape == (len(earned) + 1,):
            expected, final_value = expected[:-1], float(expected[-1])
        ended = np.zeros(len(earned), dtype=np.bool_) if dones is None else np.asarray(dones, dtype=np.bool_)
        if earned.ndim != 1 or not earned.shape == expected.shape == ended.shape:
            raise ConfigurationError(
                f"rewards, values and dones must be [T], got {list(earned.shape)}, {list(expected.shape)} "
                f"and {list(ended.shape)}"
            )
        parts = []
        starts = [0, *(np.flatnonzero(ended) + 1).tolist()]
        for start, stop in zip(starts, [*starts[1:], len(earned)], strict=True):
            if start == stop:
                continue
            estimate = gae_array(
                earned[start:stop],
                expected[start:stop],
                gamma=gamma,
                lam=gae_lambda,
                terminated=ended[stop - 1],
                final_values=np.float64(final_value),
            )
            parts.append(estimate.advantages)
        return np.concatenate(parts) if parts else np.zeros(0)

    @staticmethod
    def grpo_advantage(rewards: ArrayLike, group_size: int = 8) -> NDArray[np.float64]:
        """[groups * G] each reward less its group's mean, over the group's population deviation; groups are
        `group_size` successive rewards, and what is left at the end is dropped: it fills no group."""
        expect_that(group_size >= 2, "group_size", "be at least 2", group_size)
        earned = np.asarray(rewards, dtype=np.float64)
        whole = len(earned) // group_size * group_size
        advantages: NDArray[np.float64] = group_advantages_array(earned[:whole].reshape(-1, group_size))
        return advantages.reshape(-1)
