"""Several errands in one request at the desk: one caller, and one answer that tells how all of them went.

The answer has a line for each order, which names it:

    order K27: done, order K27 is cancelled.
    order B33: sorry, it is already shipped, so i cannot change the address.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stateset_agents.core.environment import Observation
from stateset_agents.environments.retail_desk.catalog import WORDINGS
from stateset_agents.environments.retail_desk.claims import normalized_text
from stateset_agents.environments.retail_desk.environment import SHORT_TURNS, DeskConversation, RetailDesk
from stateset_agents.environments.retail_desk.policy import FAMILIES
from stateset_agents.types.errors import ConfigurationError
from stateset_agents.types.messages import Message, ToolCall
from stateset_agents.types.scenario import Scenario, expect_split
from stateset_agents.types.seeds import derive
from stateset_agents.types.settings import expect_that, is_whole
from stateset_agents.types.trajectory import Outcome

_HELD_OUT = 200
"""Requests of validation, and of the test."""


@dataclass(slots=True, kw_only=True, eq=False)
class ErrandsConversation:
    """One request; the first reply in words is the answer to it."""

    opening: tuple[Message, ...]
    errands: tuple[DeskConversation, ...]
    """Each has a copy of the shop with its own order, in which it is graded."""
    max_turns: int
    tools: Sequence[Mapping[str, Any]] = ()
    num_replies: int = 0
    words: str = ""

    async def step(self, reply: Message) -> Observation:
        """Run the reply's calls, each in the shop that has the order; words end the conversation."""
        self.num_replies += 1
        if not reply.tool_calls:
            self.words = normalized_text(reply.content)
            return Observation(terminated=True)
        return Observation(messages=self.run(reply), truncated=self.num_replies >= self.max_turns)

    def run(self, reply: Message) -> tuple[Message, ...]:
        """The results of the reply's calls."""
        calls = enumerate(reply.tool_calls)
        return tuple(self._errand_of(call).run(call, index)[0] for index, call in calls)

    def part(self, problem: str) -> ErrandConversation:
        """A conversation about one errand, in the same shops."""
        user = Message(role="user", content=problem)
        return ErrandConversation(opening=(*self.opening[:-1], user), whole=self)

    async def outcome(self) -> Outcome:
        """The desk's verdict on every errand: success is that of all, the reward their mean."""
        outcomes = []
        orders = [errand.caller.subject for errand in self.errands]
        for errand, order in zip(self.errands, orders, strict=True):
            others = set(orders) - {order}
            claims = [claim for line in self.words.splitlines() for claim in errand.answers.read(line, order)]
            told = tuple(claim for claim in claims if claim.order_id not in others)
            errand.record.note_claims(errand.answers, told, errand.desk.database)
            outcomes.append(await errand.outcome())
        right = [bool(outcome.success) for outcome in outcomes]
        return Outcome(
            reward=sum(outcome.reward or 0.0 for outcome in outcomes) / len(outcomes),
            success=all(right),
            breakdown={"errands_right": sum(right) / len(right)},
            changes=tuple(change for outcome in outcomes for change in outcome.changes),
        )

    def fork(self) -> ErrandsConversation:
        """An independent copy, shops included."""
        return replace(self, errands=tuple(errand.fork() for errand in self.errands))

    async def close(self) -> None:
        """Close the shops."""
        for errand in self.errands:
            await errand.close()

    def _errand_of(self, call: ToolCall) -> DeskConversation:
        """The errand whose order or item a call names; the first for a call that names none of theirs."""
        named = {str(value).lower() for value in call.arguments.values()}
        for errand in self.errands:
            wanted = getattr(errand.caller, "case", None)
            if named & {errand.caller.subject.lower(), wanted.new_item.lower() if wanted else ""}:
                return errand
        return self.errands[0]


@dataclass(slots=True, kw_only=True, eq=False)
class ErrandConversation:
    """One errand of a request; the first reply in words is its answer, which the caller never hears."""

    opening: tuple[Message, ...]
    whole: ErrandsConversation
    tools: Sequence[Mapping[str, Any]] = ()
    num_replies: int = 0

    async def step(self, reply: Message) -> Observation:
        """Run the reply's calls; words end the conversation."""
        self.num_replies += 1
        if not reply.tool_calls:
            return Observation(terminated=True)
        return Observation(messages=self.whole.run(reply), truncated=self.num_replies >= SHORT_TURNS)

    async def outcome(self) -> Outcome:
        """No verdict: the whole has it."""
        return Outcome(reward=None)

    def fork(self) -> ErrandConversation:
        """Raises NotImplementedError: it works in the shops of the whole."""
        raise NotImplementedError

    async def close(self) -> None:
        """Nothing is held."""


class RetailErrands:
    """Requests of several errands at the `RetailDesk`, of its learnable kinds, each about another order.

    `num_errands`: in one request, each of another kind. `seed` chooses the training requests only, of which
    there are `num_train`.
    """

    local = True

    def __init__(self, *, num_errands: int = 3, num_train: int = 1000, seed: int = 0) -> None:
        rule = f"be from 1 to {len(FAMILIES)}"
        expect_that(
            is_whole(num_errands, 1) and num_errands <= len(FAMILIES), "num_errands", rule, num_errands
        )
        expect_that(is_whole(num_train, 1), "num_train", "be a whole number from 1 on", num_train)
        self.num_errands = num_errands
        self._desk = RetailDesk(seed=seed, prompt="short")
        self._num_train = num_train
        self._seed = seed

    def scenarios(self, split: str) -> Sequence[Scenario]:
        """The requests of a split; those of validation and test are the same for every seed."""
        is_train = expect_split(split) == "train"
        by_family: dict[str, list[Scenario]] = defaultdict(list)
        for scenario in self._desk.scenarios(split):
            if scenario.context["tells_order_id"]:
                by_family[scenario.family].append(scenario)
        seed = derive(self._seed if is_train else 0, "errands", split, self.num_errands)
        requests = []
        for index in range(self._num_train if is_train else _HELD_OUT):
            draw = random.Random(derive(seed, index))
            chosen: list[Scenario] = []
            while len({errand.context["order_id"] for errand in chosen}) < self.num_errands:
                families = draw.sample(FAMILIES, self.num_errands)
                chosen = [draw.choice(by_family[family]) for family in families]
            requests.append(_request(index, chosen))
        return requests

    async def start(self, scenario: Scenario, seed: int) -> ErrandsConversation:
        """Open a conversation. Raises ConfigurationError for a scenario that is no request of errands."""
        contexts = scenario.context.get("errands")
        if not contexts:
            raise ConfigurationError(f"{scenario.id!r:.60} has no errands: take one of scenarios(split)")
        errands = [
            await self._desk.start(replace(scenario, family=context["family"], context=context), seed)
            for context in contexts
        ]
        return ErrandsConversation(
            opening=scenario.messages(errands[0].opening[:1]),
            errands=tuple(errands),
            max_turns=SHORT_TURNS * len(errands),
        )


def _request(index: int, errands: Sequence[Scenario]) -> Scenario:
    """The request of one caller, the first errand's."""
    customer_id = errands[0].context["customer_id"]
    texts = [_without_greeting(errand.opening) for errand in errands]
    contexts = [
        {**errand.context, "family": errand.family, "customer_id": customer_id, "opening": text}
        for errand, text in zip(errands, texts, strict=True)
    ]
    split = errands[0].split
    return Scenario(
        id=f"errands-{split}-{index}-" + "-".join(errand.id.removeprefix("desk-") for errand in errands),
        family=f"{len(errands)} errands",
        opening=" ".join(texts),
        context={"errands": contexts},
        split=split,
    )


def _without_greeting(opening: str) -> str:
    greetings = (words for words in WORDINGS["greetings"] if words and opening.startswith(words))
    return opening.removeprefix(next(greetings, ""))
