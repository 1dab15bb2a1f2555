"""The M/M/c queue: the share of requests that wait, and how long, also where requests leave in time.

Requests arrive as a Poisson process, each of c servers takes an exponential time with rate mu for one, and
the oldest is served first. The simulator calls it once per step for all rows.

    utilization  rho = lambda / (c mu)              theta = c mu - lambda, the rate at which the wait falls
    wait         0, or exponential with rate theta  (Erlang C; Kleinrock, Queueing Systems I, 1975, 3.5)
    response     wait + service                     (hypoexponential in its tail)

With a time limit on the wait (M/M/c+D) the density of the wait is the same up to the limit, and only its
scale changes, so that it exists for any load (Barrer, Operations Research 5, 1957; Baccelli and Hebuterne,
1981).
All times are in seconds, all rates in 1/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stateset_agents.types.errors import ConfigurationError

Array = NDArray[np.float64]

_LEAST_RATE = 1e-9
"""1/s. A smaller difference of rates counts as this one: what is divided by it has a limit there (0/0)."""
_MOST_EXPONENT = 700.0
"""exp of more overflows a float64."""


@dataclass(frozen=True, slots=True, eq=False)
class RatioTable:
    """The waiting ratio rho B(c - 1, c rho), with Erlang's loss formula B, c servers and utilization rho: the
    one quantity by which the number of servers enters a queue's mean wait.

    Of 1 to C servers, on a grid of utilizations from 0 to 1, read linearly in between. It lies between 0 and
    about 1 and is smooth in rho, also at 1 and above.
    """

    values: Array  # [C + 1, intervals + 2]; row 0 is of no server: nothing waits there
    intervals: int

    @classmethod
    def upto(cls, max_servers: int, intervals: int = 512) -> Self:
        """Made once per process for each pair of sizes."""
        if max_servers < 1:
            raise ConfigurationError(f"a queue needs at least 1 server, got {max_servers!r}")
        return cls(_ratios(max_servers, intervals), intervals)

    def __call__(self, servers: NDArray[np.int64], utilization: Array) -> Array:
        """Ratios of servers and utilizations of one shape; a utilization above 1 counts as 1."""
        place = np.minimum(utilization, 1.0) * self.intervals
        left = place.astype(np.int64)
        share = place - left
        flat = self.values.ravel()
        index = servers * self.values.shape[1] + left
        low = flat.take(index)
        read: Array = low + share * (flat.take(index + 1) - low)
        return read


@lru_cache(maxsize=4)
def _ratios(max_servers: int, intervals: int) -> Array:
    """By the recursion 1/B_c = 1 + c/a 1/B_{c-1} in the load a, which adds positive terms only."""
    rho = np.arange(intervals + 1) / intervals
    inverse = np.ones((max_servers + 1, intervals + 1))  # 1 / B(k, c rho) of the servers c that are not done
    servers = np.arange(max_servers + 1, dtype=np.float64)[:, None]
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        reciprocal = 1.0 / (servers * rho)
        for count in range(1, max_servers):
            rows = slice(count + 1, None)
            inverse[rows] = 1.0 + inverse[rows] * (count * reciprocal[rows])
        values = rho / inverse
    values[:, 0], values[0] = 0.0, 0.0
    values = np.concatenate([values, values[:, -1:]], axis=1)  # 1 reads the next, times 0
    values.flags.writeable = False
    return values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitingTime:
    """Distribution of the wait for a server; arrays of one shape."""

    at_once: Array
    """The share that does not wait."""
    density: Array
    """1/s, of waits just above 0: density exp(-decay w) follows, up to the limit."""
    decay: Array
    """1/s: c mu - lambda; below 0 where more arrives than can be served."""
    limit: Array
    """s: who has waited as long as this leaves."""
    dropped: Array
    """The share that leaves."""

    @property
    def waits(self) -> Array:
        """The share that does not begin at once, those that leave included."""
        return 1.0 - self.at_once


def waiting_time(
    ratio: ArrayLike, capacity: ArrayLike, utilization: ArrayLike, limit: ArrayLike = np.inf
) -> WaitingTime:
    """The stationary wait. `ratio`: `waiting_ratio`; `capacity`: c mu, 1/s; `limit`: s.

    Without a limit the utilization must be below 1. With v the density at 0 the shares add up to 1:

        v / ratio / (c mu)  +  v (1 - e^(-theta limit)) / theta  +  v e^(-theta limit) / (c mu)  =  1
        no wait                served after a wait                  leaves
    """
    ratio, capacity = np.asarray(ratio, dtype=np.float64), np.asarray(capacity, dtype=np.float64)
    limit = np.asarray(limit, dtype=np.float64)
    decay = capacity * (1.0 - np.asarray(utilization, dtype=np.float64))
    decay = np.where(np.abs(decay) < _LEAST_RATE, _LEAST_RATE, decay)  # what is divided by it has a limit
    exponent = np.minimum(-decay * limit, _MOST_EXPONENT)
    leaving = np.exp(exponent)
    queued = leaving - capacity * np.expm1(exponent) / decay
    scale = ratio / (1.0 + ratio * queued)
    return WaitingTime(
        at_once=1.0 - scale * queued,
        density=scale * capacity,
        decay=decay,
        limit=limit,
        dropped=scale * leaving,
    )
