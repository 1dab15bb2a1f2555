"""A step of a cluster: what comes in goes out, when replicas are ready, and what each setting changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from queue_formulas import response_quantile, waiting_ratio
from simulated_queue import simulate_steps

from stateset_agents.numeric.autoscaling.queueing import waiting_time
from stateset_agents.numeric.autoscaling.simulator import Cluster, Fleet, Served, Simulator
from stateset_agents.types.errors import ConfigurationError

CLUSTER = Cluster()
REPLICAS = 10
CAPACITY = REPLICAS * CLUSTER.replica_capacity


def fleet_of(simulator: Simulator, rows: int = 1, replicas: int = REPLICAS) -> Fleet:
    return simulator.scale(
        simulator.start(np.full(rows, 1e9)), np.full(rows, replicas)
    )  # down to it, without a start-up


def steady(simulator: Simulator, load: float, rows: int, steps: int = 6, **settings: np.ndarray) -> Served:
    """The last of some steps at a load, by the capacity in the configuration of the start."""
    fleet = replace(fleet_of(simulator, rows), **settings)
    for _ in range(steps):
        fleet, outcome = simulator.serve(fleet, np.full(rows, load * CAPACITY))
    return outcome


def test_nothing_is_lost_or_made() -> None:
    """served + dropped + queued = arrived, over any scaling, any setting, any load."""
    simulator = Simulator(CLUSTER, canary=True)
    dice = np.random.default_rng(0)
    rows = 64
    fleet = simulator.start(dice.uniform(100, 4000, rows))
    total = np.zeros((3, rows))
    for _ in range(60):
        fleet = simulator.scale(fleet, simulator.bounded(dice.integers(0, 20, rows)))
        fleet = replace(
            fleet,
            batch=dice.integers(0, 5, rows),
            timeout=dice.integers(0, 7, rows),
            concurrency=dice.integers(0, 5, rows),
            weight=dice.integers(0, 11, rows) / 10,
        )
        before = fleet.backlog
        fleet, out = simulator.serve(fleet, dice.uniform(0, 6000, rows))
        assert np.allclose(out.served + out.dropped + out.queued, out.arrived + before, rtol=1e-9)
        assert min(part.min() for part in (out.served, out.dropped, out.queued)) >= 0
        assert (out.served <= out.capacity * CLUSTER.step_seconds * (1 + 1e-9) + 1e-3).all()
        assert ((out.late_share >= 0) & (out.late_share <= 1 + 1e-12)).all()
        assert (out.late_share >= out.dropped_share - 1e-12).all()
        total += [part.sum(axis=0) for part in (out.arrived, out.served, out.dropped)]
    arrived, served, dropped = total
    assert np.allclose(served + dropped + fleet.backlog.sum(axis=0), arrived, rtol=1e-9)


@pytest.mark.parametrize(("seconds", "steps"), [(60.0, 4), (50.0, 4), (15.0, 1), (0.0, 0)])
def test_a_replica_serves_when_its_start_up_is_over_and_not_a_step_earlier(
    seconds: float, steps: int
) -> None:
    simulator = Simulator(Cluster(startup_seconds=seconds))
    fleet = simulator.scale(fleet_of(simulator), np.array([REPLICAS + 3]))
    serving, paid = [], []
    for _ in range(6):
        fleet, outcome = simulator.serve(fleet, np.array([100.0]))
        serving.append(round(float(outcome.capacity.sum()) / CLUSTER.replica_capacity))
        paid.append(round(float(outcome.cost_per_hour[0]) / CLUSTER.price_per_replica_hour))
    assert serving == [REPLICAS] * steps + [REPLICAS + 3] * (6 - steps)
    assert paid == [REPLICAS + 3] * 6


def test_what_started_last_stops_first_and_ready_replicas_stop_at_once() -> None:
    simulator = Simulator(CLUSTER)
    fleet = simulator.scale(fleet_of(simulator), np.array([12]))
    fleet, _ = simulator.serve(fleet, np.array([100.0]))
    fleet = simulator.scale(fleet, np.array([15]))
    assert fleet.starting[:, 0, 0].tolist() == [0, 0, 2, 3]
    fleet = simulator.scale(fleet, np.array([11]))
    assert (fleet.ready.item(), fleet.starting[:, 0, 0].tolist()) == (10, [0, 0, 1, 0])
    fleet = simulator.scale(fleet, np.array([8]))
    assert (fleet.ready.item(), fleet.starting.sum()) == (8, 0)


@pytest.mark.parametrize("timeout", [0.1, 0.5])
def test_a_surge_and_its_end_are_those_of_a_queue_played_request_by_request(timeout: float) -> None:
    cluster = Cluster(batch_size=1, timeout=timeout)
    simulator, servers = Simulator(cluster), 20
    service_rate = 1 / cluster.service_seconds
    rates = servers * service_rate * np.array([0.6, 0.9, 1.3, 1.05, 0.9, 0.6])
    fleet = fleet_of(simulator, replicas=5)
    late, dropped = [], []
    for rate in rates:
        fleet, outcome = simulator.serve(fleet, np.array([rate]))
        late.append(outcome.late_share[0])
        dropped.append(outcome.dropped_share[0])
    found = simulate_steps(
        rates, servers, step_seconds=15.0, service_rate=service_rate, limit=timeout, promise=0.2, seed=1
    )
    weights = found.arrived / found.arrived.sum()
    assert np.array(dropped) @ weights == pytest.approx(found.dropped.sum() / found.arrived.sum(), abs=0.004)
    assert np.array(late) @ weights == pytest.approx(found.late.sum() / found.arrived.sum(), abs=0.03)
    assert np.array(dropped) == pytest.approx(found.dropped / found.arrived, abs=0.02)


def test_p99_and_late_share_below_capacity_are_the_queue_s() -> None:
    cluster = Cluster(batch_size=1)
    simulator = Simulator(cluster)
    rate = 1 / cluster.service_seconds
    for load in (0.3, 0.7, 0.9, 0.95):
        _, outcome = simulator.serve(fleet_of(simulator), np.array([load * 40 * rate]))
        law = waiting_time(waiting_ratio(40, load), 40 * rate, load, cluster.timeout)
        assert outcome.p99[0] == pytest.approx(response_quantile(law, rate, 0.99), rel=0.04)
        assert outcome.queued.item() == 0


def test_more_servers_than_the_table_has_wait_by_the_square_root_law() -> None:
    simulator = Simulator(CLUSTER)
    rho = np.array([[0.97, 0.98, 0.99, 0.995]])
    read = simulator._ratio(np.full((1, 4), 2000), rho)
    assert read == pytest.approx(waiting_ratio(2000, rho), abs=0.002)
    assert (read > 0.001).any()


def test_larger_batches_answer_more_and_each_later_and_the_best_is_no_bound() -> None:
    simulator = Simulator(CLUSTER)
    levels = np.arange(5)
    idle, busy = (steady(simulator, load, 5, batch=levels) for load in (0.2, 1.05))
    assert (np.diff(idle.capacity[0]) > 0).all()
    assert (np.diff(idle.p99) > 0).all()
    assert busy.late_share.argmin() == 2, busy.late_share
    assert CLUSTER.batch_sizes[2] == 4


def test_more_workers_answer_more_until_they_disturb_each_other() -> None:
    simulator = Simulator(CLUSTER)
    levels = np.arange(5)
    idle, busy = (steady(simulator, load, 5, concurrency=levels) for load in (0.1, 1.1))
    assert (np.diff(idle.capacity[0])[:3] > 0).all()
    assert idle.capacity[0, 4] < idle.capacity[0, 3]  # Gunther: 16 workers are too many
    assert idle.p99[4] > idle.p99[3] > idle.p99[2]
    assert busy.late_share.argmin() == 3, busy.late_share


def test_a_longer_timeout_drops_less_and_lets_wait_longer_and_the_best_is_no_bound() -> None:
    simulator = Simulator(CLUSTER)
    levels = np.arange(len(CLUSTER.timeouts))
    tight, over = (steady(simulator, load, len(levels), steps=40, timeout=levels) for load in (0.98, 1.03))
    assert (np.diff(tight.dropped[0]) <= 1e-9).all()
    assert tight.dropped[0, 0] > 100 * tight.dropped[0, -1]
    assert (np.diff(over.p99) > 0).all()
    fleet = replace(fleet_of(simulator, len(levels), replicas=2), timeout=levels)
    _, small = simulator.serve(fleet, np.full(len(levels), 0.97 * 2 * CLUSTER.replica_capacity))
    # .1 s: who would be late leaves, and who would not stays
    assert small.late_share.argmin() == 1, small.late_share


def test_traffic_goes_where_it_is_sent_and_the_best_share_is_that_of_the_replicas() -> None:
    simulator = Simulator(CLUSTER, canary=True)
    weights = np.arange(11) / 10
    outcome = steady(simulator, 0.9, 11, weight=weights)
    arrived = outcome.arrived / outcome.arrived.sum(axis=0)
    assert arrived[1] == pytest.approx(weights)
    assert outcome.late_share.argmin() == 2  # .2 of the replicas run the canary
    assert (np.diff(outcome.late_share[2:]) >= -1e-9).all()
    assert outcome.late_share[0] > outcome.late_share[2]
    quick = steady(Simulator(Cluster(canary_speed=2.0), canary=True), 1.0, 11, weight=weights)
    assert quick.late_share.argmin() == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_replicas": 9, "max_replicas": 8}, "min_replicas must be at most max_replicas, got 9 and 8"),
        ({"min_replicas": 0}, "min_replicas must be at least 1, got 0"),
        ({"startup_seconds": -1}, "startup_seconds must be at least 0, got -1"),
        ({"step_seconds": 0}, "step_seconds must be above 0, got 0"),
        ({"price_per_replica_hour": float("nan")}, "price_per_replica_hour must be above 0, got nan"),
        ({"canary_share": 1.0}, "canary_share must lie between 0 and 1, got 1.0"),
        ({"timeouts": (1.0, 0.5)}, r"timeouts must rise from above 0, got \(1.0, 0.5\)"),
        ({"batch_size": 3}, "batch_size must be 1, 2, 4, 8 or 16, got 3"),
        (
            {"batch_size": 16},
            "a batch takes 106 ms in the configuration of the start: it must be at most 1/8",
        ),
    ],
)
def test_clusters_that_cannot_be_are_refused_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        Cluster(**settings)  # type: ignore[arg-type]  # what it refuses
    assert "\n" not in str(error.value)
