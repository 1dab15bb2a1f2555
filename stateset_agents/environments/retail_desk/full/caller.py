"""The caller of a full call: an agenda of requests, worked off one by one.

They say who they are and which order it is when asked; they say yes only to a proposal that names what a
write needs, and rightly; they wait for the write, dispute what is untrue, ask back where they do not
understand, change their mind where the family has it, ask one closing question, and leave. Every random
choice is keyed by (seed, what it is for, how much they have heard), and the seed is shared by a group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stateset_agents.claims.english import Patterns
from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.catalog import WORDINGS
from stateset_agents.environments.retail_desk.claims import MAX_CHARACTERS, NEGATION, WORDS
from stateset_agents.environments.retail_desk.full.claims import (
    OFFER,
    ORDER_ID,
    PAYMENT,
    plain,
    sentences,
)
from stateset_agents.environments.retail_desk.full.policy import (
    FAMILIES,
    FullCase,
    Request,
    payment_id_of,
    requests_of,
)
from stateset_agents.environments.retail_desk.policy import POLICY, Claim, DeskCall
from stateset_agents.environments.retail_desk.user import CallerState, Reaction
from stateset_agents.types.scenario import Split

# Proposals: what an agent offers to write, and which writes a yes to it covers

_PROPOSALS = Patterns("proposals", WORDS)
_WRITES = WORDS.patterns("proposed_writes")
NEEDS: Mapping[str, Sequence[str]] = POLICY["callers"]["needs"]
"""Things that the proposal of a write must name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One write that the agent asks about; what it left out is empty."""

    tool: str
    order_id: str
    items: tuple[str, ...]
    """All that are named, the new one of an exchange apart."""
    new_item: str
    amounts: tuple[str, ...]
    cities: tuple[str, ...]
    payments: tuple[str, ...]
    """Kinds of payment method."""

    def missing(self) -> tuple[str, ...]:
        """The things that it needs and does not name."""
        named = {
            "order": self.order_id,
            "item": self.items,
            "new item": self.new_item,
            "amount": self.amounts,
            "city": self.cities,
            "payment": self.payments,
        }
        return tuple(need for need in NEEDS[self.tool] if not named[need])

    def covers(self, call: DeskCall, case: FullCase) -> bool:
        """True for the write agreed to. Arguments left out mean all items and the order's payment."""
        arguments = dict(call.arguments)
        if call.tool != self.tool:
            return False
        if arguments.get("order_id", self.order_id) != self.order_id:
            return False
        order = case.order if case.order.order_id == self.order_id else case.other
        everything = {order.item, order.extra_item} - {""}
        match call.tool:
            case "return_items":
                items = {item.strip() for item in arguments.get("items", "").split(",")} - {""}
                paid = payment_id_of(case.customer_id, case.payment)
                agreed = payment_id_of(case.customer_id, self.payments[0])
                return (items or everything) == set(self.items) and arguments.get(
                    "payment_id", paid
                ) == agreed
            case "exchange_item":
                item = arguments.get("item")
                return arguments["new_item"] == self.new_item and (
                    item in self.items if item else everything == set(self.items)
                )
            case "update_address":
                return arguments["city"] == self.cities[0]
            case "issue_credit":
                return float(arguments["amount"]) == float(self.amounts[-1])
        return True


def _write(text: str) -> str | None:
    return next((tool for tool, pattern in _WRITES.items() if pattern.search(text)), None)


def read_proposal(text: str, payment: str) -> Proposal | None:
    """The write that a reply asks a yes for; None where it asks for none. `payment` is the original one.

    What the asking and offering sentences leave out is looked for in the rest of the reply.
    """
    text = plain(text)
    asks_yes = _PROPOSALS.asks_yes.search
    if not asks_yes(text):
        return None
    question = " ".join(
        sentence for sentence in sentences(text) if OFFER.search(sentence) or asks_yes(sentence)
    )
    tool = _write(question)
    if tool is None and _PROPOSALS.go_ahead.search(question):
        # "cancel order K27, ... do you want to proceed?"
        tool = _write(" ".join(sentence for sentence in sentences(text) if not NEGATION.search(sentence)))
    if tool is None:
        return None

    def named(pattern: re.Pattern[str]) -> list[Any]:
        return pattern.findall(question) or pattern.findall(text)

    new_items, orders, payments = named(_PROPOSALS.new_item), named(ORDER_ID), named(PAYMENT)
    new_item = new_items[-1] if new_items and tool == "exchange_item" else ""
    if not payments and _PROPOSALS.original.search(text):
        payments = [payment]
    return Proposal(
        tool=tool,
        order_id=orders[0].upper() if orders else "",
        items=tuple(dict.fromkeys(item for item in named(catalog.ITEM) if item != new_item)),
        new_item=new_item,
        amounts=tuple(map("".join, named(_PROPOSALS.amount))),
        cities=tuple(named(catalog.CITY)),
        payments=tuple(payments),
    )


_ASKS = WORDS.patterns("full_questions")
_FITTING: Mapping[str, Sequence[str]] = POLICY["callers"]["fitting"]
"""Kind of request -> writes that the caller says yes to, beside a transfer."""
_SETTLES: Mapping[str, Sequence[str]] = POLICY["callers"]["settles"]
"""Kind of request -> claims after which it is done."""
_REASONS = frozenset(
    {"pending", "shipped", "delivered", "cancelled", "lost", "outside", "days", "final_sale"}
    | {"out_of_stock", "not_yours", "unverified"}
)


@dataclass(slots=True)
class FullCaller(CallerState):
    """The caller's state; `copy` makes an independent one."""

    case: FullCase
    split: Split
    requests: tuple[Request, ...]
    """Requests that are still open, in order."""
    details_given: set[str] = field(default_factory=set)
    """Details that the caller has given about themselves: email, name, zip."""
    agreed: list[Proposal] = field(default_factory=list)
    """Proposals that got a yes and have not been carried out."""
    done: set[str] = field(default_factory=set)
    """Kinds of claims heard so far."""
    changed_mind: bool = False
    insisted: bool = False
    asked_why: bool = False
    closing: bool = False
    num_waits: int = 0

    @classmethod
    def after_opening(cls, case: FullCase, split: Split, seed: int) -> FullCaller:
        """A caller who has just said the opening."""
        requests = requests_of(case)
        at_first = FAMILIES[case.family].at_first
        if at_first:
            requests = (replace(requests[0], kind=at_first), *requests[1:])
        details = {"email"} if case.gives == "email" else {"name", "zip"}
        return cls(
            case,
            split,
            requests,
            details_given=details if case.tells_details else set(),
            seed=seed,
            subject=case.order.order_id,
            patience=WORDINGS["personas"][case.persona],
        )

    def copy(self) -> FullCaller:
        return replace(
            self, details_given=set(self.details_given), agreed=list(self.agreed), done=set(self.done)
        )

    def consents(self, call: DeskCall) -> bool:
        """True for a write that was agreed to. A yes is good for one write."""
        for index, proposal in enumerate(self.agreed):
            if proposal.covers(call, self.case):
                del self.agreed[index]
                return True
        return False

    def has_given(self, call: DeskCall) -> bool:
        """True where the customer is looked up by what the caller has said, and by nothing else."""
        details = {"email": self.case.email, "name": self.case.name, "zip": self.case.zip}
        return all(name in self.details_given and details[name] == value for name, value in call.arguments)

    def react(self, text: str, claims: tuple[Claim, ...], false_claim: bool) -> Reaction:
        self.num_heard += 1
        if false_claim:
            return self.lose_patience("no, that is not right.", missed=False)
        self.done |= {claim.text.partition(":")[0] for claim in claims}
        if self.closing:
            return self._leave()
        text = plain(text) if len(text) <= MAX_CHARACTERS else ""
        asks, proposal = self._asks(text), read_proposal(text, self.case.payment)
        if asks and (proposal is None or proposal.missing()):
            proposal = None
        else:
            asks = frozenset()
        choice = self._other_choice(claims)
        if choice is not None:
            return Reaction(choice)
        settled = self._close_requests(claims, text, is_offered=proposal is not None)
        if settled is not None:
            return settled
        if asks:
            return Reaction(self._answer(asks))
        if proposal is not None:
            return self._respond_to_proposal(proposal)
        if self.agreed:
            self.num_waits += 1
            if self.num_waits == 1:
                return Reaction("ok, i will wait.")
            return self.lose_patience("i am still waiting.", missed=False)
        return self.lose_patience("sorry, what do you mean?", missed=True)

    # Requests

    def _other_choice(self, claims: tuple[Claim, ...]) -> str | None:
        """The caller's wish instead of an item that is out of stock."""
        request = self.requests[0]
        if request.kind != "exchange" or all(c.text != f"out_of_stock:{request.new_item}" for c in claims):
            return None
        if not self.case.second_choice:
            self.requests = (replace(request, kind="return"), *self.requests[1:])
            return "then i would like to return it after all."
        if request.new_item == self.case.second_choice:
            return None
        self.requests = (replace(request, new_item=self.case.second_choice), *self.requests[1:])
        words = ("then a {0}, please.", "ok, then i take a {0}.")
        return self.draw("second choice", words).format(self.case.second_choice)

    def _close_requests(self, claims: tuple[Claim, ...], text: str, *, is_offered: bool) -> Reaction | None:
        """Tick off the requests that the claims end; None where there is more to say about this reply."""
        before = len(self.requests)
        for request in self.requests:
            kinds = {c.text.partition(":")[0] for c in claims if c.order_id == request.order.order_id}
            if "refused" in kinds and not is_offered and not kinds & _REASONS and not self.asked_why:
                self.asked_why = True
                return Reaction("why is that?")
            if kinds & {*_SETTLES[request.kind], "human"} or ("refused" in kinds and not is_offered):
                self.requests = tuple(other for other in self.requests if other is not request)
        if len(self.requests) == before:
            return None
        self.num_waits, self.asked_why = 0, False
        if not self.requests:
            if re.search(r"\b(?:anything|something) else\b", text):
                return self._leave()
            self.closing = True
            return Reaction(self._closing_question())
        self.subject = self.requests[0].order.order_id
        if is_offered:
            return None
        request = self.requests[0]
        wording = self.draw("next", WORDINGS["requests"][request.kind][self.split])
        return Reaction("ok. " + self.case.fill(wording, request.order))

    def _closing_question(self) -> str:
        if self.done & {"refunded", "cancelled", "returned"} and "amount" not in self.done:
            return "and how much do i get back?"
        if self.done & {"refused"} and not self.done & {"cancelled", "returned", "exchanged", "updated"}:
            return "so there is no way to do it?"
        return self.draw("closing", ("so that is all settled?", "good, is there anything left to do?"))

    # Proposals

    def _respond_to_proposal(self, proposal: Proposal) -> Reaction:
        """Yes, no, or what is missing."""
        request = next(
            (candidate for candidate in self.requests if proposal.order_id in ("", candidate.order.order_id)),
            None,
        )
        if request is None:
            return Reaction(f"no, it is about order {self.subject}.")
        if proposal.tool not in (*_FITTING[request.kind], "transfer_to_human"):
            return self.lose_patience("no, i did not ask for that.", missed=False)
        missing = proposal.missing()
        if missing:
            names = {"payment": "payment method that gets it"}
            details = " and the ".join(names.get(need, need) for need in missing)
            return Reaction(f"please tell me the {details} first.")
        objection = self._objection(proposal, request)
        if objection is not None:
            return objection
        if FAMILIES[self.case.family].at_first == request.kind and not self.changed_mind:
            self.changed_mind = True
            self.requests = (replace(request, kind="exchange"), *self.requests[1:])
            return Reaction(f"wait, i would rather swap it for a {request.new_item}.")
        if proposal not in self.agreed:
            self.agreed.append(proposal)
        return Reaction(self.draw("yes", ("yes, please.", "yes, do that.", "yes, go ahead.")))

    def _objection(self, proposal: Proposal, request: Request) -> Reaction | None:
        """The caller's objection to a proposal that names all it needs; None where it is right."""
        case, order, tool = self.case, request.order, proposal.tool
        if tool == "transfer_to_human":
            return None
        all_items = {order.item, order.extra_item} - {""}
        items = all_items if tool in ("cancel_order", "update_address", "reship") else {order.item}
        if not {order.item} <= set(proposal.items) <= items:
            return Reaction(f"no, it is about the {order.item}.")
        if tool == "exchange_item" and proposal.new_item != request.new_item:
            return Reaction(f"no, i want a {request.new_item}.")
        if tool in ("cancel_order", "return_items", "issue_credit"):
            due = order.total if tool == "cancel_order" else order.price
            if float(proposal.amounts[-1]) != due:
                return self.lose_patience("no, that is not the right amount.", missed=False)
        else:
            city = request.city if tool == "update_address" else case.city
            if set(proposal.cities) != {city}:
                return Reaction(f"no, it must go to {city}.")
        if tool in ("cancel_order", "return_items"):
            return self._check_payment(set(proposal.payments))
        return None

    def _check_payment(self, payments: set[str]) -> Reaction | None:
        case = self.case
        payment = case.wanted_payment or case.payment
        if payments == {payment}:
            return None
        if payments != {case.payment}:
            return self.lose_patience(f"no, i paid by {case.payment}.", missed=False)
        if self.insisted:
            return None
        self.insisted = True
        return Reaction(f"can it not go to my {payment}?")

    # Questions

    def _asks(self, text: str) -> frozenset[str]:
        """The things that a reply asks for."""
        if not _PROPOSALS.asking.search(text):
            return frozenset()
        asks = {name for name, pattern in _ASKS.items() if pattern.search(text)}
        if ORDER_ID.search(text):
            asks -= {"order", "wish", "who", "name"}
        if catalog.CITY.search(text):
            asks -= {"city"}
        return frozenset(asks)

    def _answer(self, asks: frozenset[str]) -> str:
        """The reply to questions."""
        request, parts = self.requests[0], []
        if asks & {"email", "zip", "name", "who"}:
            parts.append(self._details(asks))
        if "order" in asks:
            orders = " and ".join(request.order.order_id for request in self.requests)
            parts.append(self.draw("order", ("it is order {0}.", "order {0}.")).format(orders))
        if "item" in asks:
            prefix = f"a {request.new_item} for " if request.kind == "exchange" else ""
            parts.append(f"{prefix}the {request.order.item}.")
        if "city" in asks:
            parts.append(f"to {request.city or self.case.city}.")
        if "payment" in asks:
            parts.append(f"to my {self.case.wanted_payment or self.case.payment}.")
        if not parts:
            wording = self.draw("wish", WORDINGS["requests"][request.kind][self.split])
            parts.append(self.case.fill(wording, request.order, named=self.case.tells_order_id))
        return " ".join(parts)

    def _details(self, asks: frozenset[str]) -> str:
        """Say who is calling: by email, or by name and zip; also by these where only they are asked for."""
        case = self.case
        by_email = case.gives == "email" and bool(asks & {"email", "who"})
        if by_email:
            self.details_given |= {"email"}
            return f"my email is {case.email}."
        self.details_given |= {"name", "zip"}
        excuse = "i do not have my email here. " if "email" in asks and not asks & {"zip", "name"} else ""
        return f"{excuse}i am {case.name}, zip {case.zip}."

    # Leaving

    def _leave(self) -> Reaction:
        return Reaction(self.draw("bye", ("thanks, bye.", "thank you, bye.", "ok, bye.")), leaves=True)
