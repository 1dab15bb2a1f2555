"""The page of many runs: experiments, their held-out results and how they differ, from the folders alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_pages import next_event, served
from report_runs import log_stage, metrics, page_data

from stateset_agents.cli.main import main
from stateset_agents.evaluation.comparison import compare_runs
from stateset_agents.reporting.live import serve_overview
from stateset_agents.reporting.overview import (
    difference,
    experiments,
    overview_data,
    read_run,
    score,
)
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import RunLog, differing_settings
from stateset_agents.tracking.tracker import JsonlTracker

BEFORE = {0, 1}


def write_run(root: Path, *, beta: float, seed: int, after: set[int], steps: int = 4) -> RunFolder:
    """A run of a few steps; of eight held-out scenarios `after` succeed at its end."""
    folder = RunFolder.create(root, "desk")
    with JsonlTracker(folder) as tracker:
        log_stage(tracker, 0, "before", wins=BEFORE)
        for step in range(1, steps + 1):
            tracker.log_metrics(step, {**metrics(step), "kl/reference": beta * step, "x/still": 2.0})
        log_stage(tracker, steps, "after", wins=after)
    folder.write_config({"training": {"beta": beta, "seed": seed, "run_name": "desk"}, "reward": "told"})
    side = {"success": len(after) / 8, "interval": [0.1, 0.9], "n": 8, "tries": 1, "temperature": 1.0}
    folder.write_summary(
        {
            "seed": seed,
            "steps": steps,
            "ended": "finished",
            "before": {**side, "success": 0.25},
            "after": side,
        }
    )
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two experiments: beta 0 with three seeds, and beta 0.5 with two of them."""
    path = tmp_path_factory.mktemp("runs")
    for seed, wins in enumerate(({0, 1, 2, 3}, {0, 1, 2}, {0, 1, 2, 3, 4})):
        write_run(path, beta=0.0, seed=seed, after=wins)
    for seed, wins in enumerate(({0, 1, 2, 3, 5}, {0, 1, 2, 6})):
        write_run(path, beta=0.5, seed=seed, after=wins)
    return path


def test_runs_that_differ_in_their_seed_alone_are_one_experiment(root: Path) -> None:
    data = overview_data(root)
    assert [one["label"] for one in data["experiments"]] == ["beta=0.0", "beta=0.5"]
    assert [(run["name"], run["experiment"], run["seed"]) for run in data["runs"]] == [
        ("0001-desk", 0, 0),
        ("0002-desk", 0, 1),
        ("0003-desk", 0, 2),
        ("0004-desk", 1, 0),
        ("0005-desk", 1, 1),
    ]
    assert data["settings"] == [
        ["training.beta", ["0.0", "0.0", "0.0", "0.5", "0.5"]],
        ["training.seed", ["0", "1", "2", "0", "1"]],
    ]
    assert data["constant"]["x/still"] == 2.0
    assert "x/still" not in data["curves"]
    assert data["curves"]["kl/reference"][3] == [0.5, 1.0, 1.5, 2.0]


def test_a_run_s_gain_is_paired_by_scenario(root: Path) -> None:
    gain = overview_data(root)["runs"][4]["gain"]
    assert (gain["mean"], gain["gained"], gain["lost"], gain["n"]) == (0.25, 2, 0, 8)
    low, high = gain["interval"]
    assert low < 0.25 < high


def test_two_experiments_are_paired_by_seed_and_scenario(root: Path) -> None:
    runs = [read_run(RunLog(RunFolder(path)), 9) for path in sorted(root.glob("0*"))]
    a, b = experiments(runs)
    found = difference(a, b)
    assert found is not None
    # Seed 0: scenario 5 is won, none is lost; seed 1: 6 is won; seed 2 is in A alone.
    assert (list(found.seeds), found.wins, found.losses, found.p_value) == ([0, 1], 2, 0, None)
    assert found.mean == pytest.approx(2 / 16)
    assert found.interval is not None
    assert found.interval[0] < 0 < found.mean < found.interval[1]
    assert found.reason == "2 of 8 scenarios differ, at least 6 must"
    single = difference(experiments(runs[:1])[0], experiments(runs[3:4])[0])
    assert single is not None
    assert (single.mean, single.wins, single.losses, single.p_value) == (1 / 8, 1, 0, 1.0)


def test_runs_without_a_common_seed_are_paired_by_scenario_as_compare_does(tmp_path: Path) -> None:
    """The page said "no seed or no scenario in common" where `compare` said that B is better."""
    folders = [
        write_run(tmp_path, beta=0.1 * seed, seed=seed, after=wins)
        for seed, wins in ((0, set()), (1, set(range(8))), (2, set()))
    ]
    none, all_of_them, other = (experiments([read_run(RunLog(folder), 9)])[0] for folder in folders)
    found = difference(none, all_of_them)
    told = compare_runs(RunLog(folders[0]), RunLog(folders[1])).success
    assert found is not None
    assert told is not None
    assert (found.verdict, found.mean, found.num_pairs, found.seeds) == ("better", 1.0, 1, [])
    assert (found.interval, found.p_value) == (told.interval, told.p_value)
    turned = difference(all_of_them, other)
    assert turned is not None
    assert turned.verdict == "worse"
    both = experiments([read_run(RunLog(folder), 9) for folder in folders])
    assert difference(both[0], both[2]).reason == "0 of 8 scenarios differ, at least 6 must"  # type: ignore[union-attr]  # they have scenarios in common


def test_an_experiment_s_number_is_that_of_its_runs(root: Path) -> None:
    """41.0 % stood beside runs of 41.5 to 43.5 %: families had been trimmed away, and counted alike."""
    runs = [read_run(RunLog(RunFolder(path)), 9) for path in sorted(root.glob("0*"))]
    a, b = experiments(runs)
    scored, few = score(a), score(b)
    assert scored is not None
    assert few is not None
    assert list(scored.runs) == [4 / 8, 3 / 8, 5 / 8] == [run.summary["after"]["success"] for run in a.runs]
    assert scored.iqm == pytest.approx(4 / 8)
    assert scored.num_scenarios == 8
    assert scored.interval is not None
    assert few.interval is None  # two runs


def test_a_run_that_kept_no_conversation_has_the_result_of_its_summary(tmp_path: Path) -> None:
    """ "None measured" stood under a full column."""
    folder = write_run(tmp_path, beta=0.0, seed=0, after={0, 1})
    folder.rollouts.unlink()
    [only] = overview_data(tmp_path)["experiments"]
    assert only["score"]["runs"] == [2 / 8]


def test_numeric_runs_are_paired_by_their_held_out_starts(tmp_path: Path) -> None:
    for seed, gain in enumerate((0.0, 5.0)):
        folder = RunFolder.create(tmp_path, "pole")
        with JsonlTracker(folder) as tracker:
            for stage, by in (("before", 0.0), ("after", gain)):
                episodes = [{"seed": start, "return": start % 7 + by} for start in range(20)]
                tracker.log_episodes(9, episodes, stage=stage)
            tracker.log_metrics(9, {"reward/mean": gain})
        folder.write_config({"kind": "control", "training": {"gamma": 1 - seed / 10, "seed": 0}})
        side = {"mean_reward": 3 + gain, "reward_interval": None, "n": 20, "num_failed": 0}
        folder.write_summary({"seed": 0, "before": side | {"mean_reward": 3}, "after": side})
    data = overview_data(tmp_path)
    assert [(run["before"]["value"], run["after"]["value"]) for run in data["runs"]] == [(3, 3), (3, 8)]
    assert [(run["gain"]["measure"], run["gain"]["mean"]) for run in data["runs"]] == [
        ("reward", 0.0),
        ("reward", 5.0),
    ]
    assert [one["score"]["runs"] for one in data["experiments"]] == [[3.0], [8.0]]
    [[_, _, found]] = data["differences"]
    assert (found["measure"], found["mean"], found["verdict"], found["seeds"]) == (
        "reward",
        5.0,
        "better",
        [0],
    )


def test_long_curves_are_means_of_bins(root: Path) -> None:
    curves = read_run(RunLog(RunFolder(root / "0004-desk")), 2).curves
    assert curves.steps == [2, 4]
    assert curves.values["kl/reference"] == [0.75, 1.75]


def test_report_takes_a_run_or_a_folder_of_runs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(root)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == root / "report.html"
    assert page_data(RunFolder(root))["name"] == root.name
    assert main(["report", str(root), "--conversations", "9"]) == 1
    assert "--conversations is for the page of one run" in capsys.readouterr().err
    assert main(["report", str(root / "0001-desk" / "checkpoints")]) == 1
    assert "is no run folder" in capsys.readouterr().err


def test_only_settings_that_differ_are_listed() -> None:
    same = {"training": {"beta": 0.1, "lr": 1}}
    assert differing_settings([same, same]) == {}
    assert differing_settings([same, {"training": {"beta": 0.1, "lr": 2}, "reward": {}}]) == {
        "training.lr": ["1", "2"],
        "reward": [None, "{}"],
    }


async def test_a_live_page_leads_to_the_runs_own_pages(tmp_path: Path) -> None:
    folder = write_run(tmp_path, beta=0.0, seed=0, after={0})
    folder.report.write_text("<!doctype html>its own page")
    other = write_run(tmp_path, beta=0.0, seed=1, after={0})
    (tmp_path / "report.html").write_text("not of a run")
    async with served(serve_overview, tmp_path) as client:
        async with client.get(f"/{folder.path.name}/report.html") as page:
            assert (page.status, await page.text()) == (200, "<!doctype html>its own page")
        for path in (f"/{other.path.name}/report.html", "/%2e/report.html", "/x/report.html"):
            async with client.get(path) as missing:
                assert missing.status == 404


async def test_a_run_that_began_between_the_page_and_its_stream_is_sent_at_once(tmp_path: Path) -> None:
    write_run(tmp_path, beta=0.0, seed=0, after={0})
    async with served(serve_overview, tmp_path) as client:
        async with client.get("/") as page:
            assert page.status == 200
        write_run(tmp_path, beta=0.0, seed=1, after={0})
        async with client.get("/events") as stream:
            name, data = await next_event(stream)
    assert (name, [run["name"] for run in data["runs"]]) == ("page", ["0001-desk", "0002-desk"])
