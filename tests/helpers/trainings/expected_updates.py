"""The expected update of a small policy by exact enumeration, and the true gradient to hold it to.

A world is a function that plays one conversation on a `Talk`. `conversations` plays it in every way it can
go; `expected_update` makes every group of them and gives each to the package's own credit and loss. Numbers
are float64.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stateset_agents.algorithms.losses import Denominators, LossInputs, policy_loss
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ValueEstimate
from stateset_agents.training.update.batch import Sample, assign_credit, trainable
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Branch, Row, Trajectory, TrajectoryGroup, Turn

__all__ = [
    "Context",
    "Critic",
    "Deviation",
    "Policy",
    "Talk",
    "Tokens",
    "Trained",
    "Way",
    "World",
    "conversations",
    "deviation",
    "expected_update",
    "number",
    "row_by_row",
    "true_gradient",
    "turn_by_turn",
    "with_branches",
    "with_unscored",
]

Context = tuple[int, ...]
Key = tuple[Context, tuple[int, ...]]
"""A context, as far as the policy reads it, and the tokens it may go on with."""
Gradient = Mapping[Key, Tensor]


def number(*about: Any) -> float:
    """Between 0 and 1, the same for the same arguments on every machine."""
    return random.Random(repr(about)).random()


class Policy:
    """A table of logits for each context, which is what stands in the row before a token.

    A family is the tokens that can be sampled at a place, (10, 11) say; no token stands in two families.
    Logits are made when a context is first met, and depend on it alone.
    """

    def __init__(
        self, *families: tuple[int, ...], reads: Callable[[Context], Context] = lambda context: context
    ) -> None:
        """`reads`: the part of a context that the logits depend on."""
        self._families = {token: family for family in families for token in family}
        self._reads = reads
        self._logits: dict[Key, Tensor] = {}
        self._starts: dict[Key, int] = {}

    def place(self, context: Context, token: int) -> int:
        """Where the token's log-prob stands in `logprobs`."""
        key = self._key(context, token)
        return self._starts[key] + key[1].index(token)

    def logprobs(self) -> Tensor:
        """[places] of every token in every context met so far."""
        return torch.cat([torch.log_softmax(logits, 0) for logits in self._logits.values()])

    def chance(self, context: Context, token: int) -> float:
        key = self._key(context, token)
        return float(torch.softmax(self._logits[key].detach(), 0)[key[1].index(token)])

    def gradient(self, objective: Tensor) -> Gradient:
        """Of every logit met so far; 0 where the objective does not depend on it."""
        slopes = torch.autograd.grad(objective, list(self._logits.values()), materialize_grads=True)
        return dict(zip(self._logits, slopes, strict=True))

    def _key(self, context: Context, token: int) -> Key:
        family = self._families[token]
        key = (self._reads(context), family)
        if key not in self._logits:
            self._starts[key] = sum(map(len, self._logits.values()))
            logits = [2 * number("logit", *key, one) for one in family]
            self._logits[key] = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
        return key


@dataclass(frozen=True)
class Way:
    """One way that a conversation can go."""

    chance: float
    trajectory: Trajectory
    choices: tuple[int, ...]
    """[sampled tokens] the place of each in its family."""
    branches: tuple[Branch, ...] = ()


class Talk:
    """A conversation while it is played: it samples the given choices, then the first of each family."""

    def __init__(self, policy: Policy, given: Sequence[int] = ()) -> None:
        self._policy = policy
        self._given = iter(given)
        self._chance = 1.0
        self._seen: list[Context] = []
        self._turns: list[Turn] = []
        self._rewards: list[float] = []
        self.choices: list[int] = []
        self.counts: list[int] = []
        """[choices] how many there are of each."""

    def say(
        self, prompt: Context, *families: tuple[int, ...], follows: int | None = -1, reward: bool = True
    ) -> tuple[int, ...]:
        """A turn with a token of each family; what it earns depends on all that was said up to it, but for
        the turns without a `reward` of their own."""
        prompt_ids = (*(self._seen[follows] if self._turns and follows is not None else ()), *prompt)
        said: Context = ()
        for family in families:
            choice = next(self._given, 0)
            self._chance *= self._policy.chance(prompt_ids + said, family[choice])
            self.choices.append(choice)
            self.counts.append(len(family))
            said += (family[choice],)
        completion = Completion(
            message=Message(role="assistant", content=""),
            prompt_ids=prompt_ids,
            token_ids=said,
            logprobs=(-1.0,) * len(said),
            finish_reason="stop",
        )
        self._seen.append(prompt_ids + said)
        self._turns.append(Turn(prompt_ids=prompt, completion=completion, follows=follows))
        self._rewards.append(number("turn", self.choices) if reward else 0.0)
        return said

    def finished(self) -> Way:
        trajectory = Trajectory(
            scenario=Scenario(id="s"),
            turns=tuple(self._turns),
            turn_rewards=tuple(self._rewards),
            reward=math.fsum([*self._rewards, 2 * number("end", self.choices)]),
        )
        return Way(self._chance, trajectory, tuple(self.choices))


World = Callable[[Talk], None]


def conversations(world: World, policy: Policy, start: Sequence[int] = ()) -> Iterator[Way]:
    """Every way a conversation can go that begins with the choices of `start`."""
    given = list(start)
    while True:
        talk = Talk(policy, given)
        world(talk)
        yield talk.finished()
        given = talk.choices
        while len(given) > len(start) and given[-1] + 1 == talk.counts[len(given) - 1]:
            given.pop()
        if len(given) == len(start):
            return
        given[-1] += 1


def with_branches(ways: Iterable[Way], world: World, policy: Policy) -> list[Way]:
    """Each way with a branch from every turn but the first, in every way that they can go."""
    branched = []
    for way in ways:
        said = list(itertools.accumulate(len(turn.completion.token_ids) for turn in way.trajectory.turns))
        from_turns = [
            [(other, turn) for other in conversations(world, policy, way.choices[: said[turn - 1]])]
            for turn in range(1, len(way.trajectory.turns))
        ]
        for drawn in itertools.product(*from_turns):
            chance = math.prod(
                other.chance / math.fsum(one.chance for one, _ in every)
                for every, (other, _) in zip(from_turns, drawn, strict=True)
            )
            branches = tuple(Branch(turn=turn, trajectory=other.trajectory) for other, turn in drawn)
            branched.append(replace(way, chance=way.chance * chance, branches=branches))
    return branched


def with_unscored(ways: Iterable[Way], share: float) -> list[Way]:
    """Each way scored or, with the chance `share`, not."""
    both = []
    for way in ways:
        lost = replace(way.trajectory, reward=None, turn_rewards=())
        both += [
            replace(way, chance=way.chance * (1 - share)),
            replace(way, chance=way.chance * share, trajectory=lost),
        ]
    return both


# --------------------------------------------------------------------------- what an update trains


class Trained(NamedTuple):
    """A token that an update trains."""

    context: Context
    """What stands before it where it is trained."""
    token: int
    advantage: float


Tokens = Callable[[Sequence[Sample]], list[list[Trained]]]
"""The samples of a step -> what is trained of each."""


def turn_by_turn(sample: Sample) -> list[list[Trained]]:
    """[turns][tokens] each in the context that it was sampled in."""
    advantages = iter(sample.advantages)
    return [
        [
            Trained(turn.completion.prompt_ids + turn.completion.token_ids[:place], token, next(advantages))
            for place, token in enumerate(turn.completion.token_ids)
        ]
        for turn in sample.trajectory.turns
    ]


def row_by_row(samples: Sequence[Sample]) -> list[list[Trained]]:
    """What the masks of `Trajectory.rows` train, with the advantages of the turns that stand in each."""
    return [
        [
            token
            for row in sample.trajectory.rows
            for token in _of_row(row, [[token.advantage for token in turn] for turn in turn_by_turn(sample)])
        ]
        for sample in samples
    ]


def _of_row(row: Row, advantages: Sequence[Sequence[float]]) -> list[Trained]:
    ids = row.token_ids
    places = [place for place, bit in enumerate(row.action_mask) if bit]
    values = [value for index in row.indices[row.trains_from :] for value in advantages[index]]
    return [
        Trained(tuple(ids[:place]), ids[place], value) for place, value in zip(places, values, strict=True)
    ]


Critic = Callable[[Trajectory], ValueEstimate]


def expected_update(
    policy: Policy,
    ways: Sequence[Way],
    config: TrainingConfig,
    *,
    critic: Critic | None = None,
    tokens: Tokens = row_by_row,
) -> Gradient:
    """Minus the loss's gradient, times `config.loss_length`, expected over all groups that `ways` make.

    A step has one group of `config.num_generations`, and is on-policy. `loss_type` is one that averages over
    trajectories.
    """
    assert math.isclose(math.fsum(way.chance for way in ways), 1.0)
    size = config.num_generations
    members = [[replace(way.trajectory, member=member) for way in ways] for member in range(size)]
    steps: dict[int, list[list[Trained]]] = {trained: [] for trained in range(1, size + 1)}
    for drawn in itertools.combinations_with_replacement(range(len(ways)), size):
        orders = math.factorial(size) / math.prod(map(math.factorial, Counter(drawn).values()))
        chance = orders * math.prod(ways[index].chance for index in drawn)
        group = TrajectoryGroup(
            key="g",
            trajectories=tuple(members[member][index] for member, index in enumerate(drawn)),
            branches=tuple(
                replace(branch, trajectory=replace(branch.trajectory, member=member))
                for member, index in enumerate(drawn)
                for branch in ways[index].branches
            ),
        )
        values = critic and {
            place: critic(group.trajectories[place[1]]) for place in trainable([group], config)
        }
        if samples := assign_credit([group], config, values).samples:
            # a sum over groups is one sum over their conversations
            steps[len(samples)] += [
                [token._replace(advantage=chance * token.advantage) for token in trained]
                for trained in tokens(samples)
            ]
    losses = [_loss(policy, num_trajectories, trained, config) for num_trajectories, trained in steps.items()]
    return policy.gradient(-sum(losses, torch.zeros(())))


def _loss(
    policy: Policy, num_trajectories: int, trained: Sequence[Sequence[Trained]], config: TrainingConfig
) -> Tensor:
    """Of steps with so many conversations each, times `loss_length`; `trained` has those of all steps."""
    tokens = [token for of_one in trained for token in of_one]
    if not tokens:
        return torch.zeros((), dtype=torch.float64)
    places = torch.tensor([policy.place(token.context, token.token) for token in tokens])
    lengths = torch.tensor([len(of_one) for of_one in trained])
    logprobs = policy.logprobs()[places]
    denominators = Denominators(
        tokens_per_trajectory=lengths,
        num_trajectories=num_trajectories,
        num_tokens=len(tokens),
        max_length=config.loss_length,
    )
    loss = policy_loss(
        config.loss_type,
        LossInputs(
            logprobs,
            logprobs.detach(),
            torch.tensor([token.advantage for token in tokens], dtype=torch.float64),
            torch.repeat_interleave(torch.arange(len(trained)), lengths),
            denominators,
        ),
    ).loss
    return config.loss_length * loss


def true_gradient(policy: Policy, ways: Iterable[Way]) -> Gradient:
    """Of the expected reward, which is a sum over all conversations."""
    expected = torch.zeros((), dtype=torch.float64)
    for way in ways:
        sample = Sample(
            trajectory=way.trajectory, advantages=(way.trajectory.reward,) * way.trajectory.num_agent_tokens
        )
        places = [policy.place(token.context, token.token) for turn in turn_by_turn(sample) for token in turn]
        expected = expected + policy.logprobs()[places].sum().exp() * way.trajectory.reward
    return policy.gradient(expected)


class Deviation(NamedTuple):
    """How far an update is from the true gradient."""

    largest: float
    """Of the differences."""
    angle: float
    """Between them, in degrees."""
    length: float
    """Over that of the true gradient."""


def deviation(update: Gradient, true: Gradient) -> Deviation:
    keys = update.keys() | true.keys()
    nothing = {key: torch.zeros(len(key[1]), dtype=torch.float64) for key in keys}
    one, other = (
        torch.cat([({**nothing, **gradient})[key] for key in sorted(keys)]) for gradient in (update, true)
    )
    ahead, aside = (
        (one / one.norm() + other / other.norm()).norm(),
        (one / one.norm() - other / other.norm()).norm(),
    )
    return Deviation(
        float((one - other).abs().max()),
        math.degrees(2 * math.atan2(aside, ahead)),
        float(one.norm() / other.norm()),
    )
