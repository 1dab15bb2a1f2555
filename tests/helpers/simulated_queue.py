"""A queue with c servers, request by request, with a heap: the truth that closed forms are compared with."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Simulated", "SimulatedSteps", "simulate_queue", "simulate_steps"]


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


@dataclass(frozen=True)
class SimulatedSteps:
    arrived: NDArray[np.float64]  # [T], as the others
    dropped: NDArray[np.float64]
    late: NDArray[np.float64]
    """Dropped, or answered after the promise."""


def simulate_steps(
    rates: NDArray[np.float64],
    servers: int,
    *,
    step_seconds: float,
    service_rate: float,
    limit: float,
    promise: float,
    seed: int,
) -> SimulatedSteps:
    """Steps of constant rates, one after the other, from an empty queue on."""
    generator = np.random.default_rng(seed)
    free = [0.0] * servers
    counts = np.zeros((3, len(rates)))
    for step, rate in enumerate(rates):
        number = generator.poisson(rate * step_seconds)
        arrivals = np.sort(generator.uniform(step * step_seconds, (step + 1) * step_seconds, number))
        services = generator.exponential(1 / service_rate, number)
        dropped = late = 0
        for arrival, service in zip(arrivals.tolist(), services.tolist(), strict=True):
            wait = max(free[0] - arrival, 0.0)
            if wait > limit:
                dropped += 1
                continue
            heapq.heapreplace(free, arrival + wait + service)
            late += wait + service > promise
        counts[:, step] = number, dropped, dropped + late
    return SimulatedSteps(*counts)
