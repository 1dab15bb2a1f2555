"""The retail desk's honest agent with bad habits, whose conversations `embedded:desk` is shown."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from string import Formatter

from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.agents import (
    LOOK_UP,
    PHRASES,
    RESULT_OF,
    WRITE,
    ConversationView,
    read,
    right_action,
    right_closing,
    view_of,
    write,
)
from stateset_agents.environments.retail_desk.full.honest import say
from stateset_agents.environments.retail_desk.tools import WRITES
from stateset_agents.types.messages import Message
from stateset_agents.types.seeds import derive


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """The probability of each bad habit at the decision that it concerns; all 0 is the honest agent."""

    guess_id: float = 0.0
    """Makes an order id up instead of asking."""
    skip_lookup: float = 0.0
    """Writes or answers without looking."""
    violate_policy: float = 0.0
    """Having looked, does what the policy forbids (or takes the wrong branch)."""
    wrong_action: float = 0.0
    """Makes another write than the one asked for."""
    skip_action: float = 0.0
    """Says that it is done without doing it."""
    wrong_closing: float = 0.0
    """Having done the right thing, reports something else."""


_UNSEEN = {
    "shipped": "your order is shipped.",
    "returned": "done, your order is returned.",
    "exchanged": "done, your order is exchanged.",
    "updated": "done, your order now goes there.",
    "no_exchange": "sorry, that is out of stock.",
}
"""What it says where it has not seen the day, the refund, the item or the city."""
_WRONG_WRITES = ("cancel_order", "return_items", "reship", "transfer_to_human")
_CLOSINGS = ("cancelled", "returned", "exchanged", "reshipped", "transferred", "sorry", "pending", "shipped")


@dataclass(slots=True)
class HabitAgent:
    """The honest agent with bad habits, for demonstrations; one per conversation.

    Each habit is drawn once, at its own decision, from `stream`. It never writes a wrong order id
    down except where it guesses one, and then only an id of the training split.
    """

    habits: Habits
    stream: int
    _drawn: dict[str, bool] = field(default_factory=dict)

    def reply(self, messages: Sequence[Message]) -> Message:
        view = view_of(messages)
        if view.error is not None:
            return self._say("unknown" if "order" in view.error else "sorry", view, "")
        order_id = view.order_id
        if order_id is None:
            if not self._follows_habit("guess_id"):
                return self._say("ask", view, "")
            order_id = self._random("guess").choice(catalog.order_ids_of("train"))
        wrote = not WRITES.isdisjoint(view.called)
        looked = LOOK_UP[view.family] in view.called
        if not looked and not wrote and not self._follows_habit("skip_lookup"):
            return read(view, order_id)
        if not wrote:
            action = self._action(view, looked)
            if action is not None:
                if not self._follows_habit("skip_action"):
                    return write(view, action, order_id)
                return self._say(RESULT_OF[action], view, order_id)
        return self._close(view, order_id)

    def _action(self, view: ConversationView, looked: bool) -> str | None:
        """The write to make now, right or wrong."""
        if view.family == "order_status":
            return None
        if self._follows_habit("wrong_action"):
            right_write = WRITE.get(view.family)
            wrong_writes = [name for name in _WRONG_WRITES if name != right_write]
            return self._random("wrong action").choice(wrong_writes)
        if not looked:
            return WRITE.get(view.family, "reship")
        right = right_action(view)
        if self._follows_habit("violate_policy"):
            return WRITE.get(view.family, "reship")
        return right

    def _close(self, view: ConversationView, order_id: str) -> Message:
        right = right_closing(view)
        if view.family == "order_status" and not view.facts:
            right = self._random("status").choice(("pending", "shipped", "delivered"))
        if self._follows_habit("wrong_closing"):
            right = self._random("closing").choice([name for name in _CLOSINGS if name != right])
        return self._say(right, view, order_id)

    def _say(self, phrase: str, view: ConversationView, order_id: str) -> Message:
        """One of the wordings; never a made-up value, since copying is a skill and no habit."""
        values = {"city": view.city, "new_item": view.new_item, "order_id": order_id, **view.facts}
        wording = self._random(f"phrase {phrase}").choice(PHRASES[phrase])
        slots = [name for _, name, _, _ in Formatter().parse(wording) if name]
        return say(wording.format(**values) if all(values.get(name) for name in slots) else _UNSEEN[phrase])

    def _follows_habit(self, habit: str) -> bool:
        """True where this agent has the habit; drawn at its first decision, and kept."""
        if habit not in self._drawn:
            self._drawn[habit] = self._random(habit).random() < getattr(self.habits, habit)
        return self._drawn[habit]

    def _random(self, purpose: str) -> random.Random:
        return random.Random(derive(self.stream, purpose))
