"""A queue with c servers, request by request, with a heap: the truth that closed forms are compared with."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Simulated", "simulate_queue"]


@dataclass(frozen=True)
class Simulated:
    waits: float
    """Share of the requests that did not begin at once."""
    mean_wait: float
    """s, of the served."""
    dropped: float
    """Share of the requests."""
    responses: NDArray[np.float64]
    """s, of the served."""


def simulate_queue(
    servers: int,
    utilization: float,
    customers: int,
    *,
    seed: int,
    service_rate: float = 1.0,
    limit: float = math.inf,
) -> Simulated:
    """The oldest first; who would wait longer than `limit` leaves unserved. A tenth more warms it up."""
    generator = np.random.default_rng(seed)
    warmup = customers // 10
    total = customers + warmup
    arrivals = np.cumsum(generator.exponential(1 / (servers * service_rate * utilization), total)).tolist()
    services = generator.exponential(1 / service_rate, total).tolist()
    free = [0.0] * servers
    waits = np.empty(total)
    for index, (arrival, service) in enumerate(zip(arrivals, services, strict=True)):
        wait = max(free[0] - arrival, 0.0)
        waits[index] = wait
        if wait <= limit:
            heapq.heapreplace(free, arrival + wait + service)
    waits, served = waits[warmup:], waits[warmup:] <= limit
    return Simulated(
        waits=float((waits > 0).mean()),
        mean_wait=float(waits[served].mean()),
        dropped=float(1 - served.mean()),
        responses=waits[served] + np.array(services[warmup:])[served],
    )
