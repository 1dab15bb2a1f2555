"""What the agent's words assert in a full call, and whether it is so.

Read clause by clause as in `retail_desk.claims`, with two differences: a sentence that asks or offers
(`shall i`, `i can`) asserts no amounts, cities or items, for they are part of the offer, and a clause that
names no order speaks of the order named last.
"""

from __future__ import annotations

import re

from stateset_agents.environments.retail_desk import claims as short
from stateset_agents.environments.retail_desk.database import Database
from stateset_agents.environments.retail_desk.full.case import FullCase
from stateset_agents.environments.retail_desk.policy import RETURN_DAYS, Claim

ORDER_ID = re.compile(r"\b([a-z]\d\d)\b")
PAYMENT = re.compile(r"\b(gift card|paypal|card)\b")
OFFER = re.compile(
    r"\?|\b(?:i (?:can|could|would|will|may)|i'(?:ll|d)|shall i|should i|may i|do you want|would you like|"
    r"let me)\b"
)
_SENTENCE = re.compile(r"(?:[^.!?\n]|\.(?=\d)|(?<=\S)\.(?=[a-z0-9]))+[.!?\n]?")
_CANNOT = r"(?:\b(?:cannot|can't|can not|could not|couldn't|unable to|did not|didn't)|(?:\bnot|n't) able to)"
_WHO = r"you\b|your (?:account|details|name|email|zip)|(?:an?|any) (?:account|customer)|anyone"
_UNVERIFIED = re.compile(
    rf"{_CANNOT} (?:verify|identify|confirm who|(?:find|locate) (?:{_WHO}))|\bnot verified\b"
    r"|\bno (?:account|customer) (?:was |is )?(?:found|with|for|under)\b"
)
_NOT_YOURS = re.compile(
    r"(?:\bnot|n't|\bcannot|\bno)\b[^,;]{0,40}\b(?:on|in|under|among|linked to|associated with|part of) your "
    r"(?:account|list|orders|name|profile)\b|(?:\bnot|n't) (?:one of )?(?:your order|yours)\b"
)
_REFUSED = re.compile(
    rf"{short.REFUSAL.pattern}|(?:\bnot|n't) (?:able|allowed|eligible|permitted|possible)\b"
    r"|(?:\bnot|n't) be (?:cancell?ed|changed|exchanged|returned|taken)\b"
)
_MADE = r"(?:issued|processed|sent|made|given|gave|added)"
_IS_DONE = r"(?:is|was|has been) (?:completed?|processed|confirmed|accepted|done)"
_REFUND = rf"\brefund\b.*\b{_MADE}\b|\b{_MADE}\b.*\brefund\b"
_CREDIT = rf"\bcredit\b(?! card).*\b{_MADE}\b|\b{_MADE}\b.*\bcredit\b(?! card)"
_ALSO: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("cancelled", rf"\bcancell?ation {_IS_DONE}"),
        ("returned", rf"\breturn {_IS_DONE}|\bprocessed (?:the|your) return\b|\b(?:taken|took)\b.*\bback\b"),
        ("refunded", _REFUND),
        ("exchanged", rf"\bexchange {_IS_DONE}|\bprocessed (?:the|your) exchange\b"),
        ("reshipped", r"\bnew (?:parcel|shipment) (?:is|was|has been)\b|\bsent out again\b"),
        ("credited", _CREDIT),
        ("human", r"\b(?:handed|passed|connected)\b.*\b(?:colleague|specialist|supervisor)\b"),
        ("outside", rf"\b(?:outside|exceeds?|past|beyond|after)\b.*\b{RETURN_DAYS}[- ]days?\b"),
        ("final_sale", r"\bfinal[- ]sale\b"),
    )
)
"""Wordings that the short calls' lexicon lacks."""
_PAID = re.compile(rf"\b(?:refunded|credited|paid back|reimbursed)\b|{_REFUND}|{_CREDIT}")
_MOVED = re.compile(r"\b(?:now|goes|going|updated|changed|redirected|set to)\b")


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
            here = ORDER_ID.findall(words)
            subject = here[0].upper() if here else subject
            if end == "?":
                continue
            found = []
            if _UNVERIFIED.search(words):
                found.append("unverified")
            if _NOT_YOURS.search(words):
                found.append("not_yours")
            if _REFUSED.search(words):
                found.append("refused")
            elif not found and not short.NEGATION.search(words) and not short.HEDGE.search(words):
                found = _assertions(words, offer, asks)
            claims.update((Claim(kind, subject), None) for kind in found)
    return tuple(claims)


def _assertions(words: str, offer: bool, asks: bool) -> list[str]:
    """What a clause asserts that is neither a no nor hedged."""
    found = [kind for kind, pattern in _ALSO if pattern.search(words) and not offer]
    paid = _PAID.search(words) is not None
    for claim in short.assertions(words):
        kind, _, value = claim.partition(":")
        if kind == "amount":
            if not offer:
                found.append(f"{'amount' if paid else 'price'}:{value.removesuffix('.00')}")
        elif kind == "city":
            if not offer and (not asks or _MOVED.search(words)):
                found.append(claim)
        elif kind == "inside" or (kind == "pending" and "refund" in words):
            continue  # the policy's words, or the state of a refund
        elif not (offer and kind == "exchanged_for"):
            found.append(claim)
    if paid and not offer:
        found += [f"refund_to:{kind}" for kind in PAYMENT.findall(words)]
    return found


def grounds(claim: Claim, database: Database, case: FullCase) -> frozenset[str]:
    """What must have been shown by a tool before this may be said, any one of it; may be empty."""
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
    """Is the claim true of the shop now?"""
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
            return (
                database.row(
                    "SELECT 1 FROM order_items JOIN variants USING (item) WHERE order_id = ? AND final_sale",
                    order_id,
                )
                is not None
            )
        case "refund_to":
            return (
                database.row(
                    "SELECT 1 FROM refunds JOIN payment_methods USING (payment_id) "
                    "WHERE order_id = ? AND payment_methods.kind = ?",
                    order_id,
                    value,
                )
                is not None
            )
    return short.holds(claim, database, case.city)
