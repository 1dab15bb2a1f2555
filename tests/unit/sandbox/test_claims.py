"""Claims: only what was expected, of exactly its type, agrees; anything else that was written is no claim."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stateset_agents.sandbox.child import encoded
from stateset_agents.sandbox.claims import agrees, read_claims, why_broken

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text()
    | st.binary()
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3))
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.sets(HASHABLE, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
    ),
)


def claim(value: object) -> Any:
    return json.loads(encoded(value))


def exactly(value: Any) -> Any:
    """Equal where the values are, and the types at every depth."""
    if isinstance(value, dict):
        return "dict", frozenset((exactly(key), exactly(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(exactly(item) for item in value)
    if isinstance(value, set | frozenset):
        return type(value).__name__, frozenset(exactly(item) for item in value)
    return type(value).__name__, value


@given(VALUES)
def test_a_value_agrees_with_itself(value: Any) -> None:
    assert agrees(claim(value), value)


@given(VALUES, VALUES)
def test_two_values_agree_where_they_are_the_same_in_value_and_type(one: Any, other: Any) -> None:
    assert agrees(claim(one), other) == (exactly(one) == exactly(other))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, 1),
        (1, True),
        (1, 1.0),
        (1.0, 1),
        ((1,), [1]),
        ([1], (1,)),
        ("1", 1),
        (b"1", "1"),
        ({1}, frozenset({1})),
        ({True}, {1}),
        ({1: "a"}, {True: "a"}),
        ({1: "a", 2: "b"}, {1: "a"}),
        ([1, [2, 3.0]], [1, [2, 3]]),
        (None, 0),
        (0, None),
        (None, False),
        (float("nan"), float("nan")),
        ({float("nan")}, {float("nan")}),
        (complex(0, float("nan")), complex(0, float("nan"))),
    ],
)
def test_values_of_other_types_and_nan_do_not_agree(given: object, expected: object) -> None:
    assert not agrees(claim(given), expected)


def test_floats_agree_within_the_tolerance_and_nothing_else_does() -> None:
    assert not agrees(claim(0.1 + 0.2), 0.3)
    assert agrees(claim(0.1 + 0.2), 0.3, tolerance=1e-9)
    assert agrees(claim([1e9 + 1, {"a": 1e-12}]), [1e9, {"a": 0.0}], tolerance=1e-9)
    assert not agrees(claim(1e-6), 0.0, tolerance=1e-9)
    assert not agrees(claim(float("inf")), 1.0, tolerance=0.5)
    assert agrees(claim(float("inf")), float("inf"), tolerance=0.5)
    assert not agrees(claim(3), 3.0, tolerance=0.5)
    assert not agrees(claim({1.0}), {1.0000001}, tolerance=0.5)  # in a set, and as a key, exactly
    assert agrees(claim(-0.0), 0.0)
    assert agrees(claim({-0.0}), {0.0})


@pytest.mark.parametrize(
    "forged",
    [
        ["list", "ab"],
        ["list", 2],
        ["list"],
        ["set", [1, 1]],
        ["set", [1, ["list", []]]],
        ["dict", [[1, 1], [1, 1]]],
        ["dict", [1, 2]],
        ["float", 1],
        ["float", "x"],
        ["int", 12],
        ["int", "zz"],
        {"list": [1, 2]},
        ["object", [1, 2]],
        "[1, 2]",
        1.5,
    ],
)
@pytest.mark.parametrize("expected", [[1, 2], {1, 2}, {1: 1, 2: 2}, 12, 1.0, 1.5])
def test_a_claim_of_another_form_agrees_with_nothing(forged: Any, expected: object) -> None:
    assert not agrees(forged, expected)


@given(st.recursive(SCALARS.map(str) | st.integers(), lambda inner: st.lists(inner, max_size=4)), VALUES)
def test_whatever_is_claimed_the_comparison_ends_with_a_verdict(forged: Any, expected: Any) -> None:
    assert agrees(forged, expected) in (True, False)


def test_integers_of_any_size_are_read_in_time_proportional_to_it() -> None:
    big = 7**300_000  # 842,000 bits
    started = time.process_time()
    assert agrees(claim(big), big)
    assert not agrees(claim(big + 1), big)
    assert time.process_time() - started < 1


def test_items_that_collide_as_hashes_do_not_slow_the_comparison_down() -> None:
    colliding = [number * (2**61 - 1) for number in range(1, 20_001)]
    forged = ["frozenset", [["int", f"{number:x}"] for number in colliding]]
    started = time.process_time()
    assert not agrees(["set", [forged]], {frozenset({1})})
    assert not agrees(["set", [["tuple", [forged, forged]]]], {(frozenset({1}), 1)})
    assert time.process_time() - started < 1


def test_claims_are_read_by_case() -> None:
    lines = b'[1,"value",["list",[1]]]\n[0,"raised","ValueError: x"]\n'
    assert read_claims(lines, num_cases=2) == ({1: ["list", [1]]}, {0: "ValueError: x"})
    assert read_claims(b"", num_cases=2) == ({}, {})
    assert read_claims(b'[-1,"raised","SyntaxError: x"]\n', num_cases=2) == ({}, {-1: "SyntaxError: x"})


@pytest.mark.parametrize(
    "lines",
    [
        b'[0,"value",1]\n[0,"value",2]\n',
        b'[0,"value",1]\n[0,"raised","x"]\n',
        b'[0,"value",1]',
        b'[2,"value",1]\n',
        b'[-1,"value",1]\n',
        b'[true,"value",1]\n',
        b'[0,"passed",1]\n',
        b'[0,"raised",1]\n',
        b'{"0": 1}\n',
        b"hello\n",
        b"\n",
        b"\xff\xfe\n",
        b'[0,"value",' + b"[" * 100_000 + b"\n",
        b'[0,"value",' + b"1" * 1_000_000 + b"]\n",
        b'"ready"\n',
    ],
    ids=range(15),
)
def test_anything_else_is_no_claim_at_all(lines: bytes) -> None:
    assert read_claims(b'[1,"value",1]\n' + lines, num_cases=2) is None


def test_a_claim_that_is_nested_too_deeply_is_refused_on_both_sides() -> None:
    deep: list[Any] = []
    for _ in range(70):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 60 deep"):
        encoded(deep)
    forged: Any = 1
    for _ in range(400):
        forged = ["tuple", [forged]]
    assert not agrees(["set", [forged]], {1})


def test_the_reason_of_a_child_that_broke_is_read() -> None:
    assert why_broken(b'["broken","OSError: no"]') == "OSError: no"
    assert why_broken(b'"ready"') is None
    assert why_broken(b"Traceback") is None
