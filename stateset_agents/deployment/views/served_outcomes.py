"""How the conversations ended that a journal's deployments shared out."""

from __future__ import annotations

from dataclasses import replace

from stateset_agents.core.sources.served_conversations import ServedOutcome
from stateset_agents.deployment.assignment import Assignment
from stateset_agents.deployment.journal import Journal, Pages
from stateset_agents.deployment.ledger import Outcome, Reassigned


def served_outcomes(journal: Journal) -> dict[str, ServedOutcome]:
    """By conversation: of those that could go to the candidate, in `gradual` and `full`.

    What timed out has no success: nobody reported it. A conversation that several deployments knew is the
    newest one's. Raises JournalError for an altered journal.
    """
    found: dict[str, ServedOutcome] = {}
    with journal.snapshot():
        for record in journal.records():
            names: dict[int, str] = {}
            for row in Pages(journal, record).new():
                match row:
                    case Assignment() if row.probability > 0:
                        names[row.number] = row.conversation
                        found[row.conversation] = ServedOutcome(
                            deployment=record.id, arm=row.arm, success=None
                        )
                    case Outcome() if row.assignment in names and not row.is_timeout:
                        name = names[row.assignment]
                        found[name] = replace(found[name], success=row.success, reward=row.reward)
                    case Reassigned() if row.assignment in names:
                        name = names[row.assignment]
                        found[name] = replace(found[name], is_moved=True)
    return found
