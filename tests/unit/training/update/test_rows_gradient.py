"""Which updates of conversations of several rows are unbiased, by exact enumeration.

`python tests/unit/training/update/test_rows_gradient.py` (with `tests/helpers` and
`tests/helpers/trainings` on PYTHONPATH) writes the tables of docs/evidence/expected-gradients.md anew.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from expected_updates import (
    Context,
    Critic,
    Deviation,
    Policy,
    Talk,
    Tokens,
    Trained,
    Way,
    World,
    conversations,
    deviation,
    expected_update,
    number,
    row_by_row,
    true_gradient,
    turn_by_turn,
    with_branches,
    with_unscored,
)
from repository_paths import ROOT

from stateset_agents.algorithms.advantages import group_advantages, returns_to_go
from stateset_agents.training.config import TrainingConfig
from stateset_agents.training.estimators import ValueEstimate
from stateset_agents.training.update.batch import Sample, assign_credit
from stateset_agents.types.trajectory import Trajectory, TrajectoryGroup

PAGE = ROOT / "docs" / "evidence" / "expected-gradients.md"

SYSTEM, USER, ASK, SUB_AGENT, RESULT = range(5)
"""What stands in prompts: a system message, a user's message, the question for a summary, a sub-agent's
system message, what the sub-agent found."""
THOUGHTS, WORDS, ANSWERS = (10, 11), (20, 21, 22), (30, 31)
SUMMARIES, ATTEMPTS, FINDINGS = (40, 41), (50, 51, 52), (60, 61)
BYE, BAD = WORDS[-1], ATTEMPTS[-1]


# ------------------------------------------------------------------------------------------ the worlds


def thought_dropped(talk: Talk) -> None:
    """A thought and a word; unless the word ends it, the next prompt has the word without the thought."""
    _, word = talk.say((SYSTEM,), THOUGHTS, WORDS)
    if word != BYE:
        talk.say((SYSTEM, word, USER), ANSWERS, follows=None)


def thought_kept(talk: Talk) -> None:
    """The same conversations, each in one row."""
    _, word = talk.say((SYSTEM,), THOUGHTS, WORDS)
    if word != BYE:
        talk.say((USER,), ANSWERS)


def compacted(talk: Talk) -> None:
    """The agent writes a summary, and answers having read that alone."""
    _, word = talk.say((SYSTEM,), THOUGHTS, WORDS)
    if word != BYE:
        (summary,) = talk.say((ASK,), SUMMARIES, reward=False)
        talk.say((SYSTEM, summary, USER), ANSWERS, follows=None)


def retried(talk: Talk) -> None:
    """A bad summary is asked for again, once, by the same prompt."""
    _, word = talk.say((SYSTEM,), THOUGHTS, WORDS)
    if word != BYE:
        (summary,) = talk.say((ASK,), ATTEMPTS, reward=False)
        if summary == BAD:
            (summary,) = talk.say((ASK,), ATTEMPTS, follows=0, reward=False)
        talk.say((SYSTEM, summary, USER), ANSWERS, follows=None)


def tree(talk: Talk) -> None:
    """A sub-agent finds something in a row of its own; then two turns follow the first."""
    _, word = talk.say((SYSTEM,), THOUGHTS, WORDS)
    if word != BYE:
        (finding,) = talk.say((SUB_AGENT, word), FINDINGS, follows=None)
        talk.say((RESULT, finding), ANSWERS, follows=0)
        talk.say((USER,), ANSWERS, follows=0)


def make_policy(reads: Callable[[Context], Context] = lambda context: context) -> Policy:
    return Policy(THOUGHTS, WORDS, ANSWERS, SUMMARIES, ATTEMPTS, FINDINGS, reads=reads)


def test_the_rows_of_the_worlds_are_as_they_say():
    rows = {}
    for world in (thought_dropped, thought_kept, compacted, retried, tree):
        longest = max(conversations(world, make_policy()), key=lambda way: len(way.trajectory.turns))
        rows[world] = [row.indices for row in longest.trajectory.rows]
    assert rows == {
        thought_dropped: [(0,), (1,)],
        thought_kept: [(0, 1)],
        compacted: [(0, 1), (2,)],
        retried: [(0, 1), (0, 2), (3,)],
        tree: [(1,), (0, 2), (0, 3)],
    }


# ----------------------------------------------------------------------------------------- critics


def any_values(ways: Sequence[Way]) -> Critic:
    """Some value for what the model saw before each turn."""
    return lambda trajectory: ValueEstimate(
        [number("value", turn.completion.prompt_ids) for turn in trajectory.turns], final=number("end")
    )


def any_values_per_token(ways: Sequence[Way]) -> Critic:
    return lambda trajectory: ValueEstimate(
        [
            number("value", turn.completion.prompt_ids, turn.completion.token_ids[:place])
            for turn in trajectory.turns
            for place in range(len(turn.completion.token_ids))
        ],
        final=number("end"),
    )


def best_values(ways: Sequence[Way]) -> Critic:
    """The return to expect after what the model saw before each turn."""
    chances: defaultdict[Context, float] = defaultdict(float)
    returns: defaultdict[Context, float] = defaultdict(float)
    for way in ways:
        to_go = returns_to_go(way.trajectory.rewards_by_turn)
        for turn, value in zip(way.trajectory.turns, to_go, strict=True):
            chances[turn.completion.prompt_ids] += way.chance
            returns[turn.completion.prompt_ids] += way.chance * value

    def critic(trajectory: Trajectory) -> ValueEstimate:
        seen = [turn.completion.prompt_ids for turn in trajectory.turns]
        return ValueEstimate([returns[ids] / chances[ids] for ids in seen], final=0.0)

    return critic


# ----------------------------------------------------------------------------- what trains wrongly


def each(tokens: Callable[[Sample, list[list[Trained]]], list[Trained]]) -> Tokens:
    """Of every sample by itself; `tokens` is given it and its turns as they should train."""
    return lambda samples: [tokens(sample, turn_by_turn(sample)) for sample in samples]


def weighted(weight: Callable[[Sample], float]) -> Tokens:
    return each(
        lambda sample, turns: [
            token._replace(advantage=weight(sample) * token.advantage) for turn in turns for token in turn
        ]
    )


def only(trains: Callable[[Sample, int], bool]) -> Tokens:
    """`trains`: does this turn of the sample?"""
    return each(
        lambda sample, turns: [
            token for index, turn in enumerate(turns) if trains(sample, index) for token in turn
        ]
    )


@each
def one_long_row(sample: Sample, turns: list[list[Trained]]) -> list[Trained]:
    """Every turn after all that was said before, the thought included."""
    first, *later = turns
    before = (SYSTEM, *(token.token for token in first), USER)
    return [*first, *(token._replace(context=before) for turn in later for token in turn)]


@each
def words_again(sample: Sample, turns: list[list[Trained]]) -> list[Trained]:
    """The second row's prompt has the first turn's word, and trains it as well."""
    _, word = turns[0]
    again = [word._replace(context=(SYSTEM,))] if len(turns) > 1 else []
    return [token for turn in turns for token in turn] + again


@each
def summary_for_itself(sample: Sample, turns: list[list[Trained]]) -> list[Trained]:
    """The summary's advantage has its turn's own reward, which is 0, in place of the conversation's."""
    reward = sample.trajectory.reward
    return [
        token._replace(advantage=token.advantage - reward) if token.token in SUMMARIES else token
        for turn in turns
        for token in turn
    ]


@each
def shared_turn_again(sample: Sample, turns: list[list[Trained]]) -> list[Trained]:
    """A turn that stands in two rows trains in both."""
    return [token for row in sample.trajectory.rows for index in row.indices for token in turns[index]]


@each
def in_the_order_of_rows(sample: Sample, turns: list[list[Trained]]) -> list[Trained]:
    """Advantages, which are in the order of turns, are handed to the tokens row by row."""
    order = [index for row in sample.trajectory.rows for index in row.indices[row.trains_from :]]
    tokens = [token for index in order for token in turns[index]]
    return [token._replace(advantage=value) for token, value in zip(tokens, sample.advantages, strict=True)]


def baseline_over_rows(samples: Sequence[Sample]) -> list[list[Trained]]:
    """Every row is a member of the group, and all rows of a conversation have its reward."""
    counts = [len(sample.trajectory.rows) for sample in samples]
    rewards = [
        sample.trajectory.reward for sample, count in zip(samples, counts, strict=True) for _ in range(count)
    ]
    (by_row,) = group_advantages([rewards], baseline="leave_one_out", scaling="none")
    advantages = iter(by_row)
    return [
        [
            token._replace(advantage=advantage)
            for turn, advantage in zip(
                turn_by_turn(sample), [next(advantages) for _ in range(count)], strict=True
            )
            for token in turn
        ]
        for sample, count in zip(samples, counts, strict=True)
    ]


def divided_by_all_rows(samples: Sequence[Sample]) -> list[list[Trained]]:
    """The step's loss is divided by its rows, not by its conversations."""
    share = len(samples) / sum(len(sample.trajectory.rows) for sample in samples)
    return weighted(lambda sample: share)(samples)


# ------------------------------------------------------------------------------------- the updates


@dataclass(frozen=True, eq=False)
class Update:
    """An update of conversations of a world, on-policy; a step has one group."""

    name: str
    world: World
    settings: Mapping[str, object]
    size: int = 2
    """Conversations in the group."""
    tokens: Tokens = row_by_row
    critic: Callable[[Sequence[Way]], Critic] | None = None

    def __str__(self) -> str:
        return f"{self.world.__name__}: {self.name}"


def config_of(update: Update) -> TrainingConfig:
    return TrainingConfig(
        **{"loss_type": "dr_grpo", "loss_length": 4, "num_generations": update.size, **update.settings}
    )


@functools.cache
def measured(update: Update) -> Deviation:
    policy = make_policy()
    ways = list(conversations(update.world, policy))
    config = config_of(update)
    got = expected_update(
        policy,
        with_branches(ways, update.world, policy) if config.branches_per_turn else ways,
        config,
        critic=update.critic and update.critic(ways),
        tokens=update.tokens,
    )
    return deviation(got, true_gradient(policy, ways))


LEAVE_ONE_OUT = {"baseline_type": "leave_one_out", "advantage_normalization": "none"}
GROUP = {"advantage_estimator": "group", **LEAVE_ONE_OUT}
TURN_GROUP = {"advantage_estimator": "turn_group"}
BRANCH = {"advantage_estimator": "branch", "num_branches": 1, "min_group_size": 1}


def gae(kind: str, gae_lambda: float = 1.0) -> dict[str, object]:
    return {"advantage_estimator": kind, "gae_lambda": gae_lambda, "advantage_normalization": "none"}


UNBIASED = [
    Update("`group`, G = 2", thought_dropped, GROUP),
    Update("`group`, G = 3", thought_dropped, GROUP, size=3),
    Update("`turn_group`, G = 2", thought_dropped, TURN_GROUP),
    Update("`turn_group`, G = 3", thought_dropped, TURN_GROUP, size=3),
    Update("`branch`, G = 2", thought_dropped, BRANCH),
    Update("`turn_gae`", thought_dropped, gae("turn_gae"), size=1, critic=any_values),
    Update("`token_gae`", thought_dropped, gae("token_gae"), size=1, critic=any_values_per_token),
    Update("`hybrid`, G = 2", thought_dropped, {**gae("hybrid"), **LEAVE_ONE_OUT}, critic=any_values),
    Update("`group`, G = 2", compacted, GROUP),
    Update("`turn_group`, G = 3", compacted, TURN_GROUP, size=3),
    Update("`branch`, G = 1", compacted, BRANCH, size=1),
    Update("`turn_gae`", compacted, gae("turn_gae"), size=1, critic=any_values),
    Update("`group`, G = 2", retried, GROUP),
    Update("`turn_group`, G = 2", retried, TURN_GROUP),
    Update("`group`, G = 2", tree, GROUP),
    Update("`turn_group`, G = 2", tree, TURN_GROUP),
    Update("`turn_gae`", tree, gae("turn_gae"), size=1, critic=any_values),
]


def last_turn_only(sample: Sample, turn: int) -> bool:
    return turn == len(sample.trajectory.turns) - 1


def all_but_the_summary(sample: Sample, turn: int) -> bool:
    return turn != 1


def all_but_a_rejected_summary(sample: Sample, turn: int) -> bool:
    return turn != 1 or sample.trajectory.turns[turn].completion.token_ids != (BAD,)


BIASED = [
    Update(
        "the first row masked where a second follows", thought_dropped, GROUP, tokens=only(last_turn_only)
    ),
    Update(
        "the second row trained as if the thought stood in it", thought_dropped, GROUP, tokens=one_long_row
    ),
    Update(
        "the first turn's word trained again in the second row", thought_dropped, GROUP, tokens=words_again
    ),
    Update("the summary masked", compacted, GROUP, tokens=only(all_but_the_summary)),
    Update("the summary given its own turn's reward alone", compacted, GROUP, tokens=summary_for_itself),
    Update("rejected summaries left out", retried, GROUP, tokens=only(all_but_a_rejected_summary)),
    Update("a turn that rows share trained in each", tree, GROUP, tokens=shared_turn_again),
    Update("turns' advantages handed out row by row", tree, TURN_GROUP, tokens=in_the_order_of_rows),
    Update(
        "rows in place of conversations in the baseline", thought_dropped, GROUP, tokens=baseline_over_rows
    ),
    Update(
        "each conversation divided by its rows",
        thought_dropped,
        GROUP,
        tokens=weighted(lambda sample: 1 / len(sample.trajectory.rows)),
    ),
    Update(
        "rows in place of conversations in the denominator",
        thought_dropped,
        GROUP,
        tokens=divided_by_all_rows,
    ),
    Update("control: `group_mean`", thought_dropped, {**GROUP, "baseline_type": "group_mean"}),
]
SPREAD = {"advantage_estimator": "group", "advantage_normalization": "population"}


def in_rows_and_in_one(name: str, settings: Mapping[str, object], **fields: Any) -> tuple[Update, Update]:
    return Update(name, thought_dropped, settings, **fields), Update(name, thought_kept, settings, **fields)


ROWS_AND_ONE = [
    in_rows_and_in_one("`turn_gae`, λ = 0.95", gae("turn_gae", 0.95), size=1, critic=best_values),
    in_rows_and_in_one("`turn_gae`, λ = 0", gae("turn_gae", 0.0), size=1, critic=best_values),
    in_rows_and_in_one("`group` by the group's deviation, G = 3", SPREAD, size=3),
    in_rows_and_in_one("`group` with `loss_type: grpo`", {**GROUP, "loss_type": "grpo"}),
]


@pytest.mark.parametrize("update", UNBIASED, ids=str)
def test_every_sampled_token_once_in_its_row_with_the_credit_of_its_turn_is_unbiased(update):
    largest, angle, length = measured(update)
    assert largest < 1e-12
    assert angle < 1e-9
    assert length == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("update", BIASED, ids=str)
def test_every_other_way_to_train_rows_is_biased(update):
    largest, angle, length = measured(update)
    assert largest > 1e-3
    assert math.radians(angle) > 1e-3 or abs(length - 1) > 1e-3


def test_leaving_a_member_in_its_own_baseline_shortens_the_gradient_and_turns_it_nowhere():
    _, angle, length = measured(BIASED[-1])
    assert angle < 1e-9
    assert length == pytest.approx(1 / 2)


def test_below_lambda_1_a_critic_that_cannot_see_the_dropped_thought_biases_the_gradient():
    for dropped, kept in ROWS_AND_ONE[:2]:
        assert measured(dropped).angle > 1
        assert measured(kept).largest < 1e-12


# ------------------------------------------------------------------------------- blind policies


def without_thoughts_past(context: Context) -> Context:
    """Thoughts do not count once the user has spoken."""
    return tuple(token for token in context if token not in THOUGHTS) if USER in context else context


@pytest.mark.parametrize("settings", [GROUP, TURN_GROUP], ids=["group", "turn_group"])
def test_to_a_policy_that_is_blind_to_what_is_dropped_rows_are_one_row(settings):
    blind = make_policy(reads=without_thoughts_past)
    config = config_of(Update("", thought_dropped, settings))
    rows, one_row = (
        expected_update(blind, list(conversations(world, blind)), config)
        for world in (thought_dropped, thought_kept)
    )
    assert deviation(rows, one_row).largest < 1e-15


# ----------------------------------------------------- what counts members of a group counts no rows


@pytest.mark.parametrize("settings", [GROUP, TURN_GROUP], ids=["group", "turn_group"])
@pytest.mark.parametrize("fewest", [2, 3])
def test_a_group_trains_with_enough_scored_conversations_however_many_rows_they_have(settings, fewest):
    policy, unscored = make_policy(), 0.3
    ways = list(conversations(thought_dropped, policy))
    config = config_of(Update("", thought_dropped, {**settings, "min_group_size": fewest}, size=3))
    got = expected_update(policy, with_unscored(ways, unscored), config)
    _, angle, length = deviation(got, true_gradient(policy, ways))
    enough = sum(math.comb(3, n) * (1 - unscored) ** n * unscored ** (3 - n) for n in range(fewest, 4))
    assert angle < 1e-9
    assert length == pytest.approx(enough, abs=1e-12)


def test_conversations_that_tie_tie_however_many_rows_they_have():
    ways = conversations(thought_dropped, make_policy())
    talks = {len(way.trajectory.rows): replace(way.trajectory, reward=1.0, turn_rewards=()) for way in ways}
    group = TrajectoryGroup(key="g", trajectories=(talks[1], replace(talks[2], member=1)))
    credit = assign_credit([group], TrainingConfig(num_generations=2)).advantages
    assert credit == [[(0.0, 0.0), (0.0, 0.0, 0.0)]]


def test_where_many_groups_tie_the_update_is_unbiased():
    policy = make_policy()
    ways = [
        replace(
            way, trajectory=replace(way.trajectory, reward=float(way.trajectory.reward > 2), turn_rewards=())
        )
        for way in conversations(thought_dropped, policy)
    ]
    got = expected_update(policy, ways, config_of(Update("", thought_dropped, GROUP, size=3)))
    assert deviation(got, true_gradient(policy, ways)).largest < 1e-12


# ------------------------------------------------------------------------------------- the page

TITLES = {
    thought_dropped: "a thought dropped",
    compacted: "compaction",
    retried: "compaction, a bad summary asked for again",
    tree: "a sub-agent, and two turns after one",
}


def _degrees(angle: float) -> str:
    return f"{angle:.1f}°"


def _updates() -> str:
    lines = ["| conversations | update | angle | length |", "|---|---|---|---|"]
    for world, title in TITLES.items():
        updates = [update for update in UNBIASED if update.world is world]
        names = "; ".join(update.name for update in updates)
        angle = max(measured(update).angle for update in updates)
        length = max((measured(update).length for update in updates), key=lambda value: abs(value - 1))
        lines.append(f"| {title} | {names} | {_degrees(angle)} | {length:.2f} |")
    for update in BIASED:
        _, angle, length = measured(update)
        lines.append(f"| {TITLES[update.world]} | {update.name} | **{_degrees(angle)}** | **{length:.2f}** |")
    return "".join(line + "\n" for line in lines)


def _rows_and_one() -> str:
    lines = ["| update | angle, thought dropped | in one row |", "|---|---|---|"]
    lines += [
        f"| {rows.name} | {_degrees(measured(rows).angle)} | {_degrees(measured(one).angle)} |"
        for rows, one in ROWS_AND_ONE
    ]
    return "".join(line + "\n" for line in lines)


TABLES = {"updates of several rows": _updates, "biased with one row or several": _rows_and_one}


def _place(text: str, name: str) -> tuple[int, int]:
    begin, end = f"<!-- table: {name} -->\n", "<!-- end of table -->\n"
    start = text.index(begin) + len(begin)
    return start, text.index(end, start)


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_measured_numbers(name):
    text = PAGE.read_text(encoding="utf-8")
    start, end = _place(text, name)
    assert text[start:end] == TABLES[name]()


if __name__ == "__main__":
    for name, make in TABLES.items():
        text = PAGE.read_text(encoding="utf-8")
        start, end = _place(text, name)
        PAGE.write_text(text[:start] + make() + text[end:], encoding="utf-8")
