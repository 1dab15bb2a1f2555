"""The document's GRPOConfig: `ControlConfig` with the defaults of GRPO for infrastructure."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated

from stateset_agents.algorithms.advantages import Scaling
from stateset_agents.numeric.settings import ControlConfig
from stateset_agents.runs.settings import Schedule

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

    clip_epsilon = property(attrgetter("clip_ratio"), doc="The document's name of clip_ratio.")
    kl_coefficient = property(attrgetter("beta"), doc="The document's name of beta.")
    entropy_coefficient = property(attrgetter("entropy_coef"), doc="The document's name of entropy_coef.")
    num_epochs = property(attrgetter("num_iterations"), doc="The document's name of num_iterations.")
    batch_size = property(attrgetter("minibatch_size"), doc="The document's name of minibatch_size.")
