"""A prompt, its replies and what they earned, as plain values; and back as samples for the learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from stateset_agents.algorithms.advantages import group_advantages
from stateset_agents.training.update.batch import Sample
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn


class Group(TypedDict):
    """G replies to one prompt, as `GRPOTrainer.generate_groups` gives them."""

    prompt: str
    prompt_ids: list[int]
    """[P]"""
    responses: list[str]
    """[G] without the token that ended them."""
    response_ids: list[list[int]]
    """[G][T] exactly as sampled, the token that ended them included."""
    old_logprobs: list[list[float]]
    """[G][T] of the distribution that was sampled from, temperature and truncation included."""
    rewards: list[float | None]
    """[G] None where the reward could not be given."""
    advantages: list[float | None]
    """[G] None where the reply does not train: unscored, empty, or all others are unscored."""
    pixels: NotRequired[tuple[PixelValues, ...]]
    """The prompt's pictures, in order; missing where it has none."""


def normalize_rewards_per_group(
    rewards: Sequence[Sequence[float | None]], *, clip: float | None = 3.0
) -> list[list[float | None]]:
    """GRPO's advantages: each reward less its group's mean, over its population deviation, within ±clip.

    [[1, 0]] -> [[1, -1]]. A group whose rewards are all equal gets 0, an unscored member None. Of G rewards
    none is further than sqrt(G - 1) deviations from its own mean, so a clip of 3 acts only in groups of more
    than 10. Raises RewardFailure on a reward that is not finite, ConfigurationError on a clip that is not
    above 0.
    """
    return group_advantages(rewards, clip=clip)


def trajectory_of(
    scenario: Scenario, prompt: str, completion: Completion, *, member: int, reward: float | None = None
) -> Trajectory:
    """One reply as the conversation that rewards and credit read. A thought that the prompt has opened, with
    `<think>` at its end, stands at the beginning of the reply."""
    opened = "<think>" if prompt.rstrip().endswith("<think>") else ""
    reply = Message(role="assistant", content=opened + completion.message.content)
    said = Completion(
        message=reply,
        prompt_ids=completion.prompt_ids,
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        version_spans=completion.version_spans,
        pixels=completion.pixels,
    )
    return Trajectory(
        scenario=scenario,
        member=member,
        opening=(Message(role="user", content=prompt),),
        turns=(Turn(prompt_ids=completion.prompt_ids, completion=said),),
        reward=reward,
    )


def samples_of(group: Group) -> list[Sample]:
    """The replies that train, with their advantages."""
    samples = []
    for member, advantage in enumerate(group["advantages"]):
        ids = group["response_ids"][member]
        if advantage is None or not ids:
            continue
        completion = Completion(
            message=Message(role="assistant", content=group["responses"][member]),
            prompt_ids=tuple(group["prompt_ids"]),
            token_ids=tuple(ids),
            logprobs=tuple(group["old_logprobs"][member]),
            finish_reason="stop",
            pixels=group.get("pixels", ()),
        )
        trajectory = trajectory_of(Scenario(id="group"), group["prompt"], completion, member=member)
        samples.append(Sample(trajectory=trajectory, advantages=(advantage,) * len(ids)))
    return samples
