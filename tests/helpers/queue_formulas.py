"""What makes a wait's distribution, Erlang B, and what follows from it: Erlang C, the mean wait, and the
response's tail and quantiles."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from stateset_agents.numeric.autoscaling.queueing import Array, WaitingTime

__all__ = ["erlang_b", "erlang_c", "mean_wait", "response_quantile", "response_tail", "waiting_ratio"]

_LEAST_RATE = 1e-9
"""1/s. A smaller difference of rates counts as this one: what is divided by it has a limit there (0/0)."""
_MOST_EXPONENT = 700.0
"""exp of more overflows a float64."""


def erlang_b(servers: int, load: ArrayLike) -> Array:
    """The share of requests that find all servers busy where nobody waits. `load`: lambda / mu.

    By the recursion 1/B_c = 1 + c/a 1/B_{c-1}, which adds positive terms only.

    >>> float(erlang_b(2, 1.0))
    0.2
    """
    offered = np.asarray(load, dtype=np.float64)
    inverse = np.ones_like(offered)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        for count in range(1, servers + 1):
            inverse = 1.0 + inverse * (count / offered)
    return np.where(offered > 0, 1.0 / inverse, 0.0 if servers else 1.0)


def waiting_ratio(servers: int, utilization: ArrayLike) -> Array:
    """rho B(c - 1, c rho), exactly, as `RatioTable` reads it."""
    rho = np.asarray(utilization, dtype=np.float64)
    return rho * erlang_b(servers - 1, servers * rho)


def erlang_c(servers: int, utilization: ArrayLike) -> Array:
    """The share of requests that wait, where nobody leaves; 1 from utilization 1 on.

    >>> round(float(erlang_c(2, 0.5)), 6)
    0.333333
    """
    rho = np.asarray(utilization, dtype=np.float64)
    ratio = waiting_ratio(servers, rho)
    return np.where(rho < 1, ratio / (ratio + np.maximum(1 - rho, 0.0)), 1.0)


def mean_wait(waiting: WaitingTime) -> Array:
    """s, of those that are served."""
    bounded = np.minimum(waiting.decay * waiting.limit, _MOST_EXPONENT)
    is_small = np.abs(bounded) < 1e-4
    divisor = np.where(is_small, 1.0, waiting.decay)
    exact = (1.0 - np.exp(-bounded) * (1.0 + bounded)) / divisor**2
    with np.errstate(invalid="ignore"):  # no limit, and no decay: not read
        series = waiting.limit**2 * (0.5 - bounded / 3.0)
    return waiting.density * np.where(is_small, series, exact) / (1.0 - waiting.dropped)


def response_tail(waiting: WaitingTime, service_rate: ArrayLike, time: ArrayLike) -> Array:
    """The share of the served whose wait and service together take longer than `time`.

    `service_rate`: 1/s, of one request's own service. The sum of two exponential times has the tail

        mu (e^(-mu t) - e^(-theta t)) / (theta - mu)

    which is 0/0 where both rates are equal. It is written with expm1 and the rates' distance, so that it goes
    through that place smoothly.
    """
    rate = np.asarray(service_rate, dtype=np.float64)
    time = np.asarray(time, dtype=np.float64)
    decay = waiting.decay
    waited = np.minimum(time, waiting.limit)
    own = rate * time
    distance = decay - rate
    size = np.maximum(np.abs(distance), _LEAST_RATE)
    # the integral over waits w of e^(-theta w) e^(-mu (t - w)) from 0 to `waited`
    lowest = own + np.minimum(distance * waited, 0.0)
    both = np.exp(-lowest) * -np.expm1(-size * waited) / size
    # the integral of e^(-theta w) from `waited` to the limit: still waiting at `time`
    rest = np.minimum(decay * (waiting.limit - waited), _MOST_EXPONENT)
    still = np.exp(-decay * waited) * -np.expm1(-rest) / decay
    tail = waiting.at_once * np.exp(-own) + waiting.density * (both + still)
    result: Array = tail / (1.0 - waiting.dropped)
    return result


def response_quantile(waiting: WaitingTime, service_rate: ArrayLike, share: float) -> Array:
    """s: the time within which `share` of the served are answered, by bisection to 1e-12 of it."""
    rate = np.asarray(service_rate, dtype=np.float64)
    low = np.zeros(np.broadcast_shapes(waiting.at_once.shape, rate.shape))
    high = np.full_like(low, 1.0) / rate
    while (is_short := response_tail(waiting, rate, high) > 1 - share).any():
        high = np.where(is_short, 2 * high, high)
    for _ in range(100):
        middle = (low + high) / 2
        is_short = response_tail(waiting, rate, middle) > 1 - share
        low, high = np.where(is_short, middle, low), np.where(is_short, high, middle)
    return high
