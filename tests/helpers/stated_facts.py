"""One fact in one text: whether the text by itself tells it."""

from __future__ import annotations

from collections.abc import Iterable

from stateset_agents.claims.fact_status import FactStatus, fact_statuses


def states_fact(wordings: Iterable[str], text: str) -> bool:
    """True when the text by itself tells a fact that has these wordings.

    "The refund takes 5 days" tells "5 days"; "it is not 5 days", "is it 5 days?" and "5 or 6 days" do not.
    """
    return fact_statuses({"": tuple(wordings)}, [text])[""] is FactStatus.TOLD
