"""The page of a run: what it shows, what it leaves out, and that it needs nothing but itself."""

from __future__ import annotations

import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from stateset_agents.cli.main import main
from stateset_agents.core.scenario import Scenario
from stateset_agents.core.trajectory import Outcome, Trajectory, TrajectoryGroup, Turn
from stateset_agents.errors import ConfigurationError
from stateset_agents.messages import Completion, Message, ToolCall
from stateset_agents.reporting.report import write_report
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker, Stage

FAMILIES = ("cancel", "exchange", "order_status", "refund")


def conversation(number: int, *, success: bool, reply: str = "Done, K27 goes to Oslo.") -> Trajectory:
    """A caller, a look-up, an answer; scenario `test-NUMBER`."""
    call = ToolCall(name="get_order", arguments={"order_id": f"K{number}"}, id="1")
    turns = (
        Turn(
            prompt_ids=(1, 2),
            completion=Completion(
                message=Message(role="assistant", content="Let me look.", tool_calls=(call,)),
                prompt_ids=(1, 2),
                token_ids=(3, 4),
                logprobs=(-0.5, -0.1),
                finish_reason="stop",
            ),
            feedback=(Message(role="tool", content='{"status": "sent", "city": "Oslo"}', tool_call_id="1"),),
        ),
        Turn(
            prompt_ids=(5,),
            completion=Completion(
                message=Message(role="assistant", content=reply),
                prompt_ids=(1, 2, 3, 4, 5),
                token_ids=(6,),
                logprobs=(-0.2,),
                finish_reason="stop",
            ),
        ),
    )
    return Trajectory(
        scenario=Scenario(id=f"test-{number}", family=FAMILIES[number % 4], split="test"),
        opening=(
            Message(role="system", content="You work for the retail desk."),
            Message(role="user", content=f"Hi, I would like to know about K{number}, please."),
        ),
        turns=turns,
        outcome=Outcome(reward=0.5, success=success),
        reward=0.9 if success else 0.15,
    )


def log_stage(tracker: JsonlTracker, step: int, stage: Stage, wins: set[int], **options: Any) -> None:
    groups = [
        TrajectoryGroup(key=f"{stage}/{n}", trajectories=(conversation(n, success=n in wins, **options),))
        for n in range(8)
    ]
    tracker.log_rollouts(step, groups, stage=stage)


def side(successes: int, greedy: float) -> dict[str, Any]:
    """A measurement of 600 scenarios, 150 a family."""
    families = {
        name: {"success": min(1.0, successes / 600 + i / 50), "n": 150} for i, name in enumerate(FAMILIES)
    }
    interval = [successes / 600 - 0.03, min(1.0, successes / 600 + 0.03)]
    return {
        "success": successes / 600,
        "interval": interval,
        "greedy": greedy,
        "n": 600,
        "families": families,
    }


def finished_run(root: Path, steps: int = 110) -> RunFolder:
    """A run as the trainer leaves it: metrics, conversations of every stage, summary, settings."""
    folder = RunFolder.create(root, "demo")
    with JsonlTracker(folder) as tracker:
        log_stage(tracker, 0, "before", wins={0, 1})
        for step in range(1, steps + 1):
            risen = 1 - math.exp(-step / 30)
            wobble = math.sin(step * 2.4) * 0.05
            metrics = {
                "reward/mean": 0.2 + 0.7 * risen + wobble,
                "success/rate": min(1.0, max(0.0, 0.2 + 0.72 * risen + wobble)),
                "rollout/conversations": 64.0,
                "kl/reference": 0.002 * step + abs(wobble) / 10,
                "policy/entropy": 0.9 - 0.5 * risen + wobble / 4,
                "policy/clip_fraction_low": 0.0,
                "policy/clip_fraction_high": 0.0,
                "tokens/per_second": 5120.0 + 900 * wobble,
                "optimizer/grad_norm": 1.0 + wobble,
                "time/rollout": 0.8 + wobble,
            }
            tracker.log_metrics(step, metrics)
        log_stage(
            tracker, steps, "after", wins={0, 2, 3, 4, 5, 6, 7}, reply="Done, sent. Anything else? Bye."
        )
    folder.write_config({"agent": {"model_name": "embedded:desk"}, "training": {"seed": 3, "beta": 0.01}})
    folder.write_summary(
        {
            "seed": 3,
            "steps": steps,
            "train_seconds": 95.2,
            "platform": "Linux, Python 3.11, torch 2.13",
            "before": side(132, 0.44),
            "after": side(561, 0.952),
        }
    )
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = finished_run(tmp_path_factory.mktemp("runs"))
    write_report(folder.path)
    return folder


class Page(HTMLParser):
    """Tags, their attributes, and the visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def page(folder: RunFolder) -> Page:
    return Page(folder.report.read_text())


def test_both_success_rates_stand_on_the_page_with_their_intervals(run: RunFolder) -> None:
    text = page(run).text
    assert "before 22.0% 95 %: 19.0% to 25.0%, 600 held-out scenarios; greedy 44.0%" in text
    assert "after 93.5% 95 %: 90.5% to 96.5%, 600 held-out scenarios; greedy 95.2%" in text


def test_each_family_has_wilson_intervals_of_its_own(run: RunFolder) -> None:
    # cancel: 33 of 150 before; Wilson's interval is [.161, .293]
    assert "cancel n = 150 22.0% [16.1%, 29.3%] 93.5%" in page(run).text


def test_every_learning_curve_is_drawn(run: RunFolder) -> None:
    labels = [attrs["aria-label"] or "" for tag, attrs in page(run).tags if tag == "svg"]
    titles = [label.split(":")[0] for label in labels]
    assert titles[:6] == ["Reward", "Success", "KL to the reference", "Entropy", "Clip fraction", "Speed"]
    assert titles[6:] == ["optimizer/grad_norm", "rollout/conversations", "time/rollout"]
    assert re.fullmatch(r"KL to the reference: 0\.00\d+ at step 1, 0\.22\d* at step 110", labels[2])


def test_a_critic_s_curves_its_estimator_and_the_reward_s_terms_are_shown(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_config({"training": {"advantage_estimator": "turn_gae"}})
    values = {"reward/mean": 0.5, "reward/std": 0.1, "reward/told": 0.2, "reward/repeats": -0.1}
    values |= {"value/explained_variance": 0.3, "loss/value": 0.1, "time/step": 1.0}
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(1, values)
    parsed = Page(write_report(folder.path).read_text())
    assert "credit turn_gae" in parsed.text
    labels = [(attrs["aria-label"] or "").split(":")[0] for tag, attrs in parsed.tags if tag == "svg"]
    assert labels[:3] == ["Reward", "Value function", "Value loss"]
    assert labels[3:] == ["reward/repeats", "reward/told", "reward/std", "time/step"]
    assert "Terms of the reward (2)" in parsed.text
    assert "All other metrics (2) reward" in parsed.text


def test_the_diagnostics_stand_on_the_page(run: RunFolder) -> None:
    text = page(run).text
    assert "✓ gradients norm 1 before clipping at 1 (median; highest 1.05)" in text
    assert "✓ event loop" not in text  # no such metric in this run


def test_a_trouble_stands_with_its_cure(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(1, {"optimizer/grad_norm": 9.0})
    text = Page(write_report(folder.path).read_text()).text
    assert (
        "✗ gradients norm 9 before clipping at 1 (median; highest 9) check the scale of the rewards" in text
    )


def test_conversations_that_changed_are_shown_side_by_side(run: RunFolder) -> None:
    text = page(run).text
    assert "Of 8 held-out scenarios, 6 went from failure to success and 1 the other way" in text
    assert re.findall(r"(\w+) (test-\d) before", text) == [
        ("order_status", "test-2"),
        ("refund", "test-3"),
        ("cancel", "test-4"),
    ]
    assert 'get_order(order_id="K2")' in text
    assert "Done, sent. Anything else? Bye." in text


def test_the_page_is_well_formed_and_loads_nothing(run: RunFolder) -> None:
    parsed = page(run)
    assert parsed.open == []
    assert not {"script", "img", "iframe"} & {tag for tag, _ in parsed.tags}
    links = {value for _, attrs in parsed.tags for name, value in attrs.items() if name in {"src", "href"}}
    assert links == {"data:,"}
    assert "url(" not in run.report.read_text()
    assert "http" not in run.report.read_text().replace("http-equiv", "")


def test_the_page_is_small(run: RunFolder) -> None:
    assert run.report.stat().st_size < 300_000


def test_it_is_made_from_the_folder_alone(run: RunFolder, tmp_path: Path) -> None:
    moved = tmp_path / run.path.name
    shutil.copytree(run.path, moved)
    (moved / "report.html").unlink()
    assert write_report(moved).read_text() == run.report.read_text()


def test_a_run_without_measurements_shows_its_curves(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "plain")
    with JsonlTracker(folder) as tracker:
        tracker.log_metrics(1, {"reward/mean": 0.5})
    text = Page(write_report(folder.path).read_text()).text
    assert "was not measured before and after" in text
    assert "Reward" in text
    assert "No scenario was played both before and after" in text


def test_a_run_that_has_just_begun_says_so(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    assert "No step has finished yet" in write_report(folder.path).read_text()


def test_a_run_stopped_after_its_first_measurement_shows_that(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_summary({"before": side(132, 0.44)})
    text = Page(write_report(folder.path).read_text()).text
    assert "before 22.0%" in text
    assert "cancel n = 150 22.0% [16.1%, 29.3%] not measured" in text


def test_text_from_users_and_settings_cannot_become_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&<b>"
    folder = RunFolder.create(tmp_path)
    with JsonlTracker(folder) as tracker:
        log_stage(tracker, 0, "before", wins=set(), reply=evil)
        log_stage(tracker, 1, "after", wins=set(), reply=evil)
        tracker.log_metrics(1, {f"x/{evil}": 1.0})
    folder.write_config({evil: evil})
    parsed = Page(write_report(folder.path).read_text())
    assert evil in parsed.text
    assert not {"script", "b"} & {tag for tag, attrs in parsed.tags if not attrs.get("class")}


def test_the_command_writes_the_page_and_prints_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finished_run(tmp_path, steps=3)
    assert main(["report", str(tmp_path / "latest")]) == 0
    assert capsys.readouterr().out.strip() == str(folder.report)
    assert folder.report.exists()


def test_a_folder_that_is_no_run_is_one_line_and_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    folder.report.mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot write .*report\.html"):
        write_report(folder.path)
