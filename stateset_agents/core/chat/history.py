"""What an agent reads of its conversation before each of its turns, as the tokens of a prompt.

A conversation that only grows is one *row*: the prompt, then sampled replies and what the template writes
between them. Where the agent is to read something else than what stands in a row (its template drops earlier
thoughts, the oldest exchanges are left out, a summary takes their place), the prompt is rendered whole and
opens a row. Rollouts, chats and the server all read conversations through this module, so that an agent is
trained as it is served.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from stateset_agents.core.agent_config import HistoryMode
from stateset_agents.core.chat.context_window import View, num_replies, slide_window, with_summary
from stateset_agents.core.chat.known_conversations import KnownConversations
from stateset_agents.core.chat.template import ChatTemplate, ToolSchemas
from stateset_agents.types.errors import ContextLengthExceeded
from stateset_agents.types.images import PixelValues
from stateset_agents.types.messages import Completion, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class HistorySettings:
    """What becomes of earlier turns."""

    mode: HistoryMode
    """As `AgentConfig.history`."""
    context_length: int
    """Tokens of the longest row."""
    reserve: int
    """Tokens of the longest reply. `slide` leaves so many free; `compact` shows the results of the last calls
    to who writes the summary only where so many are left."""
    compact_room: int
    """`compact` asks for a summary where fewer tokens are left."""
    compact_prompt: str
    """What a user says who asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the agent is shown before a turn."""

    messages: tuple[Message, ...]
    """The conversation so far."""
    tools: tuple[Mapping[str, Any], ...]
    view: View
    """What of it is shown."""
    ids: tuple[int, ...]
    """[P]"""
    follows: int | None = None
    """The turn whose tokens `ids` begin with; None where the prompt opens a row."""
    num_before: int = 0
    """Tokens of `ids` that stood there already."""
    asks_summary: bool = False
    """Is the reply a summary for the agent itself, which nobody else hears?"""
    pixels: tuple[PixelValues, ...] = ()
    """The pictures in `ids`, in order."""

    @property
    def added(self) -> tuple[int, ...]:
        """The end of `ids` that is new: all of them where the prompt opens a row."""
        return self.ids[self.num_before :]


@dataclass(frozen=True, slots=True)
class _Turn:
    index: int
    completion: Completion
    tools: tuple[Mapping[str, Any], ...]
    conversation: tuple[Message, ...]
    """Up to here: with the reply, unless that is a summary."""
    shown: View
    """What of it the prompt showed."""
    view: View
    """What of it later prompts show."""

    @property
    def sent(self) -> tuple[Message, ...]:
        return self.conversation

    @property
    def size(self) -> int:
        return len(self.completion.prompt_ids) + len(self.completion.token_ids)


@dataclass(frozen=True, slots=True)
class Place:
    """A conversation, and the turn that it goes on from."""

    messages: tuple[Message, ...]
    """What the agent said stands in it as it was sampled."""
    unread: tuple[Message, ...]
    """Those of the messages that a prompt has to encode."""
    turn: _Turn | None = None


class ChatHistory:
    """The prompts of an agent's turns: `next` makes one, `add` keeps it with the reply that was sampled.

    A prompt follows the turn that its messages go on from (`place`), if the agent is to read all that stands
    there. Who repeats a conversation need not know the agent's thoughts: they are kept here. Several turns
    may follow the same one: a conversation may be a tree.
    """

    def __init__(
        self, template: ChatTemplate, settings: HistorySettings, *, max_tokens: int | None = None
    ) -> None:
        """`max_tokens`: of all turns that are remembered, each with its prompt; the oldest are forgotten
        beyond it."""
        self._template = template
        self._settings = settings
        self._turns = KnownConversations[_Turn](max_size=max_tokens)
        self._num_turns = 0

    @property
    def num_tokens(self) -> int:
        """Of all turns that are remembered, each with its prompt."""
        return self._turns.size

    def place(self, messages: Sequence[Message]) -> Place:
        """The turn that these messages go on from: the latest whose conversation they repeat."""
        messages = tuple(messages)
        if (found := self._turns.find(messages)) is None:
            return Place(messages, messages)
        turn, following = found
        messages = (*turn.conversation, *following)
        only_appends = self._settings.mode == "keep" or self._template.appends
        return Place(messages, following if only_appends else messages, turn)

    def next(self, place: Place, tools: ToolSchemas = ()) -> Prompt:
        """The prompt before the agent's next turn in a conversation that has come to this place.

        With `compact` it may ask for a summary first: `add` that, and call again. Raises
        ContextLengthExceeded where no room for a reply is left, ConfigurationError where the template cannot
        render the conversation.
        """
        messages, turn, tools = place.messages, place.turn, tuple(tools)
        view = View() if turn is None else turn.view
        # a summary stands before the last reply, which is shown as it was, and before what answers it
        may_ask = self._settings.mode == "compact" and messages[-1].role != "assistant"
        may_ask = may_ask and num_replies(view.of(messages)) > 1
        prompt_of = self._slid if self._settings.mode == "slide" else self._prompt
        try:
            prompt = prompt_of(messages, tools, view, turn)
            left = self._settings.context_length - len(prompt.ids)
        except ContextLengthExceeded:
            if not may_ask:
                raise
            left = 0
        if may_ask and left < self._settings.compact_room:
            prompt = self._asking(messages, tools, view, turn)
            left = self._settings.context_length - len(prompt.ids)
        if left < 1:
            raise self._too_long(view.of(messages), str(len(prompt.ids)))
        return prompt

    def add(self, prompt: Prompt, completion: Completion) -> None:
        """Keep what was sampled after a prompt; the completion's message is what was read in its text."""
        said, view = prompt.messages, prompt.view
        if prompt.asks_summary:
            view = with_summary(said, completion.message.content)
        else:
            said = (*said, completion.message)
        self._turns.add(_Turn(self._num_turns, completion, prompt.tools, said, prompt.view, view))
        self._num_turns += 1

    def _prompt(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        view: View,
        turn: _Turn | None,
    ) -> Prompt:
        if turn is None or not self._goes_on(turn, messages, tools, view):
            shown = view.of(messages)
            least = self._template.least_tokens(shown)
            if least >= self._settings.context_length:  # a megabyte takes a second to encode
                raise self._too_long(shown, f"at least {least}")
            ids = tuple(self._template.prompt(shown, tools))
            return Prompt(messages=messages, tools=tools, view=view, ids=ids, pixels=self._pixels(shown))
        row, said = turn.completion.prompt_ids, turn.completion.token_ids
        calls = [call for call in turn.completion.message.tool_calls if call.error is None]
        following = messages[len(turn.conversation) :]
        delta = self._template.delta(following, calls, end=self._end(turn))
        return Prompt(
            messages=messages,
            tools=tools,
            view=view,
            ids=row + (said + tuple(delta)),  # a long row is copied once
            follows=turn.index,
            num_before=len(row) + len(said),
            pixels=turn.completion.pixels + self._pixels(following),
        )

    def _pixels(self, messages: Sequence[Message]) -> tuple[PixelValues, ...]:
        if not any(message.images for message in messages):
            return ()
        return self._template.pixels(messages)

    def _goes_on(
        self, turn: _Turn, messages: tuple[Message, ...], tools: tuple[Mapping[str, Any], ...], view: View
    ) -> bool:
        """Does a prompt of these messages begin with all that stands in the turn's row?"""
        following = messages[len(turn.conversation) :]
        if view != turn.shown or tools != turn.tools:
            return False
        if any(message.role == "assistant" for message in following):  # words that it did not say
            return False
        if self._settings.mode == "keep":
            return True
        shown, completion = view.of(turn.conversation[:-1]), turn.completion
        return self._template.goes_on(
            shown, completion.message, following, tools, sampled=completion.token_ids
        )

    def _end(self, turn: _Turn) -> int | None:
        """The token that a reply ended by; None where a limit cut it."""
        last = turn.completion.token_ids[-1:]
        return last[0] if last and last[0] in self._template.stop_ids else None

    def _slid(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        view: View,
        turn: _Turn | None,
    ) -> Prompt:
        """The prompt with as many of the newest exchanges as leave the reserve free."""
        room = self._settings.context_length - self._settings.reserve

        def fits(view: View) -> bool:
            shown = view.of(messages)
            return self._template.least_tokens(shown) <= room >= len(self._template.prompt(shown, tools))

        if self._template.least_tokens(view.of(messages)) <= room:
            prompt = self._prompt(messages, tools, view, turn)
            if len(prompt.ids) <= room:
                return prompt
        return self._prompt(messages, tools, slide_window(messages, fits), turn)

    def _asking(
        self,
        messages: tuple[Message, ...],
        tools: tuple[Mapping[str, Any], ...],
        view: View,
        turn: _Turn | None,
    ) -> Prompt:
        """The prompt that asks for a summary instead: after the last reply and, where these leave room for a
        summary, its tools' results. They are shown again after it."""
        last = max(i for i, message in enumerate(messages) if message.role == "assistant")
        said, following = messages[: last + 1], messages[last + 1 :]
        results = tuple(itertools.takewhile(lambda message: message.role == "tool", following))
        question = Message(role="user", content=self._settings.compact_prompt)

        def asking(*results: Message) -> Prompt:
            prompt = self._prompt((*said, *results, question), tools, view, turn)
            return replace(prompt, messages=said, asks_summary=True)

        if results:
            with suppress(ContextLengthExceeded):
                prompt = asking(*results)
                if self._settings.context_length - len(prompt.ids) >= self._settings.reserve:
                    return prompt
        return asking()

    def _too_long(self, shown: tuple[Message, ...], tokens: str) -> ContextLengthExceeded:
        hint = "shorten the messages or raise max_context_tokens"
        if self._settings.mode in ("template", "keep") and sum(m.role == "user" for m in shown) > 1:
            hint += ", or let the agent's history slide (without the oldest) or compact (sums them up)"
        if self._settings.mode == "compact":
            hint += ", or compact_room, so that a summary is asked for earlier"
        length = self._settings.context_length
        return ContextLengthExceeded(
            f"the conversation has {tokens} tokens and the model's context {length}: {hint}"
        )
