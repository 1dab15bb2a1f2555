"""Safe deployment of a policy that scales infrastructure: a constraint stands before every action.

    shadow    the fallback's action is executed, the policy's is recorded
    gradual   the policy's action is executed with a probability, else the fallback's
    full      the policy's action is executed

In every mode the policy's action is checked, and an unsafe one is never executed (`_executed`). More than
a tenth of unsafe ones among the last hundred put the deployment back into shadow; an hour without one in
gradual gives the policy a tenth more, until it has all.

What the policy would have earned cannot be seen in shadow: only what it would have done. So a policy comes
out of shadow by hand, or by replays: whoever has a simulator plays the policy and what it is to replace on
the same recorded load, and reports both rewards.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, runtime_checkable

from stateset_agents.deployment.guards import Clock, Constraint, Violation, WindowGuard, violations_of
from stateset_agents.deployment.sequential import PairedEvidence
from stateset_agents.deployment.state import (
    Deployment,
    Mode,
    Move,
    arm_of,
    bucket,
    checked_mode,
    new_salt,
    transition,
)
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.logs import get_logger
from stateset_agents.types.settings import expect_that

Action = Mapping[str, Any]
ALTERNATIVES = ("MAINTAIN", "SCALE_UP_SMALL", "SCALE_DOWN_SMALL")
"""Scalings that are tried in the place of an unsafe one, in this order, with NO_CHANGE and the same
traffic."""


class ActionSpace(Protocol):
    """`numeric.autoscaling.actions.InfrastructureActionSpace`, or another with named actions."""

    @property
    def scaling_actions(self) -> Sequence[Any]:
        """Offered scalings, each with a `name`."""

    @property
    def config_actions(self) -> Sequence[Any]: ...

    @property
    def encode_action(self) -> Callable[..., int]:
        """The parts of an action, by name -> its index."""

    def decode_action(self, action_idx: int) -> dict[str, Any]: ...


_log = get_logger(__name__)

HISTORY = 1000
"""Actions that are remembered."""
RAMP_SECONDS = 3600.0
"""Seconds without a violation in gradual until the share grows."""
RAMP_STEP = 0.1

Policy = Callable[[Any], Any]
"""state -> an action's index in the action space, or the action itself."""


@runtime_checkable
class WindowPolicy(Protocol):
    """`numeric.autoscaling.grpo.network.GRPOPolicyNetwork`, or another that acts on a window of metrics."""

    def get_action(self, metrics_history: Any, current_state: Any) -> tuple[Any, Any]:
        """An action's index, and its log-prob."""


class ChosenAction(NamedTuple):
    """The result of `get_action`."""

    executed: dict[str, Any]
    policy_action: dict[str, Any] | None
    """The policy's action, unchanged; None if it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAction:
    """One entry of `action_history`; `entry["was_safe"]` is `entry.was_safe`."""

    timestamp: datetime
    """Local time by the clock."""
    policy_action: dict[str, Any] | None
    executed_action: dict[str, Any]
    was_safe: bool
    """The policy's action kept every constraint."""
    mode: Mode
    """Mode of the deployment when the action was chosen."""
    source: str
    """Source of the executed action: policy, alternative, fallback or maintain."""
    violations: tuple[Violation, ...]
    """Violations of the policy's action."""
    fallback_violations: tuple[Violation, ...]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """A message that a person should read at once."""

    level: str
    """critical or warning."""
    message: str
    at: float


class SafeGRPODeployment:
    """Decides for each state whether the policy's action is executed.

    Not for several threads at once. Constraints are `function(action, state) -> bool`, or `(state, action)`,
    True where the action is allowed; one that raises, or answers anything else, has not allowed it.
    """

    def __init__(
        self,
        policy: Policy | WindowPolicy,
        action_space: ActionSpace,
        safety_constraints: Mapping[str, Callable[[Any, Any], bool]],
        *,
        clock: Clock = time.time,
        salt: str | None = None,
        on_alert: Callable[[Alert], None] | None = None,
        replays: PairedEvidence | None = None,
    ) -> None:
        """
        Args:
            policy: A function of the state, or a network that acts on its `metrics_history` and
                `current_metrics`.
            safety_constraints: By name; see `Constraint`.
            salt: Fixes which actions a share falls on; drawn at random if left out.
            replays: Margin and alpha by which replays (`report_replay`) let the policy out of shadow, or put
                it back; None: it leaves shadow by hand alone.

        Raises ConfigurationError for what could never act: a policy that is neither, one of another number of
        actions than the space, a constraint whose parameters do not say which is the action.
        """
        is_module = hasattr(policy, "state_dict") and not isinstance(policy, WindowPolicy)
        hint = "give a function of the state, such as lambda state: ..., or a GRPOPolicyNetwork"
        acts = isinstance(policy, WindowPolicy) or (callable(policy) and not is_module)
        expect_that(acts, "policy", "take a state", policy, hint, length=60)
        total_actions = getattr(action_space, "total_actions", None)
        number = getattr(policy, "action_dim", total_actions)
        if total_actions is not None and number != total_actions:
            raise ConfigurationError(
                f"the policy has {number} actions and the action space {total_actions}: make the policy with "
                "action_space"
            )
        self.policy = policy
        self.action_space = action_space
        self.constraints = tuple(Constraint(name, function) for name, function in safety_constraints.items())
        self._clock = clock
        self._salt = new_salt() if salt is None else salt
        self._on_alert = on_alert
        self._new_replays = replays
        self.reset()

    def reset(self) -> None:
        """Shadow again, with nothing remembered."""
        self.state = Deployment(id="numeric", since=float(self._clock()))
        self.action_history: deque[LoggedAction] = deque(maxlen=HISTORY)
        self.violations: Counter[str] = Counter()
        """Number of violations of the policy's actions by constraint; a policy that failed counts as
        `policy`."""
        self.num_actions = 0
        self.violation_count = 0
        """Unsafe actions of the policy."""
        self.rollback_triggered = False
        """True once it was put back into shadow, until a move by hand."""
        self._window = WindowGuard()
        self._last_violation: float | None = None
        self.replays = self._new_replays
        """Evidence of the replays so far."""

    @property
    def mode(self) -> Mode:
        return self.state.mode

    deployment_mode = property(attrgetter("mode"), doc="The document's name of mode.")

    @property
    def deployment_start(self) -> datetime | None:
        """Local time of the last move; None before the first."""
        return datetime.fromtimestamp(self.state.since) if self.state.version else None

    @property
    def rollout_percentage(self) -> float:
        """0 to 1."""
        return self.state.share

    def set_deployment_mode(self, mode: str, rollout_pct: float = 0.0) -> None:
        """Moves by hand. `rollout_pct`, 0 to 1, is for gradual; the other modes have a share of their own.

        Raises ConfigurationError, a ValueError, for another mode or share.
        """
        checked = checked_mode(mode)
        if checked == "rolled_back":
            raise ConfigurationError(
                "mode must be shadow, gradual or full, got 'rolled_back': actions roll back to shadow"
            )
        share = {"shadow": 0.0, "full": 1.0}.get(checked, rollout_pct)
        self._move(checked, share, "by hand")
        self.rollback_triggered = False

    def get_action(
        self, state: Any, fallback_action: Mapping[str, Any], *, key: str | None = None
    ) -> ChosenAction:
        """The action to execute now, and the policy's; both are copies.

        `key` decides which side of the share this action falls on, so that the same key with the same salt
        does always; its number if left out.
        """
        mode = self.mode
        number = self.num_actions
        self.num_actions += 1
        policy_action, violations = self._policy_action(state)
        place = bucket(self._salt, str(number) if key is None else f"key:{key}")
        has_turn = mode != "shadow" and arm_of(place, self.rollout_percentage) == "candidate"
        executed, source, forbidden = self._executed(
            policy_action if has_turn else None, violations, fallback_action, state
        )
        now = float(self._clock())
        self.action_history.append(
            LoggedAction(
                timestamp=datetime.fromtimestamp(now),
                policy_action=None if policy_action is None else dict(policy_action),
                executed_action=dict(executed),
                was_safe=not violations,
                mode=mode,
                source=source,
                violations=violations,
                fallback_violations=forbidden,
            )
        )
        self._window = self._window.step(is_unsafe=bool(violations))
        self.violation_count += bool(violations)
        for violation in violations:
            self.violations[violation.guard] += 1
            self._last_violation = now
            _log.warning("unsafe action", constraint=violation.guard, why=violation.why, mode=self.mode)
        if forbidden:
            names = ", ".join(violation.guard for violation in forbidden)
            self._alert("critical", f"the fallback is not allowed ({names}): nothing was changed", now)
        self._brake_or_ramp(now)
        return ChosenAction(dict(executed), None if policy_action is None else dict(policy_action))

    def report_replay(self, candidate: float, baseline: float) -> Mode:
        """Takes the rewards of the policy and the baseline where a simulator played both on the same load;
        gives the mode afterwards.

        Evidence that the policy is worse keeps it in shadow, or puts it back, until `reset` or a move by
        hand. Raises ConfigurationError where nothing was said of replays.
        """
        if self.replays is None:
            raise ConfigurationError("replays decide nothing here: make the deployment with replays=...")
        was_worse = self.replays.is_worse
        self.replays = self.replays.step(candidate - baseline)
        now = float(self._clock())
        if self.replays.is_worse and not was_worse:
            why = f"the policy is worse in {self.replays.count} replays, {self.replays.mean:.3g} in the mean"
            self._put_back(why, now)
        self._brake_or_ramp(now)
        return self.mode

    def _policy_action(self, state: Any) -> tuple[dict[str, Any] | None, tuple[Violation, ...]]:
        """The policy's action with its violations; None if the policy failed, which is one."""
        try:
            space, choice = self.action_space, self._chosen(state)
            index = space.encode_action(**choice) if isinstance(choice, Mapping) else int(choice)
            action = space.decode_action(index)
        except Exception as error:  # whatever it is, the infrastructure goes on with the fallback
            return None, (Violation("policy", f"the policy raised {type(error).__name__}: {error}"),)
        return action, violations_of(self.constraints, action, state)

    def _chosen(self, state: Any) -> Any:
        if isinstance(self.policy, WindowPolicy):
            return self.policy.get_action(state["metrics_history"], state["current_metrics"])[0]
        return self.policy(state)

    def _executed(
        self, action: Action | None, violations: Sequence[Violation], fallback: Action, state: Any
    ) -> tuple[dict[str, Any], str, tuple[Violation, ...]]:
        """The first action that is allowed, where it comes from, and the violations of the fallback, if that
        was asked for:

            the policy's action  ->  safe alternatives in order  ->  the fallback  ->  keep everything, alert

        Each is checked before it is taken; only the last is taken unchecked, as nothing does less. `action`
        is the policy's with its `violations`, None where it has no turn. Raises ConfigurationError if the
        fallback is not allowed and the space has nothing that keeps everything.
        """
        if action is not None:
            if not violations:
                return dict(action), "policy", ()
            for alternative in self._alternatives_to(action):
                if not violations_of(self.constraints, alternative, state):
                    return alternative, "alternative", ()
        forbidden = violations_of(self.constraints, fallback, state)
        if not forbidden:
            return dict(fallback), "fallback", ()
        for unchanged in self._alternatives_to(fallback):
            if int(unchanged["scaling"]) == 0:
                return unchanged, "maintain", forbidden
        raise ConfigurationError(
            f"the fallback is not allowed ({forbidden[0].guard}: {forbidden[0].why}) and the action space "
            "does not offer MAINTAIN with NO_CHANGE: offer both"
        )

    def _alternatives_to(self, action: Action) -> Iterator[dict[str, Any]]:
        """The `ALTERNATIVES` that the space offers, as whole actions."""
        scalings = {choice.name: choice for choice in self.action_space.scaling_actions}
        configs = {choice.name: choice for choice in self.action_space.config_actions}
        for name in ALTERNATIVES:
            if name in scalings and "NO_CHANGE" in configs:
                yield {**action, "scaling": scalings[name], "config": configs["NO_CHANGE"]}

    def _brake_or_ramp(self, now: float) -> None:
        if self._window.fires and self.mode != "shadow":
            unsafe = sum(self._window.recent)
            self._put_back(f"{unsafe} of the last {len(self._window.recent)} actions were unsafe", now)
        elif self.mode == "gradual" or self._may_leave_shadow():
            since = max(self.state.since, self._last_violation or self.state.since)
            if now - since > RAMP_SECONDS:
                share = round(self.rollout_percentage + RAMP_STEP, 10)  # .1 + .2 is not .3
                why = "an hour without a violation"
                self._move("full" if share >= 1 else "gradual", min(share, 1.0), why)

    def _may_leave_shadow(self) -> bool:
        """Only a new deployment does by itself: one that was put back waits for a person."""
        window = self._window
        return (
            self.replays is not None
            and self.replays.is_as_good
            and self.state.version == 0
            and len(window.recent) == window.size
            and not window.fires
        )

    def _put_back(self, why: str, now: float) -> None:
        if self.mode == "shadow":
            self._alert("critical", f"kept in shadow: {why}", now)
            return
        self._move("shadow", 0.0, why)
        self.rollback_triggered = True
        self._alert("critical", f"rolled back to shadow: {why}", now)

    def _move(self, mode: Mode, share: float, why: str) -> None:
        move = Move(mode=mode, share=float(share), at=float(self._clock()), who="deployment", why=why)
        self.state = transition(self.state, move)
        _log.info("deployment moved", mode=mode, share=share, why=why)

    def _alert(self, level: str, message: str, now: float) -> None:
        getattr(_log, level)(message)
        if self._on_alert is not None:
            self._on_alert(Alert(level=level, message=message, at=now))
