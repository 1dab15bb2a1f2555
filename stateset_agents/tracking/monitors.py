"""The table of health monitors: what is measured, its thresholds, and advice.

Used by the checks of `diagnostics` and by the trainer's live warnings (`runs.warnings`); the report and
`stateset-agents diagnose` show their findings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["ok", "warn", "fail"]

_SIGNS: Mapping[Severity, str] = {"ok": "✓", "warn": "!", "fail": "✗"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Severity
    seen: str
    """The numbers."""
    cure: str = ""
    """What to do about it; empty if the verdict is ok."""

    @property
    def sign(self) -> str:
        return _SIGNS[self.verdict]

    def __str__(self) -> str:
        line = f"{self.sign} {self.check}: {self.seen}"
        return f"{line} -> {self.cure}" if self.cure else line


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitor:
    """Thresholds of one check."""

    warn: float
    """Above it the check warns."""
    fail: float = math.inf
    """Above it the check fails."""
    advice: str
    """What to do about it, in plain words."""
    live: Severity | None = None
    """The least verdict that is logged during the run; None: only at its end, since it may pass by itself."""
    why: str
    """What is measured, and the reason for the thresholds."""


def graded(check: str, value: float, seen: str, advice: str | None = None) -> Finding:
    """Ok up to `warn`, a warning up to `fail`; `advice` replaces that of the table."""
    monitor = MONITORS[check]
    verdict: Severity = "fail" if value > monitor.fail else "warn" if value > monitor.warn else "ok"
    return Finding(check, verdict, seen, "" if verdict == "ok" else advice or monitor.advice)


MONITORS: Mapping[str, Monitor] = {
    "floor": Monitor(
        warn=-0.01,
        fail=-0.01,
        why="success below 1 % in the first and the last steps and on held-out scenarios: GRPO raises what "
        "it samples (our choice)",
        advice="warm start first, on conversations that go well (demonstrate, then sft; or distill)",
    ),
    "vocabulary": Monitor(
        warn=0.05,
        fail=0.25,
        live="warn",
        why="share of the prompts' tokens that a model that keeps its trained_tokens.json was not trained on "
        "(our choice)",
        advice="an embedded model knows the words of its own environment alone: train it there, or take a "
        "language model",
    ),
    "observations": Monitor(
        warn=1.0,
        why="the largest root mean square of an observed number below .05 or above 20: a network of tanh "
        "layers sees all of it alike (our choice)",
        advice="set policy.normalize_observations to true, or scale what the environment shows to about 1",
    ),
    "failures": Monitor(
        warn=0.01,
        fail=0.1,
        live="fail",
        why="share of conversations that broke off or that no reward could be given (our choice)",
        advice="read `error` of those conversations in rollouts.jsonl: the environment, a tool or the reward",
    ),
    "dependencies": Monitor(
        warn=0.1,
        fail=1.0,
        live="fail",
        why="tries again and answers that came too late, for each conversation (our choice)",
        advice="mend what is slow or flaky: tries again cost time, and make the run not repeatable",
    ),
    "truncation": Monitor(
        warn=0.1,
        fail=0.5,
        why="share of the last conversations that a limit cut (our choice)",
        advice="raise max_turns, agent.max_new_tokens or max_context_tokens (with history compact "
        "agent.compact_room, where metadata says context_overflow), or let the reward ask for brevity",
    ),
    "cut replies": Monitor(
        warn=0.1,
        fail=0.5,
        live="warn",
        why="share of the last replies that max_new_tokens or the context cut (our choice): the reward then "
        "judges half an answer",
        advice="raise agent.max_new_tokens (or max_context_tokens), or ask for shorter replies in the "
        "system prompt",
    ),
    "tool calls": Monitor(
        warn=0.05,
        fail=0.2,
        why="share of turns with an unreadable call: over 95 % well-formed is the usual bar for a format, "
        "below 80 % little else is learned",
        advice="warm the model up on well-formed calls, or let the reward pay for form first",
    ),
    "tokens": Monitor(
        warn=1.0,
        why="environment tokens for each of the agent's over 50, or padding over half of what is forwarded "
        "(our choice): most of the computing then teaches nothing",
        advice="shorten the system prompt and tool results, or set row_layout to packed",
    ),
    "event loop": Monitor(
        warn=0.05,
        why="seconds of the median step's longest wait: 50 ms is felt by a server's callers",
        advice="make sync code in async tools, rewards and environments plain `def`, or give the machine "
        "less to do",
    ),
    "advantages": Monitor(
        warn=3.0,
        live="warn",
        why="their deviation before scaling, after which it is 1 by construction: over 3 is noise for "
        "a learner",
        advice="scale the reward to about one, take larger groups (num_generations), vary the scenarios",
    ),
    "value bias": Monitor(
        warn=0.1,
        why="a critic's mean advantage over their deviation, where it is more than two standard errors",
        advice="it expects too much or too little: raise value_learning_rate",
    ),
    "tied groups": Monitor(
        warn=0.5,
        fail=0.9,
        why="share of groups whose members all have the same reward (our choice)",
        advice="the reward cannot tell the members apart: easier or more varied scenarios, partial credit, a "
        "larger num_generations",
    ),
    "skipped steps": Monitor(
        warn=0.2,
        fail=0.5,
        live="fail",
        why="share of steps that changed no weight (our choice)",
        advice="read events.jsonl and the reward: no group had members that differ, or gradients were not "
        "finite",
    ),
    "reward": Monitor(
        warn=-2.0,
        fail=2.0,
        why="standard errors by which the last third of the steps lies below the first (Welch)",
        advice="lower learning_rate, raise beta",
    ),
    "held-out": Monitor(
        warn=0.0,
        why="success before and after on the same scenarios, paired: whether the 95 % interval holds 0",
        advice="lower learning_rate, raise beta; read what the conversations of the highest reward do",
    ),
    "rules": Monitor(
        warn=0.5,
        fail=1.5,
        why="a numeric run's held-out returns against the environment's rules, from the same starts: 1 is "
        "worse than the best rule, 2 not better than `random` or the weakest",
        advice="take the rule, or train longer; where the return does not rise, look at what is observed",
    ),
    "reply length": Monitor(
        warn=2.0,
        why="tokens of a turn at the end over those at the start, or the other way round",
        advice="read some conversations of the report: does the reward pay for length, or for saying "
        "nothing?",
    ),
    "format": Monitor(
        warn=0.05,
        fail=0.2,
        why="share of the last replies that are not one thought and one answer in their tags, where the "
        "reward asks for it: over 95 % is the usual bar, below 80 % little else is learned",
        advice="warm the model up on replies in the format, or let the reward pay more for it first",
    ),
    "thinking": Monitor(
        warn=2.0,
        why="words of thoughts at the end over those at the start, or the other way round, of right replies "
        "and of wrong ones apart: a mean over each reply's tokens makes wrong replies longer by itself "
        "(https://arxiv.org/abs/2503.20783), and length alone proves nothing",
        advice="read right and wrong thoughts in the report; where only wrong ones grow take a loss_type "
        "that divides by a constant (docs/algorithms.md)",
    ),
    "steps of thinking": Monitor(
        warn=-0.3,
        why="rank correlation of steps and difficulty among right replies, times -1: below .3 the agent does "
        "not think longer where there is more to do (our choice)",
        advice="harder problems beside easy ones; read whether thoughts do the work or decorate the answer",
    ),
    "memory": Monitor(
        warn=0.9,
        fail=0.98,
        live="warn",
        why="the process's peak over what the machine, its container or its GPU has (our choice)",
        advice="lower micro_batch_tokens or agent.max_cached_tokens, set rollout_sleep or "
        "gradient_checkpointing; docs/memory.md counts weights and optimiser",
    ),
    "generation": Monitor(
        warn=2.0,
        why="seconds of rollout for each sampled token, its median at the end over that at the start (our "
        "choice): longer contexts slow it down, so does a busy machine, environment or judge",
        advice="compare tokens/per_turn, time/loop_lag and engine/occupancy of the same steps",
    ),
    "cache": Monitor(
        warn=0.9,
        why="share of asked answers that a ResponseCache did not have, of a hundred and more (our choice); "
        "evaluation and distillation alone may use one",
        advice="it does not repay its memory: has the model's version or a sampling setting changed at each "
        "call?",
    ),
    "numbers": Monitor(
        warn=0.0,
        fail=0.0,
        live="fail",
        why="losses, gradients and KL that are not finite; only fp16's scaler may skip infinite gradients",
        advice="lower learning_rate, use precision fp32 or bf16, look at the rewards",
    ),
    "gradients": Monitor(
        warn=2.0,
        fail=5.0,
        live="fail",
        why="median norm before clipping over max_grad_norm: 2 and 5 are for the usual max_grad_norm of 1",
        advice="check the scale of the rewards, take larger batches, lower learning_rate",
    ),
    "entropy": Monitor(
        warn=2.0,
        fail=10.0,
        live="fail",
        why="of the policy, over its own start, as its scale is the vocabulary's and the model's: above "
        "`warn` times it the policy drifts into noise, below a `fail`-th of it it has collapsed",
        advice="lower learning_rate, raise entropy_coef or beta: nothing new is tried any more",
    ),
    "KL to the reference": Monitor(
        warn=0.5,
        fail=2.0,
        live="fail",
        why="nats a token: at half of one, a reply of 20 tokens is e^10 times likelier than before (our "
        "choice)",
        advice="raise beta or lower learning_rate",
    ),
    "KL to its target": Monitor(
        warn=1.5,
        fail=10.0,
        live="fail",
        why="over kl_target where beta moves: the controllers' own band is half of it",
        advice="let beta start higher, or lower learning_rate",
    ),
    "inner passes": Monitor(
        warn=1.0,
        fail=3.0,
        live="fail",
        why="share of tokens clipped over .3, or approximate KL to the policy before the passes over .1, "
        "where there is more than one pass; with one both are 0",
        advice="lower num_iterations or learning_rate",
    ),
    "on-policy": Monitor(
        warn=0.05,
        fail=0.5,
        live="fail",
        why="highest ratio of the first pass less 1: no weight has moved, so sampler and learner disagree; "
        "one token may be off by a few per cent in bf16",
        advice="the stored log-probs are not the policy's: report this, with the model's name and versions",
    ),
    "off-policy": Monitor(
        warn=0.1,
        fail=0.5,
        live="fail",
        why="how far the mean of policy/weight is from 1: the ratio of two policies is 1 in the mean over "
        "what the lower one samples, if its log-probs are stored right and the cap cuts little (.1 is our "
        "choice); at half, the mean is as far off as single tokens are usually let be, .5 to 2",
        advice="sampler and learner drift apart: lower max_staleness or learning_rate; where rollouts are in "
        "half precision or a server's, set agent.dtype to fp32 to see whether rounding does it",
    ),
    "value function": Monitor(
        warn=-0.1,
        fail=0.0,
        why="explained variance of the returns, times -1: 1 is perfect, 0 no better than a constant",
        advice="raise value_learning_rate or value_iterations; until it predicts, prefer a group estimator",
    ),
}

MAX_TIED_STEPS = 3
"""Steps in a row without two different rewards in any group, after which it is said at once."""
MAX_LOOP_LAG = 1.0
"""Seconds without the event loop, from which on it is said at once."""
OTHER_CODE_HINT = (
    "no code of yours was seen there: is the machine busy with other work, or does an installed environment, "
    "tool or reward block?"
)
"""What to do where the event loop waits for other code than the user's."""
