"""The metrics of a run without trouble, for checks and warnings: `from healthy_run import HEALTHY`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["FALLING", "HEALTHY", "STEPS", "TRAINING", "Series"]

STEPS = 30
Series = float | Sequence[float]
RISING = [step / STEPS for step in range(STEPS)]
FALLING = RISING[::-1]
HEALTHY: Mapping[str, Series] = {
    "reward/mean": RISING,
    "success/rate": [0.1 + 0.01 * step for step in range(STEPS)],
    "tokens/untrained": 0.0,
    "observation/rms": 0.9,
    "rollout/conversations": 16.0,
    "rollout/failed": 0.0,
    "rollout/unscored": 0.0,
    "rollout/truncated": 0.02,
    "rollout/malformed": 0.01,
    "rollout/cut_replies": 0.01,
    "advantage/mean": [0.02, -0.02] * 15,
    "advantage/std": 0.4,
    "group/zero_variance": 0.2,
    "optimizer/skipped": 0.0,
    "optimizer/grad_norm": 0.7,
    "loss/policy": -0.1,
    "policy/entropy": [0.5 - 0.01 * step for step in range(STEPS)],
    "policy/clip_fraction_low": 0.05,
    "policy/clip_fraction_high": 0.05,
    "policy/first_ratio_max": 1.0,
    "policy/weight": 0.98,
    "policy/mismatch_rms": 0.01,
    "policy/rollout_mismatch": 0.1,
    "kl/reference": 0.05,
    "kl/old": 0.01,
    "value/explained_variance": 0.6,
    "tokens/per_turn": 10.0,
    "tokens/agent": 400.0,
    "tokens/environment": 1000.0,
    "tokens/forwarded": 1400.0,
    "tokens/padding": 100.0,
    "faults/retries": 0.0,
    "faults/timeouts": 0.0,
    "faults/outages": 0.0,
    "breaker/environment": 0.0,
    "time/loop_lag": 0.01,
    "time/rollout": 0.8,
    "reasoning/format": 0.98,
    "reasoning/thinking_words_right": 12.0,
    "reasoning/thinking_words_wrong": 14.0,
    "reasoning/steps_by_difficulty": 0.9,
    "memory/peak_mib": 900.0,
    "memory/limit_mib": 8000.0,
    "cache/hits": 5.0,
    "cache/misses": 5.0,
}
TRAINING = {"max_grad_norm": 1.0, "num_iterations": 2, "kl_controller": "fixed", "kl_target": 0.01}
