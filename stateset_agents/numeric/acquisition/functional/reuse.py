"""Samples that train several times: a manager that says when new ones are due, and never changes itself.

The log-probs of a batch are of the policy that chose its actions and stay so however often it is used; the
ratio to them is what the clip bounds. `num_iterations` counts all uses, the first included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stateset_agents.numeric.acquisition.functional.batch import GRPOBatch
from stateset_agents.numeric.acquisition.functional.config import GRPOConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleReuseManager:
    """What there is to train on, and how often it has been used."""

    current_samples: GRPOBatch | None = None
    reuse_iteration: int = 0
    """Uses of it so far."""
    max_iterations: int

    def should_collect_new_samples(self, required_size: int) -> bool:
        """Are there none, too few, or have they been used as often as they may?"""
        held = self.current_samples
        return held is None or len(held) < required_size or self.reuse_iteration >= self.max_iterations

    def update_for_reuse(self) -> SampleReuseManager:
        """After one more use."""
        return replace(self, reuse_iteration=self.reuse_iteration + 1)

    def reset_with_new_samples(self, samples: GRPOBatch) -> SampleReuseManager:
        """With samples that have been used once, by who collected them."""
        return replace(self, current_samples=samples, reuse_iteration=1)


def create_sample_reuse_manager(config: GRPOConfig) -> SampleReuseManager:
    """Empty, for `num_iterations` uses of each batch."""
    return SampleReuseManager(max_iterations=config.num_iterations)
