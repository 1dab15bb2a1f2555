"""Recorded conversations as trajectories again, so that other rewards can be asked about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_log import RecordedRollout
from stateset_agents.types.messages import Completion, FinishReason, VersionSpan
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.trajectory import Outcome, Status, Trajectory, TrajectoryGroup, Turn


def trajectory_of(rollout: RecordedRollout) -> Trajectory:
    """The conversation that was recorded, with its scenario, tokens, verdict and reward.

    Log-probs have the record's six decimals, grammars and kept sets are left out; everything else is as it
    was.
    """
    rewards = [turn.earned for turn in rollout.turns if turn.earned is not None]
    outcome = None
    if rollout.outcome is not None:
        outcome = Outcome(**rollout.outcome, changes=rollout.changes)
    return Trajectory(
        scenario=Scenario(
            id=rollout.scenario,
            family=rollout.family,
            opening=rollout.scenario_opening,
            prompt=rollout.scenario_prompt,
            tools=rollout.scenario_tools,
            context=rollout.context,
            split=expect_split(rollout.split),
        ),
        member=rollout.member,
        seed=rollout.seed,
        opening=rollout.messages[: rollout.opening],
        turns=tuple(_turns(rollout)),
        status=Status(rollout.status),
        outcome=outcome,
        reward=rollout.reward,
        turn_rewards=tuple(rewards) if len(rewards) == len(rollout.turns) else (),
        breakdown=rollout.breakdown,
        error=rollout.error,
        metadata=rollout.metadata,
    )


_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def _turns(rollout: RecordedRollout) -> Iterator[Turn]:
    message, start = rollout.opening, 0
    contexts: list[tuple[int, ...]] = []  # up to the end of each turn, as the model saw it
    for index, turn in enumerate(rollout.turns):
        reply_start = start + turn.prompt_tokens
        end = reply_start + turn.sampled_tokens
        follows = index - 1 if turn.follows == -1 else turn.follows
        before = () if follows is None or follows < 0 else contexts[follows]
        prompt_ids = rollout.token_ids[start:reply_start]
        completion = Completion(
            message=rollout.messages[message],
            prompt_ids=before + prompt_ids,
            token_ids=rollout.token_ids[reply_start:end],
            logprobs=rollout.logprobs[reply_start:end],
            finish_reason=_FINISH[turn.finish_reason],
            version_spans=_spans(rollout.versions[reply_start:end]),
        )
        yield Turn(
            prompt_ids=prompt_ids,
            completion=completion,
            follows=turn.follows,
            is_summary=turn.is_summary,
            feedback=rollout.messages[message + 1 : message + 1 + turn.feedback],
            reward=turn.reward,
            breakdown=turn.breakdown,
        )
        contexts.append(completion.prompt_ids + completion.token_ids)
        message, start = message + 1 + turn.feedback, end


def _spans(versions: tuple[int, ...]) -> tuple[VersionSpan, ...]:
    """(0, 0, 1) -> versions 0 of tokens [0, 2) and 1 of [2, 3)."""
    starts = [index for index in range(len(versions)) if index == 0 or versions[index] != versions[index - 1]]
    ends = [*starts[1:], len(versions)]
    return tuple(
        VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=bool(starts))
    )


def groups_of(rollouts: Iterable[RecordedRollout]) -> Iterator[tuple[int, list[TrajectoryGroup]]]:
    """(step, its groups), in the order recorded; members stand together as they were compared."""
    step: int | None = None
    groups: list[list[RecordedRollout]] = []
    for rollout in rollouts:
        if step is not None and rollout.step != step:
            yield step, [_group(members) for members in groups]
            groups = []
        step = rollout.step
        last = groups[-1][-1] if groups else None
        # a scenario may come twice in a step: its members begin anew
        if last is None or last.group != rollout.group or rollout.member <= last.member:
            groups.append([])
        groups[-1].append(rollout)
    if step is not None:
        yield step, [_group(members) for members in groups]


def _group(members: list[RecordedRollout]) -> TrajectoryGroup:
    key = members[0].group
    with damage_named(f"group {key!r:.50} of rollouts.jsonl"):
        trajectories = tuple(trajectory_of(member) for member in members)
        return TrajectoryGroup(key=key, trajectories=trajectories, weight=members[0].weight)
