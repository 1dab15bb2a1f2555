"""Deployments with a clock and outcomes of their own, for tests of the dashboard."""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from typing import Any

from stateset_agents.deployment.controller import DeploymentController, start_deployment
from stateset_agents.deployment.guards import Agreement, Answer
from stateset_agents.deployment.journal import Journal
from stateset_agents.deployment.plan import DeploymentPlan, GuardPlan
from stateset_agents.serving.saved_conversations import save_conversation
from stateset_agents.types.messages import Message

__all__ = ["PLAN", "SimulatedDeployment", "alter"]

PLAN: dict[str, Any] = {
    "stages": (0.25, 0.5),
    "shadow_answers": 30,
    "hold_outcomes": 150,
    "hold_seconds": 600,
    "guards": GuardPlan(latency=4.0, cost=0.02, window=100),
    "salt": "of the test",
}


def alter(path: Path, change: str) -> None:
    """Change rows in spite of the triggers, and leave no other trace."""
    with sqlite3.connect(path) as rows:
        triggers = rows.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for name, _ in triggers:
            rows.execute(f"DROP TRIGGER {name}")
        rows.execute(change)
        for _, sql in triggers:
            rows.execute(sql)
    rows.close()


AGREEMENTS: tuple[Agreement, ...] = ("reply", "calls", "none")


class SimulatedDeployment:
    """A deployment in a journal, with conversations of one answer."""

    def __init__(
        self,
        path: Path,
        *,
        candidate: str = "runs/0007-desk",
        start: float = 1.75e9,
        seed: int = 0,
        **plan: Any,
    ) -> None:
        self.now = start
        self.path = path
        self._dice = random.Random(seed)
        self._seed = seed
        self._number = 0
        journal = Journal(path)
        record = start_deployment(
            journal,
            candidate=candidate,
            baseline="embedded:desk",
            plan=DeploymentPlan(**{**PLAN, **plan}),
            who="ann",
            clock=lambda: self.now,
        )
        self.controller = DeploymentController(journal, record.id, clock=lambda: self.now)

    def talk(
        self, count: int, *, candidate: float = 0.8, baseline: float = 0.8, saved: Path | None = None
    ) -> None:
        """So many conversations, whose success has these probabilities; `saved`: also their words."""
        for _ in range(count):
            self._number += 1
            self.now += self._dice.uniform(10, 30)
            name = f"call {self._seed}-{self._number}"
            arm = self.controller.assign(name).arm
            is_shadow = self.controller.state.mode == "shadow"
            for who in {arm, "candidate"} if is_shadow else {arm}:
                pace = 1.2 if who == "candidate" else 0.9
                seconds = round(self._dice.lognormvariate(0, 0.5) * pace, 3)
                error = "no answer: the model was away" if self._dice.random() < 0.004 else None
                agreement = AGREEMENTS[self._number % 3] if is_shadow and who == "candidate" else None
                answer = Answer(
                    seconds=seconds, cost=round(0.004 * seconds, 6), error=error, agreement=agreement
                )
                self.controller.record_answer(name, 0, answer, arm=who)
            success = float(self._dice.random() < (candidate if arm == "candidate" else baseline))
            if saved is not None:
                mail = f"caller{self._number}@example.org"
                words = [
                    Message(role="user", content=f"Where is K{self._number}? My mail is {mail}."),
                    Message(role="assistant", content=f"K{self._number} is on its way, I wrote to {mail}."),
                ]
                save_conversation(saved, words, conversation=name)
            if self._dice.random() < 0.97:  # else nobody says how it ended
                self.controller.report_outcome(name, success=success, reward=success - 0.1)
