"""The health of a run: checks of its metrics, each with a finding and advice, from the run folder alone.

`train` prints the findings, the report shows them, and `stateset-agents diagnose RUN` prints them for any
run, also a running one. The trainer runs the same checks on its last steps (`live_findings`).

A check without its metrics returns None. "Start" and "end" are the means of the first and last tenth of the
steps, of at least five; with fewer than ten steps they are not compared. Thresholds and advice are in
`monitors`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import neg
from statistics import fmean, median, stdev
from typing import Any, Literal

from stateset_agents.algorithms.advantages import is_over_batch
from stateset_agents.algorithms.paired import (
    FEWEST_REWARDS,
    FEWEST_SCENARIOS,
    PairedMean,
    Verdict,
    paired_rewards,
    paired_shares,
)
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.monitors import OTHER_CODE_HINT, Finding, graded, monitors
from stateset_agents.tracking.run_log import MetricLine, RunLog, held_out_gains

# ------------------------------------------------------------------------------ the metrics of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The words for one kind of run, each as a singular noun."""

    kind: Literal["conversations", "numeric"]
    choice: str
    """The thing that the policy chooses; entropy and KL are given for each."""
    update: str
    """The work that one line of metrics.jsonl measures."""
    along: str
    """The thing that `step` counts in metrics.jsonl."""
    scenario: str
    """The thing that an episode starts from."""
    reward: str
    """The name of the sum of an episode's rewards."""


CONVERSATIONS = Units(
    kind="conversations", choice="token", update="step", along="step", scenario="scenario", reward="reward"
)
NUMERIC = Units(
    kind="numeric",
    choice="step",
    update="update",
    along="environment step",
    scenario="start",
    reward="return",
)


def units_of(config: Mapping[str, Any]) -> Units:
    """The words for a run with this config.yaml."""
    return NUMERIC if config.get("kind") == "control" else CONVERSATIONS


@dataclass(frozen=True, slots=True)
class History:
    """The metrics of a run's steps, its training settings, its summary, and its most common error."""

    lines: Sequence[MetricLine]
    training: Mapping[str, Any]
    summary: Mapping[str, Any]
    most_common_error: str | None = None
    """`RewardError: ... (12 times)`"""
    gains: Sequence[float] = ()
    """The held-out results after training less those before it, scenario by scenario (`held_out_gains`)."""

    def values(self, name: str) -> list[float]:
        """Every value of a metric, NaN included."""
        return [line.values[name] for line in self.lines if name in line.values]

    def finite(self, name: str) -> list[float]:
        return [value for value in self.values(name) if math.isfinite(value)]

    def start(self, name: str) -> float | None:
        """The mean of the first steps; None where there are too few steps to compare with the end."""
        values = self.finite(name)
        return fmean(values[: window(values)]) if len(values) >= 2 * window(values) else None

    def end(self, name: str) -> float | None:
        """The mean of the last steps; None without a finite value."""
        values = self.finite(name)
        return fmean(values[-window(values) :]) if values else None

    def units(self) -> Units:
        """The words for this run's numbers."""
        return NUMERIC if any("episode/length" in line.values for line in self.lines) else CONVERSATIONS

    def is_solved(self) -> bool:
        """True if nine in ten of the last conversations succeed, so that little is left to learn."""
        return (self.end("success/rate") or 0.0) >= 0.9


def part_name(name: str, metrics: Mapping[str, float]) -> str:
    """The name of a part's metric, such as of a reward's term: `reward/mean_part` for a term called mean, as
    what reads `reward/mean` wants the mean."""
    return f"{name}_part" if name in metrics else name


def window(values: Sequence[float]) -> int:
    """The number of values at the start and at the end: a tenth of them, at least five."""
    return max(5, len(values) // 10)


Check = Callable[[History], Finding | None]

# ------------------------------------------------------------------------------ what was collected


def _failures(history: History) -> Finding | None:
    """Conversations that failed or could not be scored, with the most common error."""
    conversations = sum(history.finite("rollout/conversations"))
    if not conversations:
        return None
    failed, unscored = sum(history.finite("rollout/failed")), sum(history.finite("rollout/unscored"))
    share = (failed + unscored) / conversations
    numbers = f"{failed:.0f} failed and {unscored:.0f} unscored of {conversations:.0f} conversations"
    hint = None
    if history.most_common_error is not None:
        hint = f"mend what broke most often: {history.most_common_error}"
    elif not failed:
        hint = "their rewards were None or NaN: return a number for each"
    return graded("failures", share, numbers, hint)


def _observations(history: History) -> Finding | None:
    """Numbers that are all far below or above 1, where the policy does not normalise them."""
    rms = history.end("observation/rms")
    if rms is None:
        return None
    numbers = f"the largest root mean square of an observed number is {rms:.3g}"
    return graded("observations", max(0.05 / rms if rms else math.inf, rms / 20), numbers)


def _truncation(history: History) -> Finding | None:
    """Conversations that were cut by a limit.

    If nearly all are cut, the values of a critic that bootstraps with gamma 1 have no fixed point: the value
    after the cut is its own prediction, plus a reward, for ever.
    """
    share = history.end("rollout/truncated")
    if share is None:
        return None
    training = history.training
    endless = training.get("gamma", 1.0) == 1.0 and training.get("bootstrap_truncated", True)
    if share > 0.9 and endless and history.values("value/explained_variance"):
        numbers = f"{share:.1%} of the last conversations were cut: the critic's values drift without bound"
        hint = "set bootstrap_truncated to false where the limit is part of the task, else gamma below 1"
        return Finding("truncation", "fail", numbers, hint)
    return graded("truncation", share, f"{share:.1%} of the last conversations were cut")


def _dependencies(history: History) -> Finding | None:
    """Retries and timeouts; a breaker that is open at the end fails."""
    conversations, retries = sum(history.finite("rollout/conversations")), history.finite("faults/retries")
    if not conversations or not retries:
        return None
    num_retries, num_timeouts = sum(retries), sum(history.finite("faults/timeouts"))
    outages = sum(history.finite("faults/outages"))
    numbers = f"{num_retries:.0f} tries again, {num_timeouts:.0f} answers too late, {outages:.0f} outages"
    last = next(line.values for line in reversed(history.lines) if "faults/retries" in line.values)
    breakers = [name for name in last if name.startswith("breaker/") and last[name]]
    open_breakers = [name.removeprefix("breaker/") for name in breakers]
    if open_breakers:
        names = " and ".join(open_breakers)
        hint = f"mend {names}, then resume: it failed too often in a row to be asked again at once"
        return Finding("dependencies", "fail", f"{numbers}; down: {', '.join(open_breakers)}", hint)
    return graded("dependencies", (num_retries + num_timeouts) / conversations, numbers)


def _tokens(history: History) -> Finding | None:
    """Shares of the tokens: only the agent's train, those of the environment and padding only cost time."""
    agent, environment = sum(history.finite("tokens/agent")), sum(history.finite("tokens/environment"))
    if not agent:
        return None
    forwarded, padding = sum(history.finite("tokens/forwarded")), sum(history.finite("tokens/padding"))
    padded = padding / max(1.0, forwarded + padding)
    numbers = (
        f"{environment / agent:.3g} tokens of the environment for each of the agent's, {padded:.0%} padding"
    )
    return graded("tokens", max(environment / agent / 50, padded / 0.5), numbers)


def _loop_lag(history: History) -> Finding | None:
    """The median step's longest wait of the event loop.

    At most a warning, since a busy machine has the same effect, above all in short runs and short waits.
    """
    lags = history.finite("time/loop_lag")
    if not lags:
        return None
    typical, of_user = median(lags), history.finite("time/loop_lag_user")
    hint = None
    if of_user:
        is_users = median(of_user) > monitors()["event loop"].warn
        hint = monitors()["event loop"].advice if is_users else OTHER_CODE_HINT
    elif len(lags) < 20 or typical < 0.25:  # a run from before the user's part was measured
        blocking = "make sync code in async tools, rewards and environments plain `def`"
        hint = f"is the machine busy with other work? If not, {blocking}"
    update = history.units().update
    numbers = (
        f"{typical * 1000:.0f} ms at most in the median {update}, {max(lags) * 1000:.0f} ms in the worst"
    )
    return graded("event loop", typical, numbers, hint)


# ------------------------------------------------------------------------------ the learning signal


def _value_bias(history: History) -> Finding | None:
    """A critic's mean advantage should be near zero; for groups it is zero by construction: no finding."""
    means = history.finite("advantage/mean")
    spread = history.end("advantage/std")
    if not spread or len(means) < 5 or not history.values("value/explained_variance"):
        return None
    last = means[-window(means) :]
    mean, error = fmean(last), stdev(last) / math.sqrt(len(last))
    numbers = f"mean advantage {mean:+.3g}, deviation {spread:.3g}"
    distance = abs(mean) / spread if abs(mean) > 2 * error else 0.0
    return graded("value bias", distance, numbers)


def _tied_groups(history: History) -> Finding | None:
    """Groups whose members all have the same reward teach nothing, unless the baseline is of all groups."""
    share = history.end("group/zero_variance")
    if share is None or is_over_batch(history.training.get("baseline_type")):
        return None
    numbers = f"{share:.0%} of the last groups"
    if history.is_solved():
        return Finding("tied groups", "ok", f"{numbers}, as most conversations succeed now")
    if history.units() is NUMERIC:
        hint = (
            "members earn the same: the task is solved, or larger groups and a finer reward tell more apart"
        )
        return graded("tied groups", share, numbers, hint)
    return graded("tied groups", share, numbers)


def _skipped_steps(history: History) -> Finding | None:
    """Steps that changed no weight."""
    skipped = history.values("optimizer/skipped")
    if not skipped:
        return None
    number = sum(value > 0 or math.isnan(value) for value in skipped)
    numbers = f"{number} of {len(skipped)} {history.units().update}s changed no weight"
    if history.is_solved():
        return Finding("skipped steps", "ok", numbers)
    return graded("skipped steps", number / len(skipped), numbers)


def _floor(history: History) -> Finding | None:
    """Success that hardly ever happens, at the end as at the start; no finding where it does. What is never
    sampled is never learned."""
    rates = _success_rates(history)
    if not rates or sum(history.finite("rollout/conversations")) < _MIN_JUDGED:
        return None
    numbers = f"success is at its floor, at most {max(rates):.1%} at the start and at the end"
    finding = graded("floor", -max(rates), numbers)
    return None if finding.verdict == "ok" else finding


_MIN_JUDGED = 32
"""Conversations before which none that succeeds may be chance."""


def _success_rates(history: History) -> list[float]:
    """The judged success rates: of the first and last steps, of held-out scenarios before and after."""
    held_out = [(history.summary.get(when) or {}).get("success") for when in ("before", "after")]
    rates = [history.start("success/rate"), history.end("success/rate"), *held_out]
    return [rate for rate in rates if rate is not None]


def _reward_trend(history: History) -> Finding | None:
    """The last third of the steps against the first, in standard errors of the difference (Welch)."""
    rewards = history.finite("reward/mean")
    third = len(rewards) // 3
    if third < 3:
        return None
    first, last = rewards[:third], rewards[-third:]
    fall = -_standard_errors(first, last)
    numbers = (
        f"{fmean(first):.3g} in the first third of {history.units().update}s, {fmean(last):.3g} in the last"
    )
    if history.is_solved():
        return Finding("reward", "ok", numbers)
    if fall > monitors()["reward"].fail:
        return graded("reward", fall, f"{numbers}: it fell", _skill_hint(history))
    if fall < monitors()["reward"].warn:
        return graded("reward", fall, numbers)
    result = _held_out_result(history)
    if result is not None and result.verdict == "better":
        return Finding("reward", "ok", f"{numbers}: no clear rise, but the held-out result rose: {result}")
    hint = "train longer, raise learning_rate, or take larger groups; check that the reward can be reached"
    return graded("reward", fall, f"{numbers}: no clear rise", _skill_hint(history) or hint)


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
class _HeldOutResult:
    """A result on the same held-out scenarios before and after training, with its 95 % intervals."""

    name: str
    before: float
    after: float
    intervals: tuple[Sequence[float], Sequence[float]]
    n: int
    paired: PairedMean | None = None
    """The difference, scenario by scenario; None where only the two results are known."""

    def __str__(self) -> str:
        style = ".1%" if self.name == "success" else ".3g"
        return f"{self.name} {self.before:{style}} before training, {self.after:{style}} after"

    @property
    def verdict(self) -> Verdict:
        """The verdict on the change: by the pairs, or by intervals that lie apart."""
        if self.paired is not None:
            return self.paired.verdict
        (lowest_before, highest_before), (lowest_after, highest_after) = self.intervals
        if lowest_after > highest_before:
            return "better"
        return "worse" if highest_after < lowest_before else "unclear"

    @property
    def scenarios_needed(self) -> float:
        """About how many scenarios would tell this change: separate the two intervals, or clear the paired
        one of 0."""
        change = abs(self.after - self.before)
        intervals = [self.paired.interval] if self.paired and self.paired.interval else self.intervals
        reach = sum(high - low for low, high in intervals) / 2
        least = FEWEST_SCENARIOS if self.name == "success" else FEWEST_REWARDS
        return max(least, max(1.5, (reach / change) ** 2) * self.n) if change else math.inf


def _held_out_result(history: History) -> _HeldOutResult | None:
    """Success, or the reward if the environment has no success; None if it was not evaluated."""
    before, after = history.summary.get("before") or {}, history.summary.get("after") or {}
    for name, key, interval, compare in (
        ("success", "success", "interval", paired_shares),
        (history.units().reward, "mean_reward", "reward_interval", paired_rewards),
    ):
        old, new = before.get(key), after.get(key)
        if old is None or new is None:
            continue
        paired = compare(history.gains) if history.gains else None
        if paired or (before.get(interval) and after.get(interval)):
            n = round(after["n"] / after.get("tries", 1))
            intervals = (before.get(interval) or (old, old), after.get(interval) or (new, new))
            return _HeldOutResult(name, old, new, intervals, n, paired)
    return None


def _rules(history: History) -> Finding | None:
    """The trained policy against the environment's rules, start by start."""
    rules: Mapping[str, Mapping[str, Any]] = history.summary.get("rules") or {}
    gains = {
        name: (rule["mean_reward"], *(rule["difference_interval"] or [rule["difference"]] * 2))
        for name, rule in rules.items()
        if rule.get("mean_reward") is not None and rule.get("difference") is not None
    }
    after = history.summary.get("after") or {}
    if not gains or after.get("mean_reward") is None or after["n"] < FEWEST_REWARDS:
        return None
    best = max(gains, key=lambda name: gains[name][0])
    weakest = "random" if "random" in gains else min(gains, key=lambda name: gains[name][0])
    of_rules = ", ".join(f"{name} {gains[name][0]:.3g}" for name in dict.fromkeys((weakest, best)))
    numbers = f"return {after['mean_reward']:.3g}, of {of_rules}"
    is_worse, is_better = gains[best][2] < 0, gains[weakest][1] > 0
    if not is_better and (weakest == "random" or (is_worse and best != weakest)):
        return graded("rules", 2.0, f"{numbers}: not shown better than {weakest}")
    return graded("rules", float(is_worse), f"{numbers}: worse than {best}" if is_worse else numbers)


_MAX_SCENARIOS = 1000
"""The most scenarios that advice asks for; a change that needs more is too small to look for."""


def _held_out(history: History) -> Finding | None:
    """Success (or reward) before and after on the same held-out scenarios, paired, or by their 95 % intervals
    where the conversations were not kept.

    If the reward rises and success does not, the reward pays for something else.
    """
    result = _held_out_result(history)
    if result is None:
        return None
    if result.verdict == "better" or (result.name == "success" and result.before >= 0.9):
        return _with_greedy(history, result)
    if result.verdict == "worse":
        cure = _skill_hint(history) or monitors()["held-out"].advice
        return Finding("held-out", "fail", f"{result}: it fell", cure)
    hint = "train longer; where the reward rose, look for what it pays besides success"
    if result.scenarios_needed <= _MAX_SCENARIOS:
        number = _round_up(result.scenarios_needed)
        hint = (
            f"{result.n} {history.units().scenario}s are too few to tell this change: about {number} would "
            f"(evaluation.episodes{'' if history.units() is NUMERIC else ', or evaluation.tries'})"
        )
    why = (result.paired and result.paired.reason) or "no clear change"
    return Finding("held-out", "warn", f"{result}: {why}", _skill_hint(history) or hint)


def _with_greedy(history: History, result: _HeldOutResult) -> Finding:
    """The finding that held-out success rose; a warning where greedy success fell over the same steps and
    its two 95 % intervals do not overlap."""
    before, after = history.summary.get("before") or {}, history.summary.get("after") or {}
    old, new = before.get("greedy"), after.get("greedy")
    if result.name != "success" or old is None or new is None or new >= old:
        return Finding("held-out", "ok", str(result))
    numbers = f"{result} sampled; greedy it fell from {old:.1%} to {new:.1%}"
    lowest_before = (before.get("greedy_interval") or (0.0, 1.0))[0]
    highest_after = (after.get("greedy_interval") or (0.0, 1.0))[1]
    if highest_after >= lowest_before:
        return Finding("held-out", "ok", numbers)
    cure = (
        "the likeliest reply became a wrong one while others rose: raise beta or lower learning_rate, and "
        "serve at the temperature that was trained"
    )
    return Finding("held-out", "warn", numbers, cure)


def _round_up(number: float) -> int:
    """Round up to two digits."""
    unit: int = 10 ** max(0, len(str(math.ceil(number))) - 2)
    return math.ceil(number / unit) * unit


_FORMAT_TERMS = ("reward/pattern", "reward/schema", "reward/is_json")


def _skill_hint(history: History) -> str | None:
    """Advice where a skill is missing: nothing else is learned before some success, and the format."""
    floor = _floor(history)
    if floor is not None:
        return floor.cure
    unreadable = history.end("rollout/malformed")
    shares = [] if unreadable is None else [1 - unreadable]
    shares += [share for name in _FORMAT_TERMS if (share := history.end(name)) is not None]
    if not shares or min(shares) >= 1 - monitors()["tool calls"].warn:
        return None
    return (
        f"a skill is missing: {min(shares):.0%} of the last replies are well-formed. "
        f"{monitors()['tool calls'].advice}; longer training comes after that"
    )


def _reply_length(history: History) -> Finding | None:
    """Tokens of a turn; if the length halves or doubles, the reward often causes it, wanted or not."""
    start, end = history.start("tokens/per_turn"), history.end("tokens/per_turn")
    if not start or not end:
        return None
    numbers = f"{start:.3g} tokens a turn at the start, {end:.3g} at the end"
    return graded("reply length", max(end / start, start / end), numbers)


# ------------------------------------------------------------------------------ replies that think


def _thinking(history: History) -> Finding | None:
    """Words of thoughts, of right and of wrong replies; the one that changed more counts."""
    changes, numbers = [], []
    for verdict in ("right", "wrong"):
        name = f"reasoning/thinking_words_{verdict}"
        start, end = history.start(name), history.end(name)
        if start and end:
            changes.append(max(end / start, start / end))
            numbers.append(f"{start:.3g} at the start and {end:.3g} at the end in {verdict} replies")
    if not changes:
        return None
    return graded("thinking", max(changes), f"words of thinking: {'; '.join(numbers)}")


# ------------------------------------------------------------------------------ what it costs


def _memory(history: History) -> Finding | None:
    """The peak against the limit, of main memory and of the GPU."""
    shares = {}
    for kind, words in (("memory", "memory"), ("memory/gpu", "the GPU's memory")):
        peaks, limits = history.finite(f"{kind}/peak_mib"), history.finite(f"{kind}/limit_mib")
        if peaks and limits and limits[-1]:
            shares[f"{max(peaks):,.0f} of {limits[-1]:,.0f} MiB of {words}"] = max(peaks) / limits[-1]
    if not shares:
        return None
    numbers = max(shares, key=lambda words: shares[words])
    return graded("memory", shares[numbers], f"{numbers} at the peak")


def _generation(history: History) -> Finding | None:
    """Seconds of rollout a sampled token, by step."""
    times = [
        line.values["time/rollout"] / line.values["tokens/agent"]
        for line in history.lines
        if line.values.get("tokens/agent") and math.isfinite(line.values.get("time/rollout", math.nan))
    ]
    if len(times) < 2 * window(times):
        return None
    start, end = median(times[: window(times)]), median(times[-window(times) :])
    slow = sorted(times)[math.ceil(0.95 * len(times)) - 1]
    numbers = (
        f"{start * 1000:.3g} ms a sampled token at the start, {end * 1000:.3g} at the end (median), "
        f"95 % of the steps within {slow * 1000:.3g}"
    )
    return graded("generation", end / start if start > 0 else 1.0, numbers)


def _cache(history: History) -> Finding | None:
    """Answers that a ResponseCache had and those it had not."""
    hits, misses = sum(history.finite("cache/hits")), sum(history.finite("cache/misses"))
    if hits + misses < _MIN_ASKED:
        return None
    share = hits / (hits + misses)
    return graded("cache", 1 - share, f"{share:.1%} of {hits + misses:.0f} answers were known")


_MIN_ASKED = 100
"""Answers before which a cache cannot have repaid itself."""


# ------------------------------------------------------------------------------ the optimiser


def _non_finite(history: History) -> Finding | None:
    """Losses, gradients and KL must be finite; only fp16's scaler may skip infinite gradients."""
    numbers = [
        (name, value)
        for line in history.lines
        for name, value in line.values.items()
        if name.split("/")[0] in _MUST_BE_FINITE
    ]
    non_finite = sorted({name for name, value in numbers if not math.isfinite(value)})
    if not numbers:
        return None
    if not non_finite:
        return Finding("numbers", "ok", "losses, gradients and KL are finite")
    if non_finite == ["optimizer/grad_norm"] and history.training.get("precision") == "fp16":
        return Finding("numbers", "ok", "finite, but for gradients that fp16's scaler skipped")
    return graded("numbers", 1.0, f"not finite in some step: {', '.join(non_finite)}")


_MUST_BE_FINITE = {"loss", "optimizer", "kl", "policy"}


def _gradients(history: History) -> Finding | None:
    """The median norm before clipping. If it is far above max_grad_norm, the clip and not the learning rate
    sets the length of most steps."""
    norms = history.finite("optimizer/grad_norm")
    if not norms:
        return None
    bound = float(history.training.get("max_grad_norm", 1.0))
    typical = median(norms)
    numbers = f"norm {typical:.3g} before clipping at {bound:g} (median; highest {max(norms):.3g})"
    return graded("gradients", typical / bound, numbers)


def _entropy(history: History) -> Finding | None:
    """The entropy relative to its start; a low one is no collapse if the task is solved."""
    start, end = history.start("policy/entropy"), history.end("policy/entropy")
    if start is None or end is None or start <= 0:
        return None
    numbers = f"{start:.3g} nats a {history.units().choice} at the start, {end:.3g} at the end"
    limits = monitors()["entropy"]
    if end > limits.warn * start:
        hint = "lower learning_rate or entropy_coef, raise beta"
        return Finding("entropy", "warn", f"{numbers}: the policy drifts into noise", hint)
    if end < start / limits.fail and history.units() is NUMERIC:
        hint = "fine where one action is clearly best, which ends near 0; else raise entropy_coef"
        return Finding("entropy", "warn", numbers, hint)
    if end < start / limits.fail and not history.is_solved():
        return Finding("entropy", "fail", f"{numbers}: it collapsed", limits.advice)
    return Finding("entropy", "ok", numbers)


def _reference(history: History) -> Finding | None:
    """KL of the policy to its first weights; relative to kl_target if beta is adapted."""
    kl = history.end("kl/reference")
    if kl is None:
        return None
    numbers = f"{kl:.3g} nats a {history.units().choice} at the end"
    if history.training.get("kl_controller", "fixed") == "fixed":
        return graded("KL to the reference", kl, numbers)
    target = float(history.training.get("kl_target", 0.01))
    finding = graded("KL to its target", kl / target, f"{numbers}, kl_target {target:g}")
    return replace(finding, check="KL to the reference")


def _inner_passes(history: History) -> Finding | None:
    """Passes over a batch must not be too many; below the band they hardly move the policy, which is no
    fault. With one pass there is no finding: no weight has moved when the ratio is taken."""
    passes = int(history.training.get("num_iterations", 1))
    low, high = history.end("policy/clip_fraction_low"), history.end("policy/clip_fraction_high")
    moved = history.end("kl/old")
    if passes == 1 or low is None or high is None or moved is None:
        return None
    side = "below" if low + high < 0.1 else "above" if low + high > 0.3 else "within"
    numbers = (
        f"{low + high:.1%} of the {history.units().choice}s clipped, {side} the usual 10 to 30 %, "
        f"KL {moved:.3g} to the policy before them"
    )
    return graded("inner passes", max((low + high) / 0.3, moved / 0.1), numbers)


def _on_policy(history: History) -> Finding | None:
    """The ratio must be 1 on the first pass. No finding with dropout, which changes it on purpose, nor with
    max_staleness, where the ratio is to the policy itself and so always 1."""
    ratios, training = history.finite("policy/first_ratio_max"), history.training
    if not ratios or training.get("dropout") or training.get("max_staleness"):
        return None
    highest = max(ratios)
    numbers = f"highest ratio {highest:.4g} on the first pass"
    return graded("on-policy", highest - 1, numbers)


def _sampler(history: History) -> Finding | None:
    """Gaps between the log-probs that the last steps' rollouts stored and the policy's that is updated."""
    gaps = history.finite("policy/mismatch_rms")
    if not gaps:
        return None
    rms = fmean(gaps[-window(gaps) :])
    largest = max(history.finite("policy/rollout_mismatch")[-window(gaps) :], default=0.0)
    numbers = f"rollouts' log-probs are off the update's by {rms:.2g} (root mean square)"
    if largest:
        numbers += f", one by {largest:.2g}"
    return graded("sampler", max(rms / _MAX_GAP_RMS, largest / _MAX_GAP), numbers)


_MAX_GAP_RMS, _MAX_GAP = 0.15, 1.0
"""In nats: the root mean square of gaps, and the largest one, up to which importance weights help."""


def _off_policy(history: History) -> Finding | None:
    """The mean importance weight of the tokens must be 1, in the median of the last steps."""
    weights = history.finite("policy/weight")
    if not weights:
        return None
    typical = median(weights[-window(weights) :])
    numbers = f"mean importance weight {typical:.3g} in the median of the last steps, 1 is none needed"
    return graded("off-policy", abs(typical - 1), numbers)


def _critic(history: History) -> Finding | None:
    """Explained variance of the returns, the median of the last steps. If nearly all conversations succeed,
    little variance is left to explain."""
    values = history.finite("value/explained_variance")
    if not values:
        return None
    explained = median(values[-window(values) :])
    numbers = (
        f"explains {explained:.0%} of returns' variance in the median of the last {history.units().update}s"
    )
    if history.is_solved():
        return Finding("value function", "ok", f"{numbers}, of which little is left")
    return graded("value function", -explained, numbers)


def _at_end(
    check: str, metric: str, numbers: str, badness: Callable[[float], float] = lambda value: value
) -> Check:
    """A check of one metric at the end of the run: `badness` of its value is graded, `numbers` formats it."""

    def grade(history: History) -> Finding | None:
        value = history.end(metric)
        return None if value is None else graded(check, badness(value), numbers.format(value))

    return grade


_CUT = "{:.1%} of the last replies were cut by their limit of tokens"
_FORMAT = "{:.1%} of the last replies are a thought and an answer in their tags"
_STEPS = "steps and difficulty of the last right replies have rank correlation {:.2f}"
_UNREADABLE = "{:.1%} of the last turns hold an unreadable call"
_UNTRAINED = "{:.0%} of the prompts' tokens are none that the model was trained on"

CHECKS: Mapping[str, Check] = {
    "floor": _floor,
    "held-out": _held_out,
    "rules": _rules,
    "reward": _reward_trend,
    "vocabulary": _at_end("vocabulary", "tokens/untrained", _UNTRAINED),
    "observations": _observations,
    "failures": _failures,
    "dependencies": _dependencies,
    "truncation": _truncation,
    "cut replies": _at_end("cut replies", "rollout/cut_replies", _CUT),
    "tool calls": _at_end("tool calls", "rollout/malformed", _UNREADABLE),
    "tokens": _tokens,
    "advantages": _at_end("advantages", "advantage/std", "deviation {:.3g} before scaling"),
    "tied groups": _tied_groups,
    "skipped steps": _skipped_steps,
    "numbers": _non_finite,
    "gradients": _gradients,
    "entropy": _entropy,
    "KL to the reference": _reference,
    "inner passes": _inner_passes,
    "on-policy": _on_policy,
    "sampler": _sampler,
    "off-policy": _off_policy,
    "value function": _critic,
    "value bias": _value_bias,
    "reply length": _reply_length,
    "format": _at_end("format", "reasoning/format", _FORMAT, lambda share: 1 - share),
    "thinking": _thinking,
    "steps of thinking": _at_end("steps of thinking", "reasoning/steps_by_difficulty", _STEPS, neg),
    "memory": _memory,
    "generation": _generation,
    "cache": _cache,
    "event loop": _loop_lag,
}
"""The checks by the names of their monitors, in the order in which findings are shown."""


# ------------------------------------------------------------------------------ all checks of a run


def diagnose(log: RunLog) -> list[Finding]:
    """The findings of a run, in a fixed order. Raises ConfigurationError where a file is damaged.

    >>> all_passed(diagnose(RunLog.open("runs/latest")))
    True
    """
    with damage_named(log.folder.path):
        training = log.config().get("training")
        settings = training if isinstance(training, Mapping) else {}
        history = History(list(log.metrics()), settings, log.summary(), gains=held_out_gains(log))
        if sum(history.finite("rollout/failed")) + sum(history.finite("rollout/unscored")):
            history = replace(history, most_common_error=_most_common_error(log))
        return [finding for check in CHECKS.values() if (finding := check(history)) is not None]


def _most_common_error(log: RunLog) -> str | None:
    errors = Counter(rollout.error for rollout in log.rollouts("train") if rollout.error)
    for error, times in errors.most_common(1):
        return f"{error} ({times} times)" if times > 1 else error
    return None


def all_passed(findings: Sequence[Finding]) -> bool:
    """True when no finding is a warning or worse."""
    return all(finding.verdict == "ok" for finding in findings)


def live_findings(history: History) -> list[Finding]:
    """The findings to report during the run: problems that do not pass by themselves."""
    live_checks = [check for name, check in CHECKS.items() if monitors()[name].live is not None]
    findings = [finding for check in live_checks if (finding := check(history)) is not None]
    return [finding for finding in findings if finding.verdict in ("fail", monitors()[finding.check].live)]
