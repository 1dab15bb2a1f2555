"""The data of the page: runs from their folders, deployments from their journal."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_args

from stateset_agents.core.sources.personal_text import Redactor
from stateset_agents.deployment.controller import status_of
from stateset_agents.deployment.guards import RateGuard, WindowGuard
from stateset_agents.deployment.journal import Journal, read_assignment
from stateset_agents.deployment.ledger import CheckedAnswer
from stateset_agents.deployment.state import Arm, Move
from stateset_agents.deployment.views.history import ConversationSummary, DeploymentHistory, EvidencePoint
from stateset_agents.reporting.live import FileStates, file_states
from stateset_agents.serving.saved_conversations import ServedConversation, load_served

_EVIDENCE = ("outcomes", "log_wealth_promote", "log_wealth_roll_back")
"""Values of a move's evidence that the page shows."""
ARMS: tuple[Arm, ...] = get_args(Arm)
_LONGEST_TEXT = 2000
"""Characters of one message that are shown."""


class Deployments:
    """All deployments of one journal, read as it grows. Its methods may be called from any thread."""

    def __init__(self, path: str | Path, *, conversations: str | Path | None = None) -> None:
        """`conversations`: a file that `save_conversation` writes; their texts are shown without personal
        text. Raises JournalError where there is no journal, or an altered one."""
        self._journal = Journal(path, create=False)
        self._conversations = conversations
        self._histories: dict[str, DeploymentHistory] = {}
        self._texts: dict[str, ServedConversation] = {}
        self._texts_of: FileStates = ()
        """State of the file when its texts were read."""
        self._shown: dict[str, tuple[Any, dict[str, Any]]] = {}
        """The page's data of each deployment, with the state of the sources that it was made of."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the journal."""
        self._journal.close()

    def changes(self) -> int:
        """A number that is another one after every commit of another process."""
        with self._lock:
            return self._journal.changes()

    def histories(self) -> list[DeploymentHistory]:
        """Every deployment with what is written by now, the newest first. Raises JournalError."""
        with self._lock:
            return self._read()

    def data(self) -> list[dict[str, Any]]:
        """The page's data of each deployment, the newest first. Where nothing is new it is the same
        object."""
        with self._lock:
            if self._conversations is not None:
                states = file_states(Path(self._conversations))
                if states != self._texts_of:
                    self._texts, self._texts_of = load_served(self._conversations), states
            return [self._current(history) for history in self._read()]

    def statuses(self) -> list[dict[str, Any]]:
        """The status of each deployment at its last row, the newest first."""
        return [_status(history) for history in self.histories()]

    def _read(self) -> list[DeploymentHistory]:
        with self._journal.snapshot():
            for record in self._journal.records():
                if record.id not in self._histories:
                    self._histories[record.id] = DeploymentHistory(self._journal, record)
                self._histories[record.id].read()
        return list(reversed(self._histories.values()))

    def _current(self, history: DeploymentHistory) -> dict[str, Any]:
        made_of = (dict(history.ledger.counts), self._texts_of)
        id = history.record.id
        if id not in self._shown or self._shown[id][0] != made_of:
            self._shown[id] = (made_of, self._make(history))
        return self._shown[id][1]

    def _make(self, history: DeploymentHistory) -> dict[str, Any]:
        record, points = history.record, history.points()
        return {
            "id": record.id,
            "candidate": record.candidate,
            "baseline": record.baseline,
            "who": record.who,
            "at": record.at,
            "last_at": history.ledger.last_at,
            "status": _status(history),
            "alpha": record.plan.alpha,
            "modes": [  # with the share from each moment on, the oldest first
                {"at": record.at, "mode": "shadow", "share": 0.0},
                *({"at": move.at, "mode": move.mode, "share": move.share} for move in history.moves),
            ],
            "evidence": {
                field.name: [getattr(point, field.name) for point in points]
                for field in fields(EvidencePoint)
            },
            "arms": {
                arm: {"seconds": _quantiles(history.seconds[arm]), "cost": _quantiles(history.costs[arm])}
                for arm in ARMS
            },
            "guards": _guards(history),
            "brakes": [
                {"name": name, "fires": brake.fires, **_brake(brake)}
                for name, brake in history.ledger.brakes.items()
            ],
            "violations": {
                arm: [self._violation(history, answer) for answer in reversed(history.violations[arm])]
                for arm in ARMS
            },
            "conversations": {
                arm: [
                    _conversation(entry, self._texts)
                    for entry in reversed(history.conversations[arm].values())
                ]
                for arm in ARMS
            },
            "journal": [_move(move) for move in reversed(history.moves)],
        }

    def _violation(self, history: DeploymentHistory, answer: CheckedAnswer) -> dict[str, Any]:
        row = self._journal.find("assignments", history.record.id, number=answer.assignment)
        assert row is not None  # its answer was read after it
        return {
            "at": answer.at,
            "conversation": read_assignment(row).conversation,
            "turn": answer.turn,
            "found": [asdict(violation) for violation in answer.violations],
        }


def _status(history: DeploymentHistory) -> dict[str, Any]:
    return status_of(history.record, history.ledger, history.ledger.last_at)


def _quantiles(values: Iterable[float]) -> dict[str, float] | None:
    """Quantiles of the last answers; None without any."""
    ordered = sorted(values)
    if not ordered:
        return None
    if len(ordered) == 1:
        return {"p50": ordered[0], "p95": ordered[0], "n": 1}
    cuts = statistics.quantiles(ordered, n=20, method="inclusive")
    return {"p50": statistics.median(ordered), "p95": cuts[-1], "n": len(ordered)}


def _guards(history: DeploymentHistory) -> list[dict[str, Any]]:
    """Answers of the candidate that each guard found unsafe."""
    plan, ledger = history.record.plan.guards, history.ledger
    limits = {"failure": None, "latency": plan.latency, "cost": plan.cost}
    answers = ledger.answers["candidate"]
    names = [name for name, limit in limits.items() if name == "failure" or limit is not None]
    names += sorted(set(ledger.unsafe) - set(names))
    return [
        {
            "name": name,
            "limit": limits.get(name),
            "count": ledger.unsafe[name],
            "rate": ledger.unsafe[name] / answers if answers else None,
        }
        for name in names
    ]


def _brake(brake: WindowGuard | RateGuard) -> dict[str, Any]:
    if isinstance(brake, WindowGuard):
        return {
            "limit": brake.share,
            "unsafe": sum(brake.recent),
            "answers": len(brake.recent),
            "size": brake.size,
        }
    log_wealth = 0.0 if brake.evidence is None else brake.evidence.log_wealth
    return {"limit": brake.limit, "log_wealth": log_wealth, "needed": 1 / brake.alpha}


def _conversation(
    conversation: ConversationSummary, texts: Mapping[str, ServedConversation]
) -> dict[str, Any]:
    assignment, outcome = conversation.assignment, conversation.outcome
    served = texts.get(assignment.conversation)
    return {
        "id": assignment.conversation,
        "number": assignment.number,
        "at": assignment.at,
        "probability": assignment.probability,
        "is_moved": conversation.is_moved,
        "success": None if outcome is None else outcome.success,
        "reward": None if outcome is None else outcome.reward,
        "is_timeout": outcome is not None and outcome.is_timeout,
        "answers": {arm: conversation.answers[arm] for arm in ARMS},
        "unsafe": {arm: conversation.unsafe[arm] for arm in ARMS},
        "seconds": dict(conversation.seconds),
        "messages": None if served is None else _messages(served),
    }


def _messages(served: ServedConversation) -> list[dict[str, str]]:
    """Roles and texts, without personal text; calls as they are written."""
    redactor = Redactor()
    entries = []
    for message in served.messages:
        calls = [
            f"{call.name}({_arguments(redactor.value(dict(call.arguments)))})" for call in message.tool_calls
        ]
        text = "\n".join(filter(None, [redactor.text(message.content), *calls]))
        entries.append({"role": message.role, "text": text[:_LONGEST_TEXT]})
    return entries


def _arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _move(move: Move) -> dict[str, Any]:
    return {
        **{name: getattr(move, name) for name in ("at", "mode", "share", "who", "why", "forced")},
        **{name: move.evidence.get(name) for name in _EVIDENCE},
    }
