"""What a full call starts from and should end in, for grading."""

from __future__ import annotations

import functools

from stateset_agents.environments.retail_desk.actions import Desk
from stateset_agents.environments.retail_desk.full.case import FullCase
from stateset_agents.environments.retail_desk.full.claims import grounds, holds
from stateset_agents.environments.retail_desk.full.families import subject_of, whole_decision
from stateset_agents.environments.retail_desk.full.policy import FULL_TOPICS
from stateset_agents.environments.retail_desk.full.scenarios import full_database_of
from stateset_agents.environments.retail_desk.grading import Answers, allowed_by


@functools.lru_cache(maxsize=128)
def full_answers_of(case: FullCase) -> Answers:
    """Run the gold programs on copies of the shop."""
    database, decision = full_database_of(case), whole_decision(case)
    looks_up, subject = subject_of(case)
    return Answers(
        image=database.image(),
        allowed=allowed_by(
            decision.programs, Desk(database, case.customer_id, topics=FULL_TOPICS, detailed=True)
        ),
        facts=decision.facts,
        denial=decision.is_denial,
        looks_up=looks_up,
        subject=subject,
        holds=lambda claim, database: holds(claim, database, case),
        grounds=lambda claim, database: grounds(claim, database, case),
        strict=True,
    )
