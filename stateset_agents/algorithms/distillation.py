"""On-policy distillation: what a teacher thinks of the student's own tokens, as their advantages.

The student pi_S samples, and a token's signal is log pi_T - log pi_S of it, without gradient: -k1 of `kl`,
with the teacher pi_T in the reference's place. What of it each token gets decides which gradient is followed,
where all tokens count alike (`loss_type: dr_grpo`):

    credit      a token gets                   it goes down the expected gradient of
    token       its own signal (discount 0)    KL(pi_S || pi_T) of the next token, summed over the contexts
                                               that the student comes to, which are taken as they are
    to_go       its own and all later ones'    KL(pi_S || pi_T) of whole conversations
    turn_sum    the sum over its turn          KL(pi_S || pi_T) of each turn, in contexts taken as they are
    turn_mean   the mean over its turn         no KL: that of turn_sum, divided by each turn's length

`token` has the least noise, and is what https://thinkingmachines.ai/blog/on-policy-distillation/ uses; it
does not see what an early token does to later ones. GKD (https://arxiv.org/abs/2306.13649) sums over the
vocabulary instead of sampling.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, get_args

from stateset_agents.types.errors import ConfigurationError

TeacherCredit = Literal["token", "to_go", "turn_sum", "turn_mean"]
_MOST = 20.0
"""Nats, as in `kl.log_ratio`: one token that the teacher rules out does not drown a step."""


def teacher_signal(teacher_logprobs: Sequence[float], student_logprobs: Sequence[float]) -> list[float]:
    """[N] log pi_T - log pi_S of each token, within ±20 nats.

    >>> teacher_signal([-1.0, -0.5], [-0.5, -2.0])
    [-0.5, 1.5]
    """
    pairs = zip(teacher_logprobs, student_logprobs, strict=True)
    return [max(-_MOST, min(_MOST, teacher - student)) for teacher, student in pairs]


def teacher_advantages(
    signal: Sequence[float], tokens_per_turn: Sequence[int], credit: TeacherCredit = "token"
) -> list[float]:
    """[N] what each token of a conversation gets of `teacher_signal`.

    >>> teacher_advantages([1.0, 2.0, 4.0], [2, 1], "to_go")
    [7.0, 6.0, 4.0]
    >>> teacher_advantages([1.0, 2.0, 4.0], [2, 1], "turn_mean")
    [1.5, 1.5, 4.0]

    Raises ConfigurationError for another credit.
    """
    if credit == "token":
        return list(signal)
    if credit == "to_go":
        return list(itertools.accumulate(reversed(signal)))[::-1]
    if credit not in get_args(TeacherCredit):
        raise ConfigurationError(f"credit must be {', '.join(get_args(TeacherCredit))}, got {credit!r}")
    shared: list[float] = []
    for count in tokens_per_turn:
        total = sum(signal[len(shared) : len(shared) + count])
        shared += [total / count if credit == "turn_mean" else total] * count
    return shared
