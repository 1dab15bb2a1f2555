"""Which groups may begin, which train next, how stale they may be: bookkeeping without waiting or tensors.

Used by `overlapped_rollouts.py` and by the trainer's steps. A group is one scenario with its conversations.
Groups are admitted in the order of their scenarios, finish in any order, and train in the order of their
admission: a step waits for the head, so that slow conversations train as often as quick ones. Nothing is
dropped for its age; that none grows too old is seen to where groups are admitted:

    capacity = min(max_concurrent - running, (max_staleness + step + 1) B - (accepted + running))

The rule is AReaL's (https://arxiv.org/abs/2505.24298), which trains whatever finished first; by itself it
bounds nothing. With admission order it does: the n-th accepted group trains in step n // B, and it began at a
step that is at most `max_staleness` earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from stateset_agents.types.errors import TrainingStopped

__all__ = ["Admission", "Batch", "End", "Verdict", "refuse_stale"]


class Verdict(StrEnum):
    """What a finished group can teach."""

    SIGNAL = "signal"
    """Its members differ."""
    ALIKE = "alike"
    """All members earned the same: no advantage, no gradient."""
    FAILED = "failed"
    """Too few members have a score."""


class End(StrEnum):
    """How a group ended; each has one end, whatever happened in between."""

    TRAINED = "trained"
    FILTERED = "filtered"
    """Its members were alike, and another group took its place."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on; places count the run's groups from 0."""

    taken: tuple[int, ...]
    """The step's groups, in order of admission."""
    passed_over: tuple[int, ...]
    """Groups without signal that others replaced."""
    ends: Mapping[int, End]
    """How each of them will have ended when the step has trained, in order of admission."""


@dataclass(slots=True)
class _Group:
    began: int
    """Steps done when it was admitted."""
    live: int
    """Conversations that have not ended."""
    verdict: Verdict | None = None
    """None while it runs."""


@dataclass(slots=True)
class _Step:
    size: int
    taken: list[int] = field(default_factory=list)
    passed_over: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return len(self.taken) == self.size

    @property
    def num_groups(self) -> int:
        return len(self.taken) + len(self.passed_over)


class Admission:
    """Counts groups in and out; `submitted == accepted + rejected + running` holds at all times."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        remaining: int,
        max_staleness: int = 0,
        max_concurrent: int | None = None,
        group_size: int = 1,
        max_resamples: int = 0,
        first: int = 0,
    ) -> None:
        """`remaining`: groups that are still to train, the last step may be short; `max_concurrent`:
        conversations at once, of which a group has `group_size`; `max_resamples`: groups without signal that
        are replaced in one step, further ones train; `first`: place of the first group."""
        self._groups_per_step = groups_per_step
        self._remaining = remaining
        self._max_staleness = max_staleness
        self._max_concurrent = max_concurrent
        self._group_size = group_size
        self._max_resamples = max_resamples
        self._groups: dict[int, _Group] = {}
        """Those that have not ended, by place."""
        self._next = self._sorted = first
        """Next place to admit; first place that no step has been given yet."""
        self._conversations = 0
        self._steps: list[_Step] = []
        """What steps will train on, as far as it is known; all but the last are full."""
        self._num_given = 0
        """Groups that a step has taken."""
        self._in_training = False
        self.steps_done = 0
        self.submitted = self.accepted = self.rejected = self.running = 0
        """Groups: begun; finished and to be trained on, or trained; passed over; under way."""

    @property
    def capacity(self) -> int:
        """Groups that may begin now."""
        allowed = min((self._max_staleness + self.steps_done + 1) * self._groups_per_step, self._remaining)
        free = allowed - (self.accepted + self.running)
        if self._max_concurrent is not None:
            slots = self._max_concurrent - self._conversations
            free = min(free, -(-slots // self._group_size))
        return max(0, free)

    @property
    def num_waiting(self) -> int:
        """Finished groups that wait for their step."""
        in_training = self._steps[0].num_groups if self._in_training else 0
        return len(self._groups) - self.running - in_training

    def admit(self) -> int:
        """Begin the next group; its place. Ask `capacity` first."""
        place, self._next = self._next, self._next + 1
        self._groups[place] = _Group(began=self.steps_done, live=self._group_size)
        self._conversations += self._group_size
        self.submitted += 1
        self.running += 1
        return place

    def conversation_ended(self, place: int) -> None:
        """One of the group's conversations is over, its siblings go on."""
        self._groups[place].live -= 1
        self._conversations -= 1

    def finish(self, place: int, verdict: Verdict) -> None:
        """The whole group is played and scored."""
        group = self._groups[place]
        self._conversations -= group.live
        group.live, group.verdict = 0, verdict
        self.running -= 1
        self.accepted += 1
        self._sort()

    def _sort(self) -> None:
        """Give finished groups to steps, in order, as far as no earlier group is still under way."""
        while (group := self._groups.get(self._sorted)) is not None and group.verdict is not None:
            if not self._steps or self._steps[-1].is_full:
                size = min(self._groups_per_step, self._remaining - self._num_given)
                self._steps.append(_Step(size))
            step = self._steps[-1]
            if group.verdict is not Verdict.SIGNAL and len(step.passed_over) < self._max_resamples:
                step.passed_over.append(self._sorted)
                self.accepted -= 1
                self.rejected += 1
            else:
                step.taken.append(self._sorted)
                self._num_given += 1
            self._sorted += 1

    @property
    def is_ready(self) -> bool:
        """Can the next step begin?"""
        return bool(self._steps) and self._steps[0].is_full and not self._in_training

    def take(self) -> Batch:
        """What the next step trains on; ask `is_ready` first, and `settle` when it has trained.

        Raises TrainingStopped where a group began earlier than `max_staleness` allows.
        """
        step = self._steps[0]
        for place in step.taken:
            refuse_stale(self.steps_done - self._groups[place].began, self._max_staleness)
        self._in_training = True
        ends = dict.fromkeys(step.taken, End.TRAINED) | dict.fromkeys(step.passed_over, End.FILTERED)
        failed = [place for place in ends if self._groups[place].verdict is Verdict.FAILED]
        ends |= dict.fromkeys(failed, End.FAILED)
        return Batch(tuple(step.taken), tuple(step.passed_over), dict(sorted(ends.items())))

    def settle(self) -> None:
        """The step that was taken has trained, and what begins from now on is of its policy."""
        step = self._steps.pop(0)
        self._in_training = False
        self.steps_done += 1
        for place in (*step.taken, *step.passed_over):
            del self._groups[place]


def refuse_stale(staleness: int, most: int) -> None:
    """The hard check at training time: raises TrainingStopped above the bound."""
    if staleness > most:
        raise TrainingStopped(
            f"a group of staleness {staleness} came to training and max_staleness is {most}: this must not "
            "happen, please report it"
        )
