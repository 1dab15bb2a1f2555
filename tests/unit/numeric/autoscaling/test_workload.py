"""Drawn load is a function of its seed; a user's file is read, or refused in one line that says where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stateset_agents.numeric.autoscaling.trace import TraceLoad
from stateset_agents.numeric.autoscaling.workload import SHAPES, GeneratedLoad
from stateset_agents.types.errors import ConfigurationError


@pytest.mark.parametrize("kind", SHAPES)
def test_load_follows_its_seed_and_its_level(kind: str) -> None:
    load = GeneratedLoad(kind=kind)
    drawn = [load.draw(seed, 480, 15.0) for seed in range(30)]
    assert np.array_equal(drawn[3], load.draw(3, 480, 15.0))
    assert not np.array_equal(drawn[3], drawn[4])
    means = np.array([rates.mean() for rates in drawn])
    assert means.min() > 500 * 0.3
    assert means.max() < 5000 * 3
    assert means.max() / means.min() > 3
    tenfold = GeneratedLoad(kind=kind, rates=(5000.0, 50000.0)).draw(3, 480, 15.0)
    assert np.allclose(tenfold, 10 * drawn[3], rtol=0.2)  # the same picture, with less Poisson noise


def test_kinds_look_as_they_are_called() -> None:
    def strays(kind: str, severity: float = 1.0) -> np.ndarray:
        load = GeneratedLoad(kind=kind, rates=(1e5, 1e5), severity=severity)
        return np.stack([load.draw(seed, 480, 15.0) for seed in range(60)]) / 1e5

    steepest = {kind: np.abs(np.diff(strays(kind), axis=1)).max(axis=1).mean() for kind in SHAPES}
    assert steepest["diurnal"] < steepest["ramps"] < steepest["bursts"]
    crowds = strays("flash_crowds")
    assert 0.3 < (crowds.max(axis=1) > 1.5).mean() < 0.9  # one in two hours: 1 - 1/e of the episodes
    assert strays("flash_crowds", 2.0).max() == pytest.approx(2 * crowds.max() - 1, rel=0.05)
    assert np.allclose(strays("mixed", 0.0), 1, atol=0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "burst"}, r"kind must be diurnal, .* got 'burst' \(did you mean 'bursts'\?\)"),
        ({"rates": (500.0, 50.0)}, r"rates must be two that rise from above 0, got \(500.0, 50.0\)"),
        ({"severity": -1.0}, "severity must not be negative, got -1.0"),
    ],
)
def test_loads_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        GeneratedLoad(**settings)  # type: ignore[arg-type]  # what it refuses


def written(path: Path, text: str) -> Path:
    file = path / "load.csv"
    file.write_text(text)
    return file


def test_a_trace_is_read_in_its_unit_and_played_in_windows(tmp_path: Path) -> None:
    file = written(tmp_path, "seconds,note,requests_per_minute\n100,a,60000\n1100,b,120000\n\n2100,c,60000\n")
    load = TraceLoad.from_csv(file)
    assert load.seconds.tolist() == [0, 1000, 2000]
    assert load.rates.tolist() == [1000, 2000, 1000]
    assert load.mean_rate == pytest.approx(1500)
    whole = load.draw(0, 20, 100.0)
    line = np.interp(50 + 100 * np.arange(20), [0, 1000, 2000], [1000, 2000, 1000])
    assert whole == pytest.approx(line, rel=0.02)
    assert np.array_equal(load.draw(1, 5, 100.0), load.draw(1, 5, 100.0))
    assert abs(load.draw(1, 5, 100.0) - load.draw(2, 5, 100.0)).max() > 50
    with pytest.raises(ConfigurationError, match=r"lasts 2000 s and an episode needs 2100 s: .* 19 steps"):
        load.draw(0, 21, 100.0)


HEAD = "seconds,requests_per_second\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "load.csv is empty: give it a line seconds,requests_per_second"),
        (HEAD, "must have at least two rows of load, got 0"),
        (HEAD + "0,1\n15,-3\n", "line 3: requests_per_second must not be negative, got -3"),
        (HEAD + "0,1\n30,2\n15,3\n", "line 4: seconds must rise, got 15 after 30: sort the rows"),
        (HEAD + "0,1\n15,nan\n", "line 3: requests_per_second must be a number, got 'nan'"),
        (HEAD + "0,1\n15\n", "line 3: requests_per_second must be a number, got ''"),
        (HEAD + "0,0\n15,0\n", "requests_per_second is 0 in every row"),
        ("seconds,rps\n0,1\n", "must have a column requests_per_second, requests_per_minute or requests_per"),
        ("time,requests_per_second\n0,1\n", "must have a column seconds, got time,req"),
        ("seconds,requests_per_second,requests_per_hour\n", "must have one column of load, got requests_per"),
    ],
)
def test_files_that_are_no_trace_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        TraceLoad.from_csv(written(tmp_path, text))
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.csv cannot be read as a CSV file"):
        TraceLoad.from_csv(tmp_path / "none.csv")
