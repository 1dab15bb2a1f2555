"""The checks of a run's health, each a function of its metrics; `diagnostics` asks them all.

A check that a run has no metrics for gives no finding. "Start" and "end" are the mean of the first and
last tenth of the steps, five at least. Thresholds and advice stand in `monitors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

from stateset_agents.algorithms.baselines import is_over_batch
from stateset_agents.tracking.history import History, window
from stateset_agents.tracking.monitors import MONITORS, NOT_THE_USERS, Finding, graded

__all__ = ["CHECKS", "Check"]

Check = Callable[[History], Finding | None]

# ------------------------------------------------------------------------------ what was collected


def _failures(history: History) -> Finding | None:
    """Conversations that broke off, or that no reward could be given; what broke most often is told."""
    everyone = sum(history.finite("rollout/conversations"))
    if not everyone:
        return None
    failed, unscored = sum(history.finite("rollout/failed")), sum(history.finite("rollout/unscored"))
    share = (failed + unscored) / everyone
    seen = f"{failed:.0f} failed and {unscored:.0f} unscored of {everyone:.0f} conversations"
    cure = None
    if history.commonest_error is not None:
        cure = f"mend what broke most often: {history.commonest_error}"
    return graded("failures", share, seen, cure)


def _truncation(history: History) -> Finding | None:
    """Conversations that a limit cut.

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
    return graded("truncation", share, f"{share:.1%} of the last conversations were cut")


def _dependencies(history: History) -> Finding | None:
    """What had to be tried again; a breaker that is open at the end fails."""
    everyone, retries = sum(history.finite("rollout/conversations")), history.finite("faults/retries")
    if not everyone or not retries:
        return None
    again, late = sum(retries), sum(history.finite("faults/timeouts"))
    outages = sum(history.finite("faults/outages"))
    seen = f"{again:.0f} tries again, {late:.0f} answers too late, {outages:.0f} outages"
    last = next(line.values for line in reversed(history.lines) if "faults/retries" in line.values)
    down = [name.removeprefix("breaker/") for name in last if name.startswith("breaker/") and last[name]]
    if down:
        cure = (
            f"mend {' and '.join(down)}, then resume: it failed too often in a row to be asked again at once"
        )
        return Finding("dependencies", "fail", f"{seen}; down: {', '.join(down)}", cure)
    return graded("dependencies", (again + late) / everyone, seen)


def _cut_replies(history: History) -> Finding | None:
    """Replies that came to their limit of tokens, not to their own end."""
    share = history.end("rollout/cut_replies")
    if share is None:
        return None
    return graded("cut replies", share, f"{share:.1%} of the last replies were cut by their limit of tokens")


def _malformed_calls(history: History) -> Finding | None:
    """Turns whose tool call cannot be read."""
    share = history.end("rollout/malformed")
    if share is None:
        return None
    return graded("tool calls", share, f"{share:.1%} of the last turns hold an unreadable call")


def _tokens(history: History) -> Finding | None:
    """Whose the tokens are: the agent's train, the others and the padding only cost."""
    own, others = sum(history.finite("tokens/agent")), sum(history.finite("tokens/environment"))
    if not own:
        return None
    forwarded, padding = sum(history.finite("tokens/forwarded")), sum(history.finite("tokens/padding"))
    padded = padding / max(1.0, forwarded + padding)
    seen = f"{others / own:.3g} tokens of the environment for each of the agent's, {padded:.0%} padding"
    return graded("tokens", max(others / own / 50, padded / 0.5), seen)


def _loop_lag(history: History) -> Finding | None:
    """The median step's longest wait of the event loop.

    A warning at most, as a busy machine does it too; few steps, or short waits, are rather the machine's.
    """
    lags = history.finite("time/loop_lag")
    if not lags:
        return None
    typical, of_user = median(lags), history.finite("time/loop_lag_user")
    cure = None
    if of_user:
        is_users = median(of_user) > MONITORS["event loop"].warn
        cure = MONITORS["event loop"].advice if is_users else NOT_THE_USERS
    elif len(lags) < 20 or typical < 0.25:  # a run from before the user's part was measured
        blocking = "make sync code in async tools, rewards and environments plain `def`"
        cure = f"is the machine busy with other work? If not, {blocking}"
    seen = f"{typical * 1000:.0f} ms at most in the median step, {max(lags) * 1000:.0f} ms in the worst"
    return graded("event loop", typical, seen, cure)


# ------------------------------------------------------------------------------ the learning signal


def _advantages(history: History) -> Finding | None:
    """Their deviation before any scaling."""
    spread = history.end("advantage/std")
    if spread is None:
        return None
    return graded("advantages", spread, f"deviation {spread:.3g} before scaling")


def _bias(history: History) -> Finding | None:
    """A critic's advantages should be around zero; a group's are so by construction, and nothing is said."""
    means = history.finite("advantage/mean")
    spread = history.end("advantage/std")
    if not spread or len(means) < 5 or not history.all("value/explained_variance"):
        return None
    last = means[-window(means) :]
    mean, error = fmean(last), stdev(last) / math.sqrt(len(last))
    seen = f"mean advantage {mean:+.3g}, deviation {spread:.3g}"
    off = abs(mean) / spread if abs(mean) > 2 * error else 0.0
    return graded("value bias", off, seen)


def _ties(history: History) -> Finding | None:
    """Groups whose members all tie teach nothing, unless they are compared with the other groups."""
    share = history.end("group/zero_variance")
    if share is None or is_over_batch(history.training.get("baseline_type")):
        return None
    seen = f"{share:.0%} of the last groups"
    if history.solved():
        return Finding("tied groups", "ok", f"{seen}, as most conversations succeed now")
    return graded("tied groups", share, seen)


def _skipped(history: History) -> Finding | None:
    """Steps that changed no weight."""
    skipped = history.all("optimizer/skipped")
    if not skipped:
        return None
    number = sum(value > 0 or math.isnan(value) for value in skipped)
    seen = f"{number} of {len(skipped)} steps changed no weight"
    if history.solved():
        return Finding("skipped steps", "ok", seen)
    return graded("skipped steps", number / len(skipped), seen)


def _reward_trend(history: History) -> Finding | None:
    """The last third of the steps against the first, in standard errors of the difference (Welch)."""
    rewards = history.finite("reward/mean")
    third = len(rewards) // 3
    if third < 3:
        return None
    first, last = rewards[:third], rewards[-third:]
    fall = -_standard_errors(first, last)
    seen = f"{fmean(first):.3g} in the first third of the steps, {fmean(last):.3g} in the last"
    if history.solved():
        return Finding("reward", "ok", seen)
    if fall > MONITORS["reward"].fail:
        return graded("reward", fall, f"{seen}: it fell")
    if fall < MONITORS["reward"].warn:
        return graded("reward", fall, seen)
    held_out = _measured(history)
    if held_out is not None and held_out.rose:
        return Finding("reward", "ok", f"{seen}: no clear rise, but held-out {held_out} rose")
    cure = "train longer, raise learning_rate, or take larger groups; check that the reward can be reached"
    return graded("reward", fall, f"{seen}: no clear rise", _form_first(history) or cure)


def _standard_errors(first: Sequence[float], last: Sequence[float]) -> float:
    variance = sum(
        sum((value - fmean(part)) ** 2 for value in part) / (len(part) - 1) / len(part)
        for part in (first, last)
    )
    rise = fmean(last) - fmean(first)
    if variance == 0:
        return math.copysign(math.inf, rise) if rise else 0.0
    return rise / math.sqrt(variance)


@dataclass(frozen=True, slots=True)
class _Measured:
    """A figure on the same held-out scenarios before and after training, with its 95 % intervals."""

    name: str
    before: float
    after: float
    intervals: tuple[Sequence[float], Sequence[float]]
    n: int

    def __str__(self) -> str:
        style = ".1%" if self.name == "success" else ".3g"
        return f"{self.name} {self.before:{style}} before training, {self.after:{style}} after"

    @property
    def rose(self) -> bool:
        (_, highest_before), (lowest_after, _) = self.intervals
        return lowest_after > highest_before

    @property
    def fell(self) -> bool:
        (lowest_before, _), (_, highest_after) = self.intervals
        return highest_after < lowest_before

    @property
    def enough(self) -> float:
        """About how many scenarios would set intervals around the same two figures apart."""
        change = abs(self.after - self.before)
        reach = sum(high - low for low, high in self.intervals) / 2
        return max(1.5, (reach / change) ** 2) * self.n if change else math.inf


def _measured(history: History) -> _Measured | None:
    """Success, or the reward where the environment gives no verdict; None where it was not measured."""
    before, after = history.summary.get("before") or {}, history.summary.get("after") or {}
    for name, key, interval in (
        ("success", "success", "interval"),
        ("reward", "mean_reward", "reward_interval"),
    ):
        if before.get(interval) and after.get(interval):
            n = round(after["n"] / after.get("tries", 1))
            return _Measured(name, before[key], after[key], (before[interval], after[interval]), n)
    return None


_MOST_SCENARIOS = 1000
"""Where more would be needed to tell a change, it is too small to be looked for."""


def _held_out(history: History) -> Finding | None:
    """Success (or reward) before and after on the same held-out scenarios, by their 95 % intervals.

    A reward that rises where success does not pays for something else.
    """
    measured = _measured(history)
    if measured is None:
        return None
    if measured.rose or (measured.name == "success" and measured.before >= 0.9):
        return Finding("held-out", "ok", str(measured))
    if measured.fell:
        return Finding("held-out", "fail", f"{measured}: it fell", MONITORS["held-out"].advice)
    cure = "train longer; where the reward rose, look for what it pays besides success"
    if measured.enough <= _MOST_SCENARIOS:
        cure = (
            f"{measured.n} scenarios are too few to tell this change: about {_rounded(measured.enough)} "
            "would (evaluation.episodes, or evaluation.tries)"
        )
    return Finding("held-out", "warn", f"{measured}: no clear change", _form_first(history) or cure)


def _rounded(number: float) -> int:
    """Up, to two digits."""
    unit: int = 10 ** max(0, len(str(math.ceil(number))) - 2)
    return math.ceil(number / unit) * unit


_FORMS = ("reward/pattern", "reward/schema", "reward/is_json")


def _form_first(history: History) -> str | None:
    """What to do where replies lack their form: nothing else is learned before it."""
    unreadable = history.end("rollout/malformed")
    shares = [] if unreadable is None else [1 - unreadable]
    shares += [share for name in _FORMS if (share := history.end(name)) is not None]
    if not shares or min(shares) >= 1 - MONITORS["tool calls"].warn:
        return None
    return (
        f"a skill is missing: {min(shares):.0%} of the last replies are well-formed. "
        f"{MONITORS['tool calls'].advice}; longer training comes after that"
    )


def _reply_length(history: History) -> Finding | None:
    """Tokens of a turn; a length that halves or doubles is often the reward's doing, wanted or not."""
    start, end = history.start("tokens/per_turn"), history.end("tokens/per_turn")
    if not start or not end:
        return None
    seen = f"{start:.3g} tokens a turn at the start, {end:.3g} at the end"
    change = max(end / start, start / end)
    return graded("reply length", change, seen)


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
    return graded("numbers", 1.0, f"not finite in some step: {', '.join(broken)}")


_MUST_BE_FINITE = {"loss", "optimizer", "kl", "policy"}


def _gradients(history: History) -> Finding | None:
    """The median norm before clipping. Far above max_grad_norm most steps are cut short: the clip, not the
    learning rate, says how far they go."""
    norms = history.finite("optimizer/grad_norm")
    if not norms:
        return None
    bound = float(history.training.get("max_grad_norm", 1.0))
    typical = median(norms)
    seen = f"norm {typical:.3g} before clipping at {bound:g} (median; highest {max(norms):.3g})"
    return graded("gradients", typical / bound, seen)


def _entropy(history: History) -> Finding | None:
    """Against its own start; a collapse is none where the task is solved."""
    start, end = history.start("policy/entropy"), history.end("policy/entropy")
    if start is None or end is None or start <= 0:
        return None
    seen = f"{start:.3g} nats a token at the start, {end:.3g} at the end"
    limits = MONITORS["entropy"]
    if end > limits.warn * start:
        cure = "lower learning_rate or entropy_coef, raise beta"
        return Finding("entropy", "warn", f"{seen}: the policy drifts into noise", cure)
    if end < start / limits.fail and not history.solved():
        return Finding("entropy", "fail", f"{seen}: it collapsed", limits.advice)
    return Finding("entropy", "ok", seen)


def _reference(history: History) -> Finding | None:
    """How far the policy has gone from the weights at the start; from kl_target where beta steers to it."""
    kl = history.end("kl/reference")
    if kl is None:
        return None
    seen = f"{kl:.3g} nats a token at the end"
    if history.training.get("kl_controller", "fixed") == "fixed":
        return graded("KL to the reference", kl, seen)
    target = float(history.training.get("kl_target", 0.01))
    found = graded("KL to its target", kl / target, f"{seen}, kl_target {target:g}")
    return replace(found, check="KL to the reference")


def _inner_passes(history: History) -> Finding | None:
    """Whether more than one pass over a batch uses it too long; with one pass nothing is said."""
    passes = int(history.training.get("num_iterations", 1))
    low, high = history.end("policy/clip_fraction_low"), history.end("policy/clip_fraction_high")
    moved = history.end("kl/old")
    if passes == 1 or low is None or high is None or moved is None:
        return None
    seen = f"{low + high:.1%} of the tokens clipped, KL {moved:.3g} to the policy before them"
    return graded("inner passes", max((low + high) / 0.3, moved / 0.1), seen)


def _on_policy(history: History) -> Finding | None:
    """On the first pass the ratio is 1. Nothing is said where dropout moves it on purpose, nor under
    max_staleness, where it is to the policy itself and 1 whatever sampled."""
    ratios, training = history.finite("policy/first_ratio_max"), history.training
    if not ratios or training.get("dropout") or training.get("max_staleness"):
        return None
    worst = max(ratios)
    seen = f"highest ratio {worst:.4g} on the first pass"
    return graded("on-policy", worst - 1, seen)


def _off_policy(history: History) -> Finding | None:
    """Whether the weights of the tokens, where they have any, are 1 in the mean; by the median step's."""
    weights = history.finite("policy/weight")
    if not weights:
        return None
    typical = median(weights[-window(weights) :])
    seen = f"mean importance weight {typical:.3g} in the median of the last steps, 1 is none needed"
    return graded("off-policy", abs(typical - 1), seen)


def _critic(history: History) -> Finding | None:
    """Explained variance of the returns, the median of the last steps. Where nearly all succeed, hardly any
    variance is left to explain."""
    values = history.finite("value/explained_variance")
    if not values:
        return None
    explained = median(values[-window(values) :])
    seen = f"explains {explained:.0%} of the returns' variance in the median of the last steps"
    if history.solved():
        return Finding("value function", "ok", f"{seen}, of which little is left")
    return graded("value function", -explained, seen)


CHECKS: Sequence[Check] = (
    _held_out,
    _reward_trend,
    _failures,
    _dependencies,
    _truncation,
    _cut_replies,
    _malformed_calls,
    _tokens,
    _advantages,
    _ties,
    _skipped,
    _numbers,
    _gradients,
    _entropy,
    _reference,
    _inner_passes,
    _on_policy,
    _off_policy,
    _critic,
    _bias,
    _reply_length,
    _loop_lag,
)
"""In the order in which they are shown."""
