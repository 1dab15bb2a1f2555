"""Checks of an update's health: `tracking.monitors` applied to a `GRPOUpdate`, with advice.

The document's thresholds, as they can be met: the deviation of advantages is that before scaling, after which
it is 1; the norm is that before clipping; and the entropy is a share of the most that there can be, since a
fresh policy over 49 actions has ln 49 = 3.89 nats and is well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stateset_agents.numeric.acquisition.functional.config import GRPOConfig
from stateset_agents.numeric.acquisition.functional.update import GRPOUpdate
from stateset_agents.tracking.monitors import Finding, graded, monitors


def update_findings(update: GRPOUpdate, config: GRPOConfig | None = None) -> list[Finding]:
    """advantages_normalized, advantages_raw, entropy_reasonable, kl_bounded and gradients_stable.

    Each is ok, warn or fail, with advice. `config`: of the update; the document's when absent."""
    max_grad_norm = (config or GRPOConfig()).max_grad_norm
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
    norm = f"norm {update.grad_norm:.3g} before clipping at {max_grad_norm:g}"
    return [
        replace(advantages, check="advantages_normalized"),
        replace(spread, check="advantages_raw"),
        _entropy(update),
        replace(graded("inner passes", update.approx_kl / 0.1, distance), check="kl_bounded"),
        replace(graded("gradients", update.grad_norm / max_grad_norm, norm), check="gradients_stable"),
    ]


def debug_grpo_update(
    update_info: GRPOUpdate, *, config: GRPOConfig | None = None, say: Callable[[str], None] = print
) -> bool:
    """Say each finding in a line with ✓, ! or ✗; True if all are ok."""
    findings = update_findings(update_info, config)
    for finding in findings:
        say(str(finding))
    return all(finding.verdict == "ok" for finding in findings)


def _entropy(update: GRPOUpdate) -> Finding:
    """A share of the most that there can be; in nats, with the document's .1, where that is not known."""
    monitor = monitors()["entropy"]
    if update.max_entropy is None:
        level, collapsed = f"{update.mean_entropy:.3g} nats", update.mean_entropy < 0.1
    else:
        share = update.mean_entropy / update.max_entropy if update.max_entropy else 1.0
        level, collapsed = f"{share:.1%} of the most that there can be", share < 1 / monitor.fail
    if collapsed:
        return Finding("entropy_reasonable", "fail", f"{level}: it collapsed", monitor.advice)
    return Finding("entropy_reasonable", "ok", level)
