"""The benchmarks' own arithmetic, and that docs/performance.md says what results.json holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import models, page
from benchmarks.comparisons import Comparison, Line, comparisons
from benchmarks.figures import ticks
from benchmarks.results import RESULTS, keep, ratio, read, row, spread
from benchmarks.running import Measured
from benchmarks.sides import Side
from benchmarks.talks import Talks


def test_the_page_says_what_was_measured() -> None:
    rows = read(RESULTS)
    wrong = [
        path.name
        for path, text in page.files(rows, page.PAGE.read_text()).items()
        if path.read_text() != text
    ]
    assert rows
    assert wrong == []  # make bench ARGS=--page writes them


def test_every_row_that_is_kept_still_exists() -> None:
    assert set(read(RESULTS)) <= set(comparisons())


def measured(cpu: list[float], tokens: int = 5) -> Measured:
    repetitions = [{"cpu": value, "wall": 2 * value, "peak": 300, "tokens": tokens} for value in cpu]
    memory = {"peak": 300.0, "extra": 200.0}
    return Measured(prepared={"versions": {}, "threads": 1}, repetitions=repetitions, memory=memory)


def test_a_ratio_is_of_medians_and_its_spread_the_quartiles_of_each_repetition_s() -> None:
    ours, peer = [1.0, 2.0, 100.0], [4.0, 6.0, 5.0]
    assert ratio(ours, peer) == 2.5  # 5 / 2
    assert spread(ours, peer) == (1.525, 3.5)  # of .05, 3 and 4


def test_a_row_holds_what_a_line_asks_for() -> None:
    line = Line(title="t", peer="hf", quantity="extra", at_least=2, aim=3)
    side = Side(module="hf", job={})
    comparison = Comparison(name="n", sides={"ours": side, "hf": side}, lines=(line,), model=None)
    peer = measured([1.0])
    peer.memory = {"peak": 500.0, "extra": 400.0}
    made = row(comparison, {"ours": measured([1.0]), "hf": peer})
    assert made["lines"][0]["ratio"] == 2.0
    assert made["sides"]["ours"] == {
        "cpu": 1.0,
        "wall": 2.0,
        "tokens": 5,
        "peak": 300,
        "extra": 200,
        "versions": {},
    }


def test_rows_may_be_measured_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    keep(file, {"name": "b", "ratio": 1})
    keep(file, {"name": "a", "ratio": 2})
    keep(file, {"name": "b", "ratio": 3})
    assert read(file) == {"a": {"name": "a", "ratio": 2}, "b": {"name": "b", "ratio": 3}}


def test_a_share_below_what_was_wanted_stays_in_the_table() -> None:
    line: dict[str, Any] = {
        "title": "slow",
        "peer": "trl",
        "quantity": "cpu",
        "ratio": 0.5,
        "spread": [0.4, 0.6],
    }
    rows = {"step-40": {"lines": [{**line, "at_least": 2, "aim": 3}]}}
    assert "| slow | TRL | CPU time | 0.50 (0.40 to 0.60) | 2 | 3 | no |" in page.wanted(rows)


@pytest.fixture(scope="module")
def shape() -> Talks:
    return Talks(vocabulary=64, scenarios=2, group=3, turns=2, prompt=12, reply=6, delta=8, wait=0.2)


def test_given_conversations_have_the_lengths_they_say(shape: Talks) -> None:
    given = shape.given()
    assert len(given) == shape.rows == 6
    assert {len(talk.ids) for talk in given} == {12 + 6 + 8 + 6}
    assert {sum(talk.mask) for talk in given} == {12}
    assert {len(talk.history(1)) for talk in given} == {12 + 6 + 8}
    assert given[0].history(0) == given[1].history(0) != given[3].history(0)
    assert len({tuple(talk.ids) for talk in given}) == 6


def test_every_word_is_one_token_and_the_markup_is_counted(shape: Talks, tmp_path: Path) -> None:
    tokenizer = models.tokenizer(shape.vocabulary)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    opening = [{"role": "user", "content": shape.opening(0)}]
    prompt = loaded.apply_chat_template(opening, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert len(prompt) == shape.prompt
    between = f"<|end|><|user|>{shape.user_words(0)[0]}<|end|><|assistant|>"
    assert len(loaded.encode(between, add_special_tokens=False)) == shape.delta


def test_axes_have_round_numbers() -> None:
    assert ticks(7.3) == [0, 2, 4, 6, 8]
    assert ticks(20) == [0, 5, 10, 15, 20]
    assert ticks(0.9) == [0, 0.5, 1]


def test_waits_are_lognormal_about_their_mean(shape: Talks) -> None:
    many = [seconds for number in range(4000) for seconds in shape.waits(number)]
    assert sum(many) / len(many) == pytest.approx(0.2, rel=0.05)
    assert shape.waits(3) == shape.waits(3) != shape.waits(4)
