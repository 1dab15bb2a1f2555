"""The guard before every action of a policy that scales a cluster."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stateset_agents
from stateset_agents.deployment.guards import (
    Constraint,
    RateLimit,
    max_scaling_constraint,
    min_replicas_constraint,
    violations_of,
)
from stateset_agents.deployment.numeric import Alert, SafeGRPODeployment
from stateset_agents.deployment.sequential import PairedEvidence
from stateset_agents.numeric.autoscaling.actions import (
    ConfigAction,
    InfrastructureActionSpace,
    ScalingAction,
)
from stateset_agents.types.errors import ConfigurationError

SPACE = InfrastructureActionSpace()


def action(scaling: ScalingAction = ScalingAction.MAINTAIN, traffic: int = 0) -> dict[str, Any]:
    return {"scaling": scaling, "config": ConfigAction.NO_CHANGE, "traffic_weight": traffic}


FALLBACK = action(ScalingAction.SCALE_UP_MEDIUM)
WANTED = action(ScalingAction.SCALE_UP_LARGE, traffic=30)


class Safe:
    """A deployment with a clock in `now`; a state says whether the policy's action is allowed in it."""

    def __init__(
        self, *, replays: PairedEvidence | None = None, **constraints: Callable[[Any, Any], bool]
    ) -> None:
        self.now = 1_000_000.0
        self.alerts: list[Alert] = []
        self.deployment = SafeGRPODeployment(
            lambda state: WANTED,
            SPACE,
            constraints or {"allowed": lambda state, action: state is True or action != WANTED},
            clock=lambda: self.now,
            salt="a salt",
            on_alert=self.alerts.append,
            replays=replays,
        )

    def act(self, *states: Any) -> None:
        for state in states:
            self.deployment.get_action(state, FALLBACK)


def test_shadow_executes_the_fallback_and_remembers_what_the_policy_wanted() -> None:
    safe = Safe()
    executed, wanted = safe.deployment.get_action(True, FALLBACK)
    assert (executed, wanted) == (FALLBACK, WANTED)
    [entry] = safe.deployment.action_history
    assert (entry.policy_action, entry.executed_action, entry.was_safe) == (WANTED, FALLBACK, True)
    assert (entry.mode, entry.timestamp.timestamp(), entry.source) == ("shadow", 1_000_000.0, "fallback")
    assert entry["was_safe"] is entry.was_safe
    executed["scaling"] = None  # a copy
    assert entry.executed_action == FALLBACK


def test_full_executes_the_policy_and_modes_are_checked() -> None:
    safe = Safe()
    safe.deployment.set_deployment_mode("full")
    assert safe.deployment.get_action(True, FALLBACK).executed == WANTED
    assert safe.deployment.rollout_percentage == 1.0
    with pytest.raises(ValueError, match=r"mode must be shadow, gradual, full or rolled_back, got 'canary'"):
        safe.deployment.set_deployment_mode("canary")
    with pytest.raises(ValueError, match="actions roll back to shadow"):
        safe.deployment.set_deployment_mode("rolled_back")
    with pytest.raises(ValueError, match=r"the share must be from 0 to 1, got 1\.5"):
        safe.deployment.set_deployment_mode("gradual", 1.5)


def test_gradual_gives_the_policy_its_share_and_the_same_actions_again() -> None:
    def executed() -> list[bool]:
        safe = Safe()
        safe.deployment.set_deployment_mode("gradual", 0.3)
        return [safe.deployment.get_action(True, FALLBACK).executed == WANTED for _ in range(10_000)]

    turns = executed()
    assert abs(sum(turns) - 3000) < 3 * math.sqrt(10_000 * 0.3 * 0.7)
    assert executed() == turns
    safe = Safe()
    safe.deployment.set_deployment_mode("gradual", 0.5)
    kept = {
        safe.deployment.get_action(True, FALLBACK, key="pod-7").executed["traffic_weight"] for _ in range(50)
    }
    assert len(kept) == 1


def test_what_stands_in_the_place_of_an_unsafe_action_comes_in_order() -> None:
    def executed(*forbidden: dict[str, Any]) -> Any:
        safe = Safe(rule=lambda state, chosen: chosen not in (WANTED, *forbidden))
        safe.deployment.set_deployment_mode("full")
        done = safe.deployment.get_action(None, FALLBACK).executed
        assert safe.deployment.action_history[-1].policy_action == WANTED  # not what took its place
        return done, safe

    keep, up, down = (action(ScalingAction(step), traffic=WANTED["traffic_weight"]) for step in (0, 1, -1))
    assert executed()[0] == keep
    assert executed(keep)[0] == up
    assert executed(keep, up)[0] == down
    assert executed(keep, up, down)[0] == FALLBACK
    last, safe = executed(keep, up, down, FALLBACK)
    assert last == action(ScalingAction.MAINTAIN, FALLBACK["traffic_weight"])
    assert [alert.level for alert in safe.alerts] == ["critical"]
    assert safe.deployment.action_history[-1].fallback_violations[0].guard == "rule"


def test_a_fallback_in_shadow_is_checked_too() -> None:
    safe = Safe(rule=lambda state, chosen: chosen != FALLBACK)
    assert safe.deployment.get_action(None, FALLBACK).executed == action()
    assert safe.deployment.action_history[-1].was_safe  # the policy's was
    assert safe.alerts[0].message == "the fallback is not allowed (rule): nothing was changed"


def test_constraints_that_raise_or_forget_to_answer_and_policies_that_fail_count() -> None:
    def broken(state: Any, chosen: Any) -> bool:
        raise KeyError("replicas")

    def silent(state: Any, chosen: Any) -> Any:
        return None

    found = violations_of([Constraint("broken", broken), Constraint("silent", silent)], WANTED, {})
    assert [violation.guard for violation in found] == ["broken", "silent"]
    assert found[0].why == "the guard raised KeyError: 'replicas'"
    assert "got None" in found[1].why
    safe = Safe()
    safe.deployment.policy = lambda state: 539  # one more than there are
    safe.deployment.set_deployment_mode("full")
    assert safe.deployment.get_action(True, FALLBACK) == (FALLBACK, None)
    assert safe.deployment.violations == {"policy": 1}


def test_eleven_unsafe_of_the_last_hundred_go_back_to_shadow_and_ten_do_not() -> None:
    for unsafe, total, mode in (
        (99, 99, "full"),  # too few to say
        (10, 100, "full"),  # exactly a tenth
        (11, 100, "shadow"),
        (11, 101, "shadow"),
    ):
        safe = Safe()
        safe.deployment.set_deployment_mode("full")
        safe.act(*[True] * (total - unsafe), *[False] * unsafe)
        assert safe.deployment.mode == mode, (unsafe, total)
        if mode == "shadow":
            assert safe.deployment.rollout_percentage == 0.0
            assert [alert.level for alert in safe.alerts] == ["critical"]
            assert "11 of the last 100 actions were unsafe" in safe.alerts[0].message
    safe = Safe()
    safe.deployment.set_deployment_mode("full")
    safe.act(False, *[True] * 90, *[False] * 10)  # 101 actions: the first is out of the window
    assert safe.deployment.mode == "full"
    safe.act(False)
    assert safe.deployment.mode == "shadow"


def test_a_clean_hour_gives_a_tenth_more_also_after_a_violation() -> None:
    safe = Safe()
    safe.deployment.set_deployment_mode("gradual", 0.8)
    safe.now += 1800
    safe.act(False)
    safe.now += 3600
    safe.act(True)
    assert safe.deployment.rollout_percentage == 0.8  # exactly an hour
    safe.now += 1
    safe.act(True)
    assert (safe.deployment.mode, safe.deployment.rollout_percentage) == ("gradual", 0.9)
    safe.now += 3600
    safe.act(True)
    assert safe.deployment.rollout_percentage == 0.9  # the clock began again
    safe.now += 60
    safe.act(True)
    assert (safe.deployment.mode, safe.deployment.rollout_percentage) == ("full", 1.0)


def replay(safe: Safe, difference: float, number: int = 20) -> str:
    return [safe.deployment.report_replay(-1.0 + difference, -1.0) for _ in range(number)][-1]


def test_replays_an_hour_and_a_hundred_actions_lead_out_of_shadow() -> None:
    safe = Safe(replays=PairedEvidence())
    assert replay(safe, 0.5) == "shadow"  # nothing was checked yet
    safe.act(*[True] * 99)
    safe.now += 3601
    assert replay(safe, 0.5) == "shadow"
    safe.act(True)
    assert (safe.deployment.mode, safe.deployment.rollout_percentage) == ("gradual", 0.1)
    safe = Safe(replays=PairedEvidence())
    safe.act(*[True] * 100)
    assert replay(safe, 0.5) == "shadow"  # within the hour
    safe.now += 1800
    safe.act(False)
    safe.now += 1801
    safe.act(True)
    assert safe.deployment.mode == "shadow"  # the hour began again
    safe.now += 1801
    safe.act(True)
    assert safe.deployment.mode == "gradual"
    safe = Safe(replays=PairedEvidence())
    safe.act(*[False] * 11, *[True] * 89)
    replay(safe, 0.5)
    safe.now += 3601
    assert replay(safe, 0.5) == "shadow"  # 11 of the last 100 were unsafe
    safe.act(True, True)
    assert safe.deployment.mode == "gradual"


def test_a_policy_that_is_worse_in_replays_is_kept_in_shadow_or_put_back() -> None:
    safe = Safe(replays=PairedEvidence())
    safe.act(*[True] * 100)
    safe.now += 3601
    assert replay(safe, -0.5) == "shadow"
    [alert] = safe.alerts
    assert (alert.level, alert.message[:51]) == (
        "critical",
        "kept in shadow: the policy is worse in 18 replays, ",
    )
    assert replay(safe, 0.9, 200) == "shadow"  # nothing takes that back
    safe.deployment.reset()
    assert safe.deployment.replays == PairedEvidence()
    safe.act(*[True] * 100)
    safe.now += 3601
    assert replay(safe, 0.5) == "gradual"
    assert replay(safe, -0.9, 100) == "shadow"
    assert safe.alerts[-1].message.startswith("rolled back to shadow: the policy is worse")
    safe.now += 3601
    safe.act(True)
    assert safe.deployment.mode == "shadow"


def test_what_was_put_back_or_moved_by_hand_stays_until_a_person_moves_it() -> None:
    safe = Safe(replays=PairedEvidence())
    safe.act(*[True] * 100)
    safe.now += 3601
    assert replay(safe, 0.5) == "gradual"
    safe.act(*[False] * 11)
    assert safe.deployment.mode == "shadow"
    safe.now += 7200
    safe.act(*[True] * 200)
    assert replay(safe, 0.5) == "shadow"
    safe = Safe()
    safe.act(*[True] * 100)
    safe.now += 3601
    safe.act(True)
    assert safe.deployment.mode == "shadow"  # without replays it is left by hand alone
    with pytest.raises(ConfigurationError, match="make the deployment with replays="):
        safe.deployment.report_replay(-1.0, -1.0)


def test_a_thousand_actions_are_remembered_and_reset_forgets_them() -> None:
    safe = Safe()
    safe.deployment.set_deployment_mode("full")
    safe.act(*[True] * 1001)
    assert (len(safe.deployment.action_history), safe.deployment.num_actions) == (1000, 1001)
    safe.act(False)
    safe.deployment.reset()
    assert (safe.deployment.mode, len(safe.deployment.action_history)) == ("shadow", 0)
    assert not safe.deployment.violations


@pytest.mark.parametrize(
    ("replicas", "most"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (7, 2), (8, 4), (100, 4)]
)
def test_replicas_change_by_half_at_most(replicas: int, most: int) -> None:
    allowed = [step for step in ScalingAction if max_scaling_constraint(action(step), {"replicas": replicas})]
    assert max(allowed) == most
    assert min(allowed) == -most


def test_two_replicas_are_left() -> None:
    for replicas, least in ((1, 1), (2, 0), (3, -1), (4, -2), (6, -4)):
        allowed = [
            step
            for step in ScalingAction
            if min_replicas_constraint(action(step), {"replica_count": replicas})
        ]
        assert min(allowed) == least


def test_five_minutes_lie_between_two_scalings() -> None:
    limit = RateLimit(clock=lambda: 1000.0)
    up = action(ScalingAction.SCALE_UP_SMALL)
    assert limit(up, {"last_scale_time": None})
    assert limit(up, {})
    assert limit(up, {"last_scale_time": 700.0})
    assert not limit(up, {"last_scale_time": 701.0})
    assert limit(action(), {"last_scale_time": 999.0})  # MAINTAIN is always allowed


def test_the_room_has_no_clock_and_no_random_numbers_of_its_own() -> None:
    room = Path(stateset_agents.__file__).parent / "deployment"
    hidden = re.compile(r"datetime\.now|time\.time\(\)|\brandom\.|import random|numpy|torch")
    hits = [
        f"{path.name}: {line}"
        for path in sorted(room.glob("*.py"))
        for line in path.read_text().splitlines()
        if hidden.search(line) and "without numpy" not in line
    ]
    assert hits == []


def test_a_deployment_loads_no_model_library_and_no_numpy() -> None:
    room = Path(stateset_agents.__file__).parent / "deployment"
    names = [f"stateset_agents.deployment.{path.stem}" for path in sorted(room.glob("[a-z]*.py"))]
    code = f"import {', '.join(names)}, sys\n"
    code += "print(sorted({'torch', 'numpy', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
