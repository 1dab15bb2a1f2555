"""The page of a run: what it says, what it leaves out, and that it needs nothing but itself."""

from __future__ import annotations

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_runs import finished_run, log_stage, page_data, side

from stateset_agents.cli.main import main
from stateset_agents.reporting.report import other_tables, write_report
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.errors import ConfigurationError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = finished_run(tmp_path_factory.mktemp("runs"))
    write_report(folder.path)
    return folder


@pytest.fixture(scope="module")
def data(run: RunFolder) -> dict[str, Any]:
    return page_data(run)


class Page(HTMLParser):
    """Tags of a page, their attributes, and what is open at the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def data_of(folder: RunFolder) -> dict[str, Any]:
    write_report(folder.path)
    return page_data(folder)


def titles(charts: list[dict[str, Any]]) -> list[str]:
    return [chart["title"] for chart in charts]


def test_both_success_rates_stand_on_the_page_with_their_intervals(data: dict[str, Any]) -> None:
    every = data["measured"][0]
    assert every["before"] == pytest.approx({"value": 0.22, "low": 0.19, "high": 0.25, "n": 600, "tries": 1})
    assert every["after"] == pytest.approx(
        {"value": 0.935, "low": 0.905, "high": 0.965, "n": 600, "tries": 1}
    )
    assert data["greedy"] == {"before": 0.44, "after": 0.952}


def test_each_family_has_wilson_intervals_of_its_own(data: dict[str, Any]) -> None:
    # cancel: 33 of 150 before; Wilson's interval is [.161, .293]
    assert data["measured"][1]["name"] == "cancel"
    before = data["measured"][1]["before"]
    assert (before["n"], round(before["low"], 3), round(before["high"], 3)) == (150, 0.161, 0.293)


def test_every_metric_has_its_chart_once(data: dict[str, Any]) -> None:
    assert titles(data["curves"]) == [
        *("Reward", "Success", "Success by family", "KL to the reference", "Entropy", "Clip fraction"),
        *("Value function", "Value loss", "Gradient norm", "Time", "Tokens", "Speed"),
    ]
    assert titles(data["terms"]) == ["told"]
    assert {group["stage"]: titles(group["charts"]) for group in data["others"]} == {
        "policy": ["policy/version"],
        "reward": ["reward/std"],
        "rollout": ["rollout/conversations"],
    }


def test_the_estimator_and_an_early_end_stand_among_the_facts(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_config({"training": {"advantage_estimator": "turn_gae"}})
    folder.write_summary({"steps": 3, "num_steps": 9, "why": "stopped as asked", "train_seconds": 61})
    facts = dict(data_of(folder)["facts"])
    assert (facts["credit"], facts["ended"], facts["training"]) == (
        "turn_gae",
        "stopped as asked",
        "1 min 1 s",
    )


def test_the_diagnostics_stand_on_the_page_with_signs_and_cures(data: dict[str, Any], tmp_path: Path) -> None:
    findings = {finding["check"]: finding for finding in data["findings"]}
    assert findings["gradients"]["seen"] == "norm 1 before clipping at 1 (median; highest 1.05)"
    assert "event loop" not in findings  # no such metric in this run
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(1, {"optimizer/grad_norm": 9.0})
    (finding,) = [item for item in data_of(folder)["findings"] if item["check"] == "gradients"]
    assert (finding["sign"], finding["cure"]) == (
        "✗",
        "check the scale of the rewards, take larger batches, lower learning_rate",
    )


def test_conversations_come_with_what_their_tokens_say(data: dict[str, Any]) -> None:
    assert data["total"] == len(data["conversations"]) == 2 * 8 + 110 * 10
    low, high = data["moved"].pop("interval")
    assert low < 0 < 5 / 8 < high  # 6 to 1: a coin falls so in 12 % of the cases
    assert data["moved"] == {"n": 8, "scenarios": 8, "gained": 6, "lost": 1, "difference": 5 / 8}
    assert data["tokens"]["3"] == " look"


def test_settings_are_flat(data: dict[str, Any]) -> None:
    assert data["settings"][:2] == [["agent.model_name", "embedded:desk"], ["training.seed", "3"]]


def test_the_page_is_well_formed_and_loads_nothing(run: RunFolder) -> None:
    parsed = Page(run.report.read_text())
    assert parsed.open == []
    assert not {"img", "iframe"} & {tag for tag, _ in parsed.tags}
    links = {value for _, attrs in parsed.tags for name, value in attrs.items() if name in {"src", "href"}}
    assert {link for link in links if not (link or "").startswith("#")} == {"data:,"}
    (rules,) = [attrs["content"] for _, attrs in parsed.tags if attrs.get("http-equiv")]
    assert rules == (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'unsafe-inline'; "
        "connect-src 'none'"
    )


def test_the_page_is_small_and_quickly_made(run: RunFolder) -> None:
    assert run.report.stat().st_size < 2_500_000
    started = time.process_time()
    write_report(run.path)
    assert time.process_time() - started < 2.0  # 0.35 on an idle machine


def test_a_page_stays_within_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished_run(tmp_path, steps=24)
    size = write_report(folder.path, shared_assets=True).stat().st_size
    monkeypatch.setattr("stateset_agents.reporting.report.MAX_BYTES", size - 4_000)
    assert write_report(folder.path, shared_assets=True).stat().st_size <= size - 4_000
    assert 16 < len(page_data(folder)["conversations"]) < page_data(folder)["total"]


def test_plotly_can_stand_once_beside_all_runs(tmp_path: Path) -> None:
    runs = [finished_run(tmp_path, steps=2) for _ in range(2)]
    for folder in runs:
        page = Page(write_report(folder.path, shared_assets=True).read_text())
        (source,) = [attrs["src"] for tag, attrs in page.tags if tag == "script" and "src" in attrs]
        assert "plotly.js (cartesian - minified) v" in (folder.path / str(source)).read_text()[:200]
        assert folder.report.stat().st_size < 150_000
    assert len(list(tmp_path.glob("plotly-*.min.js"))) == 1


def test_it_is_made_from_the_folder_alone(run: RunFolder, tmp_path: Path) -> None:
    moved = tmp_path / run.path.name
    shutil.copytree(run.path, moved)
    (moved / "report.html").unlink()
    assert write_report(moved).read_text() == run.report.read_text()


def test_a_run_without_measurements_shows_its_curves(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "plain")
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(1, {"reward/mean": 0.5})
    data = data_of(folder)
    assert (data["measured"], titles(data["curves"]), data["total"]) == ([], ["Reward"], 0)


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    data = data_of(RunFolder.create(tmp_path))
    assert (data["curves"], data["findings"], data["ended"]) == ([], [], None)


def test_a_run_stopped_after_its_first_measurement_shows_that(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_summary({"before": side(132, 0.44)})
    every, cancel, *_ = data_of(folder)["measured"]
    assert (every["before"]["value"], every["after"], cancel["after"]) == (0.22, None, None)


def test_other_results_have_tables_of_their_own() -> None:
    def estimate(value: float, n: int) -> dict[str, Any]:
        return {"value": value, "interval": [value - 0.1, value + 0.1], "n": n}

    before = {
        "tries": 1,
        "twins": estimate(0.2, 240),
        "violations": {"any": estimate(0.6, 600), "consent": estimate(0.5, 600)},
    }
    after = {
        "pass_at": {"1": estimate(0.8, 600), "16": estimate(0.9, 590)},
        "pass_hat": {"2": estimate(0.7, 600)},
    }
    tries, pairs, rules = other_tables(before, {**after, "twins": estimate(0.7, 240)})
    assert [(row["name"], row["before"], row["after"]["n"]) for row in tries["rows"]] == [
        ("pass@1", None, 600),
        ("pass@16", None, 590),
        ("pass^2", None, 600),
    ]
    (both,) = pairs["rows"]
    assert both["before"] == {"value": 0.2, "low": 0.1, "high": pytest.approx(0.3), "n": 240, "tries": 1}
    assert [(row["name"], row["before"]["value"], row["after"]) for row in rules["rows"]] == [
        ("any", 0.6, None),
        ("consent", 0.5, None),
    ]
    assert [table["main"] for table in (tries, pairs, rules)] == ["pass^2", "both of a pair right", "any"]
    assert other_tables({"success": 0.5}, {}) == []


def test_text_from_users_and_settings_cannot_become_markup(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>&<b><!--"
    folder = RunFolder.create(tmp_path, name=evil)
    with JsonlTracker(folder, lambda id: evil) as tracker:
        log_stage(tracker, 0, "before", wins=set(), reply=evil)
        tracker.log_metrics(1, {f"x/{evil}": 1.0})
    folder.write_config({evil: evil})
    data = data_of(folder)
    assert data["settings"] == [[evil, evil]]
    assert data["conversations"][0]["messages"][-1]["content"] == evil
    page = folder.report.read_text()
    assert "alert(1)" not in page
    assert len(re.findall("<script", page)) == 3  # data, plotly, the page's own
    assert Page(page).open == []


def test_the_command_writes_the_page_and_prints_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished_run(tmp_path, steps=3)
    assert main(["report", str(tmp_path / "latest"), "--shared-assets", "--conversations", "20"]) == 0
    assert capsys.readouterr().out.strip() == str(folder.report)
    assert len(page_data(folder)["conversations"]) == 10 + 10  # five scenarios twice, two groups of five
    assert list(tmp_path.glob("plotly-*.min.js"))


def test_open_shows_the_page_in_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    folder = finished_run(tmp_path, steps=1)
    assert main(["report", str(folder.path), "--open"]) == 0
    assert shown == [folder.report.as_uri()]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--conversations", "0"], "--conversations must be at least 1, got 0"),
        (["--port", "80"], "--port is for --live"),
        (["--live", "--port", "70000"], "--port must be from 0 to 65535, got 70000"),
        (["--live", "--shared-assets"], "--shared-assets is for the file"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    options: list[str], said: str, run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run.path), *options]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--live"]])
def test_a_folder_that_is_no_run_is_one_line_and_a_failure(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), *options]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.report.mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot write .*report\.html"):
        write_report(folder.path)


def test_what_audit_and_rescore_wrote_into_the_folder_reaches_the_page(tmp_path: Path) -> None:
    folder = finished_run(tmp_path, steps=2)
    assert data_of(folder)["verdicts"] == {"audit": None, "rescore": None}
    assert main(["rescore", str(folder.path), "--reward", "environment", "--out", str(folder.rescore)]) == 0
    idle = {"success": 0.25, "interval": [0.1, 0.5], "mean_reward": 0.4, "n": 20}
    folder.audit.write_text(json.dumps({"policies": {"idle": idle}, "honest": None, "over": ["too much"]}))
    verdicts = data_of(folder)["verdicts"]
    agent = {"name": "idle", "success": 0.25, "interval": [0.1, 0.5], "reward": 0.4, "n": 20}
    assert verdicts["audit"] == {"agents": [agent], "over": ["too much"]}
    row = verdicts["rescore"]["rows"][0]
    assert (row["name"], row["n"], row["new_mean"]) == ("all", 16, 0.45)
    folder.audit.write_text("[]")
    with pytest.raises(ConfigurationError, match=r"audit.json is not what `audit --out` writes"):
        write_report(folder.path)
