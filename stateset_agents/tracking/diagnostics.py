"""What a run's metrics say about its health: one finding per check, each with what to do.

Reads the run folder alone. `train` prints the findings, the report shows them, and
`stateset-agents diagnose RUN` gives them for any run, one that is still going on too.

A check that a run has no metrics for gives no finding. "Start" and "end" are the mean of the first and
last tenth of the steps, five at least. Thresholds stand beside the checks, with where they come from.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Any, Literal

from stateset_agents.tracking.run_log import MetricLine, RunLog

__all__ = ["Finding", "History", "Verdict", "all_passed", "diagnose"]

Verdict = Literal["ok", "warn", "fail"]

_SIGNS: Mapping[Verdict, str] = {"ok": "✓", "warn": "!", "fail": "✗"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    check: str
    verdict: Verdict
    seen: str
    """The numbers."""
    cure: str = ""
    """What to do about it; empty where all is well."""

    @property
    def sign(self) -> str:
        return _SIGNS[self.verdict]

    def __str__(self) -> str:
        line = f"{self.sign} {self.check}: {self.seen}"
        return f"{line} -> {self.cure}" if self.cure else line


@dataclass(frozen=True, slots=True)
class History:
    """The metrics of a run's steps, its training settings, how it ended, and what broke most often."""

    lines: Sequence[MetricLine]
    training: Mapping[str, Any]
    summary: Mapping[str, Any]
    commonest_error: str | None = None
    """`RewardError: ... (12 times)`"""

    def all(self, name: str) -> list[float]:
        """Every value of a metric, NaN included."""
        return [line.values[name] for line in self.lines if name in line.values]

    def finite(self, name: str) -> list[float]:
        return [value for value in self.all(name) if math.isfinite(value)]

    def start(self, name: str) -> float | None:
        values = self.finite(name)
        return fmean(values[: _window(values)]) if values else None

    def end(self, name: str) -> float | None:
        values = self.finite(name)
        return fmean(values[-_window(values) :]) if values else None

    def solved(self) -> bool:
        """Do nine in ten of the last conversations succeed? Little is left to learn then."""
        return (self.end("success/rate") or 0.0) >= 0.9


def _window(values: Sequence[float]) -> int:
    return max(5, len(values) // 10)


def diagnose(log: RunLog) -> list[Finding]:
    """The findings of a run, in a fixed order.

    >>> all_passed(diagnose(RunLog.open("runs/latest")))
    True
    """
    training = log.config().get("training")
    settings = training if isinstance(training, Mapping) else {}
    history = History(list(log.metrics()), settings, log.summary())
    if sum(history.finite("rollout/failed")) + sum(history.finite("rollout/unscored")):
        history = replace(history, commonest_error=_commonest_error(log))
    return [finding for check in CHECKS if (finding := check(history)) is not None]


def _commonest_error(log: RunLog) -> str | None:
    errors = Counter(rollout.error for rollout in log.rollouts("train") if rollout.error)
    for error, times in errors.most_common(1):
        return f"{error} ({times} times)" if times > 1 else error
    return None


def all_passed(findings: Sequence[Finding]) -> bool:
    """True when no finding is a warning or worse."""
    return all(finding.verdict == "ok" for finding in findings)


def _graded(
    check: str, value: float, seen: str, cure: str, *, warn: float, fail: float = math.inf
) -> Finding:
    """Ok up to `warn`, a warning up to `fail`."""
    verdict: Verdict = "fail" if value > fail else "warn" if value > warn else "ok"
    return Finding(check, verdict, seen, "" if verdict == "ok" else cure)


# ------------------------------------------------------------------------------ what was collected


def _failures(history: History) -> Finding | None:
    """Conversations that broke off, or that no reward could be given: 1 % warns, 10 % fails (our choice)."""
    everyone = sum(history.finite("rollout/conversations"))
    if not everyone:
        return None
    failed, unscored = sum(history.finite("rollout/failed")), sum(history.finite("rollout/unscored"))
    share = (failed + unscored) / everyone
    seen = f"{failed:.0f} failed and {unscored:.0f} unscored of {everyone:.0f} conversations"
    cure = "read `error` of those conversations in rollouts.jsonl: the environment, a tool or the reward"
    if history.commonest_error is not None:
        cure = f"mend what broke most often: {history.commonest_error}"
    return _graded("failures", share, seen, cure, warn=0.01, fail=0.1)


def _truncation(history: History) -> Finding | None:
    """Conversations that a limit cut: a tenth at the end warns, a half fails (our choice).

    Where nearly all are cut, a critic that bootstraps with gamma 1 has nothing to settle at: what comes
    after the cut is its own guess, plus a reward, for ever.
    """
    share = history.end("rollout/truncated")
    if share is None:
        return None
    training = history.training
    endless = training.get("gamma", 1.0) == 1.0 and training.get("bootstrap_truncated", True)
    if share > 0.9 and endless and history.all("value/explained_variance"):
        seen = f"{share:.1%} of the last conversations were cut: the critic's values drift without bound"
        cure = "set bootstrap_truncated to false where the limit is part of the task, else gamma below 1"
        return Finding("truncation", "fail", seen, cure)
    cure = "raise max_turns, agent.max_new_tokens or max_context_tokens, or let the reward ask for brevity"
    return _graded(
        "truncation", share, f"{share:.1%} of the last conversations were cut", cure, warn=0.1, fail=0.5
    )


def _malformed_calls(history: History) -> Finding | None:
    """Well-formed in over 95 % of cases is the usual bar for a format; below 80 % little else is learned."""
    share = history.end("rollout/malformed")
    if share is None:
        return None
    cure = "warm the model up on well-formed calls, or let the reward pay for form first"
    return _graded(
        "tool calls",
        share,
        f"{share:.1%} of the last turns hold an unreadable call",
        cure,
        warn=0.05,
        fail=0.2,
    )


def _loop_lag(history: History) -> Finding | None:
    """The median step's longest wait of the event loop: 50 ms is felt by a server's callers.

    A warning at most, as a busy machine does it too; few steps, or short waits, are rather the machine's.
    """
    lags = history.finite("time/loop_lag")
    if not lags:
        return None
    typical = median(lags)
    blocking = "make sync code in async tools, rewards and environments plain `def`"
    cure = f"{blocking}, or give the machine less to do"
    if len(lags) < 20 or typical < 0.25:
        cure = f"is the machine busy with other work? If not, {blocking}"
    seen = f"{typical * 1000:.0f} ms at most in the median step, {max(lags) * 1000:.0f} ms in the worst"
    return _graded("event loop", typical, seen, cure, warn=0.05)


# ------------------------------------------------------------------------------ the learning signal


def _advantages(history: History) -> Finding | None:
    """Their deviation before any scaling: over 3 is noise for a learner.

    After advantages are divided by their deviation it is 1 by construction, so the raw one is tested.
    """
    spread = history.end("advantage/std")
    if spread is None:
        return None
    cure = "scale the reward to about one, take larger groups (num_generations), vary the scenarios"
    return _graded("advantages", spread, f"deviation {spread:.3g} before scaling", cure, warn=3.0)


def _bias(history: History) -> Finding | None:
    """A critic's advantages should be around zero: over a tenth of their deviation warns, where it is more
    than two standard errors. A group's are so by construction, and nothing is said."""
    means = history.finite("advantage/mean")
    spread = history.end("advantage/std")
    if not spread or len(means) < 5 or not history.all("value/explained_variance"):
        return None
    last = means[-_window(means) :]
    mean, error = fmean(last), stdev(last) / math.sqrt(len(last))
    seen = f"mean advantage {mean:+.3g}, deviation {spread:.3g}"
    off = abs(mean) / spread if abs(mean) > 2 * error else 0.0
    cure = "it expects too much or too little: raise value_learning_rate"
    return _graded("value bias", off, seen, cure, warn=0.1)


def _ties(history: History) -> Finding | None:
    """Groups whose members all tie teach nothing: half of them warns, nine in ten fail (our choice)."""
    share = history.end("group/zero_variance")
    if share is None:
        return None
    seen = f"{share:.0%} of the last groups"
    if history.solved():
        return Finding("tied groups", "ok", f"{seen}, as most conversations succeed now")
    cure = (
        "the reward cannot tell the members apart: easier or more varied scenarios, partial credit, a larger "
        "num_generations"
    )
    return _graded("tied groups", share, seen, cure, warn=0.5, fail=0.9)


def _skipped(history: History) -> Finding | None:
    """Steps that changed no weight: a fifth warns, a half fails (our choice)."""
    skipped = history.all("optimizer/skipped")
    if not skipped:
        return None
    number = sum(value > 0 or math.isnan(value) for value in skipped)
    cure = "read events.jsonl and the reward: no group had members that differ, or gradients were not finite"
    seen = f"{number} of {len(skipped)} steps changed no weight"
    if history.solved():
        return Finding("skipped steps", "ok", seen)
    return _graded("skipped steps", number / len(skipped), seen, cure, warn=0.2, fail=0.5)


def _reward_trend(history: History) -> Finding | None:
    """The last third of the steps against the first, in standard errors of the difference (Welch)."""
    rewards = history.finite("reward/mean")
    third = len(rewards) // 3
    if third < 3:
        return None
    first, last = rewards[:third], rewards[-third:]
    z = _standard_errors(first, last)
    seen = f"{fmean(first):.3g} in the first third of the steps, {fmean(last):.3g} in the last"
    if z > 2 or history.solved():
        return Finding("reward", "ok", seen)
    if z < -2:
        return Finding("reward", "fail", f"{seen}: it fell", "lower learning_rate, raise beta")
    cure = "train longer, raise learning_rate, or take larger groups; check that the reward can be reached"
    return Finding("reward", "warn", f"{seen}: no clear rise", cure)


def _standard_errors(first: Sequence[float], last: Sequence[float]) -> float:
    variance = sum(
        sum((value - fmean(part)) ** 2 for value in part) / (len(part) - 1) / len(part)
        for part in (first, last)
    )
    rise = fmean(last) - fmean(first)
    if variance == 0:
        return math.copysign(math.inf, rise) if rise else 0.0
    return rise / math.sqrt(variance)


def _held_out(history: History) -> Finding | None:
    """Success before and after on the same held-out scenarios, by their 95 % intervals: apart is a change.

    A reward that rises where this does not pays for something else than success.
    """
    before, after = history.summary.get("before") or {}, history.summary.get("after") or {}
    if not before.get("interval") or not after.get("interval"):
        return None
    seen = f"success {before['success']:.1%} before training, {after['success']:.1%} after"
    if after["interval"][0] > before["interval"][1] or before["success"] >= 0.9:
        return Finding("held-out", "ok", seen)
    if after["interval"][1] < before["interval"][0]:
        cure = "lower learning_rate, raise beta; read what the conversations of the highest reward do"
        return Finding("held-out", "fail", f"{seen}: it fell", cure)
    cure = "train longer; where the reward rose, look for what it pays besides success"
    return Finding("held-out", "warn", f"{seen}: no clear change", cure)


def _reply_length(history: History) -> Finding | None:
    """Tokens of a turn; a length that halves or doubles is often the reward's doing, wanted or not."""
    start, end = history.start("tokens/per_turn"), history.end("tokens/per_turn")
    if not start or not end:
        return None
    seen = f"{start:.3g} tokens a turn at the start, {end:.3g} at the end"
    change = max(end / start, start / end)
    cure = "read some conversations of the report: does the reward pay for length, or for saying nothing?"
    return _graded("reply length", change, seen, cure, warn=2.0)


# ------------------------------------------------------------------------------ the optimiser


def _numbers(history: History) -> Finding | None:
    """Losses, gradients and KL must be finite; only fp16's scaler may skip infinite gradients."""
    names = {name for line in history.lines for name in line.values if name.split("/")[0] in _MUST_BE_FINITE}
    broken = sorted(name for name in names if not all(math.isfinite(value) for value in history.all(name)))
    if not names:
        return None
    if not broken:
        return Finding("numbers", "ok", "losses, gradients and KL are finite")
    if broken == ["optimizer/grad_norm"] and history.training.get("precision") == "fp16":
        return Finding("numbers", "ok", "finite, but for gradients that fp16's scaler skipped")
    cure = "lower learning_rate, use precision fp32 or bf16, look at the rewards"
    return Finding("numbers", "fail", f"not finite in some step: {', '.join(broken)}", cure)


_MUST_BE_FINITE = {"loss", "optimizer", "kl", "policy"}


def _gradients(history: History) -> Finding | None:
    """The median norm before clipping: twice max_grad_norm warns, five times fails.

    2 and 5 are for the usual max_grad_norm of 1. Most steps are then cut short: the clip, not the learning
    rate, says how far they go.
    """
    norms = history.finite("optimizer/grad_norm")
    if not norms:
        return None
    bound = float(history.training.get("max_grad_norm", 1.0))
    typical = median(norms)
    cure = "check the scale of the rewards, take larger batches, lower learning_rate"
    seen = f"norm {typical:.3g} before clipping at {bound:g} (median; highest {max(norms):.3g})"
    return _graded("gradients", typical / bound, seen, cure, warn=2.0, fail=5.0)


def _entropy(history: History) -> Finding | None:
    """Against its own start, as its scale is the vocabulary's and the model's: a tenth of it is a collapse
    unless the task is solved, and twice it means the policy drifts into noise."""
    start, end = history.start("policy/entropy"), history.end("policy/entropy")
    if start is None or end is None or start <= 0:
        return None
    seen = f"{start:.3g} nats a token at the start, {end:.3g} at the end"
    if end > 2 * start:
        cure = "lower learning_rate or entropy_coef, raise beta"
        return Finding("entropy", "warn", f"{seen}: the policy drifts into noise", cure)
    if end < start / 10 and not history.solved():
        cure = "lower learning_rate, raise entropy_coef or beta: nothing new is tried any more"
        return Finding("entropy", "fail", f"{seen}: it collapsed", cure)
    return Finding("entropy", "ok", seen)


def _reference(history: History) -> Finding | None:
    """Where beta moves, within half of kl_target, the controllers' own band. Else half a nat a token warns
    (a reply of 20 tokens is then e^10 times likelier than before), two fail (our choice)."""
    kl = history.end("kl/reference")
    if kl is None:
        return None
    moving = history.training.get("kl_controller", "fixed") != "fixed"
    target = float(history.training.get("kl_target", 0.01))
    if moving:
        seen = f"{kl:.3g} nats a token at the end, kl_target {target:g}"
        cure = "let beta start higher, or lower learning_rate"
        return _graded("KL to the reference", kl / target, seen, cure, warn=1.5, fail=10.0)
    seen = f"{kl:.3g} nats a token at the end"
    return _graded("KL to the reference", kl, seen, "raise beta or lower learning_rate", warn=0.5, fail=2.0)


def _inner_passes(history: History) -> Finding | None:
    """With more than one pass over a batch: over 30 % of the tokens clipped, or a KL to the policy that
    sampled above .1, says the batch is used too long. With one pass both are 0 and nothing is said."""
    passes = int(history.training.get("num_iterations", 1))
    low, high = history.end("policy/clip_fraction_low"), history.end("policy/clip_fraction_high")
    moved = history.end("kl/old")
    if passes == 1 or low is None or high is None or moved is None:
        return None
    seen = f"{low + high:.1%} of the tokens clipped, KL {moved:.3g} to the policy that sampled"
    cure = "lower num_iterations or learning_rate"
    worst = max((low + high) / 0.3, moved / 0.1)
    return _graded("inner passes", worst, seen, cure, warn=1.0, fail=3.0)


def _on_policy(history: History) -> Finding | None:
    """On the first pass no weight has moved: a ratio that is not 1 means that sampler and learner disagree.

    Dropout makes it so on purpose, and says nothing then. One token may be off by a few per cent in bf16.
    """
    ratios = history.finite("policy/first_ratio_max")
    if not ratios or history.training.get("dropout"):
        return None
    worst = max(ratios)
    cure = "the stored log-probs are not the policy's: report this, with the model's name and versions"
    seen = f"highest ratio {worst:.4g} on the first pass"
    return _graded("on-policy", worst - 1, seen, cure, warn=0.05, fail=0.5)


def _critic(history: History) -> Finding | None:
    """Explained variance of the returns, the median of the last steps: 1 is perfect, 0 no better than a
    constant, below 0 worse. Where nearly all succeed, hardly any variance is left to explain."""
    values = history.finite("value/explained_variance")
    if not values:
        return None
    explained = median(values[-_window(values) :])
    seen = f"explains {explained:.0%} of the returns' variance in the median of the last steps"
    if history.solved():
        return Finding("value function", "ok", f"{seen}, of which little is left")
    cure = "raise value_learning_rate or value_iterations; until it predicts, prefer a group estimator"
    return _graded("value function", -explained, seen, cure, warn=-0.1, fail=0.0)


CHECKS: Sequence[Callable[[History], Finding | None]] = (
    _held_out,
    _reward_trend,
    _failures,
    _truncation,
    _malformed_calls,
    _advantages,
    _ties,
    _skipped,
    _numbers,
    _gradients,
    _entropy,
    _reference,
    _inner_passes,
    _on_policy,
    _critic,
    _bias,
    _reply_length,
    _loop_lag,
)
"""In the order in which they are shown."""
