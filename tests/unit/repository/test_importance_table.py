"""The table of evidence/stale-rollouts.md: its expectations are exact, and `auto` keeps what it promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts import importance_table
from scripts.importance_table import (
    ENUMERATED,
    LENGTHS,
    POLICIES,
    SIZES,
    Sampler,
    cap_bound,
    credit,
    errors,
    families,
    sampler_of_size,
    sequence_gradient,
    task,
    threshold,
    token_gradient,
)
from stateset_agents.training.update.objective import weight_level


@pytest.fixture
def short_conversations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(importance_table, "ENUMERATED", 4)
    importance_table.enumerated.cache_clear()
    yield
    importance_table.enumerated.cache_clear()


@pytest.mark.usefixtures("short_conversations")
@pytest.mark.parametrize("level", [None, "token"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_pairs_say_what_all_conversations_say(name: str, level: None) -> None:
    policy = POLICIES[name](1)
    least = threshold(policy, 4)
    sampler = Sampler((1.2 * policy + 0.1 * torch.eye(7, 6)).log_softmax(-1)[None])
    by_pairs = token_gradient(policy, sampler, credit(sampler.kernel, 4, least), level)
    torch.testing.assert_close(by_pairs, sequence_gradient(policy, sampler, least, level))


@pytest.mark.usefixtures("short_conversations")
def test_what_the_cap_takes_is_within_its_bound() -> None:
    policy = POLICIES["short"](1)
    least = threshold(policy, 4)
    exact = token_gradient(policy, Sampler(policy[None]), credit(policy.exp(), 4, least), None)
    sampler = Sampler((2.5 * policy).log_softmax(-1)[None])
    taken = float((sequence_gradient(policy, sampler, least, "sequence") - exact).norm())
    assert 0.01 * float(exact.norm()) < taken <= cap_bound(policy, sampler, 4)


@pytest.mark.parametrize("kind", ["random step", "90 % noise, 10 % sharper"])
def test_a_sampler_s_gaps_have_the_size_that_the_table_names(kind: str) -> None:
    of = task("short", 0, 50)
    sampler = sampler_of_size(of.policy, families(of.policy, of.gradient, 0)[kind], 0.05, 50)
    weights = sampler.logprobs.softmax(0) * importance_table.occurrences(sampler.kernel, 50) / 50
    assert float((weights * (of.policy - sampler.logprobs).square()).sum().sqrt()) == pytest.approx(
        0.05, 0.01
    )


def test_where_auto_takes_conversations_no_thousandth_of_the_gradient_is_lost() -> None:
    taken = [
        (rms, length)
        for rms in SIZES
        for length in LENGTHS
        if weight_level("auto", rms, length) == "sequence"
    ]
    assert len(taken) == 10
    for name in POLICIES:
        for plain, weighed in errors(name, 0.026, 50, "sequence").values():
            assert weighed <= 1e-3 < plain


@pytest.mark.long
def test_seven_tokens_are_enumerated_and_none_of_their_gradient_is_lost() -> None:
    for name in POLICIES:
        for plain, weighed in errors(name, 0.026, ENUMERATED, "sequence").values():
            assert weighed <= 1e-3 < plain


def test_tokens_weights_leave_little_of_long_conversations_gaps() -> None:
    for plain, weighed in errors("long", 0.026, 200, "token").values():
        assert weighed < plain / 4


def test_the_page_has_a_line_for_each_size_and_length() -> None:
    page = (Path(__file__).parents[3] / "docs/evidence/stale-rollouts.md").read_text(encoding="utf-8")
    block = page.partition("<!-- importance-weights -->")[2].partition("<!-- /importance-weights -->")[0]
    rows = [line.split("|")[1:4] for line in block.splitlines() if line.startswith("| 0.")]
    assert [tuple(cell.strip() for cell in row) for row in rows] == [
        (f"{rms:g}", f"{length:,}", weight_level("auto", rms, length)) for rms in SIZES for length in LENGTHS
    ]
