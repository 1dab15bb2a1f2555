"""Reads what was said in a conversation, for the ready rewards: sound replies, facts told, false claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from stateset_agents.claims.fact_status import FactStatus, claims_phrase, fact_statuses
from stateset_agents.claims.statements import MOST_READ
from stateset_agents.claims.text_checks import choices, content_words, echo, facts, is_prose, is_rude, words
from stateset_agents.claims.typed_values import stem
from stateset_agents.types.comparison import composed, nfc
from stateset_agents.types.messages import Message
from stateset_agents.types.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """The words of a conversation."""

    replies: Sequence[str]
    """The agent's words to the user, `MOST_READ` characters of each; empty ones too, tool calls not."""
    sound: Sequence[str]
    """The replies that are read whole, prose, new, and no echo of the user or the system message."""
    user_texts: Sequence[str]
    """The user's words."""
    reactions: Sequence[str]
    """The user's words after the agent's first reply."""
    overlong: bool
    """True where a reply is longer than what is read of it."""
    topic: set[str]
    """Stems of the content words of the user, the scenario's family and its expected facts."""
    english: bool
    """True where checks that read English may be made."""

    @property
    def integrity(self) -> float:
        """Share of the replies that are sound; 0 without any reply."""
        return len(self.sound) / len(self.replies) if self.replies else 0.0

    @property
    def manner(self) -> float:
        """1, or down to .5 where every reply is rude."""
        return 1 - 0.5 * share([is_rude(text) for text in self.replies]) if self.english else 1.0


def share(checks: Sequence[bool]) -> float:
    """Share of True; 0 for none."""
    return sum(checks) / len(checks) if checks else 0.0


def read_transcript(trajectory: Trajectory, *, english: bool = True) -> Transcript:
    """Sort out what was said by whom; `english=False` leaves out what reads English."""
    replies: list[str] = []
    sound: list[str] = []
    user_texts: list[str] = []
    reactions: list[str] = []
    heard_texts: list[str] = []
    earlier: set[tuple[str, ...]] = set()
    for index, message in enumerate(trajectory.messages):
        if message.role in ("user", "system"):
            heard_texts.append(message.content[:MOST_READ])
        if message.role == "user":
            user_texts.append(message.content[:MOST_READ])
            if replies:
                reactions.append(message.content[:MOST_READ])
        is_reply = message.role == "assistant" and index >= len(trajectory.opening)  # not of the prompt
        if not is_reply or (message.tool_calls and not message.content.strip()):
            continue
        text = message.content[:MOST_READ]
        replies.append(text)
        if len(message.content) > MOST_READ:
            continue
        reply_words = tuple(words(text))
        repeated = len(reply_words) >= 4 and reply_words in earlier
        if is_prose(text, english=english) and not repeated and echo(text, heard_texts) < 0.6:
            sound.append(text)
        earlier.add(reply_words)
    expected = facts(trajectory.scenario.context, "expected_facts")
    subject = [
        trajectory.scenario.family,
        *(wording for wordings in expected.values() for wording in wordings),
    ]
    return Transcript(
        replies=replies,
        sound=sound,
        user_texts=user_texts,
        reactions=reactions,
        overlong=any(len(message.content) > MOST_READ for message in trajectory.replies),
        topic={stem(word) for text in (*user_texts, *subject) for word in content_words(text)},
        english=english,
    )


def resolution(trajectory: Trajectory, transcript: Transcript, breakdown: dict[str, float]) -> float | None:
    """The share of `context["expected_facts"]` told, the environment's verdict, or the mean of both.

    None where there is neither. A fact counts when a sound reply tells it and no reply takes it back. Writes
    `facts` and `success` into the breakdown, and `gambled` where a fact is named and not told.
    """
    context = trajectory.scenario.context
    expected = facts(context, "expected_facts")
    parts = []
    if expected:
        statuses = fact_statuses(
            expected,
            transcript.replies,
            sound=[number for number, text in enumerate(transcript.replies) if text in transcript.sound],
            user_texts=transcript.user_texts,
            shown_texts=shown_texts(context, trajectory.messages),
            choices=choices(context),
        )
        breakdown["facts"] = share([status is FactStatus.TOLD for status in statuses.values()])
        if FactStatus.NAMED in statuses.values():
            breakdown["gambled"] = 1.0
        parts.append(breakdown["facts"])
    if trajectory.success is not None:
        breakdown["success"] = float(trajectory.success)
        parts.append(breakdown["success"])
    return sum(parts) / len(parts) if parts else None


def claims_something_false(trajectory: Trajectory, transcript: Transcript) -> bool:
    """True where a reply states a phrase of `context["forbidden"]`, or is too long to be read and may."""
    forbidden = facts(trajectory.scenario.context, "forbidden")
    if forbidden and transcript.overlong:
        return True
    return any(
        claims_phrase(wordings, text) for wordings in forbidden.values() for text in transcript.replies
    )


_NOT_GIVEN = ("expected_facts", "forbidden", "choices", "answer", "secrets")


def shown_texts(context: Mapping[str, object], messages: Sequence[Message]) -> list[str]:
    """Return what the agent was shown: the context's texts, the system message, and what tools returned."""
    texts = [message.content for message in messages if message.role in ("system", "tool")]
    rest = {key: value for key, value in context.items() if key not in _NOT_GIVEN}
    return [text[:MOST_READ] for text in (*texts, *_texts(rest))]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str | int | float):
        yield str(value)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _texts(item)


# A conversation as rewards compare it: every text in one Unicode form, whoever wrote it.


def in_normal_form(trajectory: Trajectory) -> Trajectory:
    """The conversation with all that was said and called, and its scenario's context, in NFC.

    Only for comparing: its tokens stay as they were sampled.
    """
    scenario = replace(
        trajectory.scenario,
        opening=nfc(trajectory.scenario.opening),
        context=composed(trajectory.scenario.context),
    )
    turns = tuple(
        replace(
            turn,
            completion=replace(turn.completion, message=_composed(turn.completion.message)),
            feedback=_all(turn.feedback),
        )
        for turn in trajectory.turns
    )
    return replace(trajectory, scenario=scenario, opening=_all(trajectory.opening), turns=turns)


def _all(messages: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(map(_composed, messages))


def _composed(message: Message) -> Message:
    return replace(
        message,
        content=nfc(message.content),
        reasoning=None if message.reasoning is None else nfc(message.reasoning),
        tool_calls=tuple(replace(call, arguments=composed(call.arguments)) for call in message.tool_calls),
    )
