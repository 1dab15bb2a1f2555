"""The queue's closed forms: against M/M/1, Erlang's tables, and a queue simulated by a heap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_formulas import (
    erlang_b,
    erlang_c,
    mean_wait,
    response_quantile,
    response_tail,
    waiting_ratio,
)
from simulated_queue import simulate_queue

from stateset_agents.numeric.autoscaling.queueing import (
    RatioTable,
    WaitingTime,
    waiting_time,
)
from stateset_agents.types.errors import ConfigurationError


def queue(servers: int, rho: float, *, rate: float = 1.0, limit: float = math.inf) -> WaitingTime:
    return waiting_time(waiting_ratio(servers, rho), servers * rate, rho, limit)


@pytest.mark.parametrize("rho", [0.01, 0.3, 0.5, 0.8, 0.95, 0.999])
def test_one_server_is_m_m_1_exactly(rho: float) -> None:
    rate = 20.0
    law = queue(1, rho, rate=rate)
    left = rate * (1 - rho)
    assert law.waits == pytest.approx(rho, abs=1e-9)
    assert mean_wait(law) == pytest.approx(rho / left, rel=1e-9)
    assert law.dropped == 0
    for time in (0.0, 0.01, 0.3, 2.0):
        assert response_tail(law, rate, time) == pytest.approx(math.exp(-left * time), abs=1e-9)
    assert response_quantile(law, rate, 0.99) == pytest.approx(math.log(100) / left, rel=1e-9)


def test_erlang_s_table() -> None:
    # Kleinrock's examples: two servers at half their capacity, and the classic ten servers with load 5
    assert erlang_b(2, 1.0) == pytest.approx(0.2)
    assert erlang_c(2, 0.5) == pytest.approx(1 / 3)
    assert erlang_b(10, 5.0) == pytest.approx(0.018385, abs=1e-6)
    assert erlang_c(10, 0.5) == pytest.approx(0.036105, abs=1e-6)
    assert erlang_c(4, [0.0, 1.0, 1.7]).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("servers", "arrivals"), [(4, 60.0), (3, 40.0), (40, 780.0)])
def test_the_tail_is_smooth_where_both_rates_are_equal(servers: int, arrivals: float) -> None:
    """c mu - lambda = mu is 0/0 in the textbook's formula: c = 4, mu = 20, lambda = 60."""
    rate = 20.0
    times = np.array([0.01, 0.05, 0.2, 0.6])
    exact = response_tail(queue(servers, arrivals / (servers * rate), rate=rate), rate, times)
    for shift in (-1e-3, -1e-7, 1e-7, 1e-3):
        beside = response_tail(queue(servers, (arrivals + shift) / (servers * rate), rate=rate), rate, times)
        assert beside == pytest.approx(exact, abs=1e-4)
    waiting = erlang_c(servers, arrivals / (servers * rate))
    assert exact == pytest.approx(np.exp(-rate * times) * (1 + waiting * rate * times), rel=1e-9)


@given(
    servers=st.integers(1, 60),
    rho=st.floats(0.01, 0.99),
    rate=st.floats(0.1, 1000.0),
    limit=st.one_of(st.just(math.inf), st.floats(0.0, 5.0)),
)
def test_the_laws_are_probabilities(servers: int, rho: float, rate: float, limit: float) -> None:
    law = queue(servers, rho, rate=rate, limit=limit)
    assert 0 <= law.dropped <= law.waits + 1e-12 <= 1 + 1e-12
    assert mean_wait(law) >= 0
    assert mean_wait(law) <= limit + 1e-12
    times = np.linspace(0, 10 / rate, 50)
    tail = response_tail(law, rate, times)
    assert tail[0] == pytest.approx(1, abs=1e-9)
    assert (np.diff(tail) <= 1e-12).all()
    assert (tail >= np.exp(-rate * times) - 1e-12).all()  # a wait is not below 0
    quantile = response_quantile(law, rate, 0.9)
    assert response_tail(law, rate, quantile) == pytest.approx(0.1, abs=1e-6)


@given(servers=st.integers(1, 40), rho=st.floats(0.05, 0.98), limit=st.floats(0.01, 3.0))
def test_a_time_limit_shortens_waits_and_drops_requests(servers: int, rho: float, limit: float) -> None:
    patient, hasty = queue(servers, rho), queue(servers, rho, limit=limit)
    assert patient.dropped == 0 < hasty.dropped
    assert mean_wait(hasty) <= mean_wait(patient) + 1e-12
    assert hasty.waits <= patient.waits + 1e-12
    assert mean_wait(queue(servers, rho, limit=1e6)) == pytest.approx(mean_wait(patient), rel=1e-6)
    served = rho * (1 - hasty.dropped)
    assert served < 1


@given(servers=st.integers(1, 30), limit=st.floats(0.01, 5.0), rho=st.floats(1.0, 3.0))
def test_with_a_limit_more_may_arrive_than_can_be_served(servers: int, limit: float, rho: float) -> None:
    law = queue(servers, rho, limit=limit)
    assert rho * (1 - law.dropped) <= 1 + 1e-9  # no more is served than the servers can
    assert law.dropped >= 1 - 1 / rho - 1e-9


def test_the_table_is_the_formula() -> None:
    table = RatioTable.upto(64)
    servers = np.arange(1, 65).repeat(211)
    rho = np.tile(np.linspace(0, 1, 211), 64)
    exact = np.concatenate([waiting_ratio(count, np.linspace(0, 1, 211)) for count in range(1, 65)])
    assert table(servers, rho) == pytest.approx(exact, abs=2e-5)
    at_hand = rho < 0.995
    waits = waiting_time(table(servers, rho), servers, rho).waits[at_hand]
    assert waits == pytest.approx(waiting_time(exact, servers, rho).waits[at_hand], abs=4e-4)
    assert table(np.array([3]), np.array([1.5])) == pytest.approx(waiting_ratio(3, 1.0), abs=1e-12)
    assert table(np.array([0]), np.array([0.7])) == 0  # nobody waits for no server


@pytest.mark.parametrize(
    ("servers", "rho", "limit"), [(1, 0.8, 2.0), (4, 0.95, 1.0), (4, 1.3, 1.0), (40, 1.02, 0.5)]
)
def test_the_time_limit_against_a_simulated_queue(servers: int, rho: float, limit: float) -> None:
    law = queue(servers, rho, limit=limit)
    found = simulate_queue(servers, rho, 200_000, seed=1, limit=limit)
    assert law.dropped == pytest.approx(found.dropped, abs=0.006)
    assert law.waits == pytest.approx(found.waits, rel=0.02)
    assert mean_wait(law) == pytest.approx(found.mean_wait, rel=0.03)
    assert response_quantile(law, 1.0, 0.99) == pytest.approx(np.quantile(found.responses, 0.99), rel=0.03)


@pytest.mark.parametrize("servers", [1, 4, 40])
def test_a_simulated_queue_waits_as_the_formulas_say(servers: int) -> None:
    check(servers, 0.8, customers=200_000, runs=1, within=0.05)


@pytest.mark.long
@pytest.mark.parametrize("servers", [1, 4, 40])
@pytest.mark.parametrize("rho", [0.5, 0.8, 0.95])
def test_a_million_customers_wait_as_the_formulas_say(servers: int, rho: float) -> None:
    """Waits follow one another: at .95 a million customers know their mean to about 4 %, so ten times as many
    are played there."""
    check(servers, rho, customers=1_000_000, runs=10 if rho > 0.9 else 1, within=0.03)


def check(servers: int, rho: float, *, customers: int, runs: int, within: float) -> None:
    law = queue(servers, rho)
    found = [simulate_queue(servers, rho, customers, seed=seed) for seed in range(runs)]
    assert law.waits == pytest.approx(np.mean([run.waits for run in found]), rel=within, abs=1e-4)
    assert mean_wait(law) == pytest.approx(np.mean([run.mean_wait for run in found]), rel=within, abs=1e-5)
    p99 = np.mean([np.quantile(run.responses, 0.99) for run in found])
    assert response_quantile(law, 1.0, 0.99) == pytest.approx(p99, rel=within)


def test_a_queue_without_a_server_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"at least 1 server, got 0"):
        RatioTable.upto(0)
