"""Each check of the diagnostics fires on a run that shows its trouble, and is silent on one that does not."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from builders import trajectory
from healthy_run import FALLING, HEALTHY, STEPS, TRAINING, Series
from tiny_training import talk

from stateset_agents.algorithms.intervals import mean_interval, wilson
from stateset_agents.cli.main import main
from stateset_agents.tracking.diagnostics import (
    CHECKS,
    History,
    _loop_lag,
    all_passed,
    diagnose,
    live_findings,
)
from stateset_agents.tracking.monitors import Finding, monitors
from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.run_log import MetricLine, RunLog, held_out_gains
from stateset_agents.tracking.tracker import JsonlTracker
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Outcome, Status, TrajectoryGroup


def record(folder: Path, metrics: Mapping[str, Series], training: Mapping[str, Any] = TRAINING) -> RunLog:
    """A run folder with these metrics in each of 30 steps; a single number stands for all of them."""
    run = RunFolder.create(folder)
    run.write_config({"training": dict(training)})
    with JsonlTracker(run) as tracker:
        for step in range(STEPS):
            values = {
                name: series if isinstance(series, float) else series[step]
                for name, series in metrics.items()
            }
            tracker.log_metrics(step + 1, values)
    return RunLog.open(run.path)


def finding_of(folder: Path, check: str, changed: Mapping[str, Series], **training: Any) -> Finding:
    """What one check finds in the healthy run with some metrics changed; all others still pass."""
    findings = diagnose(record(folder, {**HEALTHY, **changed}, {**TRAINING, **training}))
    [finding] = [finding for finding in findings if finding.check == check]
    return finding


def test_a_healthy_run_passes_every_check(tmp_path: Path) -> None:  # but for what is measured beside it
    findings = diagnose(record(tmp_path, HEALTHY))
    assert len(findings) == len(CHECKS) - 3 == len({finding.check for finding in findings})
    assert [finding for finding in findings if finding.verdict != "ok" or finding.cure] == []
    assert all_passed(findings)


SICK: list[tuple[str, str, Mapping[str, Series], Mapping[str, Any]]] = [
    ("reward", "fail", {"reward/mean": FALLING}, {}),
    ("reward", "warn", {"reward/mean": [0.1, 0.2] * 15}, {}),
    ("vocabulary", "warn", {"tokens/untrained": 0.1}, {}),
    ("vocabulary", "fail", {"tokens/untrained": 0.4}, {}),
    ("observations", "warn", {"observation/rms": 0.001}, {}),
    ("observations", "warn", {"observation/rms": 300.0}, {}),
    ("failures", "warn", {"rollout/failed": 0.5}, {}),  # 15 of 480
    ("failures", "fail", {"rollout/unscored": 2.0}, {}),  # 60 of 480
    ("dependencies", "warn", {"faults/retries": 3.0}, {}),  # 90 in 480 conversations
    ("dependencies", "fail", {"faults/timeouts": 17.0}, {}),
    ("dependencies", "fail", {"breaker/environment": [0.0] * 29 + [1.0]}, {}),
    ("tokens", "warn", {"tokens/environment": 30_000.0}, {}),
    ("tokens", "warn", {"tokens/padding": 2000.0}, {}),
    ("truncation", "warn", {"rollout/truncated": 0.2}, {}),
    ("truncation", "fail", {"rollout/truncated": 0.7}, {}),
    ("cut replies", "warn", {"rollout/cut_replies": 0.2}, {}),
    ("cut replies", "fail", {"rollout/cut_replies": 0.6}, {}),
    ("tool calls", "warn", {"rollout/malformed": 0.1}, {}),
    ("tool calls", "fail", {"rollout/malformed": 0.3}, {}),
    ("advantages", "warn", {"advantage/std": 3.5}, {}),
    ("value bias", "warn", {"advantage/mean": [0.1, 0.12] * 15}, {}),
    ("tied groups", "warn", {"group/zero_variance": 0.6}, {}),
    ("tied groups", "fail", {"group/zero_variance": 1.0}, {}),
    ("skipped steps", "warn", {"optimizer/skipped": [0.0, 0.0, 1.0] * 10}, {}),
    ("skipped steps", "fail", {"optimizer/skipped": 1.0}, {}),
    ("numbers", "fail", {"loss/policy": [math.nan] + [0.1] * 29}, {}),
    ("gradients", "warn", {"optimizer/grad_norm": 3.0}, {}),
    ("gradients", "fail", {"optimizer/grad_norm": 3.0}, {"max_grad_norm": 0.5}),
    ("entropy", "warn", {"policy/entropy": [0.5 + 0.05 * step for step in range(STEPS)]}, {}),
    ("entropy", "fail", {"policy/entropy": [0.5] * 15 + [0.02] * 15}, {}),
    ("KL to the reference", "warn", {"kl/reference": 0.6}, {}),
    ("KL to the reference", "fail", {"kl/reference": 3.0}, {}),
    ("KL to the reference", "warn", {"kl/reference": 0.02}, {"kl_controller": "adaptive"}),
    ("inner passes", "warn", {"policy/clip_fraction_low": 0.4}, {}),
    ("inner passes", "warn", {"kl/old": 0.15}, {}),
    ("inner passes", "fail", {"kl/old": 0.5}, {}),
    ("on-policy", "warn", {"policy/first_ratio_max": 1.1}, {}),
    ("on-policy", "fail", {"policy/first_ratio_max": 4.0}, {}),
    ("sampler", "warn", {"policy/mismatch_rms": 0.2}, {}),
    ("sampler", "warn", {"policy/rollout_mismatch": [0.1] * 29 + [1.4]}, {}),
    ("off-policy", "warn", {"policy/weight": 0.85}, {}),
    ("off-policy", "fail", {"policy/weight": 1.6}, {}),
    ("value function", "warn", {"value/explained_variance": 0.05}, {}),
    ("value function", "fail", {"value/explained_variance": -0.5}, {}),
    ("reply length", "warn", {"tokens/per_turn": [10.0] * 15 + [25.0] * 15}, {}),
    ("reply length", "warn", {"tokens/per_turn": [10.0] * 15 + [3.0] * 15}, {}),
    ("event loop", "warn", {"time/loop_lag": 2.0}, {}),
    ("format", "warn", {"reasoning/format": 0.9}, {}),
    ("format", "fail", {"reasoning/format": [1.0] * 20 + [0.5] * 10}, {}),
    ("thinking", "warn", {"reasoning/thinking_words_right": [30.0] * 15 + [12.0] * 15}, {}),
    ("thinking", "warn", {"reasoning/thinking_words_wrong": [14.0] * 15 + [40.0] * 15}, {}),
    ("steps of thinking", "warn", {"reasoning/steps_by_difficulty": 0.1}, {}),
    ("memory", "warn", {"memory/peak_mib": [100.0] * 29 + [7500.0]}, {}),
    ("memory", "fail", {"memory/gpu/peak_mib": 8000.0, "memory/gpu/limit_mib": 8100.0}, {}),
    ("generation", "warn", {"time/rollout": [0.8] * 15 + [2.0] * 15}, {}),
    ("cache", "warn", {"cache/hits": 0.0}, {}),
]


@pytest.mark.parametrize(
    ("check", "verdict", "changed", "training"), SICK, ids=[f"{row[0]} {row[1]}" for row in SICK]
)
def test_a_trouble_is_found_by_its_check_alone_and_has_a_cure(
    tmp_path: Path, check: str, verdict: str, changed: Mapping[str, Series], training: Mapping[str, Any]
) -> None:
    findings = diagnose(record(tmp_path, {**HEALTHY, **changed}, {**TRAINING, **training}))
    assert [(item.check, item.verdict) for item in findings if item.verdict != "ok"] == [(check, verdict)]
    assert all(item.cure for item in findings if item.verdict != "ok")
    assert not all_passed(findings)


def test_success_at_its_floor_is_said_first_and_no_advice_goes_past_it(tmp_path: Path) -> None:
    flat = {"success/rate": 0.005, "reward/mean": [0.1, 0.2] * 15}
    log = record(tmp_path, {**HEALTHY, **flat})
    log.folder.write_summary({"before": measured(3), "after": measured(0)})
    first, *others = diagnose(log)
    assert str(first).startswith("✗ floor: success is at its floor, at most 0.5% at the start and at the end")
    assert "-> warm start first, on conversations that go well" in str(first)
    troubled = {item.check: item.cure for item in others if item.verdict != "ok"}
    assert troubled == dict.fromkeys(("held-out", "reward"), first.cure)
    assert (
        diagnose(record(tmp_path / "b", {**HEALTHY, "success/rate": [0.0] * 25 + [0.5] * 5}))[0].check
        != "floor"
    )


def test_greedy_success_that_falls_while_the_sampled_rises_is_named(tmp_path: Path) -> None:
    log = record(tmp_path, HEALTHY)
    greedy = [
        {"greedy": rate, "greedy_interval": around} for rate, around in ((0.5, (0.4, 0.6)), (0.2, (0.1, 0.3)))
    ]
    log.folder.write_summary(
        {"before": {**measured(96), **greedy[0]}, "after": {**measured(560), **greedy[1]}}
    )
    finding = next(item for item in diagnose(log) if item.check == "held-out")
    assert finding.verdict == "warn"
    assert finding.seen.endswith("after sampled; greedy it fell from 50.0% to 20.0%")


def test_every_check_has_a_trouble_above(tmp_path: Path) -> None:
    assert {row[0] for row in SICK} == {finding.check for finding in diagnose(record(tmp_path, HEALTHY))}


def test_a_critic_that_guesses_beyond_nearly_every_cut_is_told_how_to_settle(tmp_path: Path) -> None:
    cut = {"rollout/truncated": 1.0}
    endless = finding_of(tmp_path / "1", "truncation", cut)
    assert endless.verdict == "fail"
    assert "drift without bound" in endless.seen
    assert "bootstrap_truncated to false" in endless.cure
    for number, settings in enumerate(({"gamma": 0.99}, {"bootstrap_truncated": False})):
        settled = finding_of(tmp_path / f"settled{number}", "truncation", cut, **settings)
        assert "raise max_turns" in settled.cure


def test_a_group_s_advantages_need_no_check_of_their_mean(tmp_path: Path) -> None:
    metrics = {name: series for name, series in HEALTHY.items() if not name.startswith("value/")}
    log = record(tmp_path, {**metrics, "advantage/mean": 0.3})
    assert all_passed(diagnose(log))


def test_with_one_pass_nothing_is_said_about_clipping(tmp_path: Path) -> None:
    log = record(tmp_path, {**HEALTHY, "policy/clip_fraction_low": 0.0}, {**TRAINING, "num_iterations": 1})
    assert "inner passes" not in {finding.check for finding in diagnose(log)}


@pytest.mark.parametrize(("clipped", "side"), [(0.05, "below"), (0.2, "within"), (0.4, "above")])
def test_the_clip_fraction_of_several_passes_has_a_band(tmp_path: Path, clipped: float, side: str) -> None:
    metrics = {**HEALTHY, "policy/clip_fraction_low": clipped, "policy/clip_fraction_high": 0.0}
    log = record(tmp_path, metrics, {**TRAINING, "num_iterations": 2})
    [finding] = [finding for finding in diagnose(log) if finding.check == "inner passes"]
    assert f"{clipped:.1%} of the tokens clipped, {side} the usual 10 to 30 %" in finding.seen
    assert finding.verdict == ("warn" if side == "above" else "ok")


def test_a_solved_task_may_tie_its_groups_and_be_sure_of_itself(tmp_path: Path) -> None:
    solved: Mapping[str, Series] = {
        **HEALTHY,
        "success/rate": 0.97,
        "reward/mean": [0.9, 0.91] * 15,
        "group/zero_variance": 0.95,
        "optimizer/skipped": 1.0,
        "policy/entropy": [0.5] * 15 + [0.01] * 15,
    }
    assert all_passed(diagnose(record(tmp_path, solved)))


def test_fp16_may_skip_infinite_gradients_while_it_finds_its_scale(tmp_path: Path) -> None:
    norms = [math.inf] + [0.5] * 29
    assert (
        finding_of(tmp_path / "a", "numbers", {"optimizer/grad_norm": norms}, precision="fp16").verdict
        == "ok"
    )
    assert finding_of(tmp_path / "b", "numbers", {"optimizer/grad_norm": norms}).verdict == "fail"


def test_dropout_moves_the_first_ratio_on_purpose(tmp_path: Path) -> None:
    ratios = {"policy/first_ratio_max": 2.0}
    log = record(tmp_path, {**HEALTHY, **ratios}, {**TRAINING, "dropout": True})
    assert "on-policy" not in {finding.check for finding in diagnose(log)}


def test_under_staleness_the_first_ratio_is_one_whatever_sampled_and_is_no_proof(tmp_path: Path) -> None:
    log = record(tmp_path, HEALTHY, {**TRAINING, "max_staleness": 1})
    assert "on-policy" not in {finding.check for finding in diagnose(log)}


def test_a_breaker_that_is_open_at_the_end_is_seen_behind_an_evaluation(tmp_path: Path) -> None:
    log = record(tmp_path, {**HEALTHY, "breaker/environment": [0.0] * 29 + [1.0]})
    with JsonlTracker(log.folder) as tracker:
        tracker.log_metrics(STEPS, {"eval/reward": 0.5})
    [finding] = [finding for finding in diagnose(log) if finding.check == "dependencies"]
    assert finding.verdict == "fail"
    assert "down: environment" in finding.seen


def measured(successes: int) -> Mapping[str, Any]:
    """Of 600 scenarios."""
    return {"success": successes / 600, "interval": list(wilson(successes, 600)), "n": 600}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [(96, 560, "ok"), (96, 58, "fail"), (96, 110, "warn"), (570, 560, "ok")],
)
def test_held_out_success_is_compared_by_its_intervals(
    tmp_path: Path, before: int, after: int, verdict: str
) -> None:
    # 16 % is [13.3, 19.1], 93.3 % is [91.0, 95.1], 9.7 % is [7.5, 12.3]; 18.3 % lies within the first
    log = record(tmp_path, HEALTHY)
    log.folder.write_summary({"before": measured(before), "after": measured(after)})
    first = diagnose(log)[0]
    assert (first.check, first.verdict) == ("held-out", verdict)


def held_out(successes: int, n: int) -> Mapping[str, Any]:
    return {"success": successes / n, "interval": list(wilson(successes, n)), "n": n}


FLAT = {"reward/mean": [0.1, 0.2] * 15}


def test_a_numeric_run_s_findings_speak_of_updates_and_returns(tmp_path: Path) -> None:
    constants = ("optimizer/skipped", "time/loop_lag", "value/explained_variance", "episode/length")
    log = record(tmp_path, {**FLAT, **dict.fromkeys(constants, 0.0)})
    side = {"n": 100, "mean_reward": 9.0, "reward_interval": [8.0, 10.0]}
    log.folder.write_summary({"before": side, "after": {**side, "mean_reward": 9.5}})
    seen = {finding.check: finding.seen for finding in diagnose(log)}
    assert seen["skipped steps"] == "0 of 30 updates changed no weight"
    assert seen["held-out"] == "return 9 before training, 9.5 after: no clear change"
    assert not [text for text in seen.values() if "step" in text or "scenario" in text]


def test_a_flat_reward_is_no_trouble_where_the_held_out_success_rose(tmp_path: Path) -> None:
    log = record(tmp_path / "rose", {**HEALTHY, **FLAT})
    log.folder.write_summary({"before": measured(96), "after": measured(560)})
    reward = next(item for item in diagnose(log) if item.check == "reward")
    assert reward.verdict == "ok"
    assert reward.seen.endswith(
        "no clear rise, but the held-out result rose: success 16.0% before training, 93.3% after"
    )
    log = record(tmp_path / "not", {**HEALTHY, **FLAT})
    log.folder.write_summary({"before": measured(96), "after": measured(110)})
    assert next(item for item in diagnose(log) if item.check == "reward").verdict == "warn"


@pytest.mark.parametrize(
    ("before", "after", "n", "cure"),
    [
        # 17 % is [3.0, 56.4], 33 % is [9.7, 70.0]: 6 * ((.534 + .603) / 2 / .167) ** 2 = 69.8
        (1, 2, 6, "6 scenarios are too few to tell this change: about 70 would (evaluation.episodes"),
        (1, 4, 6, "6 scenarios are too few to tell this change: about 9 would"),  # 7.8, half as many more
        (96, 110, 600, "train longer"),  # two points would take thousands
        (3, 3, 6, "train longer"),  # nothing changed
    ],
)
def test_more_scenarios_are_advised_where_the_interval_is_the_trouble(
    tmp_path: Path, before: int, after: int, n: int, cure: str
) -> None:
    log = record(tmp_path, HEALTHY)
    log.folder.write_summary({"before": held_out(before, n), "after": held_out(after, n)})
    first = diagnose(log)[0]
    assert (first.check, first.verdict) == ("held-out", "warn")
    assert first.cure.startswith(cure)


def test_a_held_out_reward_is_compared_where_there_is_no_verdict(tmp_path: Path) -> None:
    def rewarded(mean: float) -> Mapping[str, Any]:
        interval = [mean - 0.1, mean + 0.1]
        return {"success": None, "interval": None, "mean_reward": mean, "reward_interval": interval, "n": 40}

    for after, verdict in ((0.9, "ok"), (0.3, "warn"), (-0.4, "fail")):
        log = record(tmp_path / verdict, HEALTHY)
        log.folder.write_summary({"before": rewarded(0.2), "after": rewarded(after)})
        first = diagnose(log)[0]
        assert (first.check, first.verdict) == ("held-out", verdict)
        assert first.seen.startswith(f"reward 0.2 before training, {after:.3g} after")


@pytest.mark.parametrize("level", [500.0, 9.0])
def test_returns_that_are_all_the_same_in_the_end_are_judged_by_what_they_were(tmp_path, level) -> None:
    before = [20.0 + seed % 7 for seed in range(20)]
    log = record(tmp_path, HEALTHY)
    with JsonlTracker(log.folder) as tracker:
        for step, (stage, values) in enumerate(
            (("before", before), ("after", [7.0] * 9), ("after", [level] * 20))
        ):
            episodes = [{"seed": seed, "return": value} for seed, value in enumerate(values)]
            tracker.log_episodes(step, episodes, stage=stage)  # the second one of a shorter run
    log.folder.write_summary(
        {
            "before": {"mean_reward": fmean(before), "reward_interval": list(mean_interval(before)), "n": 20},
            "after": {"mean_reward": level, "reward_interval": None, "n": 20},
        }
    )
    assert held_out_gains(log) == [level - value for value in before]
    first = diagnose(log)[0]
    assert (first.check, first.verdict) == ("held-out", "ok" if level > 100 else "fail")


def test_the_same_gain_from_every_start_is_a_gain(tmp_path) -> None:
    log = record(tmp_path, HEALTHY)
    returns = {
        "before": [100.0 * seed for seed in range(20)],
        "after": [100.0 * seed + 5 for seed in range(20)],
    }
    with JsonlTracker(log.folder) as tracker:
        for stage, values in returns.items():
            episodes = [{"seed": seed, "return": value} for seed, value in enumerate(values)]
            tracker.log_episodes(STEPS, episodes, stage=stage)
    sides = {
        stage: {"mean_reward": fmean(values), "reward_interval": list(mean_interval(values)), "n": 20}
        for stage, values in returns.items()
    }
    log.folder.write_summary(sides)
    assert diagnose(log)[0].verdict == "ok"


@pytest.mark.parametrize(("gain", "verdict"), [(1.0, "ok"), (0.0, "warn"), (-1.0, "fail")])
def test_returns_of_the_same_starts_are_compared_start_by_start(tmp_path, gain, verdict) -> None:
    log = record(tmp_path, HEALTHY)
    returns = {
        stage: [100.0 * seed + by + 0.1 * (seed % 3) for seed in range(20)]
        for stage, by in (("before", 0.0), ("after", gain))
    }
    returns["after"] = [value + (-1) ** seed * 0.5 for seed, value in enumerate(returns["after"])]
    with JsonlTracker(log.folder) as tracker:
        for stage, values in returns.items():
            episodes = [{"seed": seed, "return": value} for seed, value in enumerate(values)]
            tracker.log_episodes(STEPS, episodes, stage=stage)

    def side(values):
        interval = list(mean_interval(values))
        return {"mean_reward": fmean(values), "reward_interval": interval, "n": 20}

    log.folder.write_summary({stage: side(values) for stage, values in returns.items()})
    first = diagnose(log)[0]
    assert (first.check, first.verdict) == ("held-out", verdict)


@pytest.mark.parametrize(
    ("metrics", "share"),
    [({"rollout/malformed": 0.4}, "60%"), ({"reward/schema": 0.25}, "25%"), ({"reward/schema": 0.99}, None)],
)
def test_a_missing_skill_is_named_before_longer_training(
    tmp_path: Path, metrics: Mapping[str, float], share: str | None
) -> None:
    log = record(tmp_path, {**HEALTHY, **FLAT, **metrics})
    log.folder.write_summary({"before": measured(96), "after": measured(110)})
    for finding in diagnose(log)[:2]:
        assert finding.check in ("held-out", "reward")
        if share is None:
            assert finding.cure.startswith("train longer")
        else:
            assert finding.cure.startswith(f"a skill is missing: {share} of the last replies are well-formed")
            assert finding.cure.endswith("longer training comes after that")


def test_words_that_the_model_never_had_are_told_from_the_first_step_on() -> None:
    first = MetricLine(step=1, time=0.0, values={"tokens/untrained": 0.4})
    [finding] = live_findings(History([first], TRAINING, {}))
    assert (finding.check, finding.verdict) == ("vocabulary", "fail")
    assert finding.seen == "40% of the prompts' tokens are none that the model was trained on"


def test_what_was_not_logged_is_not_judged(tmp_path: Path) -> None:
    assert diagnose(record(tmp_path, {})) == []
    [only] = diagnose(record(tmp_path, {"time/loop_lag": 0.01}))
    assert str(only) == "✓ event loop: 10 ms at most in the median step, 10 ms in the worst"


def test_a_trend_needs_nine_steps(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path)
    with JsonlTracker(run) as tracker:
        for step in range(1, 9):
            tracker.log_metrics(step, {"reward/mean": -float(step)})
    assert diagnose(RunLog.open(run.path)) == []


@pytest.mark.parametrize(("steps", "is_judged"), [(9, False), (10, True)])
def test_start_and_end_are_compared_from_ten_steps_on(tmp_path: Path, steps: int, is_judged: bool) -> None:
    """With nine the windows of five had a step in common, and a collapse was halved."""
    run = RunFolder.create(tmp_path)
    with JsonlTracker(run) as tracker:
        for step in range(steps):
            early = step < 5
            values = {"policy/entropy": 1.0 if early else 0.01, "tokens/per_turn": 10.0 if early else 40.0}
            tracker.log_metrics(step + 1, values)
    findings = diagnose(RunLog.open(run.path))
    found = {finding.check: finding.verdict for finding in findings if finding.check != "numbers"}
    assert found == ({"entropy": "fail", "reply length": "warn"} if is_judged else {})


@pytest.mark.parametrize(
    ("gains", "verdict", "said"),
    [
        # by rule: its mean return, and the 95 % of what the policy, with 10, has more than it
        ({"random": (9.9, -0.4, 0.6), "ei": (15.0, -6.0, -4.0)}, "fail", "not shown better than random"),
        ({"random": (9.9, -0.4, 0.6)}, "fail", "not shown better than random"),
        ({"random": (5.0, 4.0, 6.0), "ei": (15.0, -6.0, -4.0)}, "warn", "worse than ei"),
        ({"random": (5.0, 4.0, 6.0), "ei": (10.0, -1.0, 1.0)}, "ok", "return 10, of random 5, ei 10"),
        ({"close": (12.0, -3.0, -1.0), "patient": (20.0, -11.0, -9.0)}, "fail", "better than close"),
        ({"balance": (10.0, 0.0, 0.0)}, "ok", "return 10, of balance 10"),
        ({"balance": (12.0, -3.0, -1.0)}, "warn", "worse than balance"),
        ({}, None, ""),
    ],
)
def test_a_numeric_run_is_held_against_its_rules(
    tmp_path: Path, gains: Mapping[str, tuple[float, float, float]], verdict: str | None, said: str
) -> None:
    """A policy no better than random had "10 of 10 checks passed"."""
    log = record(tmp_path, HEALTHY)
    rules = {
        name: {"mean_reward": mean, "difference": (low + high) / 2, "difference_interval": [low, high]}
        for name, (mean, low, high) in gains.items()
    }
    log.folder.write_summary({"rules": rules, "after": {"mean_reward": 10.0, "n": 100}})
    found = [finding for finding in diagnose(log) if finding.check == "rules"]
    assert [finding.verdict for finding in found] == [verdict] * (verdict is not None)
    assert all(said in finding.seen for finding in found)


def test_held_out_success_is_judged_as_compare_does(tmp_path: Path) -> None:
    """Intervals of the two rates overlap where the paired difference is clear: 20 of 60 became 32 of 60."""
    log = record(tmp_path, HEALTHY)
    with JsonlTracker(log.folder) as tracker:
        for stage, wins in (("before", 20), ("after", 32)):
            tracker.log_rollouts(
                STEPS, [_held_out_group(place, place < wins) for place in range(60)], stage=stage
            )
    log.folder.write_summary({"before": held_out(20, 60), "after": held_out(32, 60)})
    assert held_out_gains(log) == [0.0] * 20 + [1.0] * 12 + [0.0] * 28
    first = diagnose(log)[0]
    assert (first.check, first.verdict) == ("held-out", "ok")


def _held_out_group(place: int, success: bool) -> TrajectoryGroup:
    played = talk(([1], [2]), reward=float(success), outcome=Outcome(reward=None, success=success))
    scenario = Scenario(id=f"s{place}", split="test")
    return TrajectoryGroup(key=f"s{place}", trajectories=(replace(played, scenario=scenario),))


def test_the_command_says_each_finding_and_fails_on_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    well, ill = record(tmp_path / "a", HEALTHY), record(tmp_path / "b", {**HEALTHY, "reward/mean": FALLING})
    assert main(["diagnose", str(well.folder.path)]) == 0
    assert {line[0] for line in capsys.readouterr().out.splitlines()} == {"✓"}
    assert main(["diagnose", str(ill.folder.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "✗ reward: 0.817 in the first third of steps, 0.15 in the last: it fell "
        "-> lower learning_rate, raise beta"
    )
    assert main(["diagnose", str(ill.folder.path), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["all_passed"] is False
    assert result["findings"][0]["verdict"] == "fail"


def test_a_strict_gate_fails_on_warnings_too(tmp_path: Path) -> None:
    warned = str(record(tmp_path, {**HEALTHY, "advantage/std": 3.5}).folder.path)
    assert main(["diagnose", warned]) == 0
    assert main(["diagnose", warned, "--strict"]) == 1


def test_the_table_has_every_check_and_each_its_thresholds_advice_and_source(tmp_path: Path) -> None:
    findings = diagnose(record(tmp_path, HEALTHY))
    not_said = {"floor", "held-out", "rules", "KL to its target"}
    assert {finding.check for finding in findings} | not_said == set(monitors())
    for monitor in monitors().values():
        assert monitor.warn <= monitor.fail
        assert monitor.advice
        assert monitor.why


def test_a_run_that_has_just_begun_and_a_folder_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder.create(tmp_path)
    assert main(["diagnose", str(run.path)]) == 0
    assert capsys.readouterr().out == "no step has finished yet: nothing to diagnose\n"
    assert main(["diagnose", str(run.path), "--strict"]) == 1
    with pytest.raises(ConfigurationError, match="is no run folder"):
        RunLog.open(tmp_path)


def test_a_terminal_without_the_signs_shows_question_marks(tmp_path: Path) -> None:
    run = record(tmp_path, HEALTHY).folder.path
    done = subprocess.run(
        [sys.executable, "-m", "stateset_agents.cli.main", "diagnose", str(run)],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("? reward: 0.15 in the first third")


def test_a_critic_is_not_blamed_for_one_odd_step_nor_where_nothing_is_left_to_explain(tmp_path: Path) -> None:
    odd = {"value/explained_variance": [0.4] * 28 + [-30.0, 0.4]}
    assert finding_of(tmp_path / "odd", "value function", odd).verdict == "ok"
    solved = {"value/explained_variance": -0.5, "success/rate": 0.95}
    assert finding_of(tmp_path / "solved", "value function", solved).verdict == "ok"


@pytest.mark.parametrize(
    ("lag", "steps", "first"),
    [(0.1, 30, "is the machine"), (2.0, 5, "is the machine"), (2.0, 20, "make sync")],
)
def test_short_waits_and_few_steps_are_first_the_machine_s(lag: float, steps: int, first: str) -> None:
    lines = [MetricLine(step=step, time=0.0, values={"time/loop_lag": lag}) for step in range(1, steps + 1)]
    assert _loop_lag(History(lines, {}, {})).cure.startswith(first)


def test_a_loop_that_waits_for_other_code_is_not_put_down_to_the_user_s() -> None:
    def cure(of_user: float) -> str:
        values = {"time/loop_lag": 2.0, "time/loop_lag_user": of_user}
        lines = [MetricLine(step=step, time=0.0, values=values) for step in range(1, 31)]
        finding = _loop_lag(History(lines, {}, {}))
        assert finding is not None
        return finding.cure

    assert cure(0.0).startswith("no code of yours was seen there")
    assert cure(1.9).startswith("make sync code")


def test_the_failures_name_what_broke_most_often(tmp_path: Path) -> None:
    log = record(tmp_path, {**HEALTHY, "rollout/failed": 0.5})
    errors = ("KeyError: 'a' (at shop.py:3)", "other", "KeyError: 'a' (at shop.py:3)")
    broken = [trajectory("hi", status=Status.FAILED, error=error) for error in errors]
    with JsonlTracker(log.folder) as tracker:
        tracker.log_rollouts(1, [TrajectoryGroup(key="1", trajectories=tuple(broken))])
    [finding] = [finding for finding in diagnose(log) if finding.check == "failures"]
    assert finding.cure == "mend what broke most often: KeyError: 'a' (at shop.py:3) (2 times)"
