"""What conversations of several rows cost an update, in tokens (scripts/rows_cost.py measures the time)."""

from __future__ import annotations

import pytest

from scripts.rows_cost import MOST_TOKENS, WORKLOADS, Workload, forwarded_tokens, learner, samples


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_what_later_rows_repeat_goes_through_about_once(workload: Workload) -> None:
    keep, rows = (samples(workload, 2, keeps_thoughts=flag) for flag in (True, False))
    one = learner(1, 16, members=2)
    assert all(len(sample.rows) == 1 for sample in keep)
    assert all(len(sample.rows) == workload.exchanges for sample in rows)
    again = workload.call + workload.result + workload.words  # of each answer, without its thought
    least = 2 * (workload.exchanges - 1) * again
    assert forwarded_tokens(one, rows) == forwarded_tokens(one, keep) + least
    if not workload.call:
        assert forwarded_tokens(one, rows) < MOST_TOKENS * forwarded_tokens(one, keep)
