"""Conversations as samples to imitate: the agent's own prompts, with forced replies.

A demonstration is replayed through the agent's `ChatHistory` and template. What the agent is shown before
each reply, and how its replies are written, is what a rollout would show and what the parser reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stateset_agents.core.agent import MultiTurnAgent
from stateset_agents.core.chat.history import ChatHistory
from stateset_agents.core.sources.datasets import Chats, located_chats, with_shares
from stateset_agents.core.sources.row_shapes import DataRow, expect_chat, expect_reply, read_schemas
from stateset_agents.core.sources.scenario_files import RowCounts, scenario_of_row
from stateset_agents.evaluation.recorded import trajectory_of
from stateset_agents.tracking.jsonl import damage_named
from stateset_agents.tracking.run_log import RecordedRollout, RunLog
from stateset_agents.training.update.batch import Sample
from stateset_agents.types.errors import ConfigurationError, ContextLengthExceeded
from stateset_agents.types.logs import get_logger
from stateset_agents.types.messages import Completion, Message
from stateset_agents.types.scenario import Scenario
from stateset_agents.types.trajectory import Trajectory, Turn

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Samples to imitate, and samples that are held out."""

    train: tuple[Sample, ...]
    validation: tuple[Sample, ...]

    @property
    def token_ids(self) -> frozenset[int]:
        """The tokens of all prompts and replies to imitate."""
        turns = [turn for sample in self.train for turn in sample.trajectory.turns]
        return frozenset(id for turn in turns for id in (*turn.prompt_ids, *turn.completion.token_ids))


@runtime_checkable
class DemonstrationSource(Protocol):
    """Whatever knows which tokens an agent should imitate, and how much each counts."""

    def load(self, agent: MultiTurnAgent, *, validation_share: float) -> Demonstrations:
        """Blocking; the agent is initialised. A sample's advantages are its tokens' weights in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chat:
    """One conversation to replay."""

    where: str
    scenario: Scenario
    names_split: bool
    row: DataRow
    tools: tuple[Mapping[str, Any], ...]

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.row.prompt, *self.row.completion)


def load_demonstrations(
    agent: MultiTurnAgent,
    chats: Chats,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    validation_share: float = 0.0,
) -> Demonstrations:
    """Encode conversations for an initialised agent. Blocking.

    `tools`: schemas that the agent is shown where a conversation names none. All replies after the user's
    first message are imitated, of a prompt with a completion those in the completion, but for those with
    `"weight": 0`. A conversation that outgrows the agent's context ends before the reply that does. Those of
    split "test" are left out.

    Raises ConfigurationError, naming the conversation, for one that cannot be read or trains nothing.
    """
    read = list(_read(chats, tools, validation_share))
    samples: dict[str, list[Sample]] = {"train": [], "validation": []}
    num_cut = num_long = 0
    for chat in read:
        if chat.scenario.split == "test":
            continue
        sample, is_cut = _sample(agent, chat)
        num_cut += is_cut
        most = max(len(turn.completion.token_ids) for turn in sample.trajectory.turns)
        num_long += most > agent.config.max_new_tokens
        samples[chat.scenario.split].append(sample)
    if not samples["train"]:
        raise ConfigurationError(
            f"all {len(read)} conversations are held out: give some to train, or a smaller validation_share"
        )
    if num_failed := sum(chat.row.is_failure for chat in read):
        _log.warning(
            f"{num_failed} of {len(read)} conversations were reported as failures and are imitated, too: "
            "`stateset-agents import FILE --as sft --output ROWS` leaves them out"
        )
    if num_cut:
        _log.warning(
            f"{num_cut} of {len(read)} conversations are longer than the context of {agent.context_length} "
            "tokens and end early: raise max_context_tokens, or give shorter ones"
        )
    if num_long:
        _log.warning(
            f"{num_long} of {len(read)} conversations have replies of more than max_new_tokens "
            f"{agent.config.max_new_tokens} tokens, which the agent could not finish: raise it"
        )
    return Demonstrations(
        train=tuple(samples["train"]),
        validation=tuple(samples["validation"]),
    )


def _read(chats: Chats, tools: Sequence[Mapping[str, Any]], share: float) -> Iterator[_Chat]:
    """Equal conversations are held out together."""
    located = located_chats(chats)
    counts = RowCounts()
    schemas = read_schemas(tools)
    read = [_chat(where, data, schemas, counts) for where, data in located]
    counts.tell(str(chats) if isinstance(chats, str | Path) else "conversations")
    scenarios = [chat.scenario for chat in read]
    for chat, scenario in zip(
        read,
        with_shares(scenarios, {"validation": share}, [chat.names_split for chat in read]),
        strict=True,
    ):
        yield replace(chat, scenario=scenario)


def _chat(where: str, data: Any, tools: tuple[Mapping[str, Any], ...], counts: RowCounts) -> _Chat:
    try:
        row = counts.add(expect_chat(data))
        expect_reply(row, data)
        return _Chat(
            where=where,
            scenario=scenario_of_row(row),
            names_split=bool(data.get("split")),
            row=row,
            tools=tools if row.tools is None else row.tools,
        )
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _sample(agent: MultiTurnAgent, chat: _Chat) -> tuple[Sample, bool]:
    """The conversation with its weights, and whether it was cut."""
    turns: list[Turn] = []
    weights: list[float] = []
    first = len(chat.row.prompt)
    replies = [
        first + index for index, message in enumerate(chat.row.completion) if message.role == "assistant"
    ]
    history = agent.history(summarizes=False)
    is_cut = False
    try:
        for index, following in itertools.pairwise([*replies, len(chat.messages)]):
            weight = chat.row.weights[index - first]
            turn = _turn(agent, history, chat, index)
            if turn is None:
                is_cut = True
                break
            answers = chat.messages[index + 1 : following]
            turns.append(Turn(prompt_ids=turn[0], completion=turn[1], follows=turn[2], feedback=answers))
            weights += [weight] * len(turn[1].token_ids)
    except ConfigurationError as error:
        raise ConfigurationError(f"{chat.where}: {error}") from error
    if not any(weights):
        why = "its first reply does not fit the context" if is_cut else "it has no reply with a weight"
        raise ConfigurationError(f"{chat.where} trains nothing: {why}; leave it out")
    opening = chat.messages[: replies[0]]
    trajectory = Trajectory(scenario=chat.scenario, opening=opening, turns=tuple(turns))
    return Sample(trajectory=trajectory, advantages=tuple(weights)), is_cut


def _turn(
    agent: MultiTurnAgent, history: ChatHistory, chat: _Chat, index: int
) -> tuple[tuple[int, ...], Completion, int | None] | None:
    """The new part of a reply's prompt, the reply, and the turn it follows; None where it does not fit."""
    reply = chat.messages[index]
    before = agent.with_system_prompt(chat.messages[:index])
    ids = agent.template.reply(reply, chat.tools)
    try:
        prompt = history.next(history.place(before), chat.tools)
    except ContextLengthExceeded:
        return None
    if len(prompt.ids) + len(ids) > agent.context_length:
        return None
    completion = Completion(
        message=reply,
        prompt_ids=prompt.ids,
        token_ids=tuple(ids),
        logprobs=(0.0,) * len(ids),  # nobody sampled it
        finish_reason="stop",
        pixels=prompt.pixels,
    )
    history.add(prompt, completion)
    return prompt.added, completion, prompt.follows


@dataclass(frozen=True, slots=True)
class OwnSuccesses:
    """A run's own best conversations, token by token as they were sampled: of each scenario the successful
    one with the highest reward, the earliest of equals.

    Rejection sampling: RAFT (https://arxiv.org/abs/2304.06767) keeps the best of several replies to a prompt
    and fine-tunes on it. Where the environment gives no verdict, conversations with a positive reward count
    as successes.
    """

    run: Path
    """The run folder."""

    def load(self, agent: MultiTurnAgent, *, validation_share: float = 0.0) -> Demonstrations:
        """Blocking; the agent is initialised. Raises ConfigurationError for a run without successes, and an
        agent whose tokenizer is another."""
        log = RunLog.open(self.run)
        _check_tokens(agent, log)
        best: dict[str, RecordedRollout] = {}
        with damage_named(log.folder.path):
            for rollout in log.rollouts("train"):
                if _succeeded(rollout) and _value(rollout) > _value(best.get(rollout.scenario)):
                    best[rollout.scenario] = rollout
        if not best:
            raise ConfigurationError(
                f"{self.run} has no successful conversation: train longer, or with log_rollouts true"
            )
        with damage_named(log.folder.path):
            trajectories = list(map(trajectory_of, best.values()))
        scenarios = with_shares(
            [trajectory.scenario for trajectory in trajectories],
            {"validation": validation_share},
            [False] * len(trajectories),
        )
        samples: dict[str, list[Sample]] = {"train": [], "validation": []}
        for trajectory, scenario in zip(trajectories, scenarios, strict=True):
            advantages = (1.0,) * trajectory.num_agent_tokens
            split = "validation" if scenario.split == "validation" else "train"
            samples[split].append(Sample(trajectory=trajectory, advantages=advantages))
        if not samples["train"]:
            raise ConfigurationError(
                f"all {len(trajectories)} conversations are held out: lower validation_share"
            )
        return Demonstrations(train=tuple(samples["train"]), validation=tuple(samples["validation"]))


def _succeeded(rollout: RecordedRollout) -> bool:
    if rollout.success is None:
        return rollout.reward is not None and rollout.reward > 0
    return rollout.success and rollout.status != "failed"


def _value(rollout: RecordedRollout | None) -> float:
    return float("-inf") if rollout is None else (rollout.reward or 0.0)


def _check_tokens(agent: MultiTurnAgent, log: RunLog) -> None:
    """Raises ConfigurationError where the agent's tokenizer says something else by the run's tokens."""
    piece = agent.backend.tokenizer.piece
    for id, text in log.tokens().items():
        if piece(id) != text:
            raise ConfigurationError(
                f"{agent.config.model_name!r} has another tokenizer than the run (token {id}: "
                f"{piece(id)!r}, there {text!r}): take the run's own base model, or one of its checkpoints"
            )
