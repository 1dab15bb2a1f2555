"""Checks of an update's health: `tracking.monitors` applied to a `GRPOUpdate`, with advice.

The document's thresholds, as they can be met: the deviation of advantages is that before scaling, after which
it is 1; the norm is that before clipping; and the entropy is a share of the most that there can be, since a
fresh policy over 49 actions has ln 49 = 3.89 nats and is well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.update import GRPOUpdate
from stateset_agents.tracking.monitors import Finding, graded, monitors
from stateset_agents.types.settings import expect_that


def update_findings(update: GRPOUpdate, config: GRPOConfig, *, num_actions: int) -> list[Finding]:
    """advantages_normalized, advantages_raw, entropy_reasonable, kl_bounded and gradients_stable.

    Each is ok, warn or fail, with advice. `num_actions`: that could be paid, on average or at most."""
    expect_that(num_actions >= 2, "num_actions", "be at least 2", num_actions, "one leaves no choice")
    advantages = graded(
        "value bias",
        abs(update.mean_advantage),
        f"mean advantage {update.mean_advantage:.3g}",
        "members of a group are compared with each other's mean: keep groups whole",
    )
    spread = graded(
        "advantages",
        update.reward_std,
        f"deviation {update.reward_std:.3g} of the rewards",
        "group_size up, reward_scaling tanh with a lower reward_clip_value, more diverse starts",
    )
    distance = f"KL {update.approx_kl:.3g} to the policy that chose"
    norm = f"norm {update.grad_norm:.3g} before clipping at {config.max_grad_norm:g}"
    return [
        replace(advantages, check="advantages_normalized"),
        replace(spread, check="advantages_raw"),
        _entropy(update.mean_entropy / math.log(num_actions), num_actions),
        replace(graded("inner passes", update.approx_kl / 0.1, distance), check="kl_bounded"),
        replace(graded("gradients", update.grad_norm / config.max_grad_norm, norm), check="gradients_stable"),
    ]


def debug_grpo_update(
    update: GRPOUpdate, config: GRPOConfig, *, num_actions: int, say: Callable[[str], None] = print
) -> bool:
    """Say each finding in a line with ✓, ! or ✗; True if all are ok."""
    findings = update_findings(update, config, num_actions=num_actions)
    for finding in findings:
        say(str(finding))
    return all(finding.verdict == "ok" for finding in findings)


def _entropy(share: float, num_actions: int) -> Finding:
    level = f"{share:.1%} of the most that {num_actions} actions can have"
    monitor = monitors()["entropy"]
    if share < 1 / monitor.fail:
        return Finding("entropy_reasonable", "fail", f"{level}: it collapsed", monitor.advice)
    if share > 1.0 + 1e-6:
        return Finding("entropy_reasonable", "fail", level, f"num_actions {num_actions} is too few: give all")
    return Finding("entropy_reasonable", "ok", level)
