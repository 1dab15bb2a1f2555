"""Who copies what from whom, against a plain search over all pairs."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stateset_agents.backends.local.batcher import (
    MIN_SHARED_TOKENS,
    PrefixCopy,
    common_prefix,
    shared_prefixes,
)


def table(*rows: list[int]) -> np.ndarray:  # type: ignore[type-arg]  # of int64
    width = max(map(len, rows))
    return np.array([row + [0] * (width - len(row)) for row in rows], np.int64)


def lengths(*counts: int) -> np.ndarray:  # type: ignore[type-arg]  # of int64
    return np.array(counts, np.int64)


SYSTEM = list(range(100, 130))


def test_siblings_wait_for_the_first_of_them_and_others_for_the_system_prompt() -> None:
    a, b = [*SYSTEM, 1, 2, 3], [*SYSTEM, 4, 5]
    ids = table(a, a, b, b)
    shares = shared_prefixes(ids, lengths(0, 0, 0, 0), lengths(33, 33, 32, 32), [], [0, 1, 2, 3])
    assert shares == [
        PrefixCopy(0, -1, 0, 0),
        PrefixCopy(1, 0, 32, 1),  # all but the last token
        PrefixCopy(2, 0, 30, 1),
        PrefixCopy(3, 2, 31, 2),  # its sibling has one token more to give, a wave later
    ]


def test_what_is_cached_needs_no_waiting() -> None:
    ids = table([*SYSTEM, 7, 7], [*SYSTEM, 8, 8])
    assert shared_prefixes(ids, lengths(31, 0), lengths(32, 32), [0], [1]) == [PrefixCopy(1, 0, 30, 0)]


def test_a_slot_gains_at_least_a_few_tokens_or_copies_nothing() -> None:
    ids = table(SYSTEM, SYSTEM)
    num_cached = 30 - MIN_SHARED_TOKENS - 1
    assert shared_prefixes(ids, lengths(30, num_cached), lengths(30, 30), [0], [1])[0].tokens == 29
    assert shared_prefixes(ids, lengths(30, num_cached + 1), lengths(30, 30), [0], [1])[0].source == -1


def test_common_prefix() -> None:
    assert common_prefix(lengths(), lengths()) == 0
    assert common_prefix(lengths(1, 2), lengths(1, 2)) == 2
    assert common_prefix(lengths(1, 2, 3), lengths(1, 2, 4)) == 2
    assert common_prefix(lengths(5, 2), lengths(1, 2)) == 0


def alike(row: list[int], offer: list[int]) -> int:
    return max(end for end in range(len(row) + 1) if row[:end] == offer[:end])


conversations = st.lists(
    st.tuples(st.lists(st.sampled_from("ab"), min_size=1, max_size=5), st.integers(0, 60)),
    min_size=2,
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(conversations)
def test_each_takes_the_longest_prefix_that_anyone_before_it_offers(
    layout: list[tuple[list[str], int]],
) -> None:
    pieces = {"a": list(range(12)), "b": list(range(6, 18))}
    rows = [[token for piece in names for token in pieces[piece]] for names, _ in layout]
    num_cached = [min(cached, len(row)) for row, (_, cached) in zip(rows, layout, strict=True)]
    lacking = [slot for slot, row in enumerate(rows) if len(row) - num_cached[slot] > 1]
    having = [slot for slot in range(len(rows)) if num_cached[slot]]
    shares = shared_prefixes(table(*rows), lengths(*num_cached), lengths(*map(len, rows)), having, lacking)
    wave_of = {share.slot: share.wave for share in shares}
    assert [share.slot for share in shares] == lacking
    for index, share in enumerate(shares):
        row = rows[share.slot][:-1]
        offers = [rows[slot][: num_cached[slot]] for slot in having] + [
            rows[slot] for slot in lacking[:index]
        ]
        best = max((alike(row, offer) for offer in offers), default=0)
        if share.source < 0:
            assert best < num_cached[share.slot] + MIN_SHARED_TOKENS
            continue
        assert share.tokens == best >= num_cached[share.slot] + MIN_SHARED_TOKENS
        assert rows[share.source][:best] == row[:best]
        if best > num_cached[share.source]:
            assert wave_of[share.source] < share.wave
