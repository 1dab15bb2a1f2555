"""Run folders as the trainer leaves them, for tests of the report: `from report_runs import finished_run`."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

from stateset_agents.tracking.run_folder import RunFolder
from stateset_agents.tracking.tracker import JsonlTracker, Stage
from stateset_agents.tracking.windows import Panel, Trace, Window
from stateset_agents.types.messages import Completion, Message, ToolCall, VersionSpan
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import (
    Branch,
    Outcome,
    Span,
    TokenLogprobs,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

__all__ = [
    "FAMILIES",
    "WORDS",
    "conversation",
    "finished_run",
    "log_groups",
    "log_stage",
    "log_step",
    "metrics",
    "numeric_run",
    "page_data",
    "side",
]

FAMILIES = ("cancel", "exchange", "order_status", "refund")
WORDS = {1: "<|user|>", 2: " Hi", 3: " look", 4: "<|end|>", 5: "\n", 6: " Done"}
"""What the token ids of the conversations say."""


def conversation(
    number: int,
    *,
    success: bool | None,
    reply: str = "Done, K27 goes to Oslo.",
    member: int = 0,
    version: int = 0,
    logprob: float = -0.5,
    **fields: Any,
) -> Trajectory:
    """A caller, a look-up, an answer; scenario `test-NUMBER`, 6 tokens, 3 of them sampled."""
    call = ToolCall(name="get_order", arguments={"order_id": f"K{number}"}, id="1")
    turns = (
        Turn(
            prompt_ids=(1, 2),
            completion=Completion(
                message=Message(role="assistant", content="Let me look.", tool_calls=(call,)),
                prompt_ids=(1, 2),
                token_ids=(3, 4),
                logprobs=(logprob, -0.1),
                finish_reason="stop",
                version_spans=(VersionSpan(version, 0, 2),),
            ),
            feedback=(Message(role="tool", content='{"status": "sent", "city": "Oslo"}', tool_call_id="1"),),
            reward=-0.01,
        ),
        Turn(
            prompt_ids=(5,),
            completion=Completion(
                message=Message(role="assistant", content=reply),
                prompt_ids=(1, 2, 3, 4, 5),
                token_ids=(6,),
                logprobs=(-0.2,),
                finish_reason="stop",
                version_spans=(VersionSpan(version, 0, 1),),
            ),
            reward=-0.04,
            breakdown={"replies": -0.01, "repeats": -0.03},
        ),
    )
    change = {
        "table": "orders",
        "key": "K27",
        "before": {"city": "Rome", "n": 1},
        "after": {"city": "Oslo", "n": 1},
    }
    return Trajectory(
        scenario=Scenario(
            id=f"test-{number}", family=FAMILIES[number % 4], split="test", context={"order": f"K{number}"}
        ),
        member=member,
        opening=(
            Message(role="system", content="You work for the retail desk."),
            Message(role="user", content=f"Hi, I would like to know about K{number}, please."),
        ),
        turns=turns,
        spans=(
            Span("environment", 100.0, 100.001),
            Span("waiting", 100.001, 100.25),
            Span("model", 100.25, 100.5 + member / 8),
            Span("environment", 100.5 + member / 8, 101.0),
            Span("model", 101.0, 102.0),
            Span("reward", 102.5, 102.51),
        ),
        outcome=Outcome(reward=0.5, success=success, changes=(change,) if success else ()),
        reward=0.9 if success else 0.15,
        breakdown={"told": 0.9 if success else 0.15, "repeats": 0.0},
        **fields,
    )


def log_stage(tracker: JsonlTracker, step: int, stage: Stage, wins: set[int], **options: Any) -> None:
    """Eight held-out scenarios, of which `wins` succeed."""
    groups = [
        TrajectoryGroup(key=f"{stage}/{n}", trajectories=(conversation(n, success=n in wins, **options),))
        for n in range(8)
    ]
    tracker.log_rollouts(step, groups, stage=stage)


def log_groups(
    tracker: JsonlTracker, step: int, successes: list[int], *, members: int = 4, **options: Any
) -> None:
    """A group for each number: of its members so many succeed, the first ones."""
    groups = [
        TrajectoryGroup(
            key=f"{step}/{place}",
            trajectories=tuple(
                conversation(10 * step + place, success=member < number, member=member, **options)
                for member in range(members)
            ),
        )
        for place, number in enumerate(successes)
    ]
    tracker.log_rollouts(step, groups)


def log_step(
    tracker: JsonlTracker, step: int, *, groups: int = 2, learner: bool = False, **options: Any
) -> None:
    """A step: groups of four members, one of which succeeds, with a branch of the first; its metrics.

    `learner`: with the learner's log-probs before the last pass, but for the last member of the first group.
    """
    made, advantages = [], []
    logprobs: list[list[TokenLogprobs | None]] = []
    for number in range(groups):
        members = tuple(
            conversation(
                10 * step + number,
                success=member == step % 4,
                member=member,
                version=step - 1,
                logprob=-0.25 * member - 0.001 * step,
                **options,
            )
            for member in range(4)
        )
        branch = Branch(turn=1, trajectory=members[0])
        made.append(TrajectoryGroup(key=f"{step}/{number}", trajectories=members, branches=(branch,)))
        advantages.append([[0.5 * member - 0.75, 0.5 * member - 0.75, 0.125 * step] for member in range(4)])
        known = [learner and number + 3 != one.member for one in members]
        logprobs.append(
            [_moved(one, step) if is_known else None for one, is_known in zip(members, known, strict=True)]
        )
    tracker.log_rollouts(step, made, advantages, logprobs)
    tracker.log_metrics(step, metrics(step))


def _moved(trajectory: Trajectory, step: int) -> TokenLogprobs:
    """Some way from the policy that sampled, on both sides of the clip range."""
    sampled = [value for turn in trajectory.turns for value in turn.completion.logprobs]
    old = tuple(value - 0.01 * place for place, value in enumerate(sampled))
    shifts = (0.4 * math.sin(7 * step + 3 * trajectory.member + place) for place in range(len(old)))
    return TokenLogprobs(old=old, learner=tuple(one + shift for one, shift in zip(old, shifts, strict=True)))


def metrics(step: int) -> dict[str, float]:
    """A learning curve with a wobble."""
    risen = 1 - math.exp(-step / 30)
    wobble = math.sin(step * 2.4) * 0.05
    return {
        "reward/mean": 0.2 + 0.7 * risen + wobble,
        "reward/std": 0.4,
        "reward/told": 0.2 + 0.7 * risen,
        "success/rate": min(1.0, max(0.0, 0.2 + 0.72 * risen + wobble)),
        "success/cancel": 0.5 * risen,
        "success/refund": 0.9 * risen,
        "rollout/conversations": 64.0,
        "rollout/reward_low": 0.1 + 0.7 * risen + wobble,
        "rollout/reward_high": 0.3 + 0.7 * risen + wobble,
        "rollout/success_low": max(0.0, 0.1 + 0.72 * risen + wobble),
        "rollout/success_high": min(1.0, 0.3 + 0.72 * risen + wobble),
        "kl/reference": 0.002 * step + abs(wobble) / 10,
        "policy/entropy": 0.9 - 0.5 * risen + wobble / 4,
        "policy/clip_fraction_low": 0.0,
        "policy/clip_fraction_high": 0.0,
        "value/explained_variance": -14.0 if step == 2 else 0.8 * risen,
        "loss/value": 0.1,
        "tokens/per_second": 5120.0 + 900 * wobble,
        "tokens/agent": 1200.0,
        "tokens/environment": 2400.0,
        "tokens/padding": 300.0,
        "optimizer/grad_norm": 1.0 + wobble,
        "time/rollout": 0.8 + wobble,
        "time/update": 0.5,
        "policy/version": float(step),
    }


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


def finished_run(root: Path, steps: int = 110, *, learner: bool = False, **options: Any) -> RunFolder:
    """A run as the trainer leaves it: metrics, conversations of every stage, summary, settings."""
    folder = RunFolder.create(root, "demo")
    with JsonlTracker(folder, WORDS.__getitem__) as tracker:
        log_stage(tracker, 0, "before", wins={0, 1}, **options)
        for step in range(1, steps + 1):
            log_step(tracker, step, learner=learner, **options)
        log_stage(tracker, steps, "after", wins={0, 2, 3, 4, 5, 6, 7}, **options)
    folder.write_config({"agent": {"model_name": "embedded:desk"}, "training": {"seed": 3, "beta": 0.01}})
    folder.write_summary(
        {
            "seed": 3,
            "steps": steps,
            "ended": "finished",
            "train_seconds": 95.2,
            "platform": "Linux, Python 3.11, torch 2.13",
            "before": side(132, 0.44),
            "after": side(561, 0.952),
        }
    )
    return folder


def page_data(folder: RunFolder) -> dict[str, Any]:
    """What the page of a run shows, out of the page itself."""
    (packed,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', folder.report.read_text())
    data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed)))
    return data


def numeric_run(root: Path, *, updates: int = 12) -> RunFolder:
    """A finished run of kind control: ten episodes an update, two actions, a rule, and three windows."""
    folder = RunFolder.create(root, "pole", conversations=False)
    folder.write_config(
        {"kind": "control", "environment": {"name": "pole"}, "training": {"total_steps": 100 * updates}}
    )
    with JsonlTracker(folder) as tracker:
        tracker.log_episodes(0, [_episode(seed, 5.0 + seed) for seed in range(4)], stage="before")
        for number in range(1, updates + 1):
            step = 100 * number
            tracker.log_metrics(
                step,
                {
                    "reward/mean": 10.0 * number,
                    "reward/upright": 12.0 * number,
                    "reward/cost": -2.0 * number,
                    "episode/length": 10.0,
                    "policy/entropy": 0.6,
                    "eval/reward": 9.0 * number,
                    "eval/reward_low": 8.0 * number,
                    "eval/reward_high": 10.0 * number,
                    "time/rollout": 0.5,
                    "time/update": 0.25,
                    "rollout/steps_per_second": 400.0,
                },
            )
            returns = [10.0 * number + member for member in range(10)]
            tracker.log_episodes(step, [_episode(7, value) for value in returns])
            tracker.log_event("actions", step=step, counts={"left": 100 - number, "right": number})
        last = 100 * updates
        tracker.log_episodes(last, [_episode(seed, 15.0 + 2 * seed) for seed in range(4)], stage="after")
    windows = []
    for place, name in enumerate(("worst", "median", "best")):
        traces = {
            player: Trace(
                seconds_per_step=15,
                panels=[
                    Panel(
                        title="Replicas",
                        series={"load": [1.0, 2.0, 3.0], "ready": [float(place), 2.0, float(height)]},
                    ),
                    Panel(title="Response time", unit="ms", series={"p99": [100.0, 200.0, 10.0 * height]}),
                ],
            )
            for player, height in (("policy", 3), ("hpa", 4))
        }
        returns_of = {"policy": -1.25 + place, "hpa": -1.5}
        windows.append(Window(name=name, seed=place, traces=traces, returns=returns_of))
    folder.write_windows(windows)
    measured = {"n": 4, "num_failed": 0, "mean_length": 10.0, "reward_interval": [5.2, 7.8]}
    rule = {**measured, "mean_reward": 9.0, "difference": 9.0, "difference_interval": [7.0, 11.0]}
    folder.write_summary(
        {
            **{"seed": 0, "steps": last, "num_steps": last, "episodes": 10 * updates, "ended": "finished"},
            "before": {**measured, "mean_reward": 6.5},
            "after": {**measured, "mean_reward": 18.0},
            "rules": {"hpa": rule},
        }
    )
    return folder


def _episode(seed: int, value: float) -> dict[str, Any]:
    ended = "truncated" if value > 100 else "terminated"
    common = {"group": 0, "member": 0, "components": {}, "length": 10}
    return {**common, "seed": seed, "return": value, "ended": ended}
