"""The claims that the agent's words make about an order, and whether they are true.

A statement is read clause by clause with a small lexicon. Negated, hedged and asked clauses assert
nothing (a refusal apart). The user reads replies through this, and so does grading.
"""

from __future__ import annotations

import datetime
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

from stateset_agents.claims.english import PatternFile, Patterns
from stateset_agents.environments.retail_desk import catalog
from stateset_agents.environments.retail_desk.database import Database
from stateset_agents.environments.retail_desk.policy import RETURN_DAYS, Claim

MAX_CHARACTERS = 2000
"""A longer message is not read: the caller does not understand it."""

CLAUSE = re.compile(r"([^,;:!?\n]+?)(\.(?!\d)|[,;:!?\n]|\b(?:and|but|so|because|although)\b|$)")
WORDS = PatternFile(
    Path(__file__).with_name("claims.yaml"),
    return_days=str(RETURN_DAYS),
    weekdays="|".join(catalog.WEEKDAYS),
    cities="|".join(catalog.CITIES),
    items=catalog.ITEM.pattern,
)
_CLAUSES = Patterns("clauses", WORDS)
NEGATION, HEDGE, SURE = _CLAUSES.negation, _CLAUSES.hedge, _CLAUSES.sure
ORDER_ID = re.compile(r"\b([a-z]\d\d)\b")
_LEXICON = WORDS.patterns("lexicon")
_VALUES = WORDS.patterns("values")
_SOURCES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("outside", "inside", "days"), ("order",)),
    "lost": ("tracking",),
    "arrives": ("order", "tracking"),
    **dict.fromkeys(("pending", "shipped", "delivered"), ("order", "tracking", "listed")),
}
"""Kind of claim -> what a tool may have shown of the order, any one of it."""
_STOCK = re.compile(r"\b(out of stock|sold out|in stock)\b")


def normalized_text(text: str) -> str:
    """A reply as the caller reads it: letters that only look different as plain ones, invisible characters
    left out; empty where one remains that is no plain letter or digit, which the caller does not understand.

    Otherwise a lie in look-alikes (`c\u0430ncelled` with a Cyrillic a) would go unnoticed beside the truth.
    """
    if text.isascii():
        return text
    decomposed = unicodedata.normalize("NFKD", text.replace("\u2019", "'"))
    plain = "".join(letter for letter in decomposed if unicodedata.category(letter) not in ("Mn", "Cf"))
    return "" if any(letter.isalnum() and not letter.isascii() for letter in plain) else plain


def read_claims(text: str, order_id: str) -> tuple[Claim, ...]:
    """The claims of one reply; a clause speaks of the order it names, else of `order_id`.

    "sorry, K27 has shipped, so i cannot cancel it" claims `shipped` and `refused`.
    """
    if len(text) > MAX_CHARACTERS:
        return ()
    claims: dict[Claim, None] = {}
    named = ORDER_ID.findall(text.lower())
    fallback = named[0].upper() if named else order_id
    for words, end in CLAUSE.findall(SURE.sub("", " ".join(text.lower().split(" ")))):
        order_ids = ORDER_ID.findall(words)
        subject = order_ids[0].upper() if order_ids else fallback
        if end == "?":
            continue
        if _CLAUSES.refusal.search(words):
            claims[Claim("refused", subject)] = None
        elif not NEGATION.search(words) and not HEDGE.search(words):
            claims.update((Claim(kind, subject), None) for kind in assertions(words))
    return tuple(claims)


def assertions(words: str) -> list[str]:
    """The kinds of claim that a clause makes, values and stock included."""
    kinds = [kind for kind, pattern in _LEXICON.items() if pattern.search(words)]
    for kind, pattern in _VALUES.items():
        kinds += [f"{kind}:{next(filter(None, match.groups()))}" for match in pattern.finditer(words)]
    items = catalog.ITEM.findall(words)
    for match in _STOCK.finditer(words):
        kind = "in_stock" if match.group() == "in stock" else "out_of_stock"
        kinds += [f"{kind}:{item}" for item in items]
    if "exchanged" in kinds and items:
        kinds.append(f"exchanged_for:{items[-1]}")
    return kinds


def grounds(claim: Claim) -> frozenset[str]:
    """The grounds of a claim: a tool must have shown one of them before it is made. Empty where the claim's
    truth implies that the agent did it itself."""
    kind, _, value = claim.text.partition(":")
    if kind in ("in_stock", "out_of_stock"):
        return frozenset({f"item:{value}"})
    return frozenset(f"{source}:{claim.order_id}" for source in _SOURCES.get(kind, ()))


def holds(claim: Claim, database: Database, start_city: str) -> bool:
    """True where the claim is true of the shop now; `start_city` is the order's city at the start."""
    kind, _, value = claim.text.partition(":")
    if kind in ("in_stock", "out_of_stock"):
        row = database.row("SELECT stock FROM variants WHERE item = ?", value)
        return row is not None and (row[0] > 0) == (kind == "in_stock")
    order = database.row("SELECT status, city, delivered_on FROM orders WHERE order_id = ?", claim.order_id)
    if order is None:
        return False
    status, city, delivered_on = order
    days = None
    if delivered_on is not None:
        days = (catalog.TODAY - datetime.date.fromisoformat(delivered_on)).days
    if kind == "refused":
        return not database.changes()
    if kind in ("pending", "shipped", "cancelled"):
        return bool(status == kind)
    if kind == "updated":
        return bool(city != start_city)
    if kind == "city":
        return bool(city == value)
    if kind in ("outside", "inside", "days"):
        if days is None:
            return False
        truths = {"outside": days > RETURN_DAYS, "inside": days <= RETURN_DAYS, "days": str(days) == value}
        return truths[kind]
    if kind in ("delivered", "lost", "arrives", "reshipped"):
        shipments = database.rows(
            "SELECT status, arrives_on FROM shipments WHERE order_id = ? ORDER BY shipment_id", claim.order_id
        )
        if kind == "reshipped":
            return len(shipments) > 1
        if kind == "arrives":
            if not shipments or shipments[-1][0] != "moving":
                return False
            date = datetime.date.fromisoformat(shipments[-1][1])
            return catalog.WEEKDAYS[date.weekday()] == value
        return status == kind or any(shipment[0] == kind for shipment in shipments)
    if kind in ("returned", "exchanged", "exchanged_for"):
        lines = database.rows("SELECT item, status FROM order_items WHERE order_id = ?", claim.order_id)
        if kind == "exchanged_for":
            return any(line == (value, "exchanged") for line in lines)
        return any(line[1] == kind for line in lines)
    if kind == "human":
        return database.row("SELECT 1 FROM tickets WHERE order_id IN (?, '')", claim.order_id) is not None
    refunds = database.rows("SELECT amount_cents, kind FROM refunds WHERE order_id = ?", claim.order_id)
    if kind == "refunded":
        return any(refund[1] == "refund" for refund in refunds)
    if kind == "credited":
        return any(refund[1] == "credit" for refund in refunds)
    if kind == "amount":
        cents = round(float(value) * 100) if len(value) < 12 else -1
        return bool(refunds) and sum(refund[0] for refund in refunds) == cents
    raise AssertionError(f"claim kind {kind!r} has no truth")
