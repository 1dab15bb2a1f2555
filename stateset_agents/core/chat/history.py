"""The prompts of a conversation: the tokens that an agent reads before each of its turns.

A conversation that only grows is one *row*: the prompt, then sampled replies and what the template writes
between them. Where the agent is to read something else than what stands in a row (its template drops earlier
thoughts, the oldest exchanges are left out, a summary takes their place), the prompt is rendered whole and
opens a row. Rollouts, chats and the server all read conversations through this module, so that an agent is
trained as it is served.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from stateset_agents.core.agent_config import AgentConfig
from stateset_agents.core.chat.template import ChatTemplate, ToolSchemas
from stateset_agents.types.comparison import canonical
from stateset_agents.types.errors import ContextLengthExceeded
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import Completion, Message, ToolCall, tool_results


@dataclass(frozen=True, slots=True)
class SentConversation:
    """A conversation that ends with the agent's words."""

    conversation: tuple[Message, ...]
    """The messages as the agent said them."""
    sent: tuple[Message, ...]
    """The same as the other side has it."""
    size: int = 0
    """Size that counts towards the bound of the index."""


T = TypeVar("T", bound=SentConversation)
_Tools = tuple[Mapping[str, Any], ...]


class KnownConversations(Generic[T]):
    """Finds the conversation that messages go on from, among those that end with the agent's words.

    Rollouts, servers and the endpoint of external programs ask: each is given whole conversations, by
    somebody who need not have all of what the agent said. Messages repeat a conversation though they leave
    out thoughts, give calls other ids, write their arguments otherwise (3.0 and 3 are one number to many
    clients) or drop white space at the ends of what the agent said. A
    thought that is sent and differs makes it another conversation.
    """

    def __init__(self, *, max_size: int | None = None) -> None:
        """Beyond `max_size` together the oldest are forgotten, but never the latest."""
        self._max_size = max_size
        self._oldest: deque[T] = deque()
        self._ending: dict[int, list[T]] = {}
        """The index by the conversation's end, so that a lookup need not go through thousands."""
        self.size = 0
        """The sizes of all stored conversations together."""

    def add(self, known: T) -> None:
        """Keep a conversation."""
        self._oldest.append(known)
        self._ending.setdefault(_end(known.sent, len(known.sent)), []).append(known)
        self.size += known.size
        while self._max_size is not None and self.size > self._max_size and len(self._oldest) > 1:
            oldest = self._oldest.popleft()
            self.size -= oldest.size
            end = _end(oldest.sent, len(oldest.sent))
            del self._ending[end][0]
            if not self._ending[end]:
                del self._ending[end]

    def find(self, messages: tuple[Message, ...]) -> tuple[T, tuple[Message, ...]] | None:
        """The latest of the longest that the messages go on from, and what they add: results with the ids
        that their calls have in the conversation. None where they repeat none."""
        for length in range(len(messages) - 1, 0, -1):
            for entry in reversed(self._ending.get(_end(messages, length), ())):
                begin, following = messages[:length], messages[length:]
                if _repeats(begin, entry.sent):
                    if begin != entry.conversation:
                        ids = _ids(begin, entry.conversation)
                        following = tuple(_with_id(message, ids) for message in following)
                    return entry, following
        return None


def _end(messages: Sequence[Message], length: int) -> int:
    """A hash of the number of messages and of the last one's words; another conversation may share it."""
    return hash((length, messages[length - 1].content.strip()))


def _repeats(messages: tuple[Message, ...], others: tuple[Message, ...]) -> bool:
    if messages == others or len(messages) != len(others):
        return messages == others
    ids: dict[str, str] = {}
    for message, other in zip(messages, others, strict=True):
        if message.role == other.role == "assistant":
            if (
                message.content.strip() != other.content.strip()
                or (message.reasoning and message.reasoning != other.reasoning)
                or list(map(_as_text, message.tool_calls)) != list(map(_as_text, other.tool_calls))
            ):
                return False
            ids |= _ids([message], [other])
        elif _with_id(message, ids) != other:
            return False
    return True


def _as_text(call: ToolCall) -> tuple[str | None, str, str]:
    """All of a call but its id."""
    return call.error, call.name, canonical(call.arguments)


def _ids(messages: Sequence[Message], conversation: Sequence[Message]) -> dict[str, str]:
    """The ids that calls have in the conversation, by those in the messages, which repeat it."""
    both = (
        [call.id for message in side for call in message.readable_calls] for side in (messages, conversation)
    )
    return dict(zip(*both, strict=True))


def _with_id(message: Message, ids: dict[str, str]) -> Message:
    id = ids.get(message.tool_call_id or "")
    return replace(message, tool_call_id=id) if message.role == "tool" and id else message


_SUMMARY = "Summary of the conversation so far:"


@dataclass(frozen=True, slots=True)
class View:
    """A conversation whose oldest messages are shown as others; by default it is shown as it is."""

    num_replaced: int = 0
    replacement: tuple[Message, ...] = ()

    def of(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """The messages that the view shows."""
        return (*self.replacement, *messages[self.num_replaced :])


def slide_window(messages: tuple[Message, ...], fits: Callable[[View], bool]) -> View:
    """The system message and as many of the newest exchanges as fit; always at least the newest one.

    An exchange is a user message with all that follows it up to the next: answers, tool calls, their results.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]
    if len(starts) < 2:
        return View()
    head = messages[: starts[0]]
    while head and head[-1].role != "system":  # an agent that spoke first
        head = head[:-1]

    def without(number: int) -> View:
        return View(starts[number], head) if number else View()

    # the fewest exchanges to leave out, at most all but the newest
    return without(bisect_left(range(len(starts) - 1), True, key=lambda number: fits(without(number))))


def with_summary(messages: tuple[Message, ...], summary: str) -> View:
    """The opening and a summary in the place of all that was said before the last reply."""
    replies = [index for index, message in enumerate(messages) if message.role == "assistant"]
    *system, last = messages[: replies[0]] or (Message(role="user", content=""),)
    if last.role != "user":
        system, last = [*system, last], Message(role="user", content="")
    content = "\n\n".join(filter(None, [last.content, f"{_SUMMARY}\n{summary}"]))
    return View(replies[-1], (*system, replace(last, content=content)))


def num_replies(messages: Sequence[Message]) -> int:
    """The number of replies of the agent."""
    return sum(message.role == "assistant" for message in messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt of one turn."""

    messages: tuple[Message, ...]
    """The conversation so far."""
    tools: _Tools
    view: View
    """The part of the conversation that the prompt shows."""
    ids: tuple[int, ...]
    """[P]"""
    follows: int | None = None
    """The turn whose tokens `ids` begin with; None where the prompt opens a row."""
    num_before: int = 0
    """Tokens of `ids` that stood there already."""
    asks_summary: bool = False
    """True if the reply is a summary for the agent itself, which nobody else hears."""
    pixels: tuple[PixelValues, ...] = ()
    """The pictures in `ids`, in order."""

    @property
    def added(self) -> tuple[int, ...]:
        """The end of `ids` that is new: all of them where the prompt opens a row."""
        return self.ids[self.num_before :]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn(SentConversation):
    """A turn of the agent. Its conversation ends with the reply, unless that is a summary; its size is in
    tokens."""

    index: int
    completion: Completion
    tools: _Tools
    shown: View
    """The part of the conversation that the prompt showed."""
    view: View
    """The part of the conversation that later prompts show."""


@dataclass(frozen=True, slots=True)
class Place:
    """A conversation, and the turn that it goes on from."""

    messages: tuple[Message, ...]
    """The conversation, the agent's replies as they were sampled."""
    unread: tuple[Message, ...]
    """The messages that a prompt has to encode."""
    turn: _Turn | None = None


class ChatHistory:
    """The prompts of an agent's turns: `next` makes one, `add` keeps it with the reply that was sampled.

    A prompt follows the turn that its messages go on from (`place`), if the agent is to read all that stands
    there. Who repeats a conversation need not know the agent's thoughts: they are kept here. Several turns
    may follow the same one: a conversation may be a tree.
    """

    def __init__(
        self,
        template: ChatTemplate,
        config: AgentConfig,
        context_length: int,
        *,
        max_tokens: int | None = None,
        summarizes: bool = True,
    ) -> None:
        """
        Args:
            config: Says what becomes of earlier turns. Its longest reply is the reserve: `slide` leaves so
                many tokens free, and `compact` shows the results of the last calls to who writes the summary
                only where so many are left.
            context_length: Tokens of the longest row.
            max_tokens: Of all turns that are remembered, each with its prompt; the oldest are forgotten
                beyond it.
            summarizes: False: with history compact no summary is asked for.
        """
        self._template = template
        self._config = config
        self._context_length = context_length
        self._mode = "template" if config.history == "compact" and not summarizes else config.history
        self._turns = KnownConversations[_Turn](max_size=max_tokens)
        self._num_turns = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all remembered turns, each with its prompt."""
        return self._turns.size

    def place(self, messages: Sequence[Message]) -> Place:
        """The turn that these messages go on from: the latest whose conversation they repeat."""
        messages = tuple(messages)
        if (match := self._turns.find(messages)) is None:
            return Place(messages, messages)
        turn, following = match
        messages = (*turn.conversation, *following)
        only_appends = self._mode == "keep" or self._template.appends
        return Place(messages, following if only_appends else messages, turn)

    def next(self, place: Place, tools: ToolSchemas = ()) -> Prompt:
        """The prompt before the agent's next turn in a conversation that has come to this place.

        With `compact` it may ask for a summary first: `add` that, and call again. Raises
        ContextLengthExceeded where no room for a reply is left, ConfigurationError where the template cannot
        render the conversation.
        """
        messages, tools = place.messages, tuple(tools)
        view = View() if place.turn is None else place.turn.view
        # a summary stands before the last reply, which is shown as it was, and before what answers it
        may_ask = self._mode == "compact" and messages[-1].role != "assistant"
        may_ask = may_ask and num_replies(view.of(messages)) > 1
        prompt_of = self._slid if self._mode == "slide" else self._prompt
        try:
            prompt = prompt_of(place, tools, view)
            left = self._context_length - len(prompt.ids)
        except ContextLengthExceeded:
            if not may_ask:
                raise
            left = 0
        if may_ask and left < self._config.summary_room(self._context_length):
            prompt = self._asking(place, tools, view)
            left = self._context_length - len(prompt.ids)
        if left < 1:
            raise self._too_long(view.of(messages), str(len(prompt.ids)))
        return prompt

    def add(self, prompt: Prompt, completion: Completion) -> None:
        """Keep what was sampled after a prompt; the completion's message is what was read in its text."""
        conversation, view = prompt.messages, prompt.view
        if prompt.asks_summary:
            view = with_summary(conversation, completion.message.content)
        else:
            conversation = (*conversation, completion.message)
        self._turns.add(
            _Turn(
                conversation,
                conversation,
                size=len(completion.prompt_ids) + len(completion.token_ids),
                index=self._num_turns,
                completion=completion,
                tools=prompt.tools,
                shown=prompt.view,
                view=view,
            )
        )
        self._num_turns += 1

    def _prompt(self, place: Place, tools: _Tools, view: View) -> Prompt:
        messages, turn = place.messages, place.turn
        following = messages[len(turn.conversation) :] if turn is not None else ()
        if turn is None or not self._goes_on(turn, following, tools, view):
            visible_messages = view.of(messages)
            least = self._template.least_tokens(visible_messages)
            if least >= self._context_length:  # a megabyte takes a second to encode
                raise self._too_long(visible_messages, f"at least {least}")
            ids = tuple(self._template.prompt(visible_messages, tools))
            pixels = self._template.pixels(visible_messages)
            return Prompt(messages=messages, tools=tools, view=view, ids=ids, pixels=pixels)
        row, sampled = turn.completion.prompt_ids, turn.completion.token_ids
        is_cut = not sampled or sampled[-1] not in self._template.stop_ids  # by a limit
        end = None if is_cut else sampled[-1]
        delta = self._template.delta(following, turn.completion.message.readable_calls, end=end)
        return Prompt(
            messages=messages,
            tools=tools,
            view=view,
            ids=row + (sampled + tuple(delta)),  # a long row is copied once
            follows=turn.index,
            num_before=len(row) + len(sampled),
            pixels=turn.completion.pixels + self._template.pixels(following),
        )

    def _goes_on(self, turn: _Turn, following: Sequence[Message], tools: _Tools, view: View) -> bool:
        """True if a prompt with these messages after the turn begins with all that stands in its row."""
        if view != turn.shown or tools != turn.tools:
            return False
        if any(message.role == "assistant" for message in following):  # words that it did not say
            return False
        if self._mode == "keep":
            return True
        messages, completion = view.of(turn.conversation[:-1]), turn.completion
        return self._template.goes_on(
            messages, completion.message, following, tools, sampled=completion.token_ids
        )

    def _slid(self, place: Place, tools: _Tools, view: View) -> Prompt:
        """The prompt with as many of the newest exchanges as leave the reserve free."""
        room = self._context_length - self._config.max_new_tokens

        def fits(view: View) -> bool:
            talk = view.of(place.messages)
            return self._template.least_tokens(talk) <= room >= len(self._template.prompt(talk, tools))

        if self._template.least_tokens(view.of(place.messages)) <= room:
            prompt = self._prompt(place, tools, view)
            if len(prompt.ids) <= room:
                return prompt
        return self._prompt(place, tools, slide_window(place.messages, fits))

    def _asking(self, place: Place, tools: _Tools, view: View) -> Prompt:
        """The prompt that asks for a summary instead: after the last reply and, where these leave room for a
        summary, its tools' results. They are shown again after it."""
        last = max(i for i, message in enumerate(place.messages) if message.role == "assistant")
        until_reply, after = place.messages[: last + 1], place.messages[last + 1 :]
        results = tool_results(after)
        question = Message(role="user", content=self._config.compact_prompt)

        def asking(*results: Message) -> Prompt:
            summary_place = replace(place, messages=(*until_reply, *results, question))
            return replace(self._prompt(summary_place, tools, view), messages=until_reply, asks_summary=True)

        if results:
            with suppress(ContextLengthExceeded):
                prompt = asking(*results)
                if self._context_length - len(prompt.ids) >= self._config.max_new_tokens:
                    return prompt
        return asking()

    def _too_long(self, messages: tuple[Message, ...], tokens: str) -> ContextLengthExceeded:
        hint = "shorten the messages or raise max_context_tokens"
        if self._mode in ("template", "keep") and sum(m.role == "user" for m in messages) > 1:
            hint += ", or let the agent's history slide (without the oldest) or compact (sums them up)"
        if self._mode == "compact":
            hint += ", or compact_room, so that a summary is asked for earlier"
        length = self._context_length
        return ContextLengthExceeded(
            f"the conversation has {tokens} tokens and the model's context {length}: {hint}"
        )
