"""The claims that the agent's words make in a full call, and whether they are true.

Read clause by clause as in `retail_desk.claims`, with two differences: a sentence that asks or offers
(`shall i`, `i can`) asserts no amounts, cities or items, for they are part of the offer, and a clause that
names no order speaks of the order named last.
"""

from __future__ import annotations

import re

from stateset_agents.claims.english import Patterns
from stateset_agents.environments.retail_desk import claims as short
from stateset_agents.environments.retail_desk.database import Database
from stateset_agents.environments.retail_desk.full.policy import FullCase
from stateset_agents.environments.retail_desk.policy import Claim

ORDER_ID = short.ORDER_ID
_WORDS = Patterns("full", short.WORDS)
OFFER, PAYMENT = _WORDS.offer, _WORDS.payment
_SENTENCE = re.compile(r"(?:[^.!?\n]|\.(?=\d)|(?<=\S)\.(?=[a-z0-9]))+[.!?\n]?")
_ALSO = short.WORDS.patterns("full_lexicon")


def plain(text: str) -> str:
    """Lower case, single spaces; line ends stay."""
    return re.sub(r"[^\S\n]+", " ", text.lower())


def sentences(text: str) -> list[str]:
    """The sentences of a plain text, each with its end mark; a dot within a number or an email ends none."""
    return _SENTENCE.findall(text)


def read_claims(text: str, order_id: str) -> tuple[Claim, ...]:
    """The claims of one reply; `order_id` is what it is about until it names another.

    "i can return the red mug and refund 45 dollars. shall i?" claims nothing.
    """
    if len(text) > short.MAX_CHARACTERS:
        return ()
    claims: dict[Claim, None] = {}
    text = short.SURE.sub("", plain(text))
    asks = "?" in text
    subject = order_id
    for sentence in sentences(text):
        offer = OFFER.search(sentence) is not None
        for words, end in short.CLAUSE.findall(sentence):
            order_ids = ORDER_ID.findall(words)
            subject = order_ids[0].upper() if order_ids else subject
            if end == "?":
                continue
            kinds = []
            if _WORDS.unverified.search(words):
                kinds.append("unverified")
            if _WORDS.not_yours.search(words):
                kinds.append("not_yours")
            if _WORDS.refused.search(words):
                kinds.append("refused")
            elif not kinds and not short.NEGATION.search(words) and not short.HEDGE.search(words):
                kinds = _assertions(words, offer, asks)
            claims.update((Claim(kind, subject), None) for kind in kinds)
    return tuple(claims)


def _assertions(words: str, offer: bool, asks: bool) -> list[str]:
    """The kinds of claim that a clause makes which is neither a no nor hedged."""
    kinds = [kind for kind, pattern in _ALSO.items() if pattern.search(words) and not offer]
    paid = _WORDS.paid.search(words) is not None
    for claim in short.assertions(words):
        kind, _, value = claim.partition(":")
        if kind == "amount":
            if not offer:
                kinds.append(f"{'amount' if paid else 'price'}:{value.removesuffix('.00')}")
        elif kind == "city":
            if not offer and (not asks or _WORDS.moved.search(words)):
                kinds.append(claim)
        elif kind == "inside" or (kind == "pending" and "refund" in words):
            continue  # the policy's words, or the state of a refund
        elif not (offer and kind == "exchanged_for"):
            kinds.append(claim)
    if paid and not offer:
        kinds += [f"refund_to:{kind}" for kind in PAYMENT.findall(words)]
    return kinds


def grounds(claim: Claim, database: Database, case: FullCase) -> frozenset[str]:
    """The grounds of a claim: a tool must have shown one of them before it is made. May be empty."""
    match claim.text.partition(":")[0]:
        case "unverified":
            return frozenset({"nobody"})
        case "not_yours":
            return frozenset({f"orders:{case.customer_id}"})
        case "price":
            return frozenset({f"order:{claim.order_id}"})
        case "final_sale":
            lines = database.rows("SELECT item FROM order_items WHERE order_id = ?", claim.order_id)
            return frozenset(f"item:{item}" for (item,) in lines)
    return short.grounds(claim)


def holds(claim: Claim, database: Database, case: FullCase) -> bool:
    """True where the claim is true of the shop now."""
    kind, _, value = claim.text.partition(":")
    order_id = claim.order_id
    match kind:
        case "unverified":
            return case.zip_on_file not in ("", case.zip)
        case "not_yours":
            owner = database.row("SELECT customer_id FROM orders WHERE order_id = ?", order_id)
            return owner is None or owner[0] != case.customer_id
        case "refused":
            return not any(
                order_id in (change.key, (change.after or change.before or {}).get("order_id"))
                for change in database.changes()
            )
        case "price":
            lines = database.rows("SELECT price_cents FROM order_items WHERE order_id = ?", order_id)
            prices = [cents for (cents,) in lines]
            return len(value) < 12 and round(float(value) * 100) in (*prices, sum(prices))
        case "final_sale":
            query = "SELECT 1 FROM order_items JOIN variants USING (item) WHERE order_id = ? AND final_sale"
            return database.row(query, order_id) is not None
        case "refund_to":
            query = (
                "SELECT 1 FROM refunds JOIN payment_methods USING (payment_id) "
                "WHERE order_id = ? AND payment_methods.kind = ?"
            )
            return database.row(query, order_id, value) is not None
    return short.holds(claim, database, case.city)
