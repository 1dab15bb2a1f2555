"""The benchmarks' own arithmetic, and that the pages say what results.json holds."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import control, models, page, profiling, results, running
from benchmarks.__main__ import main
from benchmarks.comparisons import Comparison, Line, comparisons
from benchmarks.figures import FIGURES, Figure, Point, alternative, drawn, ticks
from benchmarks.processors import described, this_processor
from benchmarks.results import RESULTS, current, expected, ratio, read, row, spread, wanted, write_row
from benchmarks.running import Measured, Others
from benchmarks.sides import Side
from benchmarks.talks import Talks
from benchmarks.workers.hf import Update
from stateset_agents.numeric.experiment import ControlFile


def test_the_page_says_what_was_measured() -> None:
    found = read(RESULTS)
    wrong = [
        path.name
        for path, text in page.files(found, page.PAGE.read_text()).items()
        if path.read_text() != text
    ]
    assert found
    assert wrong == []  # make bench ARGS=--page writes them


def test_every_row_that_is_kept_still_exists() -> None:
    assert {name for rows in read(RESULTS).values() for name in rows} <= set(comparisons())


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
    write_row(file, {"name": "b", "ratio": 1})
    write_row(file, {"name": "a", "ratio": 2})
    write_row(file, {"name": "b", "ratio": 3})
    assert read(file) == {
        this_processor().key: {"a": {"name": "a", "ratio": 2}, "b": {"name": "b", "ratio": 3}}
    }


def test_rows_of_another_processor_stay_beside_those_of_this_one(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    write_row(file, {"name": "a", "ratio": 1}, "another")
    write_row(file, {"name": "a", "ratio": 2})
    assert read(file) == {
        "another": {"a": {"name": "a", "ratio": 1}},
        this_processor().key: {"a": {"name": "a", "ratio": 2}},
    }


def test_a_processor_is_named_by_its_model_and_what_its_matrix_products_use() -> None:
    said = (
        "processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: {}\nmodel name\t: {}\nflags\t\t: {}\n"
    )
    amd = said.format("AuthenticAMD", 25, 17, "AMD EPYC", "avx2 avx512f avx512_bf16")
    intel = said.format("GenuineIntel", 6, 143, "Xeon  Processor", "avx2 avx512f avx512_bf16 amx_bf16")
    assert described(amd).key == "AMD EPYC (family 25 model 17), avx512_bf16"
    assert described(f"{intel}\n{amd}").key == "Intel Xeon Processor (family 6 model 143), amx_bf16"


@pytest.fixture
def plain() -> Comparison:
    return Comparison(name="n", sides={}, lines=(), model=None)


def test_a_run_that_was_interrupted_goes_on_at_the_same_commit(
    plain: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "commit", lambda: "abc")
    stored = {"commit": "abc", "repetitions": 7}
    assert current(stored, plain, 7)
    assert not current(None, plain, 7)
    assert not current({**stored, "commit": "older"}, plain, 7)
    assert not current({**stored, "repetitions": 6}, plain, 7)
    monkeypatch.setattr(results, "commit", lambda: "abc+")  # files differ from the commit
    assert not current({**stored, "commit": "abc+"}, plain, 7)


def test_rows_without_a_claim_or_of_a_real_model_are_timed_less_often(plain: Comparison) -> None:
    few = replace(plain, most_repetitions=3)
    assert [wanted(plain, 7), wanted(few, 7), wanted(few, 1)] == [7, 3, 1]
    stored = {"seconds": 40, "repetitions": 3}  # four rounds with the warm-up
    assert [expected(stored, few, 7), expected(stored, plain, 7), expected(None, plain, 7)] == [40, 80, None]
    claimed = [one for one in comparisons().values() if any(line.at_least for line in one.lines)]
    assert {one.most_repetitions for one in claimed if not one.name.startswith("smollm2-")} == {None}


def test_tiny_rows_are_not_kept_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--smoke"])
    assert "--smoke needs --results FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "listed"),
    [
        (["update-32k"], ["update-32k"]),
        (["update-32", "demo"], ["update-32k", "update-32k-trl", "update-32k-of-4", "demo"]),
    ],
)
def test_a_row_is_asked_for_by_name_and_several_by_how_they_begin(
    asked: list[str], listed: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--list", "--results", str(tmp_path / "none.json"), "--only", *asked]) == 0
    assert capsys.readouterr().out.split() == listed


def test_other_work_on_the_machine_is_counted_and_ours_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_busy", iter([100.0, 106.0]).__next__)
    monkeypatch.setattr(running, "_cpu_seconds", iter([1.0, 3.0]).__next__)
    monkeypatch.setattr(running.time, "perf_counter", iter([0.0, 8.0]).__next__)
    with Others() as others:
        pass
    assert others.cores == 0.5  # 6 s of the machine, 2 of them ours, in 8 s


def test_a_profile_names_the_operators_and_what_tensors_are_for() -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    weight.grad = torch.zeros(64, 64)
    told = profiling.operators(lambda: torch.ones(64, 64) @ weight)
    assert "aten::mm" in [one["name"] for one in told["operators"]]
    held = profiling.tensors()
    assert held["parameters"] >= 64 * 64 * 4 <= held["gradients"]
    memory = {"imported": 1, "resting": 2, "in_use": 3 << 20, "peak": 4 << 20, "tensors": held}
    text = profiling.table({**told, **memory})
    assert "       4 MiB  at most" in text
    assert "outside operators" in text


FIGURE = Figure(
    name="f", title="Cost", along="turns", peer="trl", points=[Point(at=1, row="a"), Point(at=4, row="b")]
)
ROWS = {
    "a": {"sides": {"ours": {"cpu": 2.0}, "trl": {"cpu": 4.0}}},
    "b": {"sides": {"ours": {"cpu": 3.0}, "trl": {"cpu": 16.0}}},
}


def test_a_figure_is_told_in_words_too() -> None:
    assert alternative(FIGURE, ROWS) == "Cost. At 1, 4 turns: ours 1, 1.5; TRL 2, 8."


def test_a_figure_is_drawn_to_scale_from_0() -> None:
    picture = drawn(FIGURE, ROWS)
    assert picture is not None
    svg = ElementTree.fromstring(picture)
    names = {"svg": "http://www.w3.org/2000/svg"}
    ours, trl = (
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
        for line in svg.findall("svg:polyline", names)
    )
    zero = 300 - 48  # the lower edge, of 0
    assert (zero - trl[1][1]) / (zero - ours[0][1]) == pytest.approx(8, abs=0.05)
    assert (ours[1][0] - 62) / (ours[0][0] - 62) == pytest.approx(4, abs=0.01)  # four turns against one
    assert svg.findtext("svg:desc", namespaces=names) == alternative(FIGURE, ROWS)


def test_a_figure_waits_for_all_its_rows() -> None:
    assert drawn(FIGURE, {"a": ROWS["a"]}) is None
    assert alternative(FIGURE, {"a": ROWS["a"]}) is None


def test_the_page_can_be_written_whatever_was_measured() -> None:
    """A row was measured for minutes, and then the page had no name for its side, and no cell for an aim that
    it lacks."""
    rows = {}
    for name, comparison in comparisons().items():
        sides = {side: measured([1.0, 2.0]) for side in comparison.sides}
        for side in sides.values():
            side.repetitions = [
                {**one, "rollout": 1.0, "update": 1.0, "successes": 1, "conversations": 2}
                for one in side.repetitions
            ]
        rows[name] = {**row(comparison, sides), "commit": "abc", "seconds": 1, "others": 0.0}
    files = page.files({"a processor": rows}, page.PAGE.read_text())
    text = files[page.PAGE]
    for comparison in comparisons().values():
        for line in comparison.lines if not comparison.name.startswith("settings-") else ():
            assert f"| {line.title} |" in text
    table = [line for line in text.splitlines() if line.startswith("| GRPO step, SmolLM2")]
    assert len(table) >= 4
    assert {line.count("|") for line in table if " 8 |" in line or " 6.5 |" in line} == {9}


def test_every_figure_is_of_rows_that_have_its_peer() -> None:
    rows = comparisons()
    for figure in FIGURES:
        assert all(figure.peer in rows[point.row].sides for point in figure.points), figure.name
        assert figure.quantity == "cpu" or all(rows[point.row].memory for point in figure.points)


def claim(found: float, spread: list[float] | None) -> dict[str, Any]:
    line = {"title": "step", "peer": "trl", "quantity": "cpu", "ratio": found, "spread": spread}
    return {"step-40": {"lines": [{**line, "at_least": 2, "aim": 3}]}}


@pytest.mark.parametrize(
    ("others", "cells"),
    [
        ({}, "2.50 | yes | 2.50 (2.40 to 2.60)"),
        ({"b": claim(1.7, None)}, "1.70 | no | 2.50 (2.40 to 2.60) | 1.70"),  # reported: no quartiles
        ({"b": claim(3.5, [3.4, 3.6])}, "2.50 | yes | 2.50 (2.40 to 2.60) | 3.50 (3.40 to 3.60)"),
        ({"b": {}}, "2.50 | open | 2.50 (2.40 to 2.60)"),  # never tried there
    ],
)
def test_a_claim_is_the_least_of_all_processors(others: dict[str, Any], cells: str) -> None:
    table = page.wanted({"a": claim(2.5, [2.4, 2.6]), **others})
    assert f"| step | TRL | CPU time | 2 | 3 | {cells} |" in table


@pytest.fixture(scope="module")
def shape() -> Talks:
    return Talks(vocabulary=64, scenarios=2, group=3, turns=2, prompt=12, reply=6, delta=8, wait=0.2)


def test_given_conversations_have_the_lengths_they_say(shape: Talks) -> None:
    given = shape.requests()
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


def test_plain_hf_has_the_same_gradient_in_pieces() -> None:
    models.ensure(size="tiny", vocabulary=64, family="llama")
    shape = Talks(vocabulary=64, scenarios=2, group=2, turns=2, prompt=12, reply=6, shortest_reply=2, delta=8)
    job = {"model": models.folder(size="tiny", vocabulary=64, family="llama"), "talks": asdict(shape)}
    whole, cut = Update(job), Update({**job, "settings": {"pieces": 4}})
    whole.backward()
    cut.backward()
    for one, other in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        assert one.grad.abs().max() > 0
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-7)


def test_numeric_sides_are_files_that_load_and_medians_are_divided_by_the_first() -> None:
    ours = [side.job for task in control.TASKS.values() for side in task.values() if side.module == "numeric"]
    assert [ControlFile(**job).kind for job in ours] == ["control"] * 3
    runs = {
        "ours": [{"return": 500.0, "lowest": 500.0, "steps": 110_000, "cpu": cpu} for cpu in (2.0, 9.0, 1.0)],
        "sb3": [{"return": value, "lowest": 9.0, "steps": 100_000, "cpu": 30.0} for value in (490.0, 500.0)],
    }
    assert control.lines(runs) == [
        "ours: median return 500.0 (lowest 500), 110,000 steps, 2.00 CPU s, 1.0x",
        "sb3: median return 495.0 (lowest 9), 100,000 steps, 30.00 CPU s, 15.0x",
    ]
