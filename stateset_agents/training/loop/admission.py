"""Which groups may begin, which train next, how stale they may be: bookkeeping without waiting or tensors.

Both sources of rollouts use it. A group is one scenario with its conversations. Groups are admitted in the
order of their scenarios, finish in any order, and train in the order of their admission: a step waits for
its first group, so that slow conversations train as often as quick ones. No group is dropped for its age;
the age is bounded where groups are admitted:

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


class Verdict(StrEnum):
    """What a finished group can teach."""

    SIGNAL = "signal"
    """Its members differ."""
    NO_SIGNAL = "alike"
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
    """What one step trains on; a group's index counts the groups of the run from 0."""

    selected: tuple[int, ...]
    """The step's groups, in order of admission."""
    filtered: tuple[int, ...]
    """Groups without signal that others replaced."""
    ends: Mapping[int, End]
    """How each of them will have ended when the step has trained, in order of admission."""


@dataclass(slots=True)
class _Group:
    began: int
    """Steps done when it was admitted."""
    num_live: int
    """Conversations that have not ended."""
    verdict: Verdict | None = None
    """None while it runs."""


@dataclass(slots=True)
class _Step:
    size: int
    selected: list[int] = field(default_factory=list)
    filtered: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return len(self.selected) == self.size


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
        conversations at once, of which a group has `group_size`; `max_resamples`: how many groups without
        signal are replaced in one step, further ones train; `first`: index of the first group."""
        self._groups_per_step = groups_per_step
        self._remaining = remaining
        self._max_staleness = max_staleness
        self._max_concurrent = max_concurrent
        self._group_size = group_size
        self._max_resamples = max_resamples
        self._groups: dict[int, _Group] = {}
        """Groups that have not ended, by index."""
        self._next = self._next_unassigned = first
        """Index of the next group to admit, and of the first that no step has yet."""
        self._conversations = 0
        self._steps: list[_Step] = []
        """What the coming steps train on; all but the last are full."""
        self._num_selected = 0
        """Groups that steps train on, the finished steps included."""
        self._in_training = False
        self.steps_done = 0
        self.submitted = self.accepted = self.rejected = self.running = 0
        """Groups: admitted; finished and selected; finished and filtered; running."""

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
        finished = len(self._groups) - self.running
        if not self._in_training:
            return finished
        return finished - len(self._steps[0].selected) - len(self._steps[0].filtered)

    def admit(self) -> int:
        """Begin the next group, where `capacity` allows it; returns its index."""
        index, self._next = self._next, self._next + 1
        self._groups[index] = _Group(began=self.steps_done, num_live=self._group_size)
        self._conversations += self._group_size
        self.submitted += 1
        self.running += 1
        return index

    def conversation_ended(self, index: int) -> None:
        """One of the group's conversations has ended, its siblings go on."""
        self._groups[index].num_live -= 1
        self._conversations -= 1

    def finish(self, index: int, verdict: Verdict) -> None:
        """The whole group is played and scored."""
        group = self._groups[index]
        self._conversations -= group.num_live
        group.num_live, group.verdict = 0, verdict
        self.running -= 1
        self.accepted += 1
        # Steps get the finished groups in order, up to the first that still runs.
        while (head := self._groups.get(self._next_unassigned)) is not None and head.verdict is not None:
            if not self._steps or self._steps[-1].is_full:
                size = min(self._groups_per_step, self._remaining - self._num_selected)
                self._steps.append(_Step(size))
            step = self._steps[-1]
            if head.verdict is not Verdict.SIGNAL and len(step.filtered) < self._max_resamples:
                step.filtered.append(self._next_unassigned)
                self.accepted -= 1
                self.rejected += 1
            else:
                step.selected.append(self._next_unassigned)
                self._num_selected += 1
            self._next_unassigned += 1

    @property
    def is_ready(self) -> bool:
        """Can the next step begin?"""
        return bool(self._steps) and self._steps[0].is_full and not self._in_training

    def next_batch(self) -> Batch:
        """What the next step trains on, once `is_ready`; call `complete_step` when it has trained.

        Raises TrainingStopped where a group began earlier than `max_staleness` allows.
        """
        step = self._steps[0]
        for index in step.selected:
            check_staleness(self.steps_done - self._groups[index].began, self._max_staleness)
        self._in_training = True
        ends = dict.fromkeys(step.selected, End.TRAINED) | dict.fromkeys(step.filtered, End.FILTERED)
        failed = [index for index in ends if self._groups[index].verdict is Verdict.FAILED]
        ends |= dict.fromkeys(failed, End.FAILED)
        return Batch(tuple(step.selected), tuple(step.filtered), dict(sorted(ends.items())))

    def complete_step(self) -> None:
        """The step of `next_batch` has trained, and groups that begin from now on are of its policy."""
        step = self._steps.pop(0)
        self._in_training = False
        self.steps_done += 1
        for index in (*step.selected, *step.filtered):
            del self._groups[index]


def check_staleness(staleness: int, max_staleness: int) -> None:
    """Raises TrainingStopped above the bound; called as a step begins to train."""
    if staleness > max_staleness:
        raise TrainingStopped(
            f"a group of staleness {staleness} came to training and max_staleness is {max_staleness}: this "
            "must not happen, please report it"
        )
